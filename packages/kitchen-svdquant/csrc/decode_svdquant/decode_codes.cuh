// What decode_svdquant does, block by block: for its own launch, and for blocks beside those of another kernel.
#pragma once

#include "decode_svdquant/decode_svdquant.h"
#include "kitchen/common/to_float.h"
#include "kitchen/quant/int4_unpack.h"
#include "svdquant_gemm/scale_layout.h"

namespace kitchen::svdquant {

constexpr int kChunkCodes = 16;      // 8 bytes in, 16 out: a warp writes whole sectors
constexpr int kDecodeChunks = 8;     // of a thread, under way together

// Blocks of the codes, of the scales, and of `low` (an element a thread), in this order.
struct DecodeBlocks {
  int64_t codes, scales, low;

  __host__ __device__ DecodeBlocks(const DecodeParams& p, int threads) {
    const auto blocks = [threads](int64_t items) { return (items + threads - 1) / threads; };
    codes = blocks((p.rows * p.K / kChunkCodes + kDecodeChunks - 1) / kDecodeChunks);
    const int64_t padded = (p.rows + p.block - 1) / p.block * p.block;
    scales = blocks((padded * even_groups(static_cast<int>(p.K / kGroup)) + kDecodeChunks - 1) / kDecodeChunks);
    low = p.low == nullptr ? 0 : blocks(p.low_rows * p.out_R);
  }
  __host__ __device__ int64_t all() const { return codes + scales + low; }
};

// Scales at, at + kThreads, ..: groups follow each other, a group's rows are neighbours. Fewer than 2^32 in a launch.
template <int kThreads>
__device__ __forceinline__ void decode_scales(const DecodeParams& p, uint32_t at) {
  const uint32_t groups = static_cast<uint32_t>(p.K / kGroup), even = even_groups(static_cast<int>(groups));
  const uint32_t block = p.block, padded = static_cast<uint32_t>((p.rows + p.block - 1) / p.block) * block;
  uint32_t row[kDecodeChunks], group[kDecodeChunks];
  uint32_t bits[kDecodeChunks];
#pragma unroll
  for (int i = 0; i < kDecodeChunks; ++i) {
    group[i] = (at + i * kThreads) / padded, row[i] = at + i * kThreads - group[i] * padded;
    bits[i] = 0;
    if (row[i] >= p.rows || group[i] >= groups) continue;
    const int64_t from = group[i] * p.scales_pitch + row[i];
    bits[i] = p.scale_type == DType::kFloat32 ? __ldg(static_cast<const uint32_t*>(p.scales) + from)
                                              : __ldg(static_cast<const uint16_t*>(p.scales) + from);
  }
#pragma unroll
  for (int i = 0; i < kDecodeChunks; ++i) {
    if (group[i] >= even) return;
    const ScaleParts parts(load_as_float(&bits[i], 0, p.scale_type));
    const uint32_t of_block = row[i] / block;
    p.out_scales[static_cast<int64_t>(of_block * even + group[i]) * block + (row[i] - of_block * block)] =
        p.is_a ? parts.row_of_a() : parts.row_of_b();
  }
}

__device__ __forceinline__ void round_low(const DecodeParams& p, int64_t at) {
  if (at >= p.low_rows * p.out_R) return;
  const int r = static_cast<int>(at % p.out_R);
  p.out_low[at] = __float2bfloat16_rn(r < p.R ? p.low[at / p.out_R * p.R + r] : 0.0f);
}

// By kThreads threads; `blocks` is for as many.
template <int kThreads>
__device__ __forceinline__ void decode_block(const DecodeParams& p, const DecodeBlocks& blocks, int64_t block) {
  if (block >= blocks.codes) {
    const int64_t scales = block - blocks.codes, low = scales - blocks.scales;
    return low < 0 ? decode_scales<kThreads>(p, static_cast<uint32_t>(scales * kThreads * kDecodeChunks + threadIdx.x))
                   : round_low(p, low * kThreads + threadIdx.x);
  }
  const int64_t chunks = p.rows * p.K / kChunkCodes, first = block * kThreads * kDecodeChunks + threadIdx.x;
  const quant::CodeTable table = p.is_unsigned ? quant::kUnsignedE4m3 : quant::kSignedE4m3;
  uint2 words[kDecodeChunks];
#pragma unroll
  for (int i = 0; i < kDecodeChunks; ++i) {
    const int64_t chunk = first + i * kThreads;
    if (chunk < chunks) words[i] = __ldg(reinterpret_cast<const uint2*>(p.codes) + chunk);
  }
#pragma unroll
  for (int i = 0; i < kDecodeChunks; ++i) {
    const int64_t chunk = first + i * kThreads;
    if (chunk >= chunks) return;
    const uint2 low = quant::decode_8(words[i].x, table), high = quant::decode_8(words[i].y, table);
    reinterpret_cast<uint4*>(p.out)[chunk] = make_uint4(low.x, low.y, high.x, high.y);
  }
}

}  // namespace kitchen::svdquant
