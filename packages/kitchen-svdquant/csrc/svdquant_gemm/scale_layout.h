// The Hopper GEMM's scales. The tensor cores multiply them too: a_scale[m] * b_scale[n] of a group is a product of two rows
// of eight bfloat16 numbers, the parts of both scales:
//
//   a  a1 a2 a3 a1 a2 a1 a3 a2      a1 = bf16(a), a2 = bf16(a - a1), a3 = bf16(a - a1 - a2): 24 bits, exact
//   b  b1 b1 b1 b2 b2 b3 b2 b3      only a3 * b3 is left out, 2^-32 of the product
//
// A row is 16 bytes, so eight rows are a core matrix of wgmma. Memory: [rows / block][groups][block] rows, with an even
// number of groups; one of zeros is added where K / 64 is odd.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kitchen::svdquant {

constexpr int kGroup = 64;      // columns of K that share a scale
constexpr int kBlockRows = 64;  // rows of a in a block of scales
constexpr int kScaleRowBytes = 16;

__host__ __device__ constexpr int even_groups(int groups) { return (groups + 1) / 2 * 2; }

struct ScaleParts {
  uint32_t first, second, third;  // bfloat16 bits

  __device__ __forceinline__ explicit ScaleParts(float scale) {
    const auto part = [&] {
      const __nv_bfloat16 rounded = __float2bfloat16_rn(scale);
      scale -= __bfloat162float(rounded);
      return static_cast<uint32_t>(__bfloat16_as_ushort(rounded));
    };
    first = part(), second = part(), third = part();
  }
  __device__ __forceinline__ static uint32_t pair(uint32_t low, uint32_t high) { return low | high << 16; }
  __device__ __forceinline__ uint4 row_of_a() const {
    return make_uint4(pair(first, second), pair(third, first), pair(second, first), pair(third, second));
  }
  __device__ __forceinline__ uint4 row_of_b() const {
    return make_uint4(pair(first, first), pair(first, second), pair(second, third), pair(second, third));
  }
};

}  // namespace kitchen::svdquant
