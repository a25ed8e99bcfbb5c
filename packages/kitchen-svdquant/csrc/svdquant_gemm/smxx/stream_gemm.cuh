// W4A4 GEMM with a low-rank branch by mma.sync, for any M, every GPU since sm_75. Made for few rows of x, where
// reading the weight once is all the time there is. The folders sm75 and sm80 give it their MMA, `Multiply`.
//
//   acc[m, n] = sum over r of low[m, r] * up[n, r]                                          float32
//   acc[m, n] = fma(float(dot[m, n, g]) * a_scale[m, g], b_scale[n, g], acc[m, n])          for every group of 64 columns
//   y = acc + bias[n];  y = fma(residual_scale[n], y, residual[m, n])                       float32
//   out[m, n] = y rounded once to out's type
//
// Weight rows are the m=16 side of the MMA, tokens the n=8 side. The order of k inside of a group is free as long as both
// sides agree: a lane takes 8 bytes (16 codes) of a group of its rows, so codes go from global memory to registers and
// never touch shared memory. A block has 16 weight rows and up to 64 tokens; its eight warps have an eighth of K (and of R)
// each, and their sums are added up in shared memory, in order. As 8-bit integers a code is taken with its bits shifted to
// the top of the byte: 16 times its value, two instructions for eight codes; the power of two is taken out of the scale.
//
// A programmatic launch reads the first weights before it waits for the kernel in front. Measured: docs/kernels/svdquant.md.
#pragma once

#include <algorithm>

#include "kitchen/common/to_float.h"
#include "kitchen/host/check.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/dependent_launch.h"
#include "svdquant_gemm/scale_layout.h"
#include "svdquant_gemm/stream_operands.h"

namespace kitchen::svdquant::smxx {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16, kTokens = 8;
constexpr int kGroupWords = kGroup / 16;  // of 8 bytes

// The aligned word of memory that holds a float of some type, which is taken out of it where it is used: a conversion right
// behind a load would wait for it, and so would a second load for another type. Arrays of 16-bit floats start at a multiple
// of 4 bytes; the word of the last of an odd count ends 2 bytes behind it, in the same 4 bytes of the allocation.
__device__ __forceinline__ uint32_t load_word(const void* data, int64_t index, DType type) {
  return __ldg(static_cast<const uint32_t*>(data) + (type == DType::kFloat32 ? index : index >> 1));
}
__device__ __forceinline__ float float_of(uint32_t word, unsigned index, DType type) {
  if (type == DType::kFloat32) return __uint_as_float(word);
  const uint32_t bits = index % 2 == 0 ? word & 0xffffu : word >> 16;
  return type == DType::kFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
                                 : __uint_as_float(bits << 16);
}

struct Weights {
  uint2 codes[2];
  uint32_t scale[2];  // words of b_scale
};

template <int kTokenBlocks>
struct Tokens {
  uint2 codes[kTokenBlocks];
  float2 scale[kTokenBlocks];
};

// The rows and tokens of a lane. Those beyond the matrix repeat the last one; they are not stored.
template <int kTokenBlocks>
struct Lane {
  const StreamOperands& o;
  int g, t, first_token;
  int64_t row[2];

  __device__ __forceinline__ Lane(const StreamOperands& operands, int64_t first_row, int first)
      : o(operands), g(threadIdx.x % 32 / 4), t(threadIdx.x % 4), first_token(first) {
    row[0] = min(first_row + g, o.N - 1), row[1] = min(first_row + g + 8, o.N - 1);
  }
  __device__ __forceinline__ int64_t token(int inside) const {
    return min(static_cast<int64_t>(first_token + inside), o.M - 1);
  }

  __device__ __forceinline__ void load(Weights& w, int group, int end) const {
    if (group >= end) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      w.codes[i] = __ldg(reinterpret_cast<const uint2*>(o.b + row[i] * (o.K / 2)) + group * kGroupWords + t);
      w.scale[i] = load_word(o.b_scale, group * o.N + row[i], o.b_scale_type);
    }
  }

  // Not by way of the read-only cache: the kernel in front may still have been running when this one started.
  __device__ __forceinline__ void load(Tokens<kTokenBlocks>& x, int group, int end) const {
    if (group >= end) return;
#pragma unroll
    for (int j = 0; j < kTokenBlocks; ++j) {
      x.codes[j] = *(reinterpret_cast<const uint2*>(o.a + token(kTokens * j + g) * (o.K / 2)) + group * kGroupWords + t);
      const float* const scales = o.a_scale + group * o.M;
      x.scale[j] = make_float2(scales[token(kTokens * j + 2 * t)], scales[token(kTokens * j + 2 * t + 1)]);
    }
  }

  // This warp's ranks of low * up^T, four at a time.
  __device__ __forceinline__ void low_rank(float (&total)[kTokenBlocks][4], int warp) const {
    constexpr int kTogether = 4;
    const int share = (o.R + kWarps - 1) / kWarps, end = min(o.R, (warp + 1) * share);
#pragma unroll 1
    for (int first = warp * share; first < end; first += kTogether) {
      uint32_t up[kTogether][2];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int r = min(first + i, end - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) up[i][half] = load_word(o.up, row[half] * o.R + r, o.up_type);
      }
      float up_value[kTogether][2];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int r = min(first + i, end - 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          up_value[i][half] = float_of(up[i][half], static_cast<unsigned>(row[half] * o.R + r), o.up_type);
        }
      }
#pragma unroll
      for (int j = 0; j < kTokenBlocks; ++j) {
        float low[kTogether][2];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int r = min(first + i, end - 1);
#pragma unroll
          for (int e = 0; e < 2; ++e) low[i][e] = o.low[token(kTokens * j + 2 * t + e) * o.R + r];
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= end) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) total[j][e] = __fmaf_rn(low[i][e % 2], up_value[i][e / 2], total[j][e]);
        }
      }
    }
  }
};

