// Skeleton of the kernels for few tokens on Hopper, M = 1..16: out^T[N, M] = W[N, K] * x^T[K, M], limited by reading W once.
//
// Weight rows are the m=64 side of wgmma, tokens the n=8 or 16 side, both from shared memory as the copy engine puts them there.
//
//   block    kWarpgroups * 64 weight rows x all tokens x one piece of K; pieces of a tile are the blocks of a cluster, 1 to 8
//   producer one thread of the last warp: a ring of stages, 128 bytes of K each; weights of the first round are on their way before
//            the kernel in front has ended, tokens after
//   consumer a warpgroup multiplies 64 rows; all K of the piece in one set of accumulators
//   sums     int32, in shared memory and then over the cluster in distributed shared memory; no workspace, one launch
//
// A programmatic launch reads weights (and what belongs to them) before it waits for the kernel in front, tokens after.
// Measured: docs/kernels/int8_decode.md.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma.h"

namespace kitchen::gemm::decode_sm90 {

constexpr int kStageBytesK = 128;  // bytes of K in a stage: one swizzle atom
constexpr int kColumns = 4;        // neighbouring outputs that a thread finishes
constexpr int kMaxSplits = 8;       // a cluster's blocks
constexpr int kSumPad = 4;  // words between the sums of two tokens: lanes of a fragment meet no bank twice

// Of a cluster that deals out up to `tokens` tokens, what a block receives from the others.
constexpr int most_tokens_received(int tokens) {
  int most = 0;
  for (int splits = 2; splits <= kMaxSplits; ++splits) {
    const int received = (splits - 1) * ((tokens + splits - 1) / splits);
    most = received > most ? received : most;
  }
  return most;
}

template <int kTokens_, int kWarpgroups_, int kStages_, int kBlocksPerSm_>
struct Config {
  static constexpr int kTokens = kTokens_, kWarpgroups = kWarpgroups_, kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kRows = 64 * kWarpgroups, kConsumers = 128 * kWarpgroups, kThreads = kConsumers + 32;
  static constexpr int kWeightBytes = kRows * kStageBytesK, kTokenBytes = kTokens * kStageBytesK;
  static constexpr int kSumPitch = kRows + kSumPad;
  static constexpr int kSumBytes = kTokens * kSumPitch * 4;
  static constexpr int kReceivedBytes = most_tokens_received(kTokens) * kSumPitch * 4;
  // What the cluster sends lies apart from the ring only where that costs no stage; else it waits until all blocks are done.
  static constexpr bool kReceivesInRing = kTokens > 8;
  static constexpr int kRingBytes = kStages * (kWeightBytes + kTokenBytes);
  static constexpr int kSentRow = 4 * kRows;  // bytes of a token
  static constexpr int kReceivedAt = kReceivesInRing ? (kSumBytes + 127) / 128 * 128 : kRingBytes;
  static_assert(kSumBytes <= kRingBytes, "the sums take the place of the ring");
  static_assert(!kReceivesInRing || kReceivedAt + kReceivedBytes <= kRingBytes, "so does what the cluster sends");
  static constexpr int kSharedBytes = kReceivesInRing ? kRingBytes : kRingBytes + kReceivedBytes;
};

struct Problem {
  int M, N, K;
  int splits;            // pieces of K: the cluster's size
  int stages_per_split;  // of 128 bytes of K
  int tokens_each;       // that a block of the cluster finishes, rounded up
};

template <class Epilogue>
struct KernelParams {
  // [N, K] in boxes of [kRows, 128] and [M, K] in boxes of [M, 128], swizzled by 128 bytes. Not [kTokens, 128]: filling rows beyond
  // the matrix takes the copy engine longer than copying as many.
  CUtensorMap weights, tokens;
  Problem problem;
  typename Epilogue::Params epilogue;
};

template <class Config>
struct Barriers {
  uint64_t full[Config::kStages];   // weights and tokens of a stage have landed
  uint64_t empty[Config::kStages];  // every consumer warp has read it
  uint64_t received;                // the sums of the cluster have come
};

// The thread that feeds the ring.
template <class Config>
struct Producer {
  uint8_t* ring;
  Barriers<Config>& barriers;
  const CUtensorMap &weights, &tokens;
  int first_row, first_stage, stages, M;

  __device__ __forceinline__ void load_weights(int i, int slot) const {
    ptx::mbarrier_arrive_expect(&barriers.full[slot], Config::kWeightBytes + M * kStageBytesK);
    ptx::tma_load(ring + slot * Config::kWeightBytes, &weights, (first_stage + i) * kStageBytesK, first_row, &barriers.full[slot]);
  }

