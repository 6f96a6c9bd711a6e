// For functions that kernels call, too.
#pragma once

#ifdef __CUDACC__
#define JAXGRAPH_HOST_DEVICE __host__ __device__
#else
#define JAXGRAPH_HOST_DEVICE
#endif
