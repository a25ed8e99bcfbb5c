// The portable INT8 GEMM on Turing: smxx/portable_gemm.cuh on kitchen/gemm/gemm_sm75.cuh, m8n8k16. Runs on later chips too.
#include "int8_gemm/smxx/portable_gemm.cuh"
#include "kitchen/gemm/gemm_sm75.cuh"
#include "kitchen/mma/m8n8k16_s8.h"

namespace kitchen::int8::portable {
namespace {

constexpr int kTileCount = sizeof(kTilesSm75) / sizeof(TileShape);

// One instance for every alignment: it is looked up where a thread loads into registers.
template <int kTile, bool>
struct Instance {
  static constexpr TileShape kShape = kTilesSm75[kTile];
  using Config = gemm::TileConfig<kShape.m, kShape.n, kShape.k, kShape.warp_m, kShape.warp_n, kShape.warps_k,
                                  kShape.blocks_per_sm>;
  using A = gemm_sm75::CodeOperand<Config, gemm::Side::kA>;
  using B = gemm_sm75::CodeOperand<Config, gemm::Side::kB>;
  static_assert(Config::kThreads == kShape.threads() && Config::kStageBytes == kShape.stage_bytes(),
                "the table counts as the kernel does");

  static void launch(const Operands& o, const LinearPlan& plan, cudaStream_t stream) {
    using Params = gemm::KernelParams<A, B, ScaleEpilogue>;
    const auto params = kernel_params<Params>(o, plan, kShape);
    const int64_t blocks = int64_t{params.problem.tiles_m} * params.problem.tiles_n * plan.splits;
    host::launch("int8_gemm_sm75", gemm_sm75::gemm_kernel<Config, mma::M16N8K32S8Turing, A, B, ScaleEpilogue>,
                 {blocks, Config::kThreads, 1, size_t{gemm_sm75::kStages} * Config::kStageBytes, stream}, params);
  }
};

}  // namespace

void int8_gemm_sm75(const Operands& o, const LinearPlan& plan, int device, cudaStream_t stream) {
  run(Path::kSm75, "int8_gemm_sm75", o, plan, device, stream, [&](bool aligned) {
    find_tile<Instance>(kTilesSm75, plan.tile, aligned, std::make_integer_sequence<int, kTileCount>())(o, plan, stream);
  });
}

}  // namespace kitchen::int8::portable
