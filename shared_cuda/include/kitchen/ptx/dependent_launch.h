// griddep.h for kernels of every architecture: no-ops before sm_90, where no grid is launched as a dependent.
#pragma once

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include "kitchen/ptx/griddep.h"
#endif

namespace kitchen::ptx {

// Waits for the grid before, then lets the grid after start its own prologue. Call it before the first read of an operand.
__device__ __forceinline__ void wait_then_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  griddep_wait();
  griddep_launch();
#endif
}

}  // namespace kitchen::ptx
