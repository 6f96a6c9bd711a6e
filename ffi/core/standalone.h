// A program as one kernel call: launched here and now, with scratch memory that the caller brings.
// No identity, no ledger, no state: whoever captures the stream (XLA's command buffers) captures
// it.
#pragma once

#include <vector>

#include "ffi/core/program.h"
#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"
#include "ffi/kernels/emitter.h"

namespace jaxgraph {

// `addresses`: of all bases, the scratch memory (arena_bytes of it) first.
Status LaunchStandalone(GraphDevice* device, const Emitter& emitter, const Program& program,
                        const std::vector<char*>& addresses, Stream stream);

}  // namespace jaxgraph
