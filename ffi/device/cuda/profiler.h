// Named ranges (NVTX) for a profiler that is attached to the process.
#pragma once

namespace jaxgraph {

// Asked once, when first needed: profilers attach when a process starts.
bool ProfilerAttached();
void PushProfilerRange(const char* name);
void PopProfilerRange();

}  // namespace jaxgraph
