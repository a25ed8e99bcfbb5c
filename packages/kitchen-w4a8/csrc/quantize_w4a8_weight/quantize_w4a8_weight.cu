// A weight to W4A8 or W6A8: rotation, scales of groups by alternating least squares, one scale a row, codes by what they decode
// to. The arithmetic and its order are those of kitchen_core/reference/w4a8.py (quantize_w4a8_weight), to the bit.
//
//   w          = ConvRot(weight[n, :])                                                fp32
//   scale[j]   = max(absmax / reach, 1e-8), then twice max(sum(w * used) / max(sum(used^2), 1e-8), 1e-8) over group j,
//                used = the level nearest to w / scale                                (asymmetric: (max - min) / 15)
//   s_channel  = max(max |used * scale| / 127, 1e-8)
//   s_rel[j]   = e4m3(scale[j] / s_channel), or fp32
//   code       = of the levels, the one whose decoded value clamp(rne(level * s_rel)) is nearest to w / s_channel; with a seed,
//                one of the two around it by chance
//
// A block has a row, in shared memory as fp32. A thread takes units of 16 columns: one group of 16, two of 8 or four of 4, or a
// part of a larger group whose other parts lie in neighbouring lanes. Sums over a group add halves until one is left: whole
// units apart by shuffles first, then within the unit. Measured: docs/kernels/w4a8.md.
#include "quantize_w4a8_weight/quantize_w4a8_weight.h"

#include <cuda_fp8.h>

#include <algorithm>

#include "kitchen/common/from_float.h"
#include "kitchen/common/to_float.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/quant/hadamard.h"
#include "kitchen/quant/int8_codes.h"
#include "kitchen/quant/w4a8_decode.h"

namespace kitchen::w4a8 {
namespace {

constexpr int kUnit = 16, kMostThreads = 256, kPasses = 2;
constexpr float kScaleFloor = 1e-8f, kEnergyFloor = 1e-8f;
constexpr uint32_t kMostE4m3 = 0x7e;
constexpr unsigned kAllLanes = 0xffffffffu;

// What the levels of a weight are, in ascending order.
template <Levels kLevels>
struct Grid {
  static constexpr bool kTable = kLevels == Levels::kTable, kSix = kLevels == Levels::kSixBits;
  static constexpr float kFirst = kSix ? -31.0f : -8.0f;
  static constexpr int kCount = kSix ? 63 : 16;

  const float* values;  // kTable: [16] in shared memory
  float between[kTable ? 15 : 1];  // kTable: halfway to the next

  // Of 15 ascending numbers, how many are less than x.
  template <class At>
  __device__ __forceinline__ static int count_less(float x, const At& at) {
    const bool b3 = at(7) < x;
    const bool b2 = (b3 ? at(11) : at(3)) < x;
    const bool b1 = (b3 ? (b2 ? at(13) : at(9)) : (b2 ? at(5) : at(1))) < x;
    const float high = b2 ? (b1 ? at(14) : at(12)) : (b1 ? at(10) : at(8));
    const float low = b2 ? (b1 ? at(6) : at(4)) : (b1 ? at(2) : at(0));
    const bool b0 = (b3 ? high : low) < x;
    return 8 * b3 + 4 * b2 + 2 * b1 + b0;
  }

  __device__ __forceinline__ static float round(float x) {  // |x| below 2^22: ties to even
    return __fsub_rn(__fadd_rn(x, quant::kRounder), quant::kRounder);
  }

  // The level nearest to x.
  __device__ __forceinline__ float nearest(float x) const {
    if constexpr (kTable) return values[count_less(x, [&](int i) { return between[i]; })];
    return round(fminf(fmaxf(x, kFirst), kFirst + (kCount - 1)));
  }

  // What a group's largest magnitude is divided by to get its first scale.
  __device__ __forceinline__ static constexpr float reach() { return kTable ? 1.0f : kFirst + (kCount - 1); }

