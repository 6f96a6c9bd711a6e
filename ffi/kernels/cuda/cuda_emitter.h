// The emitter for CUDA devices.
#pragma once

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// Emits for the oldest GPU of this machine, so that one emitter serves all its devices.
const Emitter& CudaEmitter();

// Emits for one compute capability (90: 9.0). What the library was not compiled for is not used.
const Emitter& CudaEmitter(int compute_capability);

// As CudaEmitter(), but expressions are always interpreted: what compiled kernels (jit/) are held
// against.
const Emitter& InterpretingCudaEmitter();

}  // namespace jaxgraph
