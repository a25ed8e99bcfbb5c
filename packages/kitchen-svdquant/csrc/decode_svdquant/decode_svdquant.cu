// 4-bit codes to e4m3 numbers, and their scales to parts in blocks: what the Hopper GEMM reads. Memory-bound.
//
// A thread decodes 32 codes: 16 bytes in, 32 out. Blocks behind those of the codes write the scales, a row a thread, and the
// activations of the low-rank branch in bfloat16, an element a thread.
#include "decode_svdquant/decode_svdquant.h"

#include "kitchen/common/to_float.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/quant/int4_unpack.h"
#include "svdquant_gemm/scale_layout.h"

namespace kitchen::svdquant {
namespace {

constexpr int kThreads = 256;
constexpr int kCodesPerThread = 32;

__device__ __forceinline__ void decode_scale(const DecodeParams& p, int64_t at) {
  const int groups = static_cast<int>(p.K / kGroup), even = even_groups(groups);
  const int64_t padded = (p.rows + p.block - 1) / p.block * p.block;
  const int64_t row = at % padded;
  const int group = static_cast<int>(at / padded);
  if (group >= even) return;
  float scale = 0.0f;
  if (row < p.rows && group < groups) scale = load_as_float(p.scales, group * p.scales_pitch + row, p.scale_type);
  const ScaleParts parts(scale);
  p.out_scales[(row / p.block * even + group) * p.block + row % p.block] = p.is_a ? parts.row_of_a() : parts.row_of_b();
}

__device__ __forceinline__ void round_low(const DecodeParams& p, int64_t at) {
  if (at >= p.low_rows * p.out_R) return;
  const int r = static_cast<int>(at % p.out_R);
  p.out_low[at] = __float2bfloat16_rn(r < p.R ? p.low[at / p.out_R * p.R + r] : 0.0f);
}

// Blocks: those of the codes, of the scales, and of `low`.
__global__ void __launch_bounds__(kThreads)
    decode(const DecodeParams p, int64_t chunks, unsigned code_blocks, unsigned scale_blocks) {
  if (blockIdx.x >= code_blocks) {
    const unsigned block = blockIdx.x - code_blocks;
    if (block < scale_blocks) return decode_scale(p, static_cast<int64_t>(block) * kThreads + threadIdx.x);
    return round_low(p, static_cast<int64_t>(block - scale_blocks) * kThreads + threadIdx.x);
  }
  const int64_t chunk = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (chunk >= chunks) return;
  const quant::CodeTable table = p.is_unsigned ? quant::kUnsignedE4m3 : quant::kSignedE4m3;
  const uint4 words = reinterpret_cast<const uint4*>(p.codes)[chunk];
  const uint2 a = quant::decode_8(words.x, table), b = quant::decode_8(words.y, table);
  const uint2 c = quant::decode_8(words.z, table), d = quant::decode_8(words.w, table);
  uint4* const out = reinterpret_cast<uint4*>(p.out) + 2 * chunk;
  out[0] = make_uint4(a.x, a.y, b.x, b.y);
  out[1] = make_uint4(c.x, c.y, d.x, d.y);
}

}  // namespace

void decode_svdquant(const DecodeParams& p, int device, cudaStream_t stream) {
  host::require(p.rows >= 0 && p.K >= kGroup && p.K % kGroup == 0, "decode_svdquant: K must be a multiple of 64");
  host::require(p.block >= 1, "decode_svdquant: a block of scales has rows");
  if (p.rows == 0) return;
  const int64_t chunks = p.rows * p.K / kCodesPerThread, code_blocks = (chunks + kThreads - 1) / kThreads;
  const int64_t scales = (p.rows + p.block - 1) / p.block * p.block * even_groups(static_cast<int>(p.K / kGroup));
  const int64_t scale_blocks = (scales + kThreads - 1) / kThreads;
  const int64_t low_blocks = p.low == nullptr ? 0 : (p.low_rows * p.out_R + kThreads - 1) / kThreads;
  const int64_t blocks = code_blocks + scale_blocks + low_blocks;
  host::require(blocks < (int64_t{1} << 31), "decode_svdquant: too many codes for one launch");
  const host::DeviceGuard guard(device);
  host::launch("decode_svdquant", decode, {blocks, kThreads, 1, 0, stream}, p, chunks, static_cast<unsigned>(code_blocks),
               static_cast<unsigned>(scale_blocks));
}

}  // namespace kitchen::svdquant
