// The INT8 GEMM of int8_gemm.cu for problems with fewer tiles than SMs: K is split over a thread-block cluster
// (kitchen/gemm/gemm_sm90_split.cuh). Same arithmetic, same bits.
#include "int8_gemm/sm90/int8_gemm_split.h"

#include "int8_gemm/sm90/scale_epilogue.cuh"
#include "kitchen/gemm/gemm_sm90_split.cuh"

namespace kitchen::int8 {
namespace {

template <class T, int kTileN>
void launch(const Int8GemmParams& p, int splits, int early_stages, cudaStream_t stream) {
  using Config = sm90::TileConfig<kSplitTileM, kTileN, 1, 1, sm90::Schedule::kTogether>;
  using Epilogue = ScaleEpilogue<T, kSplitTileM, kTileN, ResidualBy::kCopiesOrLoads>;
  using Shared = sm90::SplitStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSplitSharedLimit + 1024, "the stages do not fit shared memory");
  static_assert(kMostSplits == sm90::kMaxSplits, "the sums of that many blocks fit");
  static std::atomic<uint64_t> devices_done{0};
  auto* const kernel = sm90::split_kernel<Config, MmaS8, Epilogue>;
  allow_shared_memory(kernel, sizeof(Shared), devices_done);

  sm90::SplitParams<EpilogueParams<T>> params{};
  params.a = operand_map(p.a, p.M, p.K, Config::kBoxM);
  const bool overlap = stores_may_repeat(p);
  const auto few = sm90::FewRows::of(p.M, overlap);
  params.a_few = operand_map(p.a, p.M, p.K, few.box);
  params.b = operand_map(p.b, p.N, p.K, Config::kBoxN);
  params.problem = {static_cast<int>(ceil_div(p.K, sm90::kStageBytesK)), static_cast<int>(p.M), static_cast<int>(p.N),
                    early_stages, overlap, few};
  params.epilogue = epilogue_params<T, kTileN>(p);

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const auto tiles_m = static_cast<unsigned>(ceil_div(p.M, kSplitTileM));
  const auto tiles_n = static_cast<unsigned>(ceil_div(p.N, kTileN));
  config.gridDim = dim3(splits, tiles_m, tiles_n);
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.programmatic_launch ? 2 : 1;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "int8_gemm_sm90: launch");
}

template <int kTileN>
void launch_tile(const Int8GemmParams& p, int splits, int early_stages, cudaStream_t stream) {
  switch (p.out_type) {
    case DType::kFloat32: return launch<float, kTileN>(p, splits, early_stages, stream);
    case DType::kFloat16: return launch<__half, kTileN>(p, splits, early_stages, stream);
    default: return launch<__nv_bfloat16, kTileN>(p, splits, early_stages, stream);
  }
}

}  // namespace

void int8_gemm_split(const Int8GemmParams& p, int tile_n, int splits, int early_stages, cudaStream_t stream) {
  switch (tile_n) {
    case 64: return launch_tile<64>(p, splits, early_stages, stream);
    case 96: return launch_tile<96>(p, splits, early_stages, stream);
    default: return launch_tile<128>(p, splits, early_stages, stream);
  }
}

}  // namespace kitchen::int8
