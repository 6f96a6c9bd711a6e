// CudaArena: device memory that grows, for one stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "ffi/core/status.h"

namespace jaxgraph {

class CudaArena {
 public:
  virtual ~CudaArena() = default;
  CudaArena() = default;
  CudaArena(const CudaArena&) = delete;
  CudaArena& operator=(const CudaArena&) = delete;

  virtual char* base() const = 0;
  virtual uint64_t capacity() const = 0;
  // Makes at least `bytes` usable. On failure everything is as before. The base may change only in
  // the arena of MakeMovingArena, which waits for `stream`, whose work may still use the old one.
  virtual Status Grow(uint64_t bytes, cudaStream_t stream) = 0;
};

// An address range reserved once, into which pages are mapped: the base never moves, so graphs that
// were captured before it grew stay valid. kUnsupported where the device cannot.
Status MakeMappedArena(int ordinal, std::unique_ptr<CudaArena>* arena);

// Plain allocations, each larger than the last.
std::unique_ptr<CudaArena> MakeMovingArena();

}  // namespace jaxgraph