  __device__ __forceinline__ float level(int index) const {
    if constexpr (kTable) return values[index];
    return kFirst + static_cast<float>(index);
  }
  __device__ __forceinline__ static float decode(float level, float scale) {
    return round(fminf(fmaxf(__fmul_rn(level, scale), -127.0f), 127.0f));
  }

  // How many levels of a scale, the last one left out, decode to less than x. `decoded`: all 16 of them at 4 bits.
  __device__ __forceinline__ int count_decoded(float x, float scale, const float (&decoded)[16]) const {
    if constexpr (!kSix) return count_less(x, [&](int i) { return decoded[i]; });
    float below = 0.0f;
#pragma unroll
    for (int step = 32; step > 0; step /= 2) {
      const float tried = below + static_cast<float>(step);
      if (tried < kCount && decode(tried + (kFirst - 1.0f), scale) < x) below = tried;
    }
    return static_cast<int>(below);
  }
  __device__ __forceinline__ float decoded_at(int index, float scale) const { return decode(level(index), scale); }
};

// A row in shared memory: units of four chunks of 16 bytes, exchanged so that neighbouring lanes meet no bank twice.
__device__ __forceinline__ int place(int column) {
  const int unit = column / kUnit;
  return unit * kUnit + ((column / 4 % 4 ^ (unit / 2 & 3)) * 4) + column % 4;
}
__device__ __forceinline__ void read_unit(float (&w)[kUnit], const float* row, int unit) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float4 four = *reinterpret_cast<const float4*>(row + place(unit * kUnit + 4 * c));
    w[4 * c] = four.x, w[4 * c + 1] = four.y, w[4 * c + 2] = four.z, w[4 * c + 3] = four.w;
  }
}
__device__ __forceinline__ void write_unit(float* row, int unit, const float (&w)[kUnit]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float4 four = make_float4(w[4 * c], w[4 * c + 1], w[4 * c + 2], w[4 * c + 3]);
    *reinterpret_cast<float4*>(row + place(unit * kUnit + 4 * c)) = four;
  }
}

template <class T>
__device__ __forceinline__ void load_words(float (&w)[kUnit], const void* data, int64_t first) {
  constexpr int kValues = 4 * Word<T>::kValues;  // of 16 bytes
#pragma unroll
  for (int i = 0; i < kUnit / kValues; ++i) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(data) + first) + i);
    Word<T>::unpack(words.x, w + i * kValues), Word<T>::unpack(words.y, w + i * kValues + kValues / 4);
    Word<T>::unpack(words.z, w + i * kValues + kValues / 2), Word<T>::unpack(words.w, w + i * kValues + kValues / 4 * 3);
  }
}

// The rotated row to shared memory.
__device__ __forceinline__ void load_row(float* row, const QuantizeWeightParams& p, int64_t n) {
  for (int unit = threadIdx.x; unit < p.K / kUnit; unit += blockDim.x) {
    const int64_t first = n * p.row_stride + unit * kUnit;
    float w[kUnit];
    if (p.weight_type == DType::kFloat32) {
      load_words<float>(w, p.weight, first);
    } else if (p.weight_type == DType::kFloat16) {
      load_words<__half>(w, p.weight, first);
    } else {
      load_words<__nv_bfloat16>(w, p.weight, first);
    }
    if (p.rotation >= 4) quant::butterflies<1>(w);
    if (p.rotation >= 16) quant::butterflies<4>(w);
    write_unit(row, unit, w);
  }
  __syncthreads();
  for (int stride = 16, log2 = 4; stride < p.rotation; stride *= 4, log2 += 2) {
    for (int i = threadIdx.x; i < p.K / 4; i += blockDim.x) {
      const int first = (i >> log2 << (log2 + 2)) + (i & (stride - 1));
      const auto at = [&](int n) -> float& { return row[place(first + n * stride)]; };
      quant::butterfly(at(0), at(1), at(2), at(3));
    }
    __syncthreads();
  }
}

