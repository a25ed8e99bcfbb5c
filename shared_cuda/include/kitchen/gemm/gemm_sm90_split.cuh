// Hopper GEMM for problems with fewer tiles than SMs: gemm_sm90.cuh's main loop, one tile of 128 rows a cluster, with K
// split over the cluster's blocks.
//
// Each block multiplies one piece of K, its two warpgroups 64 rows each. Then the tile is dealt out in chunks of a warp's 16
// rows x the columns that the epilogue stores at once: chunk i belongs to block i % splits. The others send their sums to the
// same warp there (st.async, in register order, into memory kept for that), which adds them in the order of the blocks and
// runs the epilogue. int32 sums are exact, so bits do not depend on the plan.
//
// Registers and shared memory are kept small, so that the grid in front (a quantizer) and this one share an SM: this one is
// set up, and copies its first rows of B, while that one runs (programmatic launch).
//
// The Epilogue is gemm_sm90.cuh's, made from its Params alone, with kChunks (of a tile's columns) and, instead of store,
// store_chunk(sums, chunk, rows, columns, row, column, staging): 16 rows of one chunk, through kStagingBytes / 2 of memory.
#pragma once

#include "kitchen/gemm/gemm_sm90.cuh"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/store_async.h"

namespace kitchen::gemm_sm90 {

constexpr int kMaxSplits = 4;                  // clusters of more fit fewer SMs, and send more sums
constexpr int kSplitSharedLimit = 180 * 1024;  // of 227 KB: the rest is for the blocks of the grid in front
constexpr int kSplitRegisters = 112;           // a thread, likewise

template <class Config, class Epilogue>
struct SplitStorage {
  static_assert(!Config::kPingPong && Config::kClusterSize == 1 && !Config::kDualB, "a tile is 128 rows of one matrix");
  static constexpr int kWarps = 4 * kConsumers, kChunks = Epilogue::kChunks;
  static constexpr int kPartVectors = 16 * (Config::kTileN / kChunks) * 4 / 16;  // a chunk's sums, 16 bytes each
  static constexpr int kMostParts = 6 * kChunks;  // that a block receives, with up to kMaxSplits splits
  static constexpr int kStagingBytes = Epilogue::kStagingBytes / 2;  // one of the store's buffers
  static constexpr int kReceived = kMostParts * kPartVectors * 16, kStaged = kWarps * kChunks * kStagingBytes;
  static constexpr int kOther = (kReceived > kStaged ? kReceived : kStaged) +
                                static_cast<int>(sizeof(typename Epilogue::Columns)) + kReservedBytes;
  static constexpr int kStages = (kSplitSharedLimit - kOther) / (Config::kBytesA + Config::kBytesB);
  static_assert(kStages >= 3, "fewer than three stages cannot hide the copies");
  static_assert(kPartVectors * 16 >= kStagingBytes, "output is staged over sums that have been read");
  alignas(1024) uint8_t a[kStages][Config::kBytesA];
  alignas(1024) uint8_t b[kStages][Config::kBytesB];
  union {
    alignas(1024) int4 parts[kMostParts][kPartVectors];
    alignas(1024) uint8_t staging[kWarps][kChunks][kStagingBytes];  // where nothing is received
  };
  alignas(16) typename Epilogue::Columns columns;
  uint64_t full[kStages], empty[kStages];
  uint64_t columns_full;
  uint64_t received[kWarps];  // the parts of a warp's chunks
};

// How a tile that is not full is copied. Each box costs the copying thread 30 ns a stage, and filling rows beyond the last takes longer
// than copying as many. So all rows up to 64 are one box; more are two of 64, the second one ending with the last row, where rows that
// both hold may be stored twice (`overlap`); and else boxes of 16. Counted on the host: blocks have nothing else to do meanwhile.
struct FewRows {
  int box;         // rows
  int per_box;     // groups of 16 rows that begin in a box
  int groups;      // in all, where there is one tile of rows; 0: each tile counts its own
  int copied;      // rows that they are copied with
  int back;        // by how many rows the second box is moved back
  int last_group;  // where the last group of 16 rows may begin

  static FewRows of(int64_t rows, bool overlap) {
    constexpr int kAnywhere = 1 << 30;
    const int M = static_cast<int>(rows), last = overlap && M >= 16 ? M - 16 : kAnywhere;
    if (M <= 64) return {M, 4, (M + 15) / 16, M, 0, kAnywhere};
    if (M < 128 && overlap) return {64, 4, 8, 128, 128 - M, last};
    return {16, 1, 0, 0, 0, last};
  }
};

struct SplitProblem {
  int k_stages;  // K in stages, rounded up; at least one a split, and fewer than 2^13
  int M, N;
  int early_stages;  // this and the next as in Problem
  bool overlap;
  FewRows few;
};

template <class EpilogueParams>
struct SplitParams {
  CUtensorMap a, a_few, b;  // a: in boxes of a tile's rows; a_few: of few.box
  SplitProblem problem;
  EpilogueParams epilogue;
};

// The work of one block: grid (splits, tiles_m, tiles_n), a cluster along x.
template <class Config>
struct SplitWork {
  const FewRows& few;
  int split, splits, first_stage, stages, row, column;
  int groups;      // of 16 rows: one a warp
  int reciprocal;  // 2^16 / splits, rounded up: a division takes a hundred cycles in which nothing else happens yet

