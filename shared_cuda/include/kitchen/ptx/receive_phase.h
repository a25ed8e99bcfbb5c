// store_async.h's barriers used more than once: waiting for a phase by its parity. sm_90 and later; earlier chips trap.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
#pragma once

#include <cstdint>

namespace kitchen::ptx {

// Until all bytes of the phase of this parity (0 for the first) have come; they are visible then.
__device__ __forceinline__ void receive_wait_phase(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
#else
  __trap();  // clusters need compute capability 9.0
#endif
}

}  // namespace kitchen::ptx