// The groups of a unit: kSub columns of each lie in this thread, and in `lanes` neighbouring lanes.
template <int kSub>
struct Groups {
  static constexpr int kCount = kUnit / kSub;  // of a thread
  int lanes;

  __device__ __forceinline__ explicit Groups(int group) : lanes(kSub == kUnit ? group / kUnit : 1) {}
  __device__ __forceinline__ bool leads() const { return (threadIdx.x & (lanes - 1)) == 0; }

  // Halves are added until one is left.
  __device__ __forceinline__ void sum(float (&v)[kUnit], float (&sums)[kCount]) const {
    if constexpr (kSub == kUnit) {
#pragma unroll 1
      for (int apart = lanes / 2; apart > 0; apart /= 2) {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) v[i] = __fadd_rn(v[i], __shfl_down_sync(kAllLanes, v[i], apart));
      }
    }
#pragma unroll
    for (int half = kSub / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (i % kSub < half) v[i] = __fadd_rn(v[i], v[i + half]);
      }
    }
#pragma unroll
    for (int s = 0; s < kCount; ++s) sums[s] = v[s * kSub];
    if (kSub == kUnit && lanes > 1) sums[0] = __shfl_sync(kAllLanes, sums[0], (threadIdx.x % 32) & ~(lanes - 1));
  }

  __device__ __forceinline__ void largest(const float (&v)[kUnit], float (&most)[kCount]) const {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      most[s] = v[s * kSub];
#pragma unroll
      for (int i = 1; i < kSub; ++i) most[s] = fmaxf(most[s], v[s * kSub + i]);
    }
    for (int apart = lanes / 2; apart > 0; apart /= 2) most[0] = fmaxf(most[0], __shfl_xor_sync(kAllLanes, most[0], apart));
  }
};

// Scales of a unit's groups and, of them and the levels in use, the largest product.
template <Levels kLevels, int kSub>
__device__ __forceinline__ float fit_scales(const Grid<kLevels>& grid, const Groups<kSub>& groups, const float (&w)[kUnit],
                                            float (&scales)[kUnit / kSub]) {
  constexpr int kCount = kUnit / kSub;
  float used[kUnit], v[kUnit], energy[kCount];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = fabsf(w[i]);
  groups.largest(v, scales);
#pragma unroll
  for (int s = 0; s < kCount; ++s) scales[s] = fmaxf(__fdiv_rn(scales[s], Grid<kLevels>::reach()), kScaleFloor);
  const auto assign = [&] {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) used[i] = grid.nearest(__fdiv_rn(w[i], scales[i / kSub]));
  };
  assign();
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(used[i], used[i]);
    groups.sum(v, energy);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(w[i], used[i]);
    groups.sum(v, scales);
#pragma unroll
    for (int s = 0; s < kCount; ++s) scales[s] = fmaxf(__fdiv_rn(scales[s], fmaxf(energy[s], kEnergyFloor)), kScaleFloor);
    assign();
  }
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) most = fmaxf(most, fabsf(__fmul_rn(used[i], scales[i / kSub])));
  return most;
}

