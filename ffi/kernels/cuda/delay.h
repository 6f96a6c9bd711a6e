// A build for tests (-DJAXGRAPH_RANDOM_DELAYS=ON) holds up every warp of every kernel for a time of
// its own once its predecessors are complete, so before anything it stores. What was right by luck
// of timing alone, between kernels or between warps, is then wrong, and shows as other bits.
#pragma once

// As a macro, because kernels compiled at run time need the function as text: every warp has a
// chance of one in four to wait for up to 16 us.
#define JAXGRAPH_RANDOM_DELAY(qualifiers)                                                     \
  qualifiers void RandomDelay() {                                                             \
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);    \
    unsigned random = (block * 64 + threadIdx.x / 32 + 1) * 2654435761u;                      \
    random ^= __shfl_sync(__activemask(), static_cast<unsigned>(clock64()), 0) * 2246822519u; \
    random ^= random >> 15;                                                                   \
    if (random % 4 == 0) __nanosleep(random >> 18);                                           \
    __syncwarp(__activemask());                                                               \
  }