  __device__ __forceinline__ explicit SplitWork(const SplitProblem& p) : few(p.few) {
    split = blockIdx.x, splits = gridDim.x;
    reciprocal = splits == 1 ? 65536 : splits == 2 ? 32768 : splits == 3 ? 21846 : 16384;
    first_stage = per_split(p.k_stages * split);
    stages = per_split(p.k_stages * (split + 1)) - first_stage;
    row = tile_begin(blockIdx.y, Config::kTileM, p.M, p.overlap);
    column = tile_begin(blockIdx.z, Config::kTileN, p.N, p.overlap);
    groups = few.groups > 0 ? few.groups : min(Config::kTileM / 16, (p.M - row + 15) / 16);
  }
  // The first row of a group: the last ones are moved back, too.
  __device__ __forceinline__ int row_of(int group) const {
    return min(row + 16 * group - (group & 4 ? few.back : 0), few.last_group);
  }
  // Whether one box of a tile's rows holds all groups.
  __device__ __forceinline__ bool whole() const {
    return few.groups == 0 && groups == Config::kTileM / 16 && row + Config::kTileM - 16 <= few.last_group;
  }
  // value / splits, for values below 2^15
  __device__ __forceinline__ int per_split(int value) const { return value * reciprocal >> 16; }
};

template <class Config, class Mma, class Shared>
__device__ __forceinline__ void produce_split(Shared& shared, const CUtensorMap& a, const CUtensorMap& a_few,
                                              const CUtensorMap& b, int early_stages, const SplitWork<Config>& work) {
  constexpr int kStageK = kStageBytesK / sizeof(typename Mma::Element);
  const int ahead = min(Shared::kStages, min(early_stages, work.stages));
  const int rows_of_a = work.few.groups > 0 ? work.few.copied : 16 * work.groups;
  const bool whole = work.whole();
  const auto start_stage = [&](int stage, int k) {
    ptx::mbarrier_arrive_expect(&shared.full[stage], rows_of_a * kStageBytesK + Config::kBytesB);
    load_b<Config>(shared, stage, b, k, work.column, 0, 0);
  };
  int k = work.first_stage * kStageK;
  for (int stage = 0; stage < ahead; ++stage) start_stage(stage, k + stage * kStageK);
  ptx::griddep_wait();
  ptx::griddep_launch();
  RingPosition<Shared::kStages> at;
  for (int stage = 0; stage < work.stages; ++stage, at.advance(), k += kStageK) {
    if (stage >= Shared::kStages) ptx::mbarrier_wait(&shared.empty[at.stage], at.phase ^ 1);
    if (stage >= ahead) start_stage(at.stage, k);
    if (whole) {
      load_a<Config>(shared, at.stage, a, k, work.row, 0, 1);
    } else {
      for (int group = 0; group < work.groups; group += work.few.per_box) {
        uint8_t* const rows = &shared.a[at.stage][group * 16 * kStageBytesK];
        ptx::tma_load(rows, &a_few, k, work.row_of(group), &shared.full[at.stage]);
      }
    }
  }
}

// One chunk's sums to the block that it belongs to. `part` is their place there.
template <class Shared, int kSums>
__device__ __forceinline__ void send_sums(Shared& shared, const int (&acc)[kSums], int chunk, uint32_t owner,
                                          int part) {
  constexpr int kQuads = kSums / 4 / Shared::kChunks;
  const uint32_t to = ptx::address_in_cluster(&shared.parts[part][threadIdx.x % 32], owner);
  const uint32_t barrier = ptx::address_in_cluster(&shared.received[threadIdx.x / 32 - 4], owner);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int* const sum = &acc[4 * (chunk * kQuads + j)];
    ptx::store_async_16(to + j * 512, barrier, make_int4(sum[0], sum[1], sum[2], sum[3]));
  }
}

template <class Shared, int kSums>
__device__ __forceinline__ void add_sums(int (&acc)[kSums], const Shared& shared, int chunk, int part) {
  constexpr int kQuads = kSums / 4 / Shared::kChunks;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int4 more = shared.parts[part][32 * j + threadIdx.x % 32];
    int* const sum = &acc[4 * (chunk * kQuads + j)];
    sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
  }
}

