// How many of a launch's clusters the device runs at once.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/device/launch.h"

namespace jaxgraph::testing {

// Of a launch along one dimension.
inline cudaError_t ClustersAtOnce(const Launch& launch, int* clusters) {
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {launch.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.grid[0]);
  config.blockDim = dim3(launch.block[0]);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, launch.kernel->cuda_function, &config);
}

}  // namespace jaxgraph::testing
