// Rowwise INT8 quantizer: codes = rne(h / scale), scale = max(absmax(h) / 127, 1e-30), h = rotate(act(x)).
//
// Tensors: x [M, K] or [M, 2K] of fp32, fp16 or bf16, any row stride; codes [M, K] int8; scales [M] fp32.
// Two kernels: row_registers.cuh holds a row in registers (16-byte aligned rows, K a multiple of 16, groups up to 256): of one CTA
// up to 16384 columns (fp32: 12288), of a cluster up to 98304 (sm_90 and later, no rms_norm). row_chunks.cuh takes everything else.
// Both compute in fp32 what kitchen_core/arithmetic.py says, to the bit where no activation is in front. Measured:
// docs/kernels/quantize_int8_rowwise.md.
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

#include <algorithm>
#include <string>

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "quantize_int8_rowwise/row_chunks.cuh"
#include "quantize_int8_rowwise/row_registers.cuh"

namespace kitchen::int8 {

extern template RowKernel find_row_kernel<float>(const QuantizeParams&, const QuantizePlan&);
extern template RowKernel find_row_kernel<__half>(const QuantizeParams&, const QuantizePlan&);
extern template RowKernel find_row_kernel<__nv_bfloat16>(const QuantizeParams&, const QuantizePlan&);

namespace {

// Warps of two tiles that an SM gets. By registers each scheduler holds 6 of the special kernels (80 registers) and 4 (fp32: 3) of the
// general one; a CTA too many would run alone at the end (5 of 5 warps: 72%, 4: 83% of copy at 4096 x 5120, rotated). For pairs
// 32 would fit, but more rows on their way than bandwidth asks for only delay the first: 5 CTAs of 3 warps beat 8 (93% and
// 89% of copy at 8192 x 3072), and 2 CTAs of 12 beat 1 (94% and 88% at K = 12288). H200, 2026-11-30.
constexpr int kResidentWarps = 24, kResidentWarpsPair = 16, kResidentWarpsGeneral = 16, kResidentWarpsFp32 = 12;
// Of one tile, that is CTAs of one warp: more of them take longer to start than they gain (4096 x 384 plain: 3.6 us, and 5.0
// with 24). H200, 2026-11-30.
constexpr int kResidentWarpsOneTile = 16;
constexpr int kReservedSmem = 1024 + sizeof(RowShared);  // of a CTA, besides its dynamic shared memory

int ceil_div(int a, int b) { return (a + b - 1) / b; }

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// The cases compiled with their activation and group (find_half_type.cuh).
bool has_special(const QuantizeParams& p) {
  using quant::InputAct;
  if (p.dtype == DType::kFloat32) return false;
  return (p.act == InputAct::kNone && (p.group == 0 || p.group == 256)) || (p.act == InputAct::kSwiglu && p.group == 256);
}

// Whether the kernels of row_registers.cuh take such rows, if they are not too long.
bool fits_registers(const QuantizeParams& p) {
  const bool aligned = p.K % kLaneColumns == 0 && is_aligned(p.x) && is_aligned(p.codes) &&
                       (p.x_row_stride * size_of(p.dtype)) % 16 == 0;
  return aligned && p.seed == 0 && p.group <= 256;
}

// A chunk of fewer columns for a short row: its CTA leaves threads and shared memory to those of other rows. It holds whole
// groups: K is at least one.
QuantizePlan plan_chunks(int K) {
  const int threads = K <= kChunkValues * 256 ? 256 : K <= kChunkValues * 512 ? 512 : kMaxChunkThreads;
  return {0, threads / 32, 1, 0, false};
}

// A row longer than one CTA holds, in the CTAs of a cluster. Few rows: eight, each on an SM of its own. Many rows: the fewest whose
// 16 warps let three of them onto an SM (40 registers; general 48): one loads while others compute, and a row starts and joins no
// more CTAs than that needs. The longest rows take eight of up to 24 warps. M * cluster fits a grid: 2^28 rows are 4 TB of codes.
QuantizePlan plan_long_row(const QuantizeParams& p, const QuantizeDevice& device) {
  const int tiles = ceil_div(p.K, kTileColumns);
  int cluster = p.M * kMaxCluster <= device.sm_count ? kMaxCluster : 2;
  while (cluster < kMaxCluster && ceil_div(tiles, cluster) > kMaxWarps) cluster *= 2;
  return {1, ceil_div(tiles, cluster), cluster, 0, has_special(p)};
}

// Dynamic shared memory of a CTA: the exchange of each warp, and the stage of the next row in the kernels of a pair.
int shared_bytes(const QuantizeParams& p, const QuantizePlan& plan) {
  const int exchange = p.group >= 64 ? plan.tiles * kExchangeWords * static_cast<int>(sizeof(float)) : 0;
  const int stage = plan.special && plan.tiles == 2 && quant::is_pair(p.act) ? plan.tiles * 2 * kStageBytes : 0;
  return plan.warps * (exchange + stage);
}

// Launched early, CTAs gather on the SMs that the grid in front leaves free (256 rows: 12 SMs with 8 and 112 with 1 take 2.9 us,
// 2 on each 1.4). With so much shared memory each, an SM takes no more than its share. H200, 2026-11-30.
int spread_bytes(int64_t grid, const QuantizeDevice& device) {
  const int64_t share = (grid + device.sm_count - 1) / device.sm_count;
  return share == 1 || share > 6 ? 0 : device.smem_per_sm / static_cast<int>(share + 1);
}

QuantizeDevice query(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device), host::attribute(cudaDevAttrClusterLaunch, device) != 0,
          host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
}

}  // namespace

