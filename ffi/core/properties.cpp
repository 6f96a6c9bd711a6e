#include "ffi/core/properties.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace jaxgraph {
namespace {

char* AddressOf(const TensorRef& t, const Snapshot& snapshot) {
  return snapshot.bases[t.base] + t.offset;
}

bool SameShape(const TensorRef& a, const TensorRef& b) {
  return a.rank == b.rank && std::equal(a.shape.begin(), a.shape.begin() + a.rank, b.shape.begin());
}
bool SameStrides(const TensorRef& a, const TensorRef& b) {
  return a.rank == b.rank &&
         std::equal(a.strides.begin(), a.strides.begin() + a.rank, b.strides.begin());
}

class Comparer {
 public:
  Comparer(const Snapshot& before, const Snapshot& after) : before_(before), after_(after) {}

  Diff Run() {
    const std::vector<Node>& a = before_.program->nodes;
    const std::vector<Node>& b = after_.program->nodes;
    const size_t common = std::min(a.size(), b.size());
    // Programs with one id have equal bytes: only the addresses can differ.
    const bool same =
        before_.program == after_.program ||
        (before_.program->id == after_.program->id && before_.program->id != Hash128{});
    for (size_t n = 0; n < common; ++n) {
      at_ = {};
      at_.node = static_cast<uint32_t>(n);
      view_ = a[n].op == Op::kView && b[n].op == Op::kView;
      if (!same) CompareNode(a[n], b[n]);
      CompareTensors(a[n].outs, b[n].outs, /*source=*/false, same);
      CompareTensors(a[n].srcs, b[n].srcs, /*source=*/true, same);
    }
    if (a.size() != b.size()) {
      at_ = {};
      at_.node = static_cast<uint32_t>(common);
      view_ = false;
      Add(Field::kNodeCount, Change::kStructure);
    }
    diff_.nodes_compared = common;
    return std::move(diff_);
  }

 private:
  void CompareNode(const Node& a, const Node& b) {
    if (a.op != b.op) Add(Field::kOp, Change::kStructure);
    if (a.params != b.params) Add(Field::kParams, Change::kStructure);
    if (a.flags != b.flags) Add(Field::kFlags, Change::kStructure);
    if (a.region != b.region) Add(Field::kRegion, Change::kStructure);
    if (a.branch != b.branch) Add(Field::kBranch, Change::kStructure);
  }

  void CompareTensors(const std::vector<TensorRef>& a, const std::vector<TensorRef>& b, bool source,
                      bool same) {
    at_.source = source;
    at_.tensor = 0;
    if (a.size() != b.size()) Add(Field::kTensorCount, Change::kStructure);
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      at_.tensor = static_cast<uint16_t>(i);
      if (!same) {
        if (a[i].dtype != b[i].dtype) Add(Field::kDType, Change::kStructure);
        if (!SameShape(a[i], b[i])) Add(Field::kShape, Change::kStructure);
        if (!SameStrides(a[i], b[i])) Add(Field::kStrides, Change::kStructure);
      }
      if (AddressOf(a[i], before_) != AddressOf(b[i], after_)) {
        Add(Field::kAddress, Change::kAddresses);
      }
    }
  }

  void Add(Field field, Change change) {
    at_.field = field;
    at_.change = view_ ? Change::kNone : change;
    diff_.change = std::max(diff_.change, at_.change);
    diff_.fields.push_back(at_);
  }

  const Snapshot& before_;
  const Snapshot& after_;
  FieldChange at_;     // the place that is being compared
  bool view_ = false;  // a VIEW on both sides: its changes matter only through its readers
  Diff diff_;
};

std::string Join(const std::array<int64_t, kMaxRank>& values, int rank) {
  std::string text = "[";
  for (int d = 0; d < rank; ++d) text += (d > 0 ? "," : "") + std::to_string(values[d]);
  return text + "]";
}

