#include "ffi/device/cuda/cuda_arena.h"

#include <algorithm>
#include <string>
#include <vector>

#include "ffi/device/cuda/cuda_error.h"
#include "ffi/device/cuda/driver_api.h"

namespace jaxgraph {
namespace {

uint64_t RoundUp(uint64_t n, uint64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

class MappedArena final : public CudaArena {
 public:
  MappedArena(const DriverApi* driver, const CUmemAllocationProp& prop, uint64_t granularity,
              CUdeviceptr base, uint64_t reserved)
      : driver_(driver), prop_(prop), granularity_(granularity), base_(base), reserved_(reserved) {}

  // Failures are ignored: at the end of the process the driver may be gone already.
  ~MappedArena() override {
    CUdeviceptr address = base_;
    for (const uint64_t bytes : segments_) {
      driver_->MemUnmap(address, bytes);
      address += bytes;
    }
    driver_->MemAddressFree(base_, reserved_);
  }

  char* base() const override { return reinterpret_cast<char*>(base_); }
  uint64_t capacity() const override { return mapped_; }

  Status Grow(uint64_t bytes, cudaStream_t) override {
    if (bytes <= mapped_) return Status::Ok();
    if (bytes > reserved_) {
      return Status(Code::kOutOfMemory, "the arena needs " + std::to_string(bytes) +
                                            " bytes; the device has " + std::to_string(reserved_));
    }
    const uint64_t more = RoundUp(bytes, granularity_) - mapped_;
    const CUdeviceptr end = base_ + mapped_;
    CUmemGenericAllocationHandle pages = 0;
    JAXGRAPH_RETURN_IF_ERROR(
        driver_->Check(driver_->MemCreate(&pages, more, &prop_, 0), "cuMemCreate"));
    const CUresult map = driver_->MemMap(end, more, 0, pages, 0);
    driver_->MemRelease(pages);  // a mapping keeps the pages alive by itself
    JAXGRAPH_RETURN_IF_ERROR(driver_->Check(map, "cuMemMap"));
    CUmemAccessDesc access = {};
    access.location = prop_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult set = driver_->MemSetAccess(end, more, &access, 1);
    if (set != CUDA_SUCCESS) driver_->MemUnmap(end, more);
    JAXGRAPH_RETURN_IF_ERROR(driver_->Check(set, "cuMemSetAccess"));
    segments_.push_back(more);
    mapped_ += more;
    return Status::Ok();
  }

 private:
  const DriverApi* driver_;
  CUmemAllocationProp prop_;
  uint64_t granularity_;
  CUdeviceptr base_;
  uint64_t reserved_;
  uint64_t mapped_ = 0;
  std::vector<uint64_t> segments_;  // a range must be unmapped as it was mapped
};

class MovingArena final : public CudaArena {
 public:
  ~MovingArena() override { IgnoreCudaError(cudaFree(base_)); }

  char* base() const override { return static_cast<char*>(base_); }
  uint64_t capacity() const override { return capacity_; }

  Status Grow(uint64_t bytes, cudaStream_t stream) override {
    if (bytes <= capacity_) return Status::Ok();
    // Twice the size, so that a sequence of growing programs does not move the arena each time.
    const uint64_t wanted = RoundUp(std::max(bytes, 2 * capacity_), 256);
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    void* moved = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaMalloc(&moved, wanted));
    IgnoreCudaError(cudaFree(base_));
    base_ = moved;
    capacity_ = wanted;
    return Status::Ok();
  }

 private:
  void* base_ = nullptr;
  uint64_t capacity_ = 0;
};

}  // namespace

Status MakeMappedArena(int ordinal, std::unique_ptr<CudaArena>* arena) {
  const DriverApi* driver = DriverApi::Get();
  if (driver == nullptr) return Status(Code::kUnsupported, "the driver cannot map memory");
  CUdevice device = 0;
  int supported = 0;
  JAXGRAPH_RETURN_IF_ERROR(driver->Check(driver->DeviceGet(&device, ordinal), "cuDeviceGet"));
  JAXGRAPH_RETURN_IF_ERROR(driver->Check(
      driver->DeviceGetAttribute(&supported,
                                 CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device),
      "cuDeviceGetAttribute"));
  if (supported == 0) return Status(Code::kUnsupported, "the device cannot map memory");

  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = ordinal;
  size_t granularity = 0, free = 0, total = 0;
  JAXGRAPH_RETURN_IF_ERROR(
      driver->Check(driver->MemGetAllocationGranularity(&granularity, &prop,
                                                        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                    "cuMemGetAllocationGranularity"));
  JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free, &total));
  // Addresses cost nothing: reserve as many as there is memory.
  const uint64_t reserved = RoundUp(total, granularity);
  CUdeviceptr base = 0;
  JAXGRAPH_RETURN_IF_ERROR(
      driver->Check(driver->MemAddressReserve(&base, reserved, 0, 0, 0), "cuMemAddressReserve"));
  *arena = std::make_unique<MappedArena>(driver, prop, granularity, base, reserved);
  return Status::Ok();
}

std::unique_ptr<CudaArena> MakeMovingArena() { return std::make_unique<MovingArena>(); }

}  // namespace jaxgraph
