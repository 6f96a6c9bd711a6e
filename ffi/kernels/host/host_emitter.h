// Launches of the host kernels: one correct kernel per kind of node, fast where decode steps spend
// their time.
#pragma once

#include "ffi/kernels/emitter.h"

namespace jaxgraph {

const Emitter& HostEmitter();

}  // namespace jaxgraph
