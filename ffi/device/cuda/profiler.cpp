// NVTX is a header that looks for a profiler's library itself; a toolkit without it costs the
// ranges.
#include "ffi/device/cuda/profiler.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace jaxgraph {

bool ProfilerAttached() {
  static const bool attached = [] {
    // Without a profiler there is nobody who could count how deep ranges nest.
    const bool counted = nvtxRangePushA("jaxgraph") >= 0;
    nvtxRangePop();
    return counted;
  }();
  return attached;
}

void PushProfilerRange(const char* name) { nvtxRangePushA(name); }
void PopProfilerRange() { nvtxRangePop(); }

}  // namespace jaxgraph

#else

namespace jaxgraph {

bool ProfilerAttached() { return false; }
void PushProfilerRange(const char*) {}
void PopProfilerRange() {}

}  // namespace jaxgraph

#endif