std::string ValueOf(const FieldChange& at, const Snapshot& snapshot) {
  if (at.field == Field::kNodeCount) return std::to_string(snapshot.program->nodes.size());
  const Node& node = snapshot.program->nodes[at.node];
  const std::vector<TensorRef>& tensors = at.source ? node.srcs : node.outs;
  char text[32];
  switch (at.field) {
    case Field::kNodeCount:
      break;
    case Field::kOp:
      return NameOf(node.op);
    case Field::kParams: {
      const Hash128 hash = HashBytes(node.params);
      std::snprintf(text, sizeof text, "%zu bytes #%02x%02x", node.params.size(), hash[0], hash[1]);
      return text;
    }
    case Field::kFlags:
      return std::to_string(node.flags);
    case Field::kRegion:
      return std::to_string(node.region);
    case Field::kBranch:
      return std::to_string(node.branch);
    case Field::kTensorCount:
      return std::to_string(tensors.size());
    case Field::kDType:
      return NameOf(tensors[at.tensor].dtype);
    case Field::kShape:
      return Join(tensors[at.tensor].shape, tensors[at.tensor].rank);
    case Field::kStrides:
      return Join(tensors[at.tensor].strides, tensors[at.tensor].rank);
    case Field::kAddress:
      std::snprintf(text, sizeof text, "0x%" PRIxPTR,
                    reinterpret_cast<uintptr_t>(AddressOf(tensors[at.tensor], snapshot)));
      return text;
  }
  return {};
}

}  // namespace

const char* NameOf(Change change) {
  constexpr const char* names[] = {"none", "addresses", "structure"};
  return names[static_cast<int>(change)];
}

const char* NameOf(Field field) {
  constexpr const char* names[] = {"node count",   "op",    "params", "flags",   "region", "branch",
                                   "tensor count", "dtype", "shape",  "strides", "address"};
  return names[static_cast<int>(field)];
}

Diff Compare(const Snapshot& before, const Snapshot& after) {
  return Comparer(before, after).Run();
}

std::vector<NodeChange> DescribeChanges(const Diff& diff, const Snapshot& before,
                                        const Snapshot& after, size_t limit) {
  std::vector<NodeChange> changes;
  for (const FieldChange& at : diff.fields) {
    if (changes.size() >= limit) break;
    if (at.change != diff.change) continue;
    NodeChange& change = changes.emplace_back();
    change.node = at.node;
    change.field = NameOf(at.field);
    change.source = at.source;
    change.tensor = at.tensor;
    change.before = ValueOf(at, before);
    change.after = ValueOf(at, after);
    if (at.node >= after.program->nodes.size()) continue;
    const Node& node = after.program->nodes[at.node];
    change.op = NameOf(node.op);
    change.label = node.label;
  }
  return changes;
}

std::string Summarize(const Diff& diff, const Snapshot& before, const Snapshot& after) {
  const auto first = std::find_if(diff.fields.begin(), diff.fields.end(),
                                  [&](const FieldChange& f) { return f.change == diff.change; });
  if (first == diff.fields.end()) return "nothing changed";
  std::string text = std::string(NameOf(diff.change)) + ": ";
  if (first->field != Field::kNodeCount) {
    const Node& node = after.program->nodes[first->node];
    text += "node " + std::to_string(first->node) + " (" + NameOf(node.op);
    text += node.label.empty() ? ") " : " " + node.label + ") ";
    if (first->field >= Field::kTensorCount) {
      text += first->source ? "source " : "output ";
      if (first->field > Field::kTensorCount) text += std::to_string(first->tensor) + " ";
    }
  }
  text += std::string(NameOf(first->field)) + " " + ValueOf(*first, before) + " -> " +
          ValueOf(*first, after);
  if (diff.fields.size() > 1) {
    text += ", and " + std::to_string(diff.fields.size() - 1) + " more fields";
  }
  return text;
}

}  // namespace jaxgraph
