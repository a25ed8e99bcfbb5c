// INT8 dequantizer: out = round(rotate(float(codes) * scale)), one rounding, to fp32, fp16 or bf16; the rotation is its own inverse.
//
// Tensors: codes [V, K] int8, rows at any pitch; scale [V] or one value, fp32; indices [M] or none; out [M, K].
// An index below 0 counts from the end; one that names no row gives a row of NaN.
// Three kernels, all of fp32 arithmetic whose bits are those of kitchen_core/arithmetic.py:
//   dequantize_plain    no rotation; 4 or 8 columns a thread, so that a store is 16 bytes
//   dequantize_rotated  groups of 4 to 256; a warp takes 1024 columns of the output, 16 of each of two tiles a lane, and goes
//                       through shared memory between the strides 4 and 16 as the rowwise quantizer does (layouts A and B)
//   dequantize_chunks   any K, alignment and group up to 4096; a CTA a row, butterflies in shared memory
// In the first two the output is one string of units, so that a row needs to fill neither a warp nor a CTA.
// Measured: docs/kernels/dequantize_int8.md.
#include "dequantize_int8/dequantize_int8.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kitchen/common/fast_divide.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/hadamard.h"
#include "quantize_int8_rowwise/row_registers.cuh"  // exchange: from layout A to layout B

namespace kitchen::int8 {

namespace {

constexpr int kPlainThreads = 256, kPlainCtas = 8, kPlainUnroll = 4;
constexpr int kRotatedThreads = 128, kRotatedCtas = 8;  // 64 registers a thread; where the group is read at run time a few more
constexpr int kUnitColumns = 16;                        // of a lane and tile of the rotated kernel
constexpr int kTileUnits = 32, kWarpUnits = 64;
constexpr int kChunkColumns = 4096, kChunkThreads = 256;

// Four codes to fp32: a byte, its sign flipped, in the mantissa of 2^23, and 2^23 + 128 off again; exact.
__device__ __forceinline__ void codes_to_float(uint32_t word, float* out) {
  word ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __uint_as_float(ptx::pick_bytes(word, 0x4b000000u, 0x7540u | i)) - 8388736.0f;
}

template <class T>
__device__ __forceinline__ T narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class T>
struct alignas(2 * sizeof(T)) StorePair {
  T low, high;
};
template <class T>
struct alignas(16) Store16 {
  T values[16 / sizeof(T)];
};

struct SourceRow {
  const int8_t* codes;
  float scale;
};

// Of row m of the output. An index out of range: row 0, which exists, times NaN.
__device__ __forceinline__ SourceRow find_row(const DequantizeParams& p, int64_t m) {
  int64_t row = m;
  bool exists = true;
  if (p.indices != nullptr) {
    row = p.narrow_indices ? static_cast<const int32_t*>(p.indices)[m] : static_cast<const int64_t*>(p.indices)[m];
    row += row < 0 ? p.V : 0;
    exists = row >= 0 && row < p.V;
    row = exists ? row : 0;
  }
  const float scale = __ldg(p.scale + row * p.scale_stride);
  return {p.codes + row * p.pitch, exists ? scale : __uint_as_float(0x7fc00000u)};
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    dequantize_plain(const DequantizeParams p, FastDivide units_of_row, uint32_t units) {
  constexpr int kColumns = 16 / sizeof(T), kWords = kColumns / 4;
  ptx::wait_then_launch_dependents();
  const uint32_t stride = gridDim.x * kPlainThreads;
  for (uint32_t first = blockIdx.x * kPlainThreads + threadIdx.x; first < units; first += kPlainUnroll * stride) {
    uint32_t words[kPlainUnroll][kWords];
    float scale[kPlainUnroll];
#pragma unroll
    for (int u = 0; u < kPlainUnroll; ++u) {
      const uint32_t unit = min(first + u * stride, units - 1), m = units_of_row.quotient(unit);
      const SourceRow row = find_row(p, m);
      scale[u] = row.scale;
      const int8_t* const from = row.codes + (unit - m * units_of_row.divisor) * kColumns;
      if constexpr (kWords == 2) {
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(from));
        words[u][0] = pair.x;
        words[u][1] = pair.y;
      } else {
        words[u][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
      }
    }
#pragma unroll
    for (int u = 0; u < kPlainUnroll; ++u) {
      float v[kColumns];
#pragma unroll
      for (int w = 0; w < kWords; ++w) codes_to_float(words[u][w], v + 4 * w);
      Store16<T> store;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) store.values[i] = narrow<T>(__fmul_rn(v[i], scale[u]));
      if (first + u * stride < units) static_cast<Store16<T>*>(p.out)[first + u * stride] = store;
    }
  }
}

// A lane's units of a warp's tile, not converted yet.
struct RawUnits {
  uint4 words[2];
  float scale[2];
};

// Units from `units` on repeat the last: they are never stored.
__device__ __forceinline__ void load_units(RawUnits& raw, const DequantizeParams& p, FastDivide units_of_row, uint32_t first,
                                           uint32_t units) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const uint32_t unit = min(first + t * kTileUnits, units - 1), m = units_of_row.quotient(unit);
    const SourceRow row = find_row(p, m);
    raw.scale[t] = row.scale;
    raw.words[t] = __ldg(reinterpret_cast<const uint4*>(row.codes + (unit - m * units_of_row.divisor) * kUnitColumns));
  }
}