template <class Config, class Mma, class Epilogue, class Shared>
__device__ __forceinline__ void consume_split(Shared& shared, const typename Epilogue::Params& params,
                                              const SplitWork<Config>& work) {
  const int warp = threadIdx.x / 32 - 4, row = work.row_of(warp);
  ptx::griddep_wait();
  Epilogue epilogue(params);
  const typename Epilogue::Rows rows = epilogue.load_rows(row);  // early, because it takes long
  if (work.splits > 1) ptx::cluster_wait();                      // every block has started
  typename Mma::Accumulator acc[1][Config::kTileN / 2];
  RingPosition<Shared::kStages> at;
  if (work.groups > warp / 4 * 4) {
    mainloop<Config, Mma>(acc, shared, at, work.stages, nullptr);
  } else {  // a warpgroup without rows leaves the tensor cores to the other
    for (int stage = 0; stage < work.stages; ++stage, at.advance()) {
      ptx::mbarrier_wait(&shared.full[at.stage], at.phase);
      release<Config>(shared, at.stage);
    }
  }
  if (warp >= work.groups) return;

  const int others = work.splits - 1;  // blocks
#pragma unroll
  for (int chunk = 0; chunk < Shared::kChunks; ++chunk) {
    const int number = warp * Shared::kChunks + chunk, slot = work.per_split(number);
    const int owner = number - slot * work.splits;
    const int place = work.split < owner ? work.split : work.split - 1;  // among the others
    if (owner != work.split) send_sums(shared, acc[0], chunk, owner, slot * others + place);
  }
  ptx::mbarrier_wait(&shared.columns_full, 0);
  if (others > 0) ptx::receive_wait(&shared.received[warp]);
#pragma unroll
  for (int chunk = 0; chunk < Shared::kChunks; ++chunk) {
    const int number = warp * Shared::kChunks + chunk, slot = work.per_split(number);
    if (number - slot * work.splits != work.split) continue;
#pragma unroll 1
    for (int place = 0; place < others; ++place) add_sums(acc[0], shared, chunk, slot * others + place);
    __syncwarp();  // every lane has read what the chunk is staged over
    void* const staging = others > 0 ? static_cast<void*>(shared.parts[slot * others]) : shared.staging[warp][chunk];
    epilogue.store_chunk(acc[0], chunk, rows, shared.columns, row, work.column, staging);
  }
  epilogue.finish();
}

// How many bytes of sums a warp of this block receives.
template <class Config, class Shared>
__device__ __forceinline__ int bytes_received(const SplitWork<Config>& work, int warp) {
  int chunks = 0;
#pragma unroll
  for (int chunk = 0; chunk < Shared::kChunks; ++chunk) {
    const int number = warp * Shared::kChunks + chunk;
    chunks += number - work.per_split(number) * work.splits == work.split;
  }
  return chunks * (work.splits - 1) * Shared::kPartVectors * 16;
}

template <class Config, class Mma, class Epilogue>
__global__ void __maxnreg__(Config::kTileN > 96 ? 128 : kSplitRegisters)
    split_kernel(const __grid_constant__ SplitParams<typename Epilogue::Params> params) {
  using Shared = SplitStorage<Config, Epilogue>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const SplitWork<Config> work(params.problem);

  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&params.b);
    ptx::tma_prefetch_map(work.whole() ? &params.a : &params.a_few);
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], Shared::kWarps);
    }
    ptx::mbarrier_init(&shared.columns_full, 32);
    ptx::mbarrier_init_fence();
  }
  if (threadIdx.x % 32 == 0 && threadIdx.x >= 128) {
    uint64_t* const received = &shared.received[threadIdx.x / 32 - 4];
    ptx::receive_init(received);
    ptx::receive_expect(received, bytes_received<Config, Shared>(work, threadIdx.x / 32 - 4));
  }
  __syncthreads();
  if (work.splits > 1) ptx::cluster_arrive();

  if (threadIdx.x >= 128) {
    consume_split<Config, Mma, Epilogue>(shared, params.epilogue, work);
    return;
  }
  if (threadIdx.x == 0) {
    produce_split<Config, Mma>(shared, params.a, params.a_few, params.b, params.problem.early_stages, work);
  }
  if (threadIdx.x / 32 == 1) {
    if (params.problem.early_stages == 0) ptx::griddep_wait();  // what belongs to columns is early, or is not, with B
    Epilogue::load_columns(params.epilogue, shared.columns, work.row, work.column);
    ptx::mbarrier_arrive(&shared.columns_full);
  }
  __syncwarp();
  if (work.splits > 1) ptx::cluster_wait();
}

}  // namespace kitchen::gemm_sm90
