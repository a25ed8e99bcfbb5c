// Tensorwise INT8 quantizer: scale = max(absmax(x) / 127, 1e-30) or given, codes = rne(x / scale).
//
// Tensors: x [elements] of fp32, fp16 or bf16, contiguous; codes [elements] int8; scale one fp32.
// Two kernels: absolute maxima of blocks, as integers (their order is that of the values, and of NaN above inf); then the
// maximum of those, by every block for itself, and the codes. No atomics, and nothing to clear first. The second kernel walks
// backwards over the tensor: what the first read last is still in L2. A thread holds 16 neighbouring values, as in the rowwise
// quantizer. The bits are those of kitchen_core/arithmetic.py. Measured: docs/kernels/quantize_int8_tensorwise.md.
#include "quantize_int8_tensorwise/quantize_int8_tensorwise.h"

#include <algorithm>

#include "kitchen/common/to_float.h"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/int8_codes.h"

namespace kitchen::int8 {

namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 6;
constexpr int kValues = 16;  // of a thread and step
constexpr int kUnroll = 4;   // 16-byte loads of the first kernel that are under way at once

// Maximum of the absolute bit patterns in a word of 2-byte or 4-byte values.
template <class T>
__device__ __forceinline__ uint32_t max_pattern(uint32_t best, uint32_t word) {
  if (sizeof(T) == 4) return max(best, word & 0x7fffffffu);
  return __vmaxu2(best, word & 0x7fff7fffu);
}

// The pattern of the maximum as fp32.
template <class T>
__device__ __forceinline__ uint32_t as_fp32_pattern(uint32_t best) {
  if (sizeof(T) == 4) return best;
  float halves[2];
  Word<T>::unpack(best, halves);
  return max(__float_as_uint(halves[0]), __float_as_uint(halves[sizeof(T) == 2 ? 1 : 0]));
}

__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warp_max[kThreads / 32];
  value = ptx::warp_max(value);
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
  __syncthreads();
  return ptx::warp_max(threadIdx.x % 32 < kThreads / 32 ? warp_max[threadIdx.x % 32] : 0u);
}

template <class T>
__global__ void __launch_bounds__(kThreads) find_absmax(const TensorwiseParams p) {
  constexpr int kPerLoad = 16 / sizeof(T);
  const uint4* const x = static_cast<const uint4*>(p.x);
  const int64_t loads = p.elements / kPerLoad, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  uint32_t best = 0;
  for (int64_t i = thread; i < loads; i += kUnroll * stride) {
    uint4 words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) words[u] = i + u * stride < loads ? __ldg(x + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      best = max_pattern<T>(max_pattern<T>(best, words[u].x), words[u].y);
      best = max_pattern<T>(max_pattern<T>(best, words[u].z), words[u].w);
    }
  }
  best = as_fp32_pattern<T>(best);
  const int64_t rest = loads * kPerLoad + thread;  // fewer than a load holds: threads of the first block
  if (rest < p.elements) {
    float value[2];
    Word<T>::unpack(sizeof(T) == 4 ? static_cast<const uint32_t*>(p.x)[rest] : static_cast<const uint16_t*>(p.x)[rest], value);
    best = max(best, __float_as_uint(value[0]) & 0x7fffffffu);
  }
  best = block_max(best);
  if (threadIdx.x == 0) p.partial_max[blockIdx.x] = best;
}

template <class T>
__device__ __forceinline__ void load_values(uint4 (&raw)[sizeof(T)], const TensorwiseParams& p, int64_t unit) {
  const uint4* const x = static_cast<const uint4*>(p.x) + unit * sizeof(T);  // 16 values are sizeof(T) loads
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) raw[i] = __ldg(x + i);
}

template <class T>
__device__ __forceinline__ void unpack_values(float (&v)[kValues], const uint4 (&raw)[sizeof(T)]) {
  constexpr int kPer = Word<T>::kValues;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    Word<T>::unpack(raw[i].x, v + 4 * kPer * i);
    Word<T>::unpack(raw[i].y, v + 4 * kPer * i + kPer);
    Word<T>::unpack(raw[i].z, v + 4 * kPer * i + 2 * kPer);
    Word<T>::unpack(raw[i].w, v + 4 * kPer * i + 3 * kPer);
  }
}

// kDivides: by IEEE division, for a given scale, which may be any number, and for stochastic rounding.
template <class T, bool kDivides>
__global__ void __launch_bounds__(kThreads) round_to_codes(const TensorwiseParams p, int partials) {
  const int64_t units = p.elements / kValues, stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  uint4 raw[sizeof(T)];
  int64_t unit = units - 1 - thread;
  if (!kDivides && unit >= 0) load_values<T>(raw, p, unit);  // a division needs the registers for itself

  quant::RowScale scale;
  if (p.given_scale != nullptr) {
    scale.scale = *p.given_scale;
    scale.finite = isfinite(scale.scale);
    if (!scale.finite) scale.scale = __uint_as_float(0x7fc00000u);
  } else {
    uint32_t best = 0;
    for (int i = threadIdx.x; i < partials; i += kThreads) best = max(best, p.partial_max[i]);
    scale = quant::row_scale(block_max(best));
  }
  if (thread == 0) *p.scale = scale.scale;

  for (; unit >= 0; unit -= stride) {
    float v[kValues];
    if (kDivides) load_values<T>(raw, p, unit);
    unpack_values<T>(v, raw);
    if (!kDivides && unit >= stride) load_values<T>(raw, p, unit - stride);
    uint32_t words[4];
    if constexpr (kDivides) {
      const uint64_t first = static_cast<uint64_t>(unit) * kValues;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t bytes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          bytes[k] = static_cast<uint8_t>(quant::code(v[4 * i + k], scale, first + 4 * i + k, p.seed));
        words[i] = quant::pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
      }
    } else {
      quant::pack_codes(v, scale, words);
    }
    __stcs(reinterpret_cast<uint4*>(p.codes) + unit, make_uint4(words[0], words[1], words[2], words[3]));
  }
  const int64_t rest = units * kValues + thread;  // fewer than 16: threads of the first block
  if (rest < p.elements)
    p.codes[rest] = quant::code(load_as_float(p.x, rest, p.dtype), scale, static_cast<uint64_t>(rest), p.seed);
}

template <class T>
void launch_both(const TensorwiseParams& p, int blocks, cudaStream_t stream) {
  const host::Launch where = {blocks, kThreads, 1, 0, stream};
  if (p.given_scale == nullptr) host::launch("quantize_int8_tensorwise (absmax)", find_absmax<T>, where, p);
  const bool divides = p.given_scale != nullptr || p.seed != 0;
  host::launch("quantize_int8_tensorwise", divides ? round_to_codes<T, true> : round_to_codes<T, false>, where, p, blocks);
}

}  // namespace

int tensorwise_blocks(int64_t elements, int sm_count) {
  const int64_t wanted = (elements + kThreads * kValues - 1) / (kThreads * kValues);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, int64_t{kCtasPerSm} * sm_count));
}

void quantize_int8_tensorwise(const TensorwiseParams& p, int device, cudaStream_t stream) {
  host::DeviceGuard guard(device);
  const int blocks = tensorwise_blocks(p.elements, host::attribute(cudaDevAttrMultiProcessorCount, device));
  if (p.dtype == DType::kFloat32) return launch_both<float>(p, blocks, stream);
  if (p.dtype == DType::kFloat16) return launch_both<__half>(p, blocks, stream);
  launch_both<__nv_bfloat16>(p, blocks, stream);
}

}  // namespace kitchen::int8
