// 4-bit and 6-bit codes to INT8: v8[n, k] = clamp(rne(fp32(level * s_rel[n, k/g])), -127, 127), level = codebook[c], c - 8 or c
// - 32.
//
//   codes [N, K/2]: column 2j in bits 0..3 of byte j; or [N, 3K/4]: the same for the low nibbles, then K/4 bytes of top bits,
//   those of column c in byte c/4 at bit 2 * (c % 4); s_rel [N, K/g] e4m3 bytes or float32; out [N, K] int8.
//
// A thread decodes 16 neighbouring columns of a row: 8 or 12 bytes in, one store of 16 bytes out, neighbours side by side. The
// arithmetic is quant/w4a8_decode.h, to the bit for every code and finite scale. Measured: docs/kernels/w4a8.md.
#include "decode_w4a8_weight/decode_w4a8_weight.h"

#include <algorithm>

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/quant/w4a8_decode.h"

namespace kitchen::w4a8 {
namespace {

constexpr int kThreads = 256, kUnit = 16;  // columns of a thread at once
constexpr int kUnits = 4;  // under way in a thread
constexpr int kBlocksPerSm = 6;

struct Unit {
  uint2 nibbles;
  uint32_t top;
  float scale;  // of float32 scales
  uint32_t scales;  // e4m3 bytes, one for each group in the unit
};

template <int kBits, bool kFloatScales>
struct Decoder {
  const DecodeParams& p;
  const uint4* table;  // 4 bits, e4m3
  const float* levels;  // 4 bits, float32
  uint32_t units_per_row, groups_per_row, minus_first;

  __device__ __forceinline__ Unit load(uint32_t unit) const {
    const uint32_t row = unit / units_per_row, at = unit - row * units_per_row;
    const uint8_t* const codes = p.codes + static_cast<int64_t>(row) * (p.K / 8 * kBits);
    Unit u = {};
    u.nibbles = __ldcs(reinterpret_cast<const uint2*>(codes) + at);
    if (kBits == 6) u.top = __ldcs(reinterpret_cast<const uint32_t*>(codes + p.K / 2) + at);
    const int64_t first = static_cast<int64_t>(row) * groups_per_row + at * kUnit / static_cast<uint32_t>(p.group);
    if (kFloatScales) {
      u.scale = static_cast<const float*>(p.s_rel)[first];
    } else {
      const uint8_t* const scales = static_cast<const uint8_t*>(p.s_rel) + first;
      u.scales = scales[0];
      if (kBits == 4 && p.group < kUnit) {
        for (int i = 1; i < kUnit / p.group; ++i) u.scales |= static_cast<uint32_t>(scales[i]) << (8 * i);
      }
    }
    return u;
  }

  __device__ __forceinline__ float level(const Unit& u, int column) const {
    const uint32_t nibble = (column < 8 ? u.nibbles.x : u.nibbles.y) >> (4 * (column % 8)) & 15;
    if (kBits == 4) return levels[nibble];
    return static_cast<float>(static_cast<int>(nibble | (u.top >> (2 * column) & 3) << 4) - 32);
  }

