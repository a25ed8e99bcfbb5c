// Every kernel of the package, compiled to one machine-code file per chip: by NVRTC 12.9 for sm_70, which CUDA 13 does not
// know, and by nvcc for 90a, where the same source is tested. Names are looked up by the host (driver.cpp), so
// they are not mangled.
#include "int8_scaled_mm/wmma_gemm.cuh"
#include "quantize_int8_rowwise/quantize_rows.cuh"

using namespace kitchen::volta;

extern "C" __global__ void __launch_bounds__(Large::kThreads) int8_scaled_mm_large(const __grid_constant__ ScaledMmParams p) {
  compute_tile<Large, Codes, FinishCodes<Large>>(p);
}

extern "C" __global__ void __launch_bounds__(Medium::kThreads) int8_scaled_mm_medium(const __grid_constant__ ScaledMmParams p) {
  compute_tile<Medium, Codes, FinishCodes<Medium>>(p);
}

extern "C" __global__ void __launch_bounds__(Small::kThreads) int8_scaled_mm_small(const __grid_constant__ ScaledMmParams p) {
  compute_tile<Small, Codes, FinishCodes<Small>>(p);
}

// The yardstick: the same tile with fp16 operands in memory, fp32 sums, fp16 out. A V100's registers hold one block of it; of
// an SM with more shared memory two, where it is faster.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kPlainBlocks = 2;
#else
constexpr int kPlainBlocks = 1;
#endif
extern "C" __global__ void __launch_bounds__(Large::kThreads, kPlainBlocks)
    plain_fp16_mm_large(const __grid_constant__ ScaledMmParams p) {
  compute_tile<Large, Halves, FinishHalves<Large>>(p);
}

extern "C" __global__ void __launch_bounds__(kMaxQuantizeThreads)
    quantize_int8_rowwise(const __grid_constant__ QuantizeParams p) {
  quantize_row(p);
}
