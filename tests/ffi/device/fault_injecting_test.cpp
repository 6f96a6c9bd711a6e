#include "ffi/device/fault_injecting.h"

#include <gtest/gtest.h>

#include "ffi/device/host/host_device.h"

namespace jaxgraph {
namespace {

TEST(FaultInjecting, FailsTheCallsItWasToldTo) {
  HostDevice host;
  FaultInjecting device(&host);
  device.Fail(DeviceCall::kIsCapturing, 1, 2, Code::kOutOfMemory);
  bool capturing = false;
  EXPECT_TRUE(device.IsCapturing(nullptr, &capturing).ok());
  EXPECT_EQ(device.IsCapturing(nullptr, &capturing).code(), Code::kOutOfMemory);
  EXPECT_EQ(device.IsCapturing(nullptr, &capturing).code(), Code::kOutOfMemory);
  EXPECT_TRUE(device.IsCapturing(nullptr, &capturing).ok());
  EXPECT_EQ(device.calls(DeviceCall::kIsCapturing), 4u);
  EXPECT_EQ(device.failures(), 2u);
}

TEST(FaultInjecting, FailedEndStillEndsTheCapture) {
  HostDevice host;
  FaultInjecting device(&host);
  Stream stream = nullptr;
  ASSERT_TRUE(device.CreateStream(&stream).ok());
  ASSERT_TRUE(device.BeginCapture(stream).ok());
  device.Fail(DeviceCall::kEndCapture, 0);
  GraphHandle graph = stream;
  EXPECT_FALSE(device.EndCapture(stream, &graph).ok());
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(device.live_handles().graphs, 0);
  bool capturing = true;
  EXPECT_TRUE(device.IsCapturing(stream, &capturing).ok());
  EXPECT_FALSE(capturing);
  device.DestroyStream(stream);
}

TEST(FaultInjecting, HealForgetsAllOrders) {
  HostDevice host;
  FaultInjecting device(&host);
  device.Fail(DeviceCall::kEnterDevice, 0, 100);
  device.Heal();
  int previous = 0;
  EXPECT_TRUE(device.EnterDevice(&previous).ok());
}

}  // namespace
}  // namespace jaxgraph
