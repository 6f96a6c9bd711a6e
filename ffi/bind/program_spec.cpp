#include "ffi/bind/program_spec.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <utility>

namespace nb = nanobind;

namespace jaxgraph {
namespace {

template <typename T>
T Get(const nb::dict& dict, const char* key) {
  if (!dict.contains(key)) {
    throw nb::key_error((std::string("the program spec lacks '") + key + "'").c_str());
  }
  return nb::cast<T>(dict[key]);
}

std::string ToString(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// An enum from its number. Its range is checked by Decode; what does not fit a byte is refused
// here.
template <typename Enum>
Enum EnumOf(const nb::handle& number) {
  return static_cast<Enum>(nb::cast<uint8_t>(number));
}

TensorRef TensorFromSpec(const nb::tuple& spec) {
  TensorRef tensor;
  tensor.dtype = EnumOf<DType>(spec[0]);
  tensor.base = nb::cast<uint32_t>(spec[1]);
  tensor.offset = nb::cast<int64_t>(spec[2]);
  const auto shape = nb::cast<nb::tuple>(spec[3]);
  const auto strides = nb::cast<nb::tuple>(spec[4]);
  if (shape.size() > kMaxRank || strides.size() != shape.size()) {
    throw nb::value_error(
        "a tensor of the program spec has too many dimensions, or not one stride "
        "for each");
  }
  tensor.rank = static_cast<uint8_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    tensor.shape[i] = nb::cast<int64_t>(shape[i]);
    tensor.strides[i] = nb::cast<int64_t>(strides[i]);
  }
  return tensor;
}

Node NodeFromSpec(const nb::tuple& spec) {
  Node node;
  node.op = EnumOf<Op>(spec[0]);
  node.flags = nb::cast<uint32_t>(spec[1]);
  node.region = nb::cast<uint32_t>(spec[2]);
  node.branch = nb::cast<uint32_t>(spec[3]);
  node.params = ToString(nb::cast<nb::bytes>(spec[4]));
  for (nb::handle out : nb::cast<nb::list>(spec[5])) {
    node.outs.push_back(TensorFromSpec(nb::cast<nb::tuple>(out)));
  }
  for (nb::handle src : nb::cast<nb::list>(spec[6])) {
    node.srcs.push_back(TensorFromSpec(nb::cast<nb::tuple>(src)));
  }
  node.label = nb::cast<std::string>(spec[7]);
  return node;
}

Base BaseFromSpec(const nb::dict& spec) {
  Base base;
  base.kind = EnumOf<BaseKind>(spec["kind"]);
  base.hint = EnumOf<BaseHint>(spec["hint"]);
  base.written = Get<bool>(spec, "written");
  base.alias = Get<int32_t>(spec, "alias");
  base.index = Get<uint32_t>(spec, "index");
  base.nbytes = Get<uint64_t>(spec, "nbytes");
  base.label = Get<std::string>(spec, "label");
  return base;
}

ExecOptions OptionsFromSpec(const nb::dict& spec) {
  ExecOptions options;
  options.chunk_size = Get<uint32_t>(spec, "chunk_size");
  options.warmup_calls = Get<uint32_t>(spec, "warmup_calls");
  options.max_variants = Get<uint32_t>(spec, "max_variants");
  options.max_failures = Get<uint32_t>(spec, "max_failures");
  options.disabled = Get<bool>(spec, "disabled");
  options.fusion = Get<bool>(spec, "fusion");
  options.concurrency = Get<bool>(spec, "concurrency");
  options.rewarm_on_address_change = Get<bool>(spec, "rewarm_on_address_change");
  options.update_depth = static_cast<UpdateDepth>(Get<uint8_t>(spec, "update_depth"));
  options.idle_ms = Get<uint32_t>(spec, "idle_ms");
  options.sweep_ms = Get<uint32_t>(spec, "sweep_ms");
  options.max_executables = Get<uint32_t>(spec, "max_executables");
  options.memory_budget = Get<uint64_t>(spec, "memory_budget");
  return options;
}

nb::dict DescribeTensor(const TensorRef& tensor) {
  nb::list shape, strides;
  for (int i = 0; i < tensor.rank; ++i) {
    shape.append(tensor.shape[i]);
    strides.append(tensor.strides[i]);
  }
  nb::dict out;
  out["dtype"] = NameOf(tensor.dtype);
  out["base"] = tensor.base;
  out["offset"] = tensor.offset;
  out["shape"] = nb::tuple(shape);
  out["strides"] = nb::tuple(strides);
  return out;
}

nb::dict DescribeNode(const Node& node) {
  nb::list outs, srcs;
  for (const TensorRef& t : node.outs) outs.append(DescribeTensor(t));
  for (const TensorRef& t : node.srcs) srcs.append(DescribeTensor(t));
  nb::dict out;
  out["op"] = NameOf(node.op);
  out["flags"] = node.flags;
  out["region"] = node.region;
  out["branch"] = node.branch;
  out["params"] = nb::bytes(node.params.data(), node.params.size());
  out["outs"] = outs;
  out["srcs"] = srcs;
  out["label"] = node.label;
  return out;
}

nb::dict DescribeBase(const Base& base) {
  static constexpr const char* kHints[] = {"unknown", "wanders"};
  nb::dict out;
  out["kind"] = NameOf(base.kind);
  out["hint"] = kHints[static_cast<int>(base.hint)];
  out["written"] = base.written;
  out["alias"] = base.alias;
  out["index"] = base.index;
  out["nbytes"] = base.nbytes;
  out["label"] = base.label;
  return out;
}

nb::dict DescribeOptions(const ExecOptions& options) {
  nb::dict out;
  out["chunk_size"] = options.chunk_size;
  out["warmup_calls"] = options.warmup_calls;
  out["max_variants"] = options.max_variants;
  out["max_failures"] = options.max_failures;
  out["disabled"] = options.disabled;
  out["fusion"] = options.fusion;
  out["concurrency"] = options.concurrency;
  out["rewarm_on_address_change"] = options.rewarm_on_address_change;
  out["update_depth"] = static_cast<uint8_t>(options.update_depth);
  out["idle_ms"] = options.idle_ms;
  out["sweep_ms"] = options.sweep_ms;
  out["max_executables"] = options.max_executables;
  out["memory_budget"] = options.memory_budget;
  return out;
}

}  // namespace

Program ProgramFromSpec(const nb::dict& spec) {
  Program program;
  program.function = Get<std::string>(spec, "function");
  program.function_id = Get<uint64_t>(spec, "function_id");
  program.split = Get<uint32_t>(spec, "split");
  const std::string key = ToString(Get<nb::bytes>(spec, "key"));
  if (key.size() != program.key.size()) throw nb::value_error("'key' must have 16 bytes");
  std::memcpy(program.key.data(), key.data(), key.size());
  program.arena_bytes = Get<uint64_t>(spec, "arena_bytes");
  program.options = OptionsFromSpec(Get<nb::dict>(spec, "options"));
  for (nb::handle base : Get<nb::list>(spec, "bases")) {
    program.bases.push_back(BaseFromSpec(nb::cast<nb::dict>(base)));
  }
  for (nb::handle node : Get<nb::list>(spec, "nodes")) {
    program.nodes.push_back(NodeFromSpec(nb::cast<nb::tuple>(node)));
  }
  return program;
}

nb::dict DescribeProgram(const Program& program) {
  nb::list bases, nodes;
  for (const Base& base : program.bases) bases.append(DescribeBase(base));
  for (const Node& node : program.nodes) nodes.append(DescribeNode(node));
  nb::dict out;
  out["function"] = program.function;
  out["function_id"] = program.function_id;
  out["split"] = program.split;
  out["key"] = nb::bytes(program.key.data(), program.key.size());
  out["arena_bytes"] = program.arena_bytes;
  out["options"] = DescribeOptions(program.options);
  out["bases"] = bases;
  out["nodes"] = nodes;
  out["id"] = nb::bytes(program.id.data(), program.id.size());
  return out;
}

}  // namespace jaxgraph
