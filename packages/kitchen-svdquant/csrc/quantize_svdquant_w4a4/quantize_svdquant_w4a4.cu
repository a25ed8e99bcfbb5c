// Activations to 4-bit codes, per row and group of 64 columns, bit for bit as kitchen_core/reference/svdquant.py:
//
//   v = (x + shift) / smooth[k]                  IEEE division
//   scale = max(absmax of the group, 1e-10) / L  IEEE division; L = 7 (signed) or 15 (unsigned)
//   code = clamp(rne(v / scale))                 IEEE division; -7..7, or 0..15
//   a group whose absmax is not finite: scale NaN, codes 0
//
// A thread owns 16 columns, whose smooth factors it keeps, and walks over rows; four lanes share a group (group_codes.cuh).
// Blocks behind those of x decode the weight for the Hopper GEMM.
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"

#include <algorithm>

#include "decode_svdquant/decode_codes.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/dependent_launch.h"
#include "quantize_svdquant_w4a4/group_codes.cuh"

namespace kitchen::svdquant {
namespace {

constexpr int kThreads = 64;

template <class T, CodeForm kForm, bool kUnsigned>
__device__ __forceinline__ void quantize_rows(const QuantizeParams& p, unsigned blocks, int column_blocks, bool aligned) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x % column_blocks) * kThreads + threadIdx.x) * kColumns;
  const int64_t row_step = blocks / column_blocks;
  int64_t row = blockIdx.x / column_blocks;
  const int groups = static_cast<int>(p.K / kGroup);
  const bool inside = column < p.K;  // whole groups of lanes are
  const int64_t own_column = inside ? column : 0;
  const Smooth smooth(p.smooth, own_column, p.smooth_type);
  const T* const x = static_cast<const T*>(p.x) + own_column;
  Loaded<T> next;
  if (row < p.M) next.load(x + row * p.x_row_stride, aligned);
  for (; row < p.M; row += row_step) {
    float v[kColumns], codes[kColumns], scale;
    next.unpack(v);
    if (row + row_step < p.M) next.load(x + (row + row_step) * p.x_row_stride, aligned);
    add_shift(v, p.shift);
    if (!__all_sync(0xffffffffu, group_codes_if_plain<kUnsigned>(codes, scale, v, smooth))) {  // rare
      Loaded<T> again;  // not kept: that would take registers all along
      again.load(x + row * p.x_row_stride, aligned);
      again.unpack(codes);
      add_shift(codes, p.shift);
      smooth.divide(codes);
      scale = group_codes<kUnsigned>(codes);
    }
    if (!inside) continue;
    store_codes<kForm>(p.codes, row * p.K + column, codes);
    if (threadIdx.x % kLanesPerGroup == 0) {
      store_scale<kForm>(p, row, column / kGroup, groups, scale);
    }
  }
}

template <class T, CodeForm kForm, bool kUnsigned>
__global__ void __launch_bounds__(kThreads) quantize(const QuantizeParams p, unsigned blocks, int column_blocks, bool aligned, const DecodeParams weight) {
  const bool is_weight = kForm == CodeForm::kE4m3 && blockIdx.x >= blocks;
  if (is_weight) {
    decode_block<kThreads>(weight, DecodeBlocks(weight, kThreads), blockIdx.x - blocks);
  } else {
    if (blockIdx.x == 0) clear(p);
    quantize_rows<T, kForm, kUnsigned>(p, blocks, column_blocks, aligned);
  }
  ptx::wait_then_launch_dependents();
}

template <class T, CodeForm kForm>
void launch(const QuantizeParams& p, const DecodeParams* weight, bool beside, int device, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 12;
  const int column_blocks = static_cast<int>((p.K / kColumns + kThreads - 1) / kThreads);
  const int64_t rows_at_once =
      std::max<int64_t>(1, int64_t{kBlocksPerSm} * host::attribute(cudaDevAttrMultiProcessorCount, device) / column_blocks);
  const int64_t passes = (p.M + rows_at_once - 1) / rows_at_once, rows = (p.M + passes - 1) / passes;  // evenly dealt out
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_row_stride * sizeof(T) % 16 == 0;
  const auto kernel = p.is_unsigned ? quantize<T, kForm, true> : quantize<T, kForm, false>;
  const int64_t blocks = rows * column_blocks;
  const int64_t all = blocks + (weight == nullptr ? 0 : DecodeBlocks(*weight, kThreads).all());
  host::require(all < (int64_t{1} << 31), "quantize_svdquant_w4a4: more than 2^31 - 1 blocks");
  host::launch("quantize_svdquant_w4a4", kernel, {all, kThreads, 1, 0, stream, beside}, p, static_cast<unsigned>(blocks), column_blocks,
               aligned, weight == nullptr ? DecodeParams{} : *weight);
}

template <class T>
void launch_form(const QuantizeParams& p, const DecodeParams* weight, bool beside, int device, cudaStream_t stream) {
  switch (p.form) {
    case CodeForm::kPacked: return launch<T, CodeForm::kPacked>(p, weight, beside, device, stream);
    case CodeForm::kE4m3: return launch<T, CodeForm::kE4m3>(p, weight, beside, device, stream);
  }
}

}  // namespace

void quantize_svdquant_w4a4(const QuantizeParams& p, const DecodeParams* weight, int device, cudaStream_t stream, bool beside) {
  host::require(p.M >= 0 && p.K >= kGroup && p.K % kGroup == 0 && p.K <= (int64_t{1} << 30),
                "quantize_svdquant_w4a4: K must be a multiple of 64 and at most 2^30");
  if (weight != nullptr) {
    host::require(p.form == CodeForm::kE4m3, "quantize_svdquant_w4a4: the weight is decoded beside e4m3 codes alone");
    check_decode(*weight);
  }
  if (p.M == 0) return;
  const host::DeviceGuard guard(device);
  switch (p.type) {
    case DType::kFloat32: return launch_form<float>(p, weight, beside, device, stream);
    case DType::kFloat16: return launch_form<__half>(p, weight, beside, device, stream);
    case DType::kBFloat16: return launch_form<__nv_bfloat16>(p, weight, beside, device, stream);
  }
}

}  // namespace kitchen::svdquant