QuantizePlan choose_plan(const QuantizeParams& p, const QuantizeDevice& device) {
  if (!fits_registers(p)) return plan_chunks(p.K);
  const int tiles = ceil_div(p.K, kTileColumns);
  if (tiles > 2 * (p.dtype == DType::kFloat32 ? kMaxWarpsFast : kMaxWarps)) {
    const bool exchanged = device.has_clusters && p.act != quant::InputAct::kRmsNorm;  // of a cluster, maxima alone
    return exchanged && tiles <= kMaxCluster * kMaxWarpsSmall ? plan_long_row(p, device) : plan_chunks(p.K);
  }
  QuantizePlan plan = {1, tiles, 1, 0, has_special(p)};
  const bool few = p.M <= device.sm_count && tiles <= kMaxWarpsSmall, two_each = p.M <= 2 * device.sm_count && tiles <= kMaxWarpsFast;
  if (few || two_each) {  // latency: spread a row over as many schedulers as it can use
    const bool rms = p.act == quant::InputAct::kRmsNorm;  // its sum is not exchanged between CTAs
    if (device.has_clusters && !rms && tiles >= 16) {
      plan.cluster = p.M * 8 <= device.sm_count ? 8 : p.M * 4 <= device.sm_count ? 4 : 1;
    }
    // A long row alone on an SM: half the warps are as fast (2.8 us, not 2.9, at 64 x 12288) and leave registers for blocks of the
    // GEMM behind, which otherwise find too few SMs to read their weights from (64 tokens, 12288x3072: 18.1 us, 48 tokens: 15.5).
    if (plan.cluster == 1 && tiles >= 16 && !quant::is_pair(p.act)) plan.tiles = 2;
    plan.warps = ceil_div(tiles, plan.cluster * plan.tiles);
    return plan;
  }
  plan.tiles = tiles >= 2 ? 2 : 1;
  plan.warps = ceil_div(tiles, plan.tiles);
  const bool pair = quant::is_pair(p.act);
  if ((!pair && plan.warps > kMaxWarpsFast) || shared_bytes(p, plan) > device.smem_per_cta) plan.special = false;
  if (shared_bytes(p, plan) > device.smem_per_cta) return plan_chunks(p.K);
  const int general = p.dtype == DType::kFloat32 ? kResidentWarpsFp32 : kResidentWarpsGeneral;
  const int by_registers = !plan.special ? general / plan.warps
                           : !pair       ? (plan.tiles == 1 ? kResidentWarpsOneTile : kResidentWarps) / plan.warps
                                         : std::max(2, kResidentWarpsPair / plan.warps);
  const int by_smem = device.smem_per_sm / (shared_bytes(p, plan) + kReservedSmem);
  plan.ctas_per_sm = std::max(1, std::min(by_registers, by_smem));
  return plan;
}

void quantize_int8_rowwise(const QuantizeParams& given, const QuantizePlan* forced, int device, cudaStream_t stream) {
  if (given.M == 0) return;
  QuantizeParams p = given;
  p.row_bytes = row_bytes(p.K, p.order);
  host::DeviceGuard guard(device);
  const QuantizeDevice facts = query(device);
  const QuantizePlan plan = forced ? *forced : choose_plan(p, facts);
  if (plan.tiles == 0) {
    const int threads = plan.warps * 32, columns = kChunkValues * threads;
    host::require(threads <= kMaxChunkThreads && columns >= 1 && (p.group == 0 || columns % p.group == 0),
                  "quantize_int8_rowwise: chunks of " + std::to_string(columns) + " columns hold no whole groups");
    host::launch("quantize_int8_rowwise (chunks)", quantize_row_chunks,
                 {p.M, threads, 1, columns * sizeof(float), stream, p.programmatic_launch}, p);
    return;
  }
  const bool covers = static_cast<int64_t>(plan.tiles) * plan.warps * plan.cluster * kTileColumns >= p.K;
  const bool few = p.dtype == DType::kFloat32 || (plan.special && has_special(p) && !quant::is_pair(p.act));
  const int most_warps = plan.tiles == 1 ? kMaxWarpsSmall : few ? kMaxWarpsFast : kMaxWarps;
  const bool one_cta = plan.cluster == 1;
  const bool exchanges = plan.tiles == 1 && plan.cluster <= kMaxCluster && p.act != quant::InputAct::kRmsNorm;
  host::require(fits_registers(p) && covers && plan.warps <= most_warps && (one_cta || exchanges),
                "quantize_int8_rowwise: this plan does not cover K=" + std::to_string(p.K));
  RowKernel kernel = p.dtype == DType::kFloat32   ? find_row_kernel<float>(p, plan)
                     : p.dtype == DType::kFloat16 ? find_row_kernel<__half>(p, plan)
                                                  : find_row_kernel<__nv_bfloat16>(p, plan);
  const int64_t rows_at_once = int64_t{plan.ctas_per_sm} * facts.sm_count;
  const int64_t grid = plan.ctas_per_sm > 0 && rows_at_once < p.M ? rows_at_once : p.M * plan.cluster;
  const bool spread = p.programmatic_launch && grid == p.M;  // not where CTAs walk over rows: they fill the chip
  const auto smem = static_cast<size_t>(std::max(shared_bytes(p, plan), spread ? spread_bytes(grid, facts) : 0));
  host::launch("quantize_int8_rowwise", kernel, {grid, plan.warps * 32, plan.cluster, smem, stream, p.programmatic_launch}, p);
}

}  // namespace kitchen::int8
