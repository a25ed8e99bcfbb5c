// The portable INT8 GEMM on sm_80 and later: smxx/portable_gemm.cuh on kitchen/gemm/gemm_sm80.cuh, m16n8k32.
#include "int8_gemm/smxx/portable_gemm.cuh"
#include "kitchen/gemm/gemm_sm80.cuh"
#include "kitchen/mma/m16n8k32_s8.h"

namespace kitchen::int8::portable {
namespace {

constexpr int kTileCount = sizeof(kTilesSm80) / sizeof(TileShape);

// kAlways16: both operands have rows aligned to 16 bytes. The other instance takes every alignment, and exists for some tiles.
template <int kTile, bool kAlways16>
struct Instance {
  static constexpr TileShape kShape = kTilesSm80[kTile];
  using Config = gemm::TileConfig<kShape.m, kShape.n, kShape.k, kShape.warp_m, kShape.warp_n, kShape.warps_k,
                                  kShape.blocks_per_sm>;
  using A = gemm_sm80::CodeOperand<Config, gemm::Side::kA, kAlways16>;
  using B = gemm_sm80::CodeOperand<Config, gemm::Side::kB, kAlways16>;
  static_assert(Config::kThreads == kShape.threads() && Config::kStageBytes == kShape.stage_bytes(),
                "the table counts as the kernel does");

  static void launch(const Operands& o, const LinearPlan& plan, cudaStream_t stream) {
    if constexpr (kAlways16 || kShape.any_alignment) {
      using Params = gemm::KernelParams<A, B, ScaleEpilogue>;
      const auto params = kernel_params<Params>(o, plan, kShape);
      const int64_t blocks = int64_t{params.problem.tiles_m} * params.problem.tiles_n * plan.splits;
      const auto smem = static_cast<size_t>(plan.stages) * Config::kStageBytes;
      host::launch("int8_gemm_sm80", gemm_sm80::gemm_kernel<Config, mma::M16N8K32S8, A, B, gemm_sm80::NoPromotion, ScaleEpilogue>,
                   {blocks, Config::kThreads, 1, smem, stream}, params);
    }
  }
};

}  // namespace

void int8_gemm_sm80(const Operands& o, const LinearPlan& plan, int device, cudaStream_t stream) {
  run(Path::kSm80, "int8_gemm_sm80", o, plan, device, stream, [&](bool aligned) {
    find_tile<Instance>(kTilesSm80, plan.tile, aligned, std::make_integer_sequence<int, kTileCount>())(o, plan, stream);
  });
}

}  // namespace kitchen::int8::portable
