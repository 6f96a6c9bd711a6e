// Memory for benchmarks: zeros would flatter whoever reads them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "benchmarks/check.h"

namespace jaxgraph {

// Device memory, filled with bf16 numbers of both signs between 2^-7 and 2^-3.
class FilledMemory {
 public:
  FilledMemory() = default;
  FilledMemory(const FilledMemory&) = delete;
  FilledMemory& operator=(const FilledMemory&) = delete;
  ~FilledMemory() {
    for (char* data : taken_) cudaFree(data);
    cudaFree(pattern_);
  }

  char* Take(int64_t bytes) {
    char* data = nullptr;
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    taken_.push_back(data);
    if (pattern_ == nullptr) {
      std::vector<uint16_t> noise(kPattern / 2);
      uint32_t state = 1;
      for (uint16_t& n : noise) {
        state = state * 1664525u + 1013904223u;
        n = static_cast<uint16_t>(((state >> 16) & 0x81ff) + 0x3c00);
      }
      CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&pattern_), kPattern));
      CHECK_CUDA(cudaMemcpy(pattern_, noise.data(), kPattern, cudaMemcpyHostToDevice));
    }
    for (int64_t at = 0; at < bytes; at += kPattern) {
      CHECK_CUDA(cudaMemcpyAsync(data + at, pattern_, std::min(kPattern, bytes - at),
                                 cudaMemcpyDeviceToDevice));
    }
    CHECK_CUDA(cudaStreamSynchronize(nullptr));  // launches in other streams do not wait for it
    return data;
  }

 private:
  static constexpr int64_t kPattern = 1 << 21;
  std::vector<char*> taken_;
  char* pattern_ = nullptr;
};

}  // namespace jaxgraph
