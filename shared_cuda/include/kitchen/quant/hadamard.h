// ConvRot: the regular Hadamard rotation as radix-4 butterflies, strides 1, 4, 16, 64, ... in this order.
//
// One butterfly maps (a, b, c, d) to (h-d, h-c, h-b, h-a), h = ((a+b) + (c+d)) / 2: the matrix J/2 - antidiagonal, whose
// Kronecker powers are the symmetric, orthogonal matrices that the format calls ConvRot. The order of the stages and the
// association of the sum decide the last bit, so they are part of the contract (arithmetic.py: hadamard_rotate).
// The halving and the subtraction are one FMA: halving is exact but for subnormal sums, so the bits are those of the two
// separate operations for every sum of 2^-125 or more, far below the scale's floor of 1e-30.
#pragma once

namespace kitchen::quant {

__device__ __forceinline__ void butterfly(float& a, float& b, float& c, float& d) {
  const float sum = __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
  const float y0 = __fmaf_rn(0.5f, sum, -d);
  const float y1 = __fmaf_rn(0.5f, sum, -c);
  const float y2 = __fmaf_rn(0.5f, sum, -b);
  const float y3 = __fmaf_rn(0.5f, sum, -a);
  a = y0;
  b = y1;
  c = y2;
  d = y3;
}

// One stage over registers: kStride 1 joins neighbours, kStride 4 joins v[i], v[i+4], v[i+8], v[i+12].
template <int kStride, int kValues>
__device__ __forceinline__ void butterflies(float (&v)[kValues]) {
  static_assert(kValues % (4 * kStride) == 0, "a stage needs whole quadruples");
#pragma unroll
  for (int block = 0; block < kValues; block += 4 * kStride) {
#pragma unroll
    for (int i = block; i < block + kStride; ++i) butterfly(v[i], v[i + kStride], v[i + 2 * kStride], v[i + 3 * kStride]);
  }
}

}  // namespace kitchen::quant
