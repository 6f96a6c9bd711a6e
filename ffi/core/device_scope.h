#pragma once

#include "ffi/core/status.h"
#include "ffi/device/graph_device.h"

namespace jaxgraph {

// Makes the device current for as long as it lives.
class DeviceScope {
 public:
  explicit DeviceScope(GraphDevice* device) : device_(device) {
    status_ = device->EnterDevice(&previous_);
  }
  ~DeviceScope() {
    if (status_.ok()) device_->LeaveDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  const Status& status() const { return status_; }

 private:
  GraphDevice* device_;
  int previous_ = 0;
  Status status_;
};

}  // namespace jaxgraph
