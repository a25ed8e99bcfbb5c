// INT8 GEMM with a fused epilogue for every GPU with INT8 tensor cores: the part that the paths of sm80/ and sm75/ share.
//
//   acc[m, n] = sum over k of a[m, k] * b[n, k]                      int32, exact for K <= 131071
//   y = fma(float(acc) * a_scale[m], b_scale[n], bias[n])            float32; without bias: the product
//   y = fma(residual_scale[n], y, residual[m, n])                    where there is a residual
//   out[m, n] = y rounded once to out's type
//
//   a [M, K] int8, b [N, K] int8, K contiguous, rows any pitch apart and of any alignment; a_scale [M], b_scale [N] or one
//   value, float32; bias [N] float32/float16/bfloat16; residual and out [M, N] of out's type; residual_scale [N] or one value.
//
// A block multiplies one tile, or with a split K a piece of its sum, which goes to a workspace and is finished by reduce_splits.
// Main loops: kitchen/gemm/gemm_sm80.cuh, gemm_sm75.cuh. Measured: docs/kernels/int8_gemm_portable.md.
#pragma once

#include <utility>

#include "int8_gemm/smxx/scale_epilogue.cuh"
#include "int8_gemm/smxx/tiles.h"
#include "kitchen/gemm/code_rows.h"
#include "kitchen/gemm/mma_tile.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"

namespace kitchen::int8::portable {

inline gemm::CodeRowsParams code_rows(const int8_t* data, int64_t rows, int64_t K, int64_t pitch) {
  return {reinterpret_cast<const uint8_t*>(data), static_cast<int>(rows), static_cast<int>(K), static_cast<int>(pitch),
          aligned_16(data) && pitch % 16 == 0};
}

inline EpilogueParams epilogue_params(const Operands& o, const LinearPlan& plan) {
  EpilogueParams e = {scale_params(o.gemm, kColumns), plan.splits > 1 ? o.partials : nullptr, o.gemm.M, static_cast<int>(o.gemm.N)};
  e.vectors &= aligned_16(e.partials);
  return e;
}

template <class Params>
Params kernel_params(const Operands& o, const LinearPlan& plan, const TileShape& tile) {
  const Int8GemmParams& g = o.gemm;
  const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  Params params = {};
  params.problem = {static_cast<int>(g.M), static_cast<int>(g.N), static_cast<int>(g.K),
                    ceil_div(g.M, tile.m), ceil_div(g.N, tile.n), plan.raster_group,
                    ceil_div(ceil_div(g.K, tile.k), plan.splits)};
  params.stages = plan.stages;
  params.a = code_rows(g.a, g.M, g.K, o.a_pitch);
  params.b = code_rows(g.b, g.N, g.K, o.b_pitch);
  params.epilogue = epilogue_params(o, plan);
  return params;
}

inline Device query(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device), host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device)};
}

// Checks, then `launch(aligned)`, which launches the kernel of the plan, then the second phase where K is split.
template <class Launch>
void run(Path path, const char* name, const Operands& o, const LinearPlan& plan, int device, cudaStream_t stream,
         const Launch& launch) {
  const Int8GemmParams& g = o.gemm;
  if (g.M == 0) return;
  host::DeviceGuard guard(device);
  const bool aligned = aligned_16(g.a) && aligned_16(g.b) && o.a_pitch % 16 == 0 && o.b_pitch % 16 == 0;
  const LinearProblem problem{g.M, g.N, g.K, aligned};
  if (const char* reason = unsupported(path, problem, plan, query(device))) {
    throw std::invalid_argument(std::string(name) + ": " + describe(path, problem, plan) + ": " + reason);
  }
  constexpr int64_t kMostPitch = (int64_t{1} << 31) - 1;
  host::require(o.a_pitch >= 0 && o.b_pitch >= 0 && o.a_pitch <= kMostPitch && o.b_pitch <= kMostPitch,
                std::string(name) + ": rows must be less than 2^31 bytes apart; copy the operand");
  host::require(plan.splits == 1 || o.partials != nullptr, std::string(name) + ": a split K needs a workspace");
  launch(aligned);
  if (plan.splits > 1) reduce_splits(epilogue_params(o, plan), plan.splits, stream);
}

using LaunchTile = void (*)(const Operands&, const LinearPlan&, cudaStream_t);

// Instance<tile, always16>::launch for every tile of a table.
template <template <int, bool> class Instance, int... kTiles>
LaunchTile find_tile(const TileShape* tiles, int tile, bool aligned, std::integer_sequence<int, kTiles...>) {
  static constexpr LaunchTile always[] = {Instance<kTiles, true>::launch...};
  static constexpr LaunchTile any[] = {Instance<kTiles, false>::launch...};
  return aligned || !tiles[tile].any_alignment ? always[tile] : any[tile];
}

}  // namespace kitchen::int8::portable
