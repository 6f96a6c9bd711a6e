// Launch: one kernel launch as plain data. Emitters produce it, and the same data serves the eager
// run, the capture and the patch, so that the three can never differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace jaxgraph {

// Runs pieces of a host kernel on several threads. The caller works too.
class ParallelFor {
 public:
  virtual ~ParallelFor() = default;
  virtual int num_threads() const = 0;
  // Calls fn(ctx, i) for every i in [0, n), in any order, on any thread; returns when all are done.
  virtual void Run(int n, void (*fn)(void* ctx, int i), void* ctx) = 0;
};

// A kernel known to the process; statically allocated, so its address is its identity.
struct KernelInfo {
  const char* name;
  size_t param_bytes;  // every kernel takes exactly one trivially copyable struct, by value
  void (*host_function)(const void* params, ParallelFor& pool) = nullptr;
  const void* cuda_function = nullptr;  // a __global__ function taking that struct
};

struct Launch {
  const KernelInfo* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t cluster = 1;             // blocks a cluster along x
  uint32_t shared_bytes = 0;        // dynamic shared memory
  bool dependent = false;           // programmatic dependent launch on the launch before it
  uint32_t first_node = 0;          // the nodes that this launch covers: a fused group is a run
  uint32_t node_count = 0;          // 0: a copy node of the executor's own (slots)
  uint32_t region = 0, branch = 0;  // of the nodes covered
  uint32_t reads_to = 0;  // addresses of nodes before this one are in it, if there are more
  std::string params;     // kernel->param_bytes bytes

  template <typename P>
  void set_params(const P& p) {
    static_assert(std::is_trivially_copyable_v<P>);
    params.assign(reinterpret_cast<const char*>(&p), sizeof(P));
  }
  // Same kernel and configuration: then only params differ and an executable can be patched.
  bool SameConfig(const Launch& o) const {
    return kernel == o.kernel && cluster == o.cluster && shared_bytes == o.shared_bytes &&
           dependent == o.dependent && std::memcmp(grid, o.grid, sizeof grid) == 0 &&
           std::memcmp(block, o.block, sizeof block) == 0;
  }
};

}  // namespace jaxgraph
