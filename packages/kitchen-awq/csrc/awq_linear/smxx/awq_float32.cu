// AWQ linear for few rows of float32 x: what has had an activation or a norm in front, and calls that ask for fp32. Any GPU.
//
//   W[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))     T: the type that the weight decodes to
//   y = sum over k of x[m, k] * W[n, k], fp32 FMAs;  then epilogue.cuh
//
//   x [M, K] float32; codes [N, K/2]; scale, zero [K/g, N] of any float type; K and g multiples of 8
//
// A block takes 8 weight rows and up to 4 rows of x, its warps in turn 256 columns of them: a lane has 8 columns, one word of codes of
// each row. Sums over lanes, then over warps in shared memory, in a fixed order. Tensor cores would round x.
// Measured: docs/kernels/awq.md.
#include "awq_linear/awq_linear.h"
#include "awq_linear/epilogue.cuh"
#include "kitchen/host/device.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 8, kColumns = 8, kMostTokens = 4;
constexpr int kChunk = 32 * kColumns;

struct Float32Params {
  int M, N, K, group;
  const float* x;
  const uint8_t* codes;
  const void *scale, *zero;
  DType parameter_type;
  bool vectors;  // N is a multiple of 8, and parameters are aligned to 16 bytes: those of a block's rows lie together
  EpilogueParams epilogue;
};

template <class T>
__device__ __forceinline__ float rounded(float value);
template <>
__device__ __forceinline__ float rounded<float>(float value) { return value; }
template <>
__device__ __forceinline__ float rounded<__half>(float value) { return __half2float(__float2half_rn(value)); }
template <>
__device__ __forceinline__ float rounded<__nv_bfloat16>(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

template <class T>
__device__ __forceinline__ void unpack(float (&values)[kRows], const uint4& words) {
  Word<T>::unpack(words.x, values), Word<T>::unpack(words.y, values + 2), Word<T>::unpack(words.z, values + 4), Word<T>::unpack(words.w, values + 6);
}

// Parameters of the block's rows in one group, those beyond N as those of the last.
__device__ __forceinline__ void load_rows(float (&values)[kRows], const void* data, int64_t at, int left, const Float32Params& p) {
  if (!p.vectors) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[r] = load_as_float(data, at + min(r, left - 1), p.parameter_type);
  } else if (p.parameter_type == DType::kFloat32) {
    const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
    const float4 low = from[0], high = from[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + at);
    if (p.parameter_type == DType::kFloat16) unpack<__half>(values, words);
    else unpack<__nv_bfloat16>(values, words);
  }
}

template <int kTokens>
using Sums = float[kRows][kTokens];

// A warp's sums over its chunks.
template <class T, int kTokens>
__device__ __forceinline__ void accumulate(Sums<kTokens>& sums, const Float32Params& p, int first_row, int first_token) {
  const int lane = static_cast<int>(threadIdx.x) % 32, left = p.N - first_row;
#pragma unroll 2
  for (int k = static_cast<int>(threadIdx.x) / 32 * kChunk + lane * kColumns; k < p.K; k += kWarps * kChunk) {
    uint32_t words[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      words[r] = __ldcs(reinterpret_cast<const uint32_t*>(p.codes + static_cast<int64_t>(first_row + min(r, left - 1)) * (p.K / 2) + k / 2));
    }
    float scale[kRows], zero[kRows], x[kTokens][kColumns];
    const int64_t at = static_cast<int64_t>(k / p.group) * p.N + first_row;
    load_rows(scale, p.scale, at, left, p), load_rows(zero, p.zero, at, left, p);
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      const float4* const from = reinterpret_cast<const float4*>(p.x + static_cast<int64_t>(min(first_token + m, p.M - 1)) * p.K + k);
      const float4 low = from[0], high = from[1];
      x[m][0] = low.x, x[m][1] = low.y, x[m][2] = low.z, x[m][3] = low.w, x[m][4] = high.x, x[m][5] = high.y, x[m][6] = high.z, x[m][7] = high.w;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float w = rounded<T>(quant::awq_decode_fp32(words[r], c, scale[r], zero[r]));
#pragma unroll
        for (int m = 0; m < kTokens; ++m) sums[r][m] = __fmaf_rn(x[m][c], w, sums[r][m]);
      }
    }
  }
}

template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads) awq_float32_kernel(const __grid_constant__ Float32Params p) {
  __shared__ float of_warps[kWarps][kTokens][kRows];
  const int first_row = static_cast<int>(blockIdx.x) * kRows, first_token = static_cast<int>(blockIdx.y) * kTokens;
  Sums<kTokens> sums = {};
  accumulate<T, kTokens>(sums, p, first_row, first_token);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      float sum = sums[r][m];
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][m][r] = sum;
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) % kRows, m = static_cast<int>(threadIdx.x) / kRows;
  if (m >= kTokens || first_token + m >= p.M || first_row + r >= p.N) return;
  float y = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) y += of_warps[warp][m][r];
  finish_one(p.epilogue, static_cast<int64_t>(first_token + m) * p.N + first_row + r, first_row + r, y);
}

template <class T>
void launch(const Float32Params& p, cudaStream_t stream) {
  const int tokens = p.M == 1 ? 1 : p.M == 2 ? 2 : kMostTokens;
  const dim3 grid(static_cast<unsigned>((p.N + kRows - 1) / kRows), static_cast<unsigned>((p.M + tokens - 1) / tokens));
  if (tokens == 1) awq_float32_kernel<T, 1><<<grid, kThreads, 0, stream>>>(p);
  else if (tokens == 2) awq_float32_kernel<T, 2><<<grid, kThreads, 0, stream>>>(p);
  else awq_float32_kernel<T, kMostTokens><<<grid, kThreads, 0, stream>>>(p);
  host::check(cudaGetLastError(), "awq_float32");
}

}  // namespace

void awq_float32(const LinearParams& q, DType weight_type, int device, cudaStream_t stream) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  host::require(q.x_type == DType::kFloat32 && q.K % kColumns == 0 && q.group % kColumns == 0 && q.K % q.group == 0,
                "awq_float32: takes float32 x, K and groups of multiples of 8");
  host::require(q.M <= 1024 && q.N <= (int64_t{1} << 30) && q.K < (int64_t{1} << 30) && aligned(q.x) && aligned(q.codes),
                "awq_float32: takes up to 1024 rows of x, N and K up to 2^30, and operands aligned to 16 bytes");
  if (q.M == 0 || q.N == 0) return;
  host::DeviceGuard guard(device);
  const Float32Params p = {static_cast<int>(q.M), static_cast<int>(q.N), static_cast<int>(q.K), static_cast<int>(q.group),
                           static_cast<const float*>(q.x), q.codes, q.scale, q.zero, q.parameter_type,
                           q.N % kRows == 0 && aligned(q.scale) && aligned(q.zero),
                           {q.bias, q.residual, q.residual_scale, q.out, q.residual_scale_stride, q.bias_type, q.residual_type, q.out_type, false}};
  if (weight_type == DType::kFloat32) return launch<float>(p, stream);
  if (weight_type == DType::kFloat16) return launch<__half>(p, stream);
  launch<__nv_bfloat16>(p, stream);
}

}  // namespace kitchen::awq