// kGroup: the rotation group, or kAnyGroup to read it from the parameters.
template <class T, int kGroup>
__global__ void __launch_bounds__(kRotatedThreads, kGroup == kAnyGroup ? kRotatedCtas - 2 : kRotatedCtas)
    dequantize_rotated(const DequantizeParams p, FastDivide units_of_row, uint32_t units) {
  __shared__ float exchange_memory[kRotatedThreads / 32][2 * kExchangeWords];
  ptx::wait_then_launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = kGroup == kAnyGroup ? p.group : kGroup;
  const uint32_t stride = gridDim.x * (kRotatedThreads / 32) * kWarpUnits;
  uint32_t first = (blockIdx.x * (kRotatedThreads / 32) + warp) * kWarpUnits;
  RawUnits raw;
  load_units(raw, p, units_of_row, first + lane, units);
  for (; first < units; first += stride) {
    float v[2 * kUnitColumns];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float* const half = v + t * kUnitColumns;
      codes_to_float(raw.words[t].x, half);
      codes_to_float(raw.words[t].y, half + 4);
      codes_to_float(raw.words[t].z, half + 8);
      codes_to_float(raw.words[t].w, half + 12);
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) half[i] = __fmul_rn(half[i], raw.scale[t]);
    }
    load_units(raw, p, units_of_row, first + stride + lane, units);
    quant::butterflies<1>(v);
    if (group >= 16) quant::butterflies<4>(v);
    exchange<2>(v, exchange_memory[warp], lane);
    if (group >= 64) quant::butterflies<2>(v);
    if (group >= 256) quant::butterflies<8>(v);
    // layout B: v[2 j + i] is column 2 (lane % 8) + i of unit j of the block of 16 units lane / 8
    const uint32_t block = first + 16 * (lane / 8);
    const bool whole = first + kWarpUnits <= units;
    StorePair<T>* const out = static_cast<StorePair<T>*>(p.out) + int64_t{block} * (kUnitColumns / 2) + lane % 8;
#pragma unroll
    for (int j = 0; j < kUnitColumns; ++j) {
      const StorePair<T> pair = {narrow<T>(v[2 * j]), narrow<T>(v[2 * j + 1])};
      if (whole || block + j < units) out[j * (kUnitColumns / 2)] = pair;
    }
  }
}

__device__ __forceinline__ void store_as(void* out, int64_t index, DType type, float value) {
  if (type == DType::kFloat32) static_cast<float*>(out)[index] = value;
  if (type == DType::kFloat16) static_cast<__half*>(out)[index] = narrow<__half>(value);
  if (type == DType::kBFloat16) static_cast<__nv_bfloat16*>(out)[index] = narrow<__nv_bfloat16>(value);
}

