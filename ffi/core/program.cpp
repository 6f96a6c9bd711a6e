// The wire format of programs. After the magic and the version, the fields of Program in the order
// of its declaration (see Encode): integers little endian, bools one byte, strings and arrays with
// a u32 count in front; of shapes and strides only `rank` entries. The hash stays outside.
#include "ffi/core/program.h"

#include <cstring>

#include "ffi/core/validate.h"
#include "ffi/core/wire.h"

namespace jaxgraph {
namespace {

constexpr uint32_t kMagic = 0x5047584a;  // "JXGP"
constexpr uint32_t kVersion = 2;

// The least bytes that one of these takes: bounds for hostile counts.
constexpr size_t kMinTensorBytes = 1 + 1 + 4 + 8;
constexpr size_t kMinNodeBytes = 1 + 4 + 4 + 4 + 4 * 4;
constexpr size_t kMinBaseBytes = 1 + 1 + 1 + 4 + 4 + 8 + 4;

Status Malformed(const std::string& what) {
  return Status(Code::kInvalidArgument, "malformed program: " + what);
}

void PutTensor(const TensorRef& t, Writer* w) {
  w->Put(t.dtype);
  w->Put(t.rank);
  w->Put(t.base);
  w->Put(t.offset);
  for (int d = 0; d < t.rank; ++d) w->Put(t.shape[d]);
  for (int d = 0; d < t.rank; ++d) w->Put(t.strides[d]);
}

void PutTensors(const std::vector<TensorRef>& tensors, Writer* w) {
  w->Put(static_cast<uint32_t>(tensors.size()));
  for (const TensorRef& t : tensors) PutTensor(t, w);
}

void PutOptions(const ExecOptions& o, Writer* w) {
  w->Put(o.chunk_size);
  w->Put(o.warmup_calls);
  w->Put(o.max_variants);
  w->Put(o.max_failures);
  for (bool b : {o.disabled, o.fusion, o.concurrency, o.rewarm_on_address_change}) {
    w->Put(static_cast<uint8_t>(b));
  }
  w->Put(o.update_depth);
  w->Put(o.idle_ms);
  w->Put(o.sweep_ms);
  w->Put(o.max_executables);
  w->Put(o.memory_budget);
}

bool GetBool(Reader* r, bool* value) {
  const uint8_t byte = r->Get<uint8_t>();
  *value = byte == 1;
  return byte <= 1;
}

template <typename E>
bool GetEnum(Reader* r, int count, E* value) {
  const uint8_t byte = r->Get<uint8_t>();
  if (byte >= count) return false;
  *value = static_cast<E>(byte);
  return true;
}

Status GetTensors(Reader* r, std::vector<TensorRef>* tensors) {
  tensors->resize(r->GetCount(kMinTensorBytes));
  for (TensorRef& t : *tensors) {
    if (!GetEnum(r, kNumDTypes, &t.dtype)) return Malformed("unknown dtype");
    t.rank = r->Get<uint8_t>();
    if (t.rank > kMaxRank) return Malformed("rank " + std::to_string(t.rank));
    t.base = r->Get<uint32_t>();
    t.offset = r->Get<int64_t>();
    for (int d = 0; d < t.rank; ++d) t.shape[d] = r->Get<int64_t>();
    for (int d = 0; d < t.rank; ++d) t.strides[d] = r->Get<int64_t>();
  }
  return Status::Ok();
}

Status GetOptions(Reader* r, ExecOptions* o) {
  o->chunk_size = r->Get<uint32_t>();
  o->warmup_calls = r->Get<uint32_t>();
  o->max_variants = r->Get<uint32_t>();
  o->max_failures = r->Get<uint32_t>();
  for (bool* b : {&o->disabled, &o->fusion, &o->concurrency, &o->rewarm_on_address_change}) {
    if (!GetBool(r, b)) return Malformed("an option is neither true nor false");
  }
  if (!GetEnum(r, kNumUpdateDepths, &o->update_depth)) return Malformed("unknown update depth");
  o->idle_ms = r->Get<uint32_t>();
  o->sweep_ms = r->Get<uint32_t>();
  o->max_executables = r->Get<uint32_t>();
  o->memory_budget = r->Get<uint64_t>();
  return Status::Ok();
}

Status GetBase(Reader* r, Base* base) {
  if (!GetEnum(r, 3, &base->kind)) return Malformed("unknown kind of base");
  if (!GetEnum(r, 2, &base->hint)) return Malformed("unknown hint of a base");
  if (!GetBool(r, &base->written)) return Malformed("`written` is neither true nor false");
  base->alias = r->Get<int32_t>();
  base->index = r->Get<uint32_t>();
  base->nbytes = r->Get<uint64_t>();
  base->label = r->GetString();
  return Status::Ok();
}

Status GetNode(Reader* r, Node* node) {
  if (!GetEnum(r, kNumOps, &node->op)) return Malformed("unknown op");
  node->flags = r->Get<uint32_t>();
  node->region = r->Get<uint32_t>();
  node->branch = r->Get<uint32_t>();
  node->params = r->GetString();
  JAXGRAPH_RETURN_IF_ERROR(GetTensors(r, &node->outs));
  JAXGRAPH_RETURN_IF_ERROR(GetTensors(r, &node->srcs));
  node->label = r->GetString();
  return Status::Ok();
}

}  // namespace

const char* NameOf(BaseKind kind) {
  constexpr const char* names[] = {"arena", "operand", "result"};
  return names[static_cast<int>(kind)];
}

const char* NameOf(Op op) {
  constexpr const char* names[kNumOps] = {"view",     "expr", "row",       "matmul", "gather",
                                          "set_rows", "copy", "attention", "sort"};
  return names[static_cast<int>(op)];
}

int64_t TensorRef::num_elements() const {
  int64_t n = 1;
  for (int d = 0; d < rank; ++d) n *= shape[d];
  return n;
}

IndexParams IndexParamsOf(const Node& node) {
  IndexParams params;
  std::memcpy(static_cast<void*>(&params), node.params.data(), sizeof params);
  return params;
}

std::string Encode(const Program& program) {
  Writer w;
  w.Put(kMagic);
  w.Put(kVersion);
  w.PutString(program.function);
  w.Put(program.function_id);
  w.Put(program.split);
  w.PutBytes(program.key.data(), program.key.size());
  w.Put(program.arena_bytes);
  PutOptions(program.options, &w);
  w.Put(static_cast<uint32_t>(program.bases.size()));
  for (const Base& base : program.bases) {
    w.Put(base.kind);
    w.Put(base.hint);
    w.Put(static_cast<uint8_t>(base.written));
    w.Put(base.alias);
    w.Put(base.index);
    w.Put(base.nbytes);
    w.PutString(base.label);
  }
  w.Put(static_cast<uint32_t>(program.nodes.size()));
  for (const Node& node : program.nodes) {
    w.Put(node.op);
    w.Put(node.flags);
    w.Put(node.region);
    w.Put(node.branch);
    w.PutString(node.params);
    PutTensors(node.outs, &w);
    PutTensors(node.srcs, &w);
    w.PutString(node.label);
  }
  return w.Take();
}

Status Decode(std::string_view bytes, Program* program) {
  Reader r(bytes);
  if (r.Get<uint32_t>() != kMagic) return Malformed("not a program (wrong magic)");
  const uint32_t version = r.Get<uint32_t>();
  if (version != kVersion) {
    return Malformed("format version " + std::to_string(version) + ", this library reads " +
                     std::to_string(kVersion));
  }
  Program p;
  p.function = r.GetString();
  p.function_id = r.Get<uint64_t>();
  p.split = r.Get<uint32_t>();
  r.GetBytes(p.key.data(), p.key.size());
  p.arena_bytes = r.Get<uint64_t>();
  JAXGRAPH_RETURN_IF_ERROR(GetOptions(&r, &p.options));
  p.bases.resize(r.GetCount(kMinBaseBytes));
  for (Base& base : p.bases) JAXGRAPH_RETURN_IF_ERROR(GetBase(&r, &base));
  p.nodes.resize(r.GetCount(kMinNodeBytes));
  for (Node& node : p.nodes) JAXGRAPH_RETURN_IF_ERROR(GetNode(&r, &node));
  if (!r.at_end()) return Malformed(r.ok() ? "bytes behind its end" : "truncated");
  JAXGRAPH_RETURN_IF_ERROR(Validate(p));
  p.id = HashBytes(bytes);
  *program = std::move(p);
  return Status::Ok();
}

}  // namespace jaxgraph
