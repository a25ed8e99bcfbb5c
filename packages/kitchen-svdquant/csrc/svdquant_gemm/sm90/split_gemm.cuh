// promoted_gemm.cuh for fewer tiles than SMs: a cluster has one tile, and each of its blocks a piece of K.
//
// The first block has the low-rank branch too. Sums of a warp's 16 rows meet in one block of the cluster, which adds them in the order
// of the blocks, its own first, and runs their epilogue. What a block receives lies where its ring was.
#pragma once

#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/store_async.h"
#include "svdquant_gemm/sm90/promoted_gemm.cuh"

namespace kitchen::svdquant::sm90 {

constexpr int kMostSplits = 4;

template <class EpilogueParams>
struct SplitParams : KernelParams<EpilogueParams> {
  int stages_each;  // of K, of a block
};

// Sums of a warp's rows, 16 bytes each.
template <class Config>
constexpr int kPartVectors = Config::kTileN / 8 * 32;

// With two blocks, four warps receive one part; with four, two receive three.
template <class Config>
using Parts = int4[6][kPartVectors<Config>];

template <class Config, class Epilogue>
struct SplitStorage : SharedStorage<Config, Epilogue> {
  static_assert(sizeof(Parts<Config>) <= sizeof(SharedStorage<Config, Epilogue>::a), "what is received takes the place of A");
  uint64_t received[4 * Config::kConsumers];  // the parts of a consumer warp
  uint64_t peers_done;                        // the consumer warps of the other blocks read their rings no more
};

// The work of a block.
template <class Config>
struct Share {
  int rank, splits, row, column, first_stage, stages, rank_stages;

  template <class Params>
  __device__ __forceinline__ explicit Share(const Params& params)
      : rank(static_cast<int>(ptx::cluster_rank())), splits(static_cast<int>(ptx::cluster_size())) {
    const int tile = static_cast<int>(blockIdx.x) / splits;
    row = tile % params.problem.tiles_m * Config::kTileM, column = tile / params.problem.tiles_m * Config::kTileN;
    first_stage = min(params.problem.k_stages, rank * params.stages_each);
    stages = min(params.stages_each, params.problem.k_stages - first_stage);
    rank_stages = rank == 0 ? params.rank_stages : 0;
  }
  __device__ __forceinline__ bool finishes(int warp) const { return warp % splits == rank; }
};

// One thread: copies the stages of this block's piece.
template <class Config, class Shared, class Params>
__device__ __forceinline__ void produce_piece(Shared& shared, const Params& params, const Share<Config>& share) {
  RingPosition<Shared::kStages> at;
  for (int s = 0; s < share.rank_stages; ++s, at.advance()) {
    ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect(&shared.full[at.stage], Config::kBytesA + Config::kBytesB);
    ptx::tma_load(shared.a[at.stage], &params.low, 64 * s, share.row, &shared.full[at.stage]);
    ptx::tma_load(shared.b[at.stage], &params.up, 64 * s, share.column, &shared.full[at.stage]);
  }
  const uint4* b_scale = scales_of_b<Config>(params, share.column / Config::kTileN, share.first_stage);
  for (int i = 0; i < share.stages; ++i, at.advance()) {
    const int k = share.first_stage + i;
    ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
    ptx::mbarrier_arrive_expect(&shared.full[at.stage], Config::kStageBytes);
    ptx::tma_load(shared.a[at.stage], &params.a, k * kStageBytesK, share.row, &shared.full[at.stage]);
    ptx::tma_load(shared.b[at.stage], &params.b, k * kStageBytesK, share.column, &shared.full[at.stage]);
    load_scales<Config>(shared, at.stage, params, k, share.row, b_scale);
    b_scale += kStageGroups * Config::kTileN;
  }
}

// A barrier of the cluster's consumer warps alone: what they receive lies where their rings were. A block that has passed it and has
// its parts is reached by nobody any more, and may end.
template <class Config, class Shared>
__device__ __forceinline__ void wait_for_peers(Shared& shared, const Share<Config>& share) {
  const int lane = threadIdx.x % 32;
  if (lane < share.splits && lane != share.rank) ptx::mbarrier_arrive_cluster(&shared.peers_done, lane);
  ptx::mbarrier_wait(&shared.peers_done, 0);
}

template <class Config, class Shared>
__device__ __forceinline__ void meet(Sums<Config>& total, Shared& shared, const Share<Config>& share, int warp) {
  constexpr int kQuads = Config::kTileN / 8;  // of a thread
  auto& parts = *reinterpret_cast<Parts<Config>*>(shared.a);
  const int lane = static_cast<int>(threadIdx.x) % 32, owner = warp % share.splits, others = share.splits - 1;
  const int first = warp / share.splits * others;
  if (owner != share.rank) {
    const int part = first + (share.rank < owner ? share.rank : share.rank - 1);
    const uint32_t to = ptx::address_in_cluster(&parts[part][lane], owner);
    const uint32_t barrier = ptx::address_in_cluster(&shared.received[warp], owner);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float* const sums = &total[i / (kQuads / 2)][i % (kQuads / 2) * 4];
      ptx::store_async_16(to + i * 512, barrier,
                          make_int4(__float_as_int(sums[0]), __float_as_int(sums[1]), __float_as_int(sums[2]),
                                    __float_as_int(sums[3])));
    }
    return;
  }
  ptx::receive_wait(&shared.received[warp]);
#pragma unroll 1
  for (int part = first; part < first + others; ++part) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int4 more = parts[part][32 * i + lane];
      float* const sums = &total[i / (kQuads / 2)][i % (kQuads / 2) * 4];
      sums[0] += __int_as_float(more.x), sums[1] += __int_as_float(more.y);
      sums[2] += __int_as_float(more.z), sums[3] += __int_as_float(more.w);
    }
  }
}