// Sums of all warps, in their order; bias, residual, one rounding.
__device__ __forceinline__ void store(const StreamOperands& o, float y, int64_t m, int64_t n) {
  if (o.bias != nullptr) y = __fadd_rn(y, load_as_float(o.bias, n, o.bias_type));
  const int64_t at = m * o.N + n;
  if (o.residual != nullptr) {
    const float scale = o.residual_scale == nullptr ? 1.0f : o.residual_scale[n * o.residual_scale_stride];
    y = __fmaf_rn(scale, y, load_as_float(o.residual, at, o.out_type));
  }
  if (o.out_type == DType::kFloat32) {
    static_cast<float*>(o.out)[at] = y;
  } else if (o.out_type == DType::kFloat16) {
    static_cast<__half*>(o.out)[at] = __float2half_rn(y);
  } else {
    static_cast<__nv_bfloat16*>(o.out)[at] = __float2bfloat16_rn(y);
  }
}

template <class Multiply, int kTokenBlocks>
__global__ void __launch_bounds__(kThreads) stream_gemm(const __grid_constant__ StreamOperands o, int tiles_n) {
  constexpr int kAhead = kTokenBlocks == 1 ? 6 : kTokenBlocks == 2 ? 4 : kTokenBlocks == 4 ? 2 : 1;  // groups under way
  constexpr int kPitch = kRows + 1, kTileTokens = kTokens * kTokenBlocks;
  __shared__ float sums[kWarps][kTileTokens][kPitch];
  const int warp = threadIdx.x / 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % tiles_n) * kRows;
  const int first_token = static_cast<int>(blockIdx.x / tiles_n) * kTileTokens;
  const Multiply by(o.is_unsigned);
  const Lane<kTokenBlocks> lane(o, first_row, first_token);
  const int groups = static_cast<int>(o.K / kGroup), share = (groups + kWarps - 1) / kWarps;
  const int begin = warp * share, end = min(groups, begin + share);

  Weights w[kAhead];
  Tokens<kTokenBlocks> x[kAhead];
#pragma unroll
  for (int s = 0; s < kAhead; ++s) lane.load(w[s], begin + s, end);
  ptx::wait_then_launch_dependents();
#pragma unroll
  for (int s = 0; s < kAhead; ++s) lane.load(x[s], begin + s, end);
  float total[kTokenBlocks][4] = {};
  lane.low_rank(total, warp);
  for (int group = begin; group < end; group += kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (group + s < end) {
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scale[i] =
              float_of(w[s].scale[i], static_cast<unsigned>((group + s) * o.N + lane.row[i]), o.b_scale_type) * by.factor;
        }
#pragma unroll
        for (int j = 0; j < kTokenBlocks; ++j) {
          int dot[4] = {};
          by.multiply(dot, w[s].codes[0], w[s].codes[1], x[s].codes[j]);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float scaled = __fmul_rn(__int2float_rn(dot[e]), e % 2 ? x[s].scale[j].y : x[s].scale[j].x);
            total[j][e] = __fmaf_rn(scaled, scale[e / 2], total[j][e]);
          }
        }
      }
      lane.load(w[s], group + s + kAhead, end);
      lane.load(x[s], group + s + kAhead, end);
    }
  }
#pragma unroll
  for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[warp][kTokens * j + 2 * lane.t + e % 2][lane.g + 8 * (e / 2)] = total[j][e];
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < kTileTokens * kRows; i += kThreads) {
    const int64_t m = first_token + i / kRows, n = first_row + i % kRows;
    if (m >= o.M || n >= o.N) continue;
    float y = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) y = __fadd_rn(y, sums[k][i / kRows][i % kRows]);
    store(o, y, m, n);
  }
}

template <class Multiply, int kTokenBlocks>
void launch(const StreamOperands& o, cudaStream_t stream) {
  const int64_t tiles_n = (o.N + kRows - 1) / kRows,
                tiles_m = (o.M + kTokens * kTokenBlocks - 1) / (kTokens * kTokenBlocks);
  host::require(tiles_n * tiles_m < (int64_t{1} << 31), "svdquant_gemm_sm80: more than 2^31 - 1 blocks");
  host::launch("svdquant_gemm_sm80", stream_gemm<Multiply, kTokenBlocks>, {tiles_n * tiles_m, kThreads, 1, 0, stream, o.programmatic_launch},
               o, static_cast<int>(tiles_n));
}

template <class Multiply>
void launch_tokens(const StreamOperands& o, cudaStream_t stream) {
  if (o.M <= 8) return launch<Multiply, 1>(o, stream);
  if (o.M <= 16) return launch<Multiply, 2>(o, stream);
  if (o.M <= 32) return launch<Multiply, 4>(o, stream);
  return launch<Multiply, 8>(o, stream);
}

inline void check_operands(const StreamOperands& o) {
  host::require(o.M >= 0 && o.N >= 1 && o.K >= kGroup && o.K % kGroup == 0 && o.R >= 0,
                "svdquant_gemm: M, N, K or R is out of range");
  host::require(reinterpret_cast<uintptr_t>(o.a) % 8 == 0 && reinterpret_cast<uintptr_t>(o.b) % 8 == 0,
                "svdquant_gemm: codes must be aligned to 8 bytes");
  host::require(reinterpret_cast<uintptr_t>(o.b_scale) % 4 == 0 && reinterpret_cast<uintptr_t>(o.up) % 4 == 0,
                "svdquant_gemm: b_scale and up must be aligned to 4 bytes");
}

}  // namespace kitchen::svdquant::smxx