// The same where 16 levels span a group's minimum and maximum; `w` becomes what the stored correction leaves over.
template <int kSub>
__device__ __forceinline__ float fit_asymmetric(const Groups<kSub>& groups, const QuantizeWeightParams& p, int64_t n, int unit,
                                                bool inside, float (&w)[kUnit], float (&scales)[kUnit / kSub]) {
  constexpr int kCount = kUnit / kSub;
  float v[kUnit], low[kCount], high[kCount], most = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = -w[i];
  groups.largest(v, low);
  groups.largest(w, high);
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    low[s] = -low[s];
    scales[s] = fmaxf(__fdiv_rn(__fsub_rn(high[s], low[s]), 15.0f), kScaleFloor);
    const float offset = __fadd_rn(__fmul_rn(8.0f, scales[s]), low[s]);
    float stored = offset;
    const int64_t at = (static_cast<int64_t>(unit) * kUnit / p.group + s) * p.N + n;
    const bool stores = inside && groups.leads();
    if (p.weight_type == DType::kFloat32) {
      if (stores) static_cast<float*>(p.correction)[at] = offset;
    } else {
      const bool half = p.weight_type == DType::kFloat16;
      const auto bits = static_cast<uint16_t>(half ? half_bits(offset) : bfloat16_bits(offset));
      if (stores) static_cast<uint16_t*>(p.correction)[at] = bits;
      stored = half ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
#pragma unroll
    for (int i = s * kSub; i < (s + 1) * kSub; ++i) {
      const float quotient = fminf(fmaxf(__fdiv_rn(__fsub_rn(w[i], low[s]), scales[s]), 0.0f), 15.0f);
      const float used = __fsub_rn(Grid<Levels::kAsymmetric>::round(quotient), 8.0f);
      most = fmaxf(most, fabsf(__fmul_rn(used, scales[s])));
      w[i] = __fsub_rn(w[i], stored);
    }
  }
  return most;
}

// The index of the level for each target, and what it decodes to. Of levels that decode alike, the first.
template <Levels kLevels, int kSub>
__device__ __forceinline__ void assign(const Grid<kLevels>& grid, const float (&target)[kUnit],
                                       const float (&scales)[kUnit / kSub], int64_t first_element, uint64_t seed,
                                       uint32_t (&index)[kUnit], float (&decoded)[kUnit]) {
#pragma unroll
  for (int s = 0; s < kUnit / kSub; ++s) {
    float all[16];
    if (!Grid<kLevels>::kSix) {
#pragma unroll
      for (int i = 0; i < 16; ++i) all[i] = grid.decoded_at(i, scales[s]);
    }
#pragma unroll
    for (int i = s * kSub; i < (s + 1) * kSub; ++i) {
      const int upper = grid.count_decoded(target[i], scales[s], all), lower = max(upper - 1, 0);
      const float at_upper = grid.decoded_at(upper, scales[s]), at_lower = grid.decoded_at(lower, scales[s]);
      const float above = __fsub_rn(at_upper, target[i]), below = __fsub_rn(target[i], at_lower);
      bool takes_upper = below > above;
      if (seed != 0) takes_upper = below > __fmul_rn(quant::uniform(first_element + i, seed), __fadd_rn(above, below));
      decoded[i] = takes_upper ? at_upper : at_lower;
      index[i] = grid.count_decoded(decoded[i], scales[s], all);
    }
  }
}

__device__ __forceinline__ float stored_scale(float scale, bool as_float, uint32_t& byte) {
  if (as_float) return scale;
  byte = __nv_cvt_float_to_fp8(fminf(scale, 448.0f), __NV_SATFINITE, __NV_E4M3);
  return quant::e4m3_to_float(byte);
}

// Neighbours of each scale, taken where they lower the group's squared error.
template <Levels kLevels, int kSub>
__device__ __forceinline__ void search(const Grid<kLevels>& grid, const Groups<kSub>& groups, const float (&target)[kUnit],
                                       bool float_scales, float (&scales)[kUnit / kSub], uint32_t (&bytes)[kUnit / kSub],
                                       uint32_t (&index)[kUnit], const float (&decoded)[kUnit]) {
  static_assert(kSub == kUnit, "of 6 bits only, whose groups are not smaller than a unit");
  float v[kUnit], least[1], tried_error[1], tried_decoded[kUnit];
  uint32_t tried_index[kUnit];
  const auto squares = [&](const float (&values)[kUnit]) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float off = __fsub_rn(values[i], target[i]);
      v[i] = __fmul_rn(off, off);
    }
  };
  squares(decoded);
  groups.sum(v, least);
  const float first_scale = scales[0];
  const uint32_t first_byte = bytes[0];
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const uint32_t byte = min(max(static_cast<int>(first_byte) + (side == 0 ? -1 : 1), 1), static_cast<int>(kMostE4m3));
    const float tried[1] = {float_scales ? __fmul_rn(first_scale, side == 0 ? 0.97f : 1.03f) : quant::e4m3_to_float(byte)};
    assign<kLevels, kSub>(grid, target, tried, 0, 0, tried_index, tried_decoded);
    squares(tried_decoded);
    groups.sum(v, tried_error);
    if (tried_error[0] < least[0]) {
      least[0] = tried_error[0], scales[0] = tried[0], bytes[0] = byte;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) index[i] = tried_index[i];
    }
  }
}