template <class Config, class Epilogue, class Shared, class Params>
__device__ __forceinline__ void consume_piece(Shared& shared, const Params& params, const Share<Config>& share,
                                              Epilogue& epilogue) {
  const int index = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const Consumer<Config, Shared> consumer(shared, index);
  RingPosition<Shared::kStages> at;
  Sums<Config> total;
  consumer.low_rank(total, at, params, share.rank_stages);
  consumer.groups(total, at, share.stages);
  if (share.splits > 1) {
    wait_for_peers<Config>(shared, share);
    meet<Config>(total, shared, share, warp);
  }
  if (!share.finishes(warp)) return;
  ptx::mbarrier_wait(&shared.columns_full, 0);
  epilogue.store(total, shared.columns, share.row + warp * 16, share.column);
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    split_gemm(const __grid_constant__ SplitParams<typename Epilogue::Params> params) {
  using Shared = SplitStorage<Config, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Share<Config> share(params);
  set_up<Config>(shared, params);
  if (threadIdx.x >= 128 && threadIdx.x % 32 == 0) {
    const int warp = threadIdx.x / 32 - 4;
    ptx::receive_init(&shared.received[warp]);
    if (share.finishes(warp)) ptx::receive_expect(&shared.received[warp], (share.splits - 1) * kPartVectors<Config> * 16);
  }
  if (threadIdx.x == 0) ptx::mbarrier_init(&shared.peers_done, max(1, (share.splits - 1) * 4 * Config::kConsumers)), ptx::mbarrier_init_fence();
  __syncthreads();
  if (share.splits > 1) ptx::cluster_sync();  // every block has its barriers
  ptx::griddep_wait();

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0) ptx::griddep_launch(), produce_piece<Config>(shared, params, share);
    if (threadIdx.x / 32 == 1) {
      Epilogue::load_columns(params.epilogue, shared.columns, share.row, share.column);
      ptx::mbarrier_arrive(&shared.columns_full);
    }
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    Epilogue epilogue(params.epilogue, shared.staging[threadIdx.x / 32 - 4]);
    consume_piece<Config>(shared, params, share, epilogue);
    epilogue.finish();
  }
}

}  // namespace kitchen::svdquant::sm90
