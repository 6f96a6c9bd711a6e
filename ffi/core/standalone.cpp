#include "ffi/core/standalone.h"

#include "ffi/core/device_scope.h"
#include "ffi/core/launch_plan.h"
#include "ffi/core/placement.h"

namespace jaxgraph {

Status LaunchStandalone(GraphDevice* device, const Emitter& emitter, const Program& program,
                        const std::vector<char*>& addresses, Stream stream) {
  const DeviceScope scope(device);
  JAXGRAPH_RETURN_IF_ERROR(scope.status());
  const Placement placement(program, /*slots=*/false);
  JAXGRAPH_RETURN_IF_ERROR(CheckAddresses(program, placement, addresses));
  LaunchPlan plan;
  JAXGRAPH_RETURN_IF_ERROR(
      Planner(emitter, program, placement).Make({addresses, addresses}, &plan));
  for (const PlannedChunk& chunk : plan.chunks) {
    for (const Launch& launch : chunk.launches) {
      JAXGRAPH_RETURN_IF_ERROR(device->LaunchKernel(launch, stream));
    }
  }
  return Status::Ok();
}

}  // namespace jaxgraph