// Codes of 16 columns, packed.
template <bool kSix>
__device__ __forceinline__ void store_codes(const QuantizeWeightParams& p, int64_t n, int unit,
                                            const uint32_t (&codes)[kUnit]) {
  uint2 nibbles = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    nibbles.x |= (codes[i] & 15) << (4 * i);
    nibbles.y |= (codes[8 + i] & 15) << (4 * i);
  }
  uint8_t* const row = p.codes + n * (p.K / 8 * (kSix ? 6 : 4));
  reinterpret_cast<uint2*>(row)[unit] = nibbles;
  if constexpr (kSix) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) top |= (codes[i] >> 4) << (2 * i);
    reinterpret_cast<uint32_t*>(row + p.K / 2)[unit] = top;
  }
}

// The largest of all threads' values, which are at least 0.
__device__ __forceinline__ float block_largest(float value, float* shared) {
  for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, apart));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) value = fmaxf(value, shared[warp]);
  return value;
}

template <Levels kLevels, int kSub>
__global__ void __launch_bounds__(kMostThreads, 2) quantize_weight(const __grid_constant__ QuantizeWeightParams p) {
  constexpr int kCount = kUnit / kSub;
  extern __shared__ __align__(16) float row[];  // [K], then the scales of groups
  __shared__ float values[16], warps[kMostThreads / 32];
  __shared__ uint32_t stored[16];  // the code of each level
  float* const group_scales = row + p.K;
  const int64_t n = blockIdx.x;
  const int units = p.K / kUnit;
  if (kLevels == Levels::kTable && threadIdx.x < 16) {  // a foreign table need not ascend
    const int i = static_cast<int>(threadIdx.x);
    const float own = p.codebook[i];
    int rank = 0;
    for (int j = 0; j < 16; ++j) rank += p.codebook[j] < own || (p.codebook[j] == own && j < i);
    values[rank] = own;
    stored[rank] = i;
  }
  load_row(row, p, n);  // its barriers are those of the table, too

  Grid<kLevels> grid;
  grid.values = values;
  if constexpr (kLevels == Levels::kTable) {
#pragma unroll
    for (int i = 0; i < 15; ++i) grid.between[i] = __fmul_rn(__fadd_rn(values[i + 1], values[i]), 0.5f);
  }
  const Groups<kSub> groups(p.group);
  const int lane = static_cast<int>(threadIdx.x) % 32, first_unit = static_cast<int>(threadIdx.x) - lane;
  float most = 0.0f;
  // A warp's lanes beyond the last unit repeat it, in groups of their own.
#pragma unroll 1
  for (int first = first_unit; first < units; first += static_cast<int>(blockDim.x)) {
    const int own = first + lane, unit = min(own, units - 1);
    float w[kUnit], scales[kCount];
    read_unit(w, row, unit);
    if constexpr (kLevels == Levels::kAsymmetric) {
      __syncwarp();  // all have read
      const float of_unit = fit_asymmetric<kSub>(groups, p, n, unit, own < units, w, scales);
      if (own < units) most = fmaxf(most, of_unit), write_unit(row, unit, w);
    } else {
      const float of_unit = fit_scales<kLevels, kSub>(grid, groups, w, scales);
      if (own < units) most = fmaxf(most, of_unit);  // groups beyond the last are no groups of the row
    }
    if (own < units && groups.leads()) {
#pragma unroll
      for (int s = 0; s < kCount; ++s) group_scales[unit * kUnit / p.group + s] = scales[s];
    }
  }
  most = block_largest(most, warps);
  const float channel = fmaxf(__fdiv_rn(most, 127.0f), kScaleFloor);
  if (threadIdx.x == 0) p.s_channel[n] = channel;

#pragma unroll 1
  for (int first = first_unit; first < units; first += static_cast<int>(blockDim.x)) {
    const int own = first + lane, unit = min(own, units - 1), group = unit * kUnit / p.group;
    float target[kUnit], scales[kCount], decoded[kUnit];
    uint32_t bytes[kCount] = {}, index[kUnit];
    read_unit(target, row, unit);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) target[i] = __fdiv_rn(target[i], channel);
#pragma unroll
    for (int s = 0; s < kCount; ++s)
      scales[s] = stored_scale(__fdiv_rn(group_scales[group + s], channel), p.float_scales, bytes[s]);
    const int64_t element = n * p.K + static_cast<int64_t>(unit) * kUnit;
    const bool searches = kLevels == Levels::kSixBits && p.scale_search;
    assign<kLevels, kSub>(grid, target, scales, element, searches ? 0 : p.seed, index, decoded);
    if constexpr (kLevels == Levels::kSixBits) {
      if (searches) {
        search<kLevels, kSub>(grid, groups, target, p.float_scales, scales, bytes, index, decoded);
        if (p.seed != 0) assign<kLevels, kSub>(grid, target, scales, element, p.seed, index, decoded);
      }
    }
    if (own >= units) continue;
    if (groups.leads()) {
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        const int64_t at = n * (p.K / p.group) + group + s;
        if (p.float_scales) {
          static_cast<float*>(p.s_rel)[at] = scales[s];
        } else {
          static_cast<uint8_t*>(p.s_rel)[at] = static_cast<uint8_t>(bytes[s]);
        }
      }
    }
    constexpr uint32_t kFirstCode = kLevels == Levels::kSixBits ? 1 : 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) index[i] = kLevels == Levels::kTable ? stored[index[i]] : index[i] + kFirstCode;
    store_codes<kLevels == Levels::kSixBits>(p, n, unit, index);
  }
}

