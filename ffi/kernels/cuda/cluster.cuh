// What blocks of a cluster tell each other: barriers, and sums sent into another block's memory.
#pragma once

#include <cstdint>

namespace jaxgraph {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The two halves of a barrier of all threads of a cluster. All threads of a warp come to an aligned
// one together, which those that a branch has parted do not by themselves.
__device__ __forceinline__ void ArriveInCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void WaitForCluster() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where the others are to see nothing of this block but the barriers that it has made: no fence.
__device__ __forceinline__ void ArriveWithBarriers() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Before a cluster's blocks meet: of `bytes` that its blocks will send into this block's memory.
__device__ __forceinline__ void ExpectFromCluster(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitForClusterBytes(uint32_t barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier)
      : "memory");
}
// The same place in another of the cluster's blocks.
__device__ __forceinline__ uint32_t InBlock(int rank, uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Stores `v` in another block and tells its barrier; the sender may exit meanwhile.
__device__ __forceinline__ void Send(uint32_t to, float v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
      "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void Send(uint32_t to, const float2& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void Send(uint32_t to, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

#endif

}  // namespace jaxgraph
