// SerialFor: a ParallelFor of one thread, for calls that bring none.
#pragma once

#include "ffi/device/launch.h"

namespace jaxgraph {

class SerialFor final : public ParallelFor {
 public:
  int num_threads() const override { return 1; }
  void Run(int n, void (*fn)(void* ctx, int i), void* ctx) override {
    for (int i = 0; i < n; ++i) fn(ctx, i);
  }
};

}  // namespace jaxgraph