  __device__ __forceinline__ void load_tokens(int i, int slot) const {
    uint8_t* const to = ring + Config::kStages * Config::kWeightBytes + slot * Config::kTokenBytes;
    ptx::tma_load(to, &tokens, (first_stage + i) * kStageBytesK, 0, &barriers.full[slot]);
  }

  // Weights of the first round: before anything else.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int i = 0; i < min(stages, Config::kStages); ++i) load_weights(i, i);
  }

  // Waits for the kernel in front; then tokens of the first round, and what follows.
  __device__ __forceinline__ void run() const {
    ptx::griddep_wait();
#pragma unroll 1
    for (int i = 0; i < min(stages, Config::kStages); ++i) load_tokens(i, i);
    int slot = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int i = Config::kStages; i < stages; ++i) {
      ptx::mbarrier_wait(&barriers.empty[slot], phase);
      load_weights(i, slot);
      load_tokens(i, slot);
      if (++slot == Config::kStages) slot = 0, phase ^= 1;
    }
  }
};

// A warpgroup: every stage of the piece. What lies in the ring behind the last token is multiplied too, and its sums dropped.
// One group of instructions stays in flight while the next stage is awaited.
template <class Config>
__device__ __forceinline__ void consume(int (&sums)[Config::kTokens / 2], const uint8_t* ring, Barriers<Config>& barriers, int stages) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const uint64_t weights = ptx::descriptor_swizzle128(ptx::smem_address(ring + warpgroup * 64 * kStageBytesK));
  const uint64_t tokens = ptx::descriptor_swizzle128(ptx::smem_address(ring + Config::kStages * Config::kWeightBytes));
  int slot = 0, previous = -1;
  uint32_t phase = 0;
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    ptx::mbarrier_wait(&barriers.full[slot], phase);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStageBytesK / 32; ++step) {
      ptx::WgmmaS8<Config::kTokens>::mma(sums, weights + (slot * Config::kWeightBytes + 32 * step) / 16,
                                         tokens + (slot * Config::kTokenBytes + 32 * step) / 16, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&barriers.empty[previous]);
    previous = slot;
    if (++slot == Config::kStages) slot = 0, phase ^= 1;
  }
  ptx::wgmma_wait<0>();
}

// Fragments to shared memory as [M][kSumPitch].
template <class Config>
__device__ __forceinline__ void store_sums(int* shared, const int (&sums)[Config::kTokens / 2], int M) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int* const mine = shared + 16 * warp + lane / 4;
#pragma unroll
  for (int i = 0; i < Config::kTokens / 2; ++i) {
    const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (token < M) mine[token * Config::kSumPitch + 8 * (i / 2 % 2)] = sums[i];
  }
}

__device__ __forceinline__ void add(int4& sum, const int4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Tokens are dealt out over the cluster: block `rank` finishes those from first(rank) to end(rank).
struct OwnedTokens {
  int M, each;
  __device__ __forceinline__ int first(int rank) const { return min(M, rank * each); }
  __device__ __forceinline__ int end(int rank) const { return min(M, rank * each + each); }
};

// Where the sums from block `from` arrive in block `to`, in words.
template <class Config>
__device__ __forceinline__ int arrival(const Problem& problem, int from, int to) {
  return (from < to ? from : from - 1) * problem.tokens_each * Config::kSumPitch;
}

// Straight to where they are finished, 16 bytes a thread. `each` tokens a block make the owner a short search.
template <class Config>
__device__ __forceinline__ void send_sums(const int* sums, int* received, uint64_t* barrier, const Problem& problem, int rank) {
  constexpr int kQuads = Config::kRows / kColumns;
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < problem.M * kQuads; quad += Config::kThreads) {
    const int token = quad / kQuads, column = quad % kQuads * kColumns;
    int to = 0, first = 0;
    while (token >= first + problem.tokens_each) ++to, first += problem.tokens_each;
    if (to == rank) continue;
    const int4 sum = *reinterpret_cast<const int4*>(sums + token * Config::kSumPitch + column);
    ptx::store_async_16(received + arrival<Config>(problem, rank, to) + (token - first) * Config::kSumPitch + column, barrier, to, sum);
  }
}