__global__ void __launch_bounds__(kChunkThreads) dequantize_chunks(const DequantizeParams p) {
  __shared__ float values[kChunkColumns];
  ptx::wait_then_launch_dependents();
  const int64_t m = blockIdx.x;
  const SourceRow row = find_row(p, m);
  for (int first = 0; first < p.K; first += kChunkColumns) {
    const int count = min(kChunkColumns, p.K - first);
    for (int i = threadIdx.x; i < count; i += kChunkThreads) {
      values[i] = __fmul_rn(static_cast<float>(row.codes[first + i]), row.scale);
    }
    __syncthreads();
    for (int stride = 1; stride < p.group; stride *= 4) {
      for (int i = threadIdx.x; i < count / 4; i += kChunkThreads) {
        float* v = values + (i / stride) * 4 * stride + i % stride;
        quant::butterfly(v[0], v[stride], v[2 * stride], v[3 * stride]);
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < count; i += kChunkThreads) store_as(p.out, m * p.K + first + i, p.out_type, values[i]);
    __syncthreads();
  }
}

// Whether rows are whole units of `columns` and codes aligned to as many bytes, few enough for 31-bit arithmetic.
bool is_units(const DequantizeParams& p, int columns) {
  const bool aligned = (reinterpret_cast<uintptr_t>(p.codes) | static_cast<uintptr_t>(p.pitch)) % columns == 0;
  return aligned && p.K % columns == 0 && p.M * (p.K / columns) < (int64_t{1} << 31);
}

template <class T>
void launch_units(const DequantizeParams& p, int sm_count, cudaStream_t stream) {
  const int columns = p.group == 0 ? 16 / sizeof(T) : kUnitColumns;
  const auto units = static_cast<uint32_t>(p.M * (p.K / columns));
  const FastDivide units_of_row = FastDivide::by(static_cast<uint32_t>(p.K / columns));
  if (p.group == 0) {
    const int64_t wanted = (units + kPlainThreads - 1) / kPlainThreads, most = int64_t{kPlainCtas} * sm_count;
    host::launch("dequantize_int8", dequantize_plain<T>, {std::min(wanted, most), kPlainThreads, 1, 0, stream}, p, units_of_row,
                 units);
  } else {
    constexpr int kCtaUnits = kRotatedThreads / 32 * kWarpUnits;
    const int64_t wanted = (int64_t{units} + kCtaUnits - 1) / kCtaUnits, most = int64_t{kRotatedCtas} * sm_count;
    const auto kernel = p.group == 256 ? dequantize_rotated<T, 256> : dequantize_rotated<T, kAnyGroup>;
    host::launch("dequantize_int8 (rotated)", kernel, {std::min(wanted, most), kRotatedThreads, 1, 0, stream}, p, units_of_row,
                 units);
  }
}

}  // namespace

void dequantize_int8(const DequantizeParams& p, int device, cudaStream_t stream) {
  if (p.M == 0) return;
  host::require(p.V > 0, "dequantize_int8: there are no rows to read");
  host::DeviceGuard guard(device);
  const int columns = p.group != 0 ? kUnitColumns : p.out_type == DType::kFloat32 ? 4 : 8;
  if (p.group > 256 || !is_units(p, columns)) {
    host::launch("dequantize_int8 (chunks)", dequantize_chunks, {p.M, kChunkThreads, 1, 0, stream}, p);
    return;
  }
  const int sm_count = host::attribute(cudaDevAttrMultiProcessorCount, device);
  if (p.out_type == DType::kFloat32) return launch_units<float>(p, sm_count, stream);
  if (p.out_type == DType::kFloat16) return launch_units<__half>(p, sm_count, stream);
  launch_units<__nv_bfloat16>(p, sm_count, stream);
}

}  // namespace kitchen::int8
