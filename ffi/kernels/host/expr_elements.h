// Elements of an EXPR inside another kernel, over the params that EmitExpr gave its launch.
#pragma once

#include <cstdint>

namespace jaxgraph {

// Runs the elements [begin, end) of the flattened space on the calling thread.
void RunExprElements(const char* params, int64_t begin, int64_t end);

// Another address for one tensor, in a thread's own copy of the params.
void SetExprSource(char* params, int source, char* address);
void SetExprOutput(char* params, int output, char* address);

}  // namespace jaxgraph