// The tokens of this block: summed over the cluster, and handed to epilogue.store(token, sums of four columns). A thread has the same
// columns in every token. int32 sums are exact: the order decides no bit.
template <class Config, class Epilogue>
__device__ __forceinline__ void finish(const int* sums, const int* received, const Problem& problem, int rank,
                                       const Epilogue& epilogue) {
  constexpr int kQuads = Config::kRows / kColumns, kStep = Config::kConsumers / kQuads;
  constexpr int kAtOnce = Config::kTokens / kStep;
  const OwnedTokens owned = {problem.M, problem.tokens_each};
  const int first = owned.first(rank), end = owned.end(rank), column = static_cast<int>(threadIdx.x) % kQuads * kColumns;
#pragma unroll 1
  for (int token = first + static_cast<int>(threadIdx.x) / kQuads; token < end; token += kAtOnce * kStep) {
    int4 sum[kAtOnce];
    int at[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      at[i] = min(token + i * kStep, end - 1) * Config::kSumPitch + column;
      sum[i] = *reinterpret_cast<const int4*>(sums + at[i]);
      at[i] -= first * Config::kSumPitch;
    }
#pragma unroll 1
    for (int from = 0; from < problem.splits; ++from) {
      if (from == rank) continue;
      const int* const theirs = received + arrival<Config>(problem, from, rank);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add(sum[i], *reinterpret_cast<const int4*>(theirs + at[i]));
    }
    epilogue.template store<kAtOnce>(sum, token, kStep, end);
  }
}

// Grid: tiles * splits blocks. An Epilogue is made before the wait and may read then what belongs to weights; stage_tokens()
// comes after the wait, and barriers between it and store().
template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_sm90_kernel(const __grid_constant__ KernelParams<Epilogue> params) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ Barriers<Config> barriers;
  const Problem& problem = params.problem;
  const int tile = static_cast<int>(blockIdx.x) / problem.splits, rank = static_cast<int>(blockIdx.x) % problem.splits;
  const int first_stage = rank * problem.stages_per_split;
  const int all_stages = (problem.K + kStageBytesK - 1) / kStageBytesK;
  const int stages = max(0, min(problem.stages_per_split, all_stages - first_stage));
  const bool consumer = threadIdx.x < Config::kConsumers, producer = threadIdx.x == Config::kConsumers;

  const Producer<Config> feed = {ring, barriers, params.weights, params.tokens, tile * Config::kRows, first_stage, stages, problem.M};

  if (producer) {
    ptx::tma_prefetch_map(&params.weights);
    ptx::tma_prefetch_map(&params.tokens);
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(&barriers.full[i], 1);
      ptx::mbarrier_init(&barriers.empty[i], Config::kConsumers / 32);
    }
    ptx::mbarrier_init_fence();
    feed.start();
    if (problem.splits > 1) {
      ptx::receive_init(&barriers.received);
      const OwnedTokens owned = {problem.M, problem.tokens_each};
      ptx::receive_expect(&barriers.received, (problem.splits - 1) * (owned.end(rank) - owned.first(rank)) * Config::kSentRow);
    }
  }
  __syncthreads();
  if (!Config::kReceivesInRing && problem.splits > 1) ptx::cluster_arrive_relaxed();  // this block has started

  Epilogue epilogue(params.epilogue, problem, tile * Config::kRows);
  int sums[Config::kTokens / 2] = {};
  if (producer) {
    feed.run();
  } else {
    ptx::griddep_wait();
  }
  if (consumer) {
    epilogue.stage_tokens();
    consume<Config>(sums, ring, barriers, stages);
  }
  // After this block's loads: the next kernel's blocks need no place before.
  ptx::griddep_launch();
  __syncthreads();  // all have read their stages: the sums take their place
  // Relaxed is enough. What the others will overwrite was written here by the copy engine and read by wgmma alone; both are complete,
  // not merely issued: a consumer passes mbarrier_wait and wgmma_wait<0> before that barrier. No write of a thread of this block is
  // to be seen by another block (the barrier `received` was published by its own fence), so there is nothing to release; releasing
  // costs a MEMBAR.ALL.GPU. The same reason frees a stage that a pair shares (mbarrier.h, mbarrier_arrive_cluster).
  if (Config::kReceivesInRing && problem.splits > 1) ptx::cluster_arrive_relaxed();
  int* const own = reinterpret_cast<int*>(ring);
  int* const received = reinterpret_cast<int*>(ring + Config::kReceivedAt);
  if (consumer) store_sums<Config>(own, sums, problem.M);
  if (problem.splits > 1) ptx::cluster_wait();
  __syncthreads();
  if (problem.splits > 1) {
    send_sums<Config>(own, received, &barriers.received, problem, rank);
    ptx::receive_wait(&barriers.received);
  }
  if (consumer) finish<Config>(own, received, problem, rank, epilogue);
}

}  // namespace kitchen::gemm::decode_sm90
