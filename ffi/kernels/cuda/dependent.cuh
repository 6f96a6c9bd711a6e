// Programmatic dependent launch, as every kernel here does it that reads nothing before it waits.
// Does nothing where the launch has no such attribute.
#pragma once

#include "ffi/kernels/cuda/delay.h"

namespace jaxgraph {

#ifdef JAXGRAPH_RANDOM_DELAYS
JAXGRAPH_RANDOM_DELAY(__device__ __forceinline__)
#else
__device__ __forceinline__ void RandomDelay() {}
#endif

// Lets the next launch's blocks come, and returns when every launch before this one is complete and
// what it wrote can be seen. Every thread calls it before it touches memory, or returns.
__device__ __forceinline__ void BeginLaunch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  RandomDelay();
}

}  // namespace jaxgraph
