// The epilogue of the kernels for few tokens: scales, bias and residual in fp32, one rounding. A thread is handed four columns of a
// token at a time; what belongs to weights is read before the wait of a programmatic launch.
#pragma once

#include "int8_gemm/smxx/scale_params.cuh"
#include "kitchen/ptx/prefetch.h"

namespace kitchen::int8 {

constexpr int kMostTokens = 64;
constexpr int kQuadColumns = 4;  // of a thread

// A token's residual under the block's columns to L2.
template <int kRows>
__device__ __forceinline__ void prefetch_residual(const ScaleParams& p, int token, int N, int first_column) {
  const int size = p.out_type == DType::kFloat32 ? 4 : 2;
  const char* const row = static_cast<const char*>(p.residual) + (static_cast<int64_t>(token) * N + first_column) * size;
  const int bytes = min(kRows, N - first_column) * size;
#pragma unroll 1
  for (int at = 0; at < bytes; at += 32) ptx::prefetch_l2(row + at);
}

// Four neighbouring elements from index `at`, of which `left` are inside of the row.
__device__ __forceinline__ float4 load_residual(const ScaleParams& p, int64_t at, int left) {
  float values[4] = {};
  if (p.vectors && p.out_type != DType::kFloat32) {
    const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.residual) + at);
    if (p.out_type == DType::kFloat16) {
      Word<__half>::unpack(words.x, values), Word<__half>::unpack(words.y, values + 2);
    } else {
      Word<__nv_bfloat16>::unpack(words.x, values), Word<__nv_bfloat16>::unpack(words.y, values + 2);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = e < left ? load_as_float(p.residual, at + e, p.out_type) : 0.0f;
  }
  return make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ float4 load_residual_scale(const ScaleParams& p, int n, int N) {
  const auto at = [&](int e) { return residual_scale_of(p, min(n + e, N - 1)); };
  return make_float4(at(0), at(1), at(2), at(3));
}

// acc * a_scale * b_scale + bias, each operation rounded, the last two as one.
__device__ __forceinline__ float4 scale_sums(const int4& acc, float a_scale, const float4& b_scale, const float4& bias) {
  const auto one = [&](int sum, float scale, float offset) {
    return __fmaf_rn(__fmul_rn(__int2float_rn(sum), a_scale), scale, offset);
  };
  return make_float4(one(acc.x, b_scale.x, bias.x), one(acc.y, b_scale.y, bias.y), one(acc.z, b_scale.z, bias.z),
                     one(acc.w, b_scale.w, bias.w));
}

__device__ __forceinline__ float4 add_residual(const float4& y, const float4& scale, const float4& residual) {
  return make_float4(__fmaf_rn(scale.x, y.x, residual.x), __fmaf_rn(scale.y, y.y, residual.y),
                     __fmaf_rn(scale.z, y.z, residual.z), __fmaf_rn(scale.w, y.w, residual.w));
}

// Four neighbouring elements from index `at`, of which `left` are inside of the row.
__device__ __forceinline__ void store_quad(const ScaleParams& p, int64_t at, int left, const float4& y) {
  if (p.out_type == DType::kFloat32) {
    float* const to = static_cast<float*>(p.out) + at;
    if (p.vectors) {
      *reinterpret_cast<float4*>(to) = y;
      return;
    }
    const float values[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) to[e] = values[e];
    }
    return;
  }
  const uint2 words = make_uint2(pack_pair(y.x, y.y, p.out_type), pack_pair(y.z, y.w, p.out_type));
  uint16_t* const to = static_cast<uint16_t*>(p.out) + at;
  if (p.vectors) {
    *reinterpret_cast<uint2*>(to) = words;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e < left) to[e] = static_cast<uint16_t>((e < 2 ? words.x : words.y) >> (16 * (e % 2)));
  }
}

// For decode_smallm.cuh, whose threads are handed any four columns. Scales and bias travel while the weights do, and wait in
// shared memory.
template <int kRows>
struct DecodeEpilogue {
  using Params = ScaleParams;
  struct Shared {
    alignas(16) float b_scale[kRows];
    alignas(16) float bias[kRows];
    float a_scale[kMostTokens];
  };

