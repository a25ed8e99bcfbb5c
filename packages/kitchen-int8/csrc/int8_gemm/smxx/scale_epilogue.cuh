// What becomes of the sums: y = fma(float(acc) * a_scale[m], b_scale[n], bias[n]); y = fma(residual_scale[n], y, residual[m, n]);
// out = y rounded once. Or, where K is split, the sums themselves to a workspace.
//
// A lane finishes 8 neighbouring columns, whose scales and biases it keeps in registers, of one row after another.
#pragma once

#include "int8_gemm/portable.h"
#include "int8_gemm/smxx/scale_params.cuh"

namespace kitchen::int8::portable {

constexpr int kColumns = 8;  // of a lane

struct EpilogueParams : ScaleParams {
  int32_t* partials;  // not nullptr: store the sums of each split here, [splits, M, N]
  int64_t M;
  int N;
};

struct ScaleEpilogue {
  using Params = EpilogueParams;
  struct Columns {
    float b_scale[kColumns], bias[kColumns], residual_scale[kColumns];
  };
  struct Ahead {
    uint4 residual[2];  // 8 columns of a row as they lie in memory, the second half for float32 alone; where rows are vectors
  };

  const Params& p;
  int32_t* partials;

  __device__ __forceinline__ ScaleEpilogue(const Params& params, int split)
      : p(params), partials(params.partials == nullptr ? nullptr : params.partials + split * params.M * params.N) {}

  // Columns beyond N repeat the last one; they are not stored.
  __device__ __forceinline__ Columns load_columns(int column) const {
    Columns c = {};
    if (partials != nullptr) return c;
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      const int n = min(column + e, p.N - 1);
      c.b_scale[e] = b_scale_of(p, n);
      c.bias[e] = bias_of(p, n);
      c.residual_scale[e] = residual_scale_of(p, n);
    }
    return c;
  }

  __device__ __forceinline__ float load_row(int row) const {
    return partials == nullptr && row < p.M ? p.a_scale[row] : 0.0f;
  }

  // Loads that are under way while the sums change places.
  __device__ __forceinline__ Ahead load_ahead(int row, int column) const {
    Ahead ahead = {};
    if (!loads_ahead() || row >= p.M || column >= p.N) return ahead;
    const int64_t at = static_cast<int64_t>(row) * p.N + column;
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.residual) + at * size_of(p.out_type));
    ahead.residual[0] = from[0];
    if (p.out_type == DType::kFloat32) ahead.residual[1] = from[1];
    return ahead;
  }

  __device__ __forceinline__ void store(int row, int column, const Columns& columns, float a_scale, const Ahead& ahead,
                                        const int (&acc)[kColumns]) const {
    if (row >= p.M || column >= p.N) return;
    const int64_t at = static_cast<int64_t>(row) * p.N + column;
    if (partials != nullptr) return store_partials(at, p.N - column, acc);
    float y[kColumns];
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      y[e] = __fmaf_rn(__fmul_rn(__int2float_rn(acc[e]), a_scale), columns.b_scale[e], columns.bias[e]);
    }
    if (p.residual != nullptr) {
      float values[kColumns];
      unpack_residual(at, p.N - column, ahead, values);
#pragma unroll
      for (int e = 0; e < kColumns; ++e) y[e] = __fmaf_rn(columns.residual_scale[e], y[e], values[e]);
    }
    store_out(at, p.N - column, y);
  }

 private:
  __device__ __forceinline__ void store_partials(int64_t at, int left, const int (&acc)[kColumns]) const {
    if (p.vectors) {
      int4* const to = reinterpret_cast<int4*>(partials + at);
      to[0] = make_int4(acc[0], acc[1], acc[2], acc[3]);
      to[1] = make_int4(acc[4], acc[5], acc[6], acc[7]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < left) partials[at + e] = acc[e];
    }
  }

  __device__ __forceinline__ bool loads_ahead() const { return p.vectors && p.residual != nullptr && partials == nullptr; }

  __device__ __forceinline__ void unpack_residual(int64_t at, int left, const Ahead& ahead, float (&values)[kColumns]) const {
    if (!p.vectors) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) values[e] = e < left ? load_as_float(p.residual, at + e, p.out_type) : 0.0f;
      return;
    }
    const uint4 low = ahead.residual[0], high = ahead.residual[1];
    const uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (p.out_type == DType::kFloat32) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) values[e] = __uint_as_float(word[e]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p.out_type == DType::kFloat16 ? Word<__half>::unpack(word[i], values + 2 * i)
                                    : Word<__nv_bfloat16>::unpack(word[i], values + 2 * i);
    }
  }

  __device__ __forceinline__ void store_out(int64_t at, int left, const float (&y)[kColumns]) const {
    if (p.out_type == DType::kFloat32) {
      float* const to = static_cast<float*>(p.out) + at;
      if (p.vectors) {
        reinterpret_cast<float4*>(to)[0] = make_float4(y[0], y[1], y[2], y[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(y[4], y[5], y[6], y[7]);
        return;
      }
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        if (e < left) to[e] = y[e];
      }
      return;
    }
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = pack_pair(y[2 * i], y[2 * i + 1], p.out_type);
    uint16_t* const to = static_cast<uint16_t*>(p.out) + at;
    if (p.vectors) {
      *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {
      if (e < left) to[e] = static_cast<uint16_t>(word[e / 2] >> (16 * (e % 2)));
    }
  }
};

void reduce_splits(const EpilogueParams& params, int splits, cudaStream_t stream);  // smxx/reduce_splits.cu

}  // namespace kitchen::int8::portable
