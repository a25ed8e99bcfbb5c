// The sum of what the lanes of a warp have.
#pragma once

namespace kitchen::ptx {

// Over the 32 lanes of a full warp, in every lane. redux.sync from sm_80 on.
__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, x);
#else
  for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
#endif
}

}  // namespace kitchen::ptx