  // Columns of float32 scales; groups of 4 and 8 columns have theirs read here.
  __device__ __forceinline__ uint4 decode_floats(const Unit& u, uint32_t unit) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float scale = u.scale;
      if (kBits == 4 && p.group < kUnit) scale = static_cast<const float*>(p.s_rel)[(int64_t{unit} * kUnit + 4 * i) / p.group];
      words[i] =
          quant::join_bytes(quant::decode_value(level(u, 4 * i), scale), quant::decode_value(level(u, 4 * i + 1), scale),
                            quant::decode_value(level(u, 4 * i + 2), scale), quant::decode_value(level(u, 4 * i + 3), scale));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ __forceinline__ uint4 decode(const Unit& u, uint32_t unit) const {
    if (kFloatScales) return decode_floats(u, unit);
    uint4 out;
    if (kBits == 6) {
      uint32_t words[4];
      quant::SixCodes(u.nibbles.x, u.nibbles.y, u.top).decode(words, quant::negated_scale(u.scales), minus_first);
      constexpr uint32_t kInvert = 0x7f7f7f7fu;  // 127 - w for every w of at most 254
      return make_uint4(words[0] ^ kInvert, words[1] ^ kInvert, words[2] ^ kInvert, words[3] ^ kInvert);
    }
    if (p.group >= kUnit) {
      const uint4 row = table[u.scales];
      quant::look_up(row, u.nibbles.x, out.x, out.y);
      quant::look_up(row, u.nibbles.y, out.z, out.w);
      return out;
    }
    const int step = p.group == 4 ? 8 : 0, eight = p.group == 4 ? 16 : 8;  // bits from one scale byte to the next
    out.x = quant::look_up_four(table[u.scales & 255], u.nibbles.x);
    out.y = quant::look_up_four(table[u.scales >> step & 255], u.nibbles.x >> 16);
    out.z = quant::look_up_four(table[u.scales >> eight & 255], u.nibbles.y);
    out.w = quant::look_up_four(table[u.scales >> (eight + step) & 255], u.nibbles.y >> 16);
    return out;
  }
};

template <int kBits, bool kFloatScales>
__global__ void __launch_bounds__(kThreads) decode_weight(const __grid_constant__ DecodeParams p, uint32_t minus_first) {
  constexpr bool kTable = kBits == 4 && !kFloatScales;
  __shared__ uint4 table[kTable ? 256 : 1];
  __shared__ float levels[16];
  const uint32_t units_per_row = p.K / kUnit, units = units_per_row * static_cast<uint32_t>(p.N);
  const Decoder<kBits, kFloatScales> decoder{p, table, levels, units_per_row, static_cast<uint32_t>(p.K / p.group), minus_first};
  const uint32_t stride = gridDim.x * kThreads;
  if (p.launch == EarlyLaunch::kWaitsFirst) ptx::wait_then_launch_dependents();
  if (kTable) {
    quant::fill_decode_table(table, p.codebook, threadIdx.x, kThreads);
  } else if (threadIdx.x < 16) {
    levels[threadIdx.x] = p.codebook == nullptr ? static_cast<float>(threadIdx.x) - 8.0f : p.codebook[threadIdx.x];
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < units; first += kUnits * stride) {
    Unit loaded[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i == 0 || units - first > i * stride) loaded[i] = decoder.load(first + i * stride);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i > 0 && units - first <= i * stride) break;
      reinterpret_cast<uint4*>(p.out)[first + i * stride] = decoder.decode(loaded[i], first + i * stride);
    }
  }
  if (p.launch == EarlyLaunch::kWaitsLast) ptx::wait_then_launch_dependents();
}

}  // namespace

void decode_w4a8_weight(const DecodeParams& p, int device, cudaStream_t stream) {
  const int64_t units = p.N * (p.K / kUnit);
  host::require(p.bits == 4 || p.bits == 6, "decode_w4a8_weight: bits must be 4 or 6");
  host::require(units < int64_t{1} << 31, "decode_w4a8_weight: at most 2^35 weights at once");
  if (units == 0) return;
  host::DeviceGuard guard(device);
  const int64_t needed = (units + kThreads * kUnits - 1) / (kThreads * kUnits);
  const int64_t grid =
      std::min<int64_t>(needed, int64_t{kBlocksPerSm} * host::attribute(cudaDevAttrMultiProcessorCount, device));
  const auto kernel = p.bits == 4 ? (p.float_scales ? decode_weight<4, true> : decode_weight<4, false>)
                                  : (p.float_scales ? decode_weight<6, true> : decode_weight<6, false>);
  host::launch("decode_w4a8_weight", kernel, {grid, kThreads, 1, 0, stream, p.launch != EarlyLaunch::kNone}, p,
               quant::kMinusFirst);
}

}  // namespace kitchen::w4a8
