// The dense weight of packed AWQ codes.
//
//   out[n, k] = round_T(fma(q[n, k] - 8, scale[k / g, n], zero[k / g, n]))    fma in fp32, one rounding
//
//   codes [N, K/2]: column 2j in the low nibble of byte j; scale, zero [K/g, N] of any float type; out [N, K] of any float type
//
// A thread decodes 8 columns of 4 neighbouring rows: parameters of the 4 rows lie side by side, a warp reads 128 bytes and writes
// 512 or 1024 bytes of each row. Where columns, groups or addresses do not come in eights, a thread decodes one byte of one row.
// fp32 arithmetic throughout, since stores bound it. Measured: docs/kernels/awq.md.
#include "dequantize_awq/dequantize_awq.h"

#include "kitchen/common/to_float.h"
#include "kitchen/host/device.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq {
namespace {

constexpr int kThreads = 256, kRows = 4, kColumns = 8;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

__device__ __forceinline__ float rounded(float value, DType type) {
  if (type == DType::kFloat16) return __half2float(__float2half_rn(value));
  if (type == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(value));
  return value;
}

template <class T>
__device__ __forceinline__ T stored(float value, DType round_type);
template <>
__device__ __forceinline__ float stored(float value, DType round_type) { return rounded(value, round_type); }
template <>
__device__ __forceinline__ __half stored(float value, DType) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 stored(float value, DType) { return __float2bfloat16_rn(value); }

// Parameters of rows n .. n + 3 in one group, those beyond N as those of the last.
__device__ __forceinline__ void load_rows(float (&values)[kRows], const void* data, int64_t at, int left, DType type, bool vectors) {
  if (vectors && left >= kRows) {
    if (type == DType::kFloat32) {
      const float4 four = *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
      memcpy(values, &four, 16);
      return;
    }
    const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
    if (type == DType::kFloat16) Word<__half>::unpack(words.x, values), Word<__half>::unpack(words.y, values + 2);
    else Word<__nv_bfloat16>::unpack(words.x, values), Word<__nv_bfloat16>::unpack(words.y, values + 2);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) values[i] = load_as_float(data, at + min(i, left - 1), type);
}

// Eight neighbouring columns, rounded, by stores of 16 bytes: spelled out, since nvcc 13.0 makes four of an assignment here.
template <class T>
__device__ __forceinline__ void store_columns(T* to, const float (&values)[kColumns], DType) {
  using P = quant::AwqPairs<T>;
  __stcg(reinterpret_cast<uint4*>(to), make_uint4(P::rounded(values[0], values[1]), P::rounded(values[2], values[3]),
                                                  P::rounded(values[4], values[5]), P::rounded(values[6], values[7])));
}
__device__ __forceinline__ void store_columns(float* to, const float (&values)[kColumns], DType type) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    __stcg(reinterpret_cast<float4*>(to + i), make_float4(rounded(values[i], type), rounded(values[i + 1], type),
                                                          rounded(values[i + 2], type), rounded(values[i + 3], type)));
  }
}

// K, g and the addresses in eights of columns.
template <class T>
__global__ void __launch_bounds__(kThreads) dense_rows(const __grid_constant__ DequantizeParams p, bool vectors) {
  const unsigned column_blocks = static_cast<unsigned>((p.K / kColumns + kThreads - 1) / kThreads);
  const int64_t n = static_cast<int64_t>(blockIdx.x / column_blocks) * kRows;
  const int64_t k = (static_cast<int64_t>(blockIdx.x % column_blocks) * kThreads + threadIdx.x) * kColumns;
  if (k >= p.K) return;
  const int left = static_cast<int>(min(p.N - n, static_cast<int64_t>(kRows)));
  uint32_t words[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    words[i] = i < left ? __ldg(reinterpret_cast<const uint32_t*>(p.codes + (n + i) * (p.K / 2) + k / 2)) : 0;
  }
  float scale[kRows], zero[kRows];
  const int64_t at = static_cast<int64_t>(static_cast<unsigned>(k) / static_cast<unsigned>(p.group)) * p.parameter_pitch + n;
  load_rows(scale, p.scale, at, left, p.parameter_type, vectors);
  load_rows(zero, p.zero, at, left, p.parameter_type, vectors);
  T* const out = static_cast<T*>(p.out) + n * p.K + k;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float values[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) values[c] = quant::awq_decode_fp32(words[i], c, scale[i], zero[i]);
    if (i < left) store_columns(out + i * p.K, values, p.round_type);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) dense_bytes(const __grid_constant__ DequantizeParams p) {
  const int64_t row_bytes = p.K / 2, total = p.N * row_bytes;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t n = i / row_bytes;
    const uint32_t byte = p.codes[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t k = 2 * (i - n * row_bytes) + half, at = k / p.group * p.parameter_pitch + n;
      const float scale = load_as_float(p.scale, at, p.parameter_type), zero = load_as_float(p.zero, at, p.parameter_type);
      static_cast<T*>(p.out)[n * p.K + k] = stored<T>(quant::awq_decode_fp32(byte, half, scale, zero), p.round_type);
    }
  }
}

template <class T>
void launch(const DequantizeParams& p, cudaStream_t stream) {
  const auto aligned = [](const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; };
  const int64_t column_blocks = (p.K / kColumns + kThreads - 1) / kThreads, blocks = (p.N + kRows - 1) / kRows * column_blocks;
  const bool eights = p.K % kColumns == 0 && p.group % kColumns == 0 && aligned(p.codes, 4) && aligned(p.out, 16);
  if (eights && blocks <= kMostBlocks && p.K < (int64_t{1} << 32)) {
    const bool vectors = p.parameter_pitch % 4 == 0 && aligned(p.scale, 16) && aligned(p.zero, 16);
    dense_rows<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, vectors);
  } else {
    const int64_t wanted = (p.N * (p.K / 2) + kThreads - 1) / kThreads;
    dense_bytes<T><<<static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks), kThreads, 0, stream>>>(p);
  }
  host::check(cudaGetLastError(), "dequantize_awq");
}

}  // namespace

void dequantize_awq(const DequantizeParams& p, int device, cudaStream_t stream) {
  host::require(p.K > 0 && p.K % 2 == 0 && p.group > 0 && p.K % p.group == 0, "dequantize_awq: K must be even and the group divide it");
  if (p.N == 0) return;
  host::DeviceGuard guard(device);
  if (p.out_type == DType::kFloat32) return launch<float>(p, stream);
  if (p.out_type == DType::kFloat16) return launch<__half>(p, stream);
  launch<__nv_bfloat16>(p, stream);
}

}  // namespace kitchen::awq
