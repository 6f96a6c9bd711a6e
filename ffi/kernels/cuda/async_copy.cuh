// Copies into shared memory that a thread starts and others wait for.
#pragma once

#include <cstdint>

namespace jaxgraph {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

}  // namespace jaxgraph
