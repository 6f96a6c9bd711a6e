// The XLA FFI handlers of `jaxgraph_execute` and `jaxgraph_launch`. A C interface without XLA's
// headers, so that what registers them (the Python module) is compiled without them.
#pragma once

#include "ffi/runtime/export.h"

struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;

extern "C" {

// Instantiate, once per call site when XLA compiles it: decodes the attribute `program` (bytes).
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphInstantiateHost(struct XLA_FFI_CallFrame* frame);
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphInstantiateCuda(struct XLA_FFI_CallFrame* frame);

// Execute: runs the program on the call's operands and results, on the call's stream.
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphExecuteHost(struct XLA_FFI_CallFrame* frame);
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphExecuteCuda(struct XLA_FFI_CallFrame* frame);

// Launch: runs the program's kernels once, without an executor. One more result than the program
// has, the last, is scratch memory. Instantiated as above.
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphLaunchHost(struct XLA_FFI_CallFrame* frame);
JAXGRAPH_EXPORT struct XLA_FFI_Error* JaxgraphLaunchCuda(struct XLA_FFI_CallFrame* frame);

}  // extern "C"