  const Params& p;
  int M, N, first_column;
  Shared* shared;
  float b_scale = 0, bias = 0;  // of column threadIdx.x

  template <class Problem>
  __device__ __forceinline__ DecodeEpilogue(const Params& params, const Problem& problem, int first_row)
      : p(params), M(problem.M), N(problem.N), first_column(first_row) {
    __shared__ Shared storage;
    shared = &storage;
    const int n = min(first_column + static_cast<int>(threadIdx.x), N - 1);
    if (threadIdx.x < kRows) {
      b_scale = b_scale_of(p, n);
      bias = bias_of(p, n);
    }
  }

  __device__ __forceinline__ void stage_tokens() const {
    const int m = static_cast<int>(threadIdx.x);
    const float a_scale = m < M ? p.a_scale[m] : 0.0f;
    if (m < kRows) {
      shared->b_scale[m] = b_scale;
      shared->bias[m] = bias;
    }
    if (m >= M) return;
    shared->a_scale[m] = a_scale;
    if (p.residual != nullptr) prefetch_residual<kRows>(p, m, N, first_column);
  }

  // Four columns of a token, those beyond N dropped.
  __device__ __forceinline__ void store(int token, int column, const int4& sum) const {
    const int n = first_column + column;
    if (n >= N) return;
    const int64_t at = static_cast<int64_t>(token) * N + n;
    float4 y = scale_sums(sum, shared->a_scale[token], *reinterpret_cast<const float4*>(shared->b_scale + column),
                          *reinterpret_cast<const float4*>(shared->bias + column));
    if (p.residual != nullptr) y = add_residual(y, load_residual_scale(p, n, N), load_residual(p, at, N - n));
    store_quad(p, at, N - n, y);
  }
};

// For decode_sm90.cuh, whose threads finish the same four columns of every token: scales and bias stay in registers.
template <int kRows>
struct DecodeSm90Epilogue {
  using Params = ScaleParams;

  const Params& p;
  int M, N, first_column, n;
  float* a_scale;  // of every token, in shared memory
  float4 b_scale, bias;

  template <class Problem>
  __device__ __forceinline__ DecodeSm90Epilogue(const Params& params, const Problem& problem, int first_row)
      : p(params), M(problem.M), N(problem.N), first_column(first_row), n(first_row + static_cast<int>(threadIdx.x) % (kRows / 4) * 4) {
    __shared__ float storage[kMostTokens];
    a_scale = storage;
    const auto column = [&](int e) { return min(n + e, N - 1); };
    b_scale = make_float4(b_scale_of(p, column(0)), b_scale_of(p, column(1)), b_scale_of(p, column(2)), b_scale_of(p, column(3)));
    bias = make_float4(bias_of(p, column(0)), bias_of(p, column(1)), bias_of(p, column(2)),
                       bias_of(p, column(3)));
  }

  __device__ __forceinline__ void stage_tokens() const {
    const int m = static_cast<int>(threadIdx.x);
    if (m >= M) return;
    a_scale[m] = p.a_scale[m];
    if (p.residual != nullptr) prefetch_residual<kRows>(p, m, N, first_column);
  }

  // Tokens token, token + step, .. below `end`, and of columns those below N.
  template <int kTokens>
  __device__ __forceinline__ void store(const int4 (&sums)[kTokens], int token, int step, int end) const {
    if (n >= N) return;
    const int64_t first = static_cast<int64_t>(token) * N + n, apart = static_cast<int64_t>(step) * N;
    float4 y[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) y[i] = scale_sums(sums[i], a_scale[min(token + i * step, end - 1)], b_scale, bias);
    if (p.residual != nullptr) {
      const float4 scale = load_residual_scale(p, n, N);
      float4 residual[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        residual[i] = token + i * step < end ? load_residual(p, first + i * apart, N - n) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i) y[i] = add_residual(y[i], scale, residual[i]);
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token + i * step < end) store_quad(p, first + i * apart, N - n, y[i]);
    }
  }
};

}  // namespace kitchen::int8
