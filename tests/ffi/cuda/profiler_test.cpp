// Ranges reach a profiler that is attached. The profiler is this program: NVTX takes an injection
// that is linked in. Needs no GPU.
#include "ffi/device/cuda/profiler.h"

#include <gtest/gtest.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#define NVTX_NO_IMPL  // it would define the pointer below, for others to override
#include <nvtx3/nvToolsExt.h>

#include <string>
#include <vector>

namespace {

std::vector<std::string> seen;  // "+name" and "-"
int depth = 0;

int NVTX_API Push(const char* name) {
  seen.push_back(std::string("+") + name);
  return depth++;
}

int NVTX_API Pop() {
  seen.push_back("-");
  return --depth;
}

int NVTX_API Inject(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks =
      static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&Push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&Pop);
  return 1;
}

}  // namespace

extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = &Inject;
}

namespace jaxgraph {
namespace {

TEST(Profiler, RangesArriveByNameAndNest) {
  ASSERT_TRUE(ProfilerAttached());
  ASSERT_TRUE(ProfilerAttached()) << "asked once, known for good";
  EXPECT_EQ(seen, (std::vector<std::string>{"+jaxgraph", "-"}));
  seen.clear();
  PushProfilerRange("step split 0");
  PushProfilerRange("step split 0 chunk 1");
  PopProfilerRange();
  PopProfilerRange();
  EXPECT_EQ(seen, (std::vector<std::string>{"+step split 0", "+step split 0 chunk 1", "-", "-"}));
  EXPECT_EQ(depth, 0);
}

}  // namespace
}  // namespace jaxgraph

#else

TEST(Profiler, IsNotAttachedWithoutNvtx) { EXPECT_FALSE(jaxgraph::ProfilerAttached()); }

#endif