using Kernel = void (*)(QuantizeWeightParams);

template <Levels kLevels>
Kernel find_kernel(int group) {
  return group == 4 ? quantize_weight<kLevels, 4> : group == 8 ? quantize_weight<kLevels, 8> : quantize_weight<kLevels, 16>;
}

Kernel find_kernel(const QuantizeWeightParams& p) {
  switch (p.levels) {
    case Levels::kTable: return find_kernel<Levels::kTable>(p.group);
    case Levels::kUniform: return find_kernel<Levels::kUniform>(p.group);
    case Levels::kAsymmetric: return find_kernel<Levels::kAsymmetric>(p.group);
    default: return quantize_weight<Levels::kSixBits, 16>;
  }
}

}  // namespace

int64_t quantize_w4a8_weight_shared_bytes(int64_t K, int group) { return 4 * (K + K / group); }

void quantize_w4a8_weight(const QuantizeWeightParams& p, int device, cudaStream_t stream) {
  const bool six = p.levels == Levels::kSixBits;
  host::require(p.group >= (six ? 16 : 4) && p.group <= 512 && (p.group & (p.group - 1)) == 0 && p.K % p.group == 0 &&
                    p.K % (six ? 32 : 16) == 0,
                "quantize_w4a8_weight: takes groups of a power of two from 4 (6 bits: 16) to 512 that divide K, got K=" +
                    std::to_string(p.K) + ", group=" + std::to_string(p.group));
  if (p.N == 0) return;
  host::DeviceGuard guard(device);
  const int threads = std::min(kMostThreads, (p.K / kUnit + 31) / 32 * 32);
  const auto smem = static_cast<size_t>(quantize_w4a8_weight_shared_bytes(p.K, p.group));
  host::launch("quantize_w4a8_weight", find_kernel(p), {p.N, threads, 1, smem, stream}, p);
}

}  // namespace kitchen::w4a8
