#include "ffi/device/cuda/cuda_error.h"

#include <string>

namespace jaxgraph {

Code CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return Code::kOutOfMemory;
    case cudaErrorGraphExecUpdateFailure:
      return Code::kUpdateRefused;
    case cudaErrorNotSupported:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorCallRequiresNewerDriver:
      return Code::kUnsupported;
    // Every later call in this context returns the same error: the process must start anew.
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorContextIsDestroyed:
      return Code::kContextPoisoned;
    default:
      return Code::kDeviceError;
  }
}

Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return Status::Ok();
  // A poisoned context keeps its error; clearing the thread's copy does no harm.
  cudaGetLastError();
  const std::string text(call);
  const std::string name = text.substr(0, text.find('('));
  return Status(CodeOf(error),
                name + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

void IgnoreCudaError(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
}

}  // namespace jaxgraph
