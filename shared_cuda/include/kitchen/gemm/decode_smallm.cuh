// Skeleton of the kernels for few tokens, M = 1..64: out^T[N, M] = W[N, K] * x^T[K, M], limited by reading W once. sm_80 and later.
//
// Weight rows are the m=16 side of mma.sync m16n8k32, tokens the n=8 side. The order of k inside of a sum is free as long as
// both sides agree: a lane takes the 16 bytes k = 64*step + 16*(lane%4) of its rows as four words for two MMAs, so weights go from
// global memory to registers 16 bytes at a time and never touch shared memory.
//
//   block    Config::kRows weight rows x all tokens x one piece of K; pieces of a tile are the blocks of a cluster
//   warp     16 * kRowBlocks rows, every kWarpsK-th step of 64 k
//   tokens   the block's piece of x in shared memory, in two buffers where it does not fit at once
//   sums     int32: over warps in shared memory, then over the cluster in distributed shared memory; no workspace, one launch
//
// A programmatic launch reads weights (and what belongs to them) before it waits for the kernel in front, tokens after.
// Measured: docs/kernels/int8_decode.md.
#pragma once

#include <cstdint>

#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/cp_async_group.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/load_streaming.h"
#include "kitchen/ptx/store_async.h"

namespace kitchen::gemm::decode {

constexpr int kStepBytes = 64;  // of K: four lanes' 16 bytes, two MMAs
constexpr int kMmaRows = 16, kMmaTokens = 8;
constexpr int kColumns = 4, kColumnsTogether = 32;  // neighbouring outputs that a thread, and a block of a cluster, finishes
constexpr int kSumPad = 4;  // words between the sums of two tokens: lanes of a fragment meet no bank twice

template <int kTokenBlocks_, int kRowBlocks_, int kWarpsN_, int kWarpsK_, int kSteps_, int kBlocksPerSm_>
struct Config {
  static constexpr int kTokenBlocks = kTokenBlocks_;  // of 8 tokens
  static constexpr int kRowBlocks = kRowBlocks_;      // of 16 weight rows, of a warp
  static constexpr int kWarpsN = kWarpsN_, kWarpsK = kWarpsK_;
  static constexpr int kSteps = kSteps_;              // whose weights a warp has under way
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // that registers are kept for
  static constexpr int kRows = kMmaRows * kRowBlocks * kWarpsN, kThreads = 32 * kWarpsN * kWarpsK;
  static constexpr int kRound = kSteps * kWarpsK;     // steps of the block's warps in one unrolled round
  static constexpr int kSumPitch = kRows + kSumPad;
  static constexpr bool kWholeBlocks = kTokenBlocks >= 4;  // shared memory has room for whole blocks of 8 tokens
  static_assert(kTokenBlocks <= 2 || kWholeBlocks, "tokens_apart clamps one block beyond the first");
  static_assert(kRows % kColumnsTogether == 0 || kRows == kMmaRows, "a cluster deals out whole runs of columns");
};

struct Problem {
  int M, N, K;
  int tiles;            // of kRows weight rows, rounded up
  int splits, splits_log2;  // pieces of K, a power of two: the cluster's size
  int steps_per_split;  // of 64 k
  int chunk_steps;      // of x in one buffer, a multiple of kRound
  int token_pitch;      // bytes between tokens in shared memory: 64 modulo 128
  int buffer_bytes, received_at;  // of one buffer; byte where the cluster's sums arrive
};

template <class Weights, class Epilogue>
struct KernelParams {
  Problem problem;
  const int8_t* tokens;  // [M, K], rows contiguous, 16-byte aligned
  typename Weights::Params weights;
  typename Epilogue::Params epilogue;
};

// int8 weight rows [N, K] as they lie, aligned to 16 bytes. Another format puts its decoder here.
template <class Config>
struct CodeWeights {
  struct Params {
    const int8_t* rows;
  };
  using Raw = uint4[Config::kRowBlocks][2];  // of a step: rows g and g + 8 of each block

  const int8_t* next;  // this lane's 16 bytes of its first row, in the step that is loaded next
  int rows_apart;      // bytes from a row to the eighth after it
  int rows_left;       // of the matrix, from this lane's first row on
  int k_left;          // columns of the piece, from `next` on

  __device__ __forceinline__ CodeWeights(const Params& params, const Problem& problem, int first_row, int first_k, int k_end) {
    const int lane = static_cast<int>(threadIdx.x) % 32, n = first_row + lane / 4, k = first_k + 16 * (lane % 4);
    next = params.rows + static_cast<int64_t>(n) * problem.K + k;
    rows_apart = 8 * problem.K;
    rows_left = problem.N - n;
    k_left = k_end - k;
  }

  // Step `step` from the next one on. Rows and columns beyond the matrix or the piece are zeros.
  __device__ __forceinline__ void load(Raw& raw, int step) const {
    const int k = step * Config::kWarpsK * kStepBytes;
#pragma unroll
    for (int i = 0; i < 2 * Config::kRowBlocks; ++i) {
      const int8_t* const row = next + static_cast<int64_t>(i) * rows_apart;
      raw[i / 2][i % 2] = ptx::load_streaming_16_or_zeros(row + k, k < k_left && 8 * i < rows_left);
    }
  }

  __device__ __forceinline__ void advance(int steps) {
    next += steps * Config::kWarpsK * kStepBytes;
    k_left -= steps * Config::kWarpsK * kStepBytes;
  }

  // The MMA operand of row block `i` for the first or second half of the step's words.
  __device__ __forceinline__ static void decode(uint32_t (&a)[4], const Raw& raw, int i, int half) {
    const uint4 &low = raw[i][0], &high = raw[i][1];
    a[0] = half == 0 ? low.x : low.z, a[1] = half == 0 ? high.x : high.z;
    a[2] = half == 0 ? low.y : low.w, a[3] = half == 0 ? high.y : high.w;
  }
};

// x[0 .. M-1][first_k .. first_k + 64 * steps - 1] to shared memory, columns from k_end on as zeros.
template <class Config>
__device__ __forceinline__ void stage_tokens(uint8_t* buffer, const int8_t* tokens, const Problem& problem, int first_k, int k_end) {
  constexpr int kWarps = Config::kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
  const int chunks = problem.chunk_steps * (kStepBytes / 16);
  // Few tokens: several warps a token.
  const int warps_per_token = problem.M <= kWarps / 4 ? 4 : 1;
#pragma unroll 1
  for (int m = warp / warps_per_token; m < problem.M; m += kWarps / warps_per_token) {
    const int8_t* const row = tokens + static_cast<int64_t>(m) * problem.K + first_k;
#pragma unroll 1
    for (int chunk = lane + 32 * (warp % warps_per_token); chunk < chunks; chunk += 32 * warps_per_token) {
      ptx::cp_async_16_or_zeros(shared + m * problem.token_pitch + 16 * chunk, row + 16 * chunk, first_k + 16 * chunk < k_end ? 16 : 0);
    }
  }
  ptx::cp_async_commit();
}

template <class Config>
using Sums = int[Config::kRowBlocks][Config::kTokenBlocks][4];

// One step: `tokens` is where this lane's 16 bytes of the first token block lie.
template <class Config, class Mma, class Weights>
__device__ __forceinline__ void multiply(Sums<Config>& sums, const typename Weights::Raw& raw, const uint8_t* tokens,
                                         int tokens_apart) {
#pragma unroll
  for (int j = 0; j < Config::kTokenBlocks; ++j) {
    const uint4 b = *reinterpret_cast<const uint4*>(tokens + j * tokens_apart);
#pragma unroll
    for (int i = 0; i < Config::kRowBlocks; ++i) {
      uint32_t a[4];
      Weights::decode(a, raw, i, 0);
      Mma::multiply(sums[i][j], a, b.x, b.y);
      Weights::decode(a, raw, i, 1);
      Mma::multiply(sums[i][j], a, b.z, b.w);
    }
  }
}

// Fragments to shared memory as [kWarpsK][M][kSumPitch].
template <class Config>
__device__ __forceinline__ void store_sums(int* shared, const Sums<Config>& sums, int M, int warp_n, int warp_k, int lane) {
  int* const mine = shared + warp_k * M * Config::kSumPitch + warp_n * kMmaRows * Config::kRowBlocks + lane / 4;
#pragma unroll
  for (int i = 0; i < Config::kRowBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = kMmaTokens * j + 2 * (lane % 4) + e % 2;
        if (token < M) mine[token * Config::kSumPitch + kMmaRows * i + 8 * (e / 2)] = sums[i][j][e];
      }
    }
  }
}

__device__ __forceinline__ void add(int4& sum, const int4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Who finishes which four neighbouring columns ("quads") of which token: block `rank` of the cluster has every splits-th run of
// kColumnsTogether columns.
template <class Config>
struct Ownership {
  static constexpr int kQuads = Config::kRows / kColumns, kTogether = kColumnsTogether / kColumns;
  int quads, splits, splits_log2;

  __device__ __forceinline__ explicit Ownership(const Problem& problem)
      : quads(problem.M * kQuads), splits(problem.splits), splits_log2(problem.splits_log2) {}

  __device__ __forceinline__ unsigned owner_of(int quad) const { return quad / kTogether & (splits - 1); }
  __device__ __forceinline__ int slot_of(int quad) const { return (quad / kTogether >> splits_log2) * kTogether + quad % kTogether; }
  __device__ __forceinline__ int quad_of(int slot, unsigned rank) const {
    return ((slot / kTogether << splits_log2) + static_cast<int>(rank)) * kTogether + slot % kTogether;
  }
  // How many quads block `rank` finishes; their slots count from 0.
  __device__ __forceinline__ int count_of(unsigned rank) const {
    const int runs = quads / kTogether, rest = quads % kTogether;  // whole runs, and quads of one more
    const int own = (runs + splits - 1 - static_cast<int>(rank)) >> splits_log2;
    return own * kTogether + (rest > 0 && (runs & (splits - 1)) == static_cast<int>(rank) ? rest : 0);
  }
};

// Every quad: summed over the block's warps, sent to the block that finishes it, summed over the cluster, and handed to
// epilogue.store(token, column in the tile, sum). int32 sums are exact: the order decides no bit.
template <class Config, class Epilogue>
__device__ __forceinline__ void finish(const int* sums, int4* received, uint64_t* barrier, const Problem& problem, unsigned rank,
                                       const Epilogue& epilogue) {
  const Ownership<Config> ownership(problem);
  constexpr int kQuads = Ownership<Config>::kQuads;
  const int splits = problem.splits;
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < ownership.quads; quad += Config::kThreads) {
    const int token = quad / kQuads, column = quad % kQuads * kColumns;
    int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < Config::kWarpsK; ++w) {
      add(sum, *reinterpret_cast<const int4*>(sums + (w * problem.M + token) * Config::kSumPitch + column));
    }
    if (splits == 1) {
      epilogue.store(token, column, sum);
    } else {
      ptx::store_async_16(received + ownership.slot_of(quad) * splits + rank, barrier, ownership.owner_of(quad), sum);
    }
  }
  if (splits == 1) return;
  ptx::receive_wait(barrier);
  const int count = ownership.count_of(rank);
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x); slot < count; slot += Config::kThreads) {
    int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll 1
    for (int s = 0; s < splits; ++s) add(sum, received[slot * splits + s]);
    const int quad = ownership.quad_of(slot, rank);
    epilogue.store(quad / kQuads, quad % kQuads * kColumns, sum);
  }
}

// Grid: tiles * splits blocks. An Epilogue is made before the wait and may read then what belongs to weights; stage_tokens()
// comes after the wait, and barriers between it and store().
template <class Config, class Mma, class Weights, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ KernelParams<Weights, Epilogue> params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Problem& problem = params.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_n = warp % Config::kWarpsN, warp_k = warp / Config::kWarpsN;
  const unsigned rank = blockIdx.x & (problem.splits - 1);
  const int first_row = static_cast<int>(blockIdx.x >> problem.splits_log2) * Config::kRows;
  const int first_k = static_cast<int>(rank) * problem.steps_per_split * kStepBytes;
  const int k_end = min(problem.K, first_k + problem.steps_per_split * kStepBytes);

  Weights weights(params.weights, problem, first_row + warp_n * kMmaRows * Config::kRowBlocks, first_k + warp_k * kStepBytes, k_end);
  constexpr int kNext = Config::kWarpsK * kStepBytes;  // from a warp's step to its next
  typename Weights::Raw raw[Config::kSteps];
#pragma unroll
  for (int s = 0; s < Config::kSteps; ++s) weights.load(raw[s], s);
  weights.advance(Config::kSteps);
  Epilogue epilogue(params.epilogue, problem, first_row);
  __shared__ uint64_t barrier;
  if (problem.splits > 1) {
    if (threadIdx.x == 0) {
      ptx::receive_init(&barrier);
      ptx::receive_expect(&barrier, Ownership<Config>(problem).count_of(rank) * problem.splits * sizeof(int4));
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // this block has started: others may write to its shared memory
  }

  ptx::wait_then_launch_dependents();
  const int buffer_bytes = problem.buffer_bytes, chunk_bytes = problem.chunk_steps * kStepBytes;
  stage_tokens<Config>(shared, params.tokens, problem, first_k, k_end);
  epilogue.stage_tokens();

  Sums<Config> sums = {};
  // Tokens beyond the last repeat one, or are whatever lies there: their sums are not stored.
  const int token = Config::kWholeBlocks ? lane / 4 : min(lane / 4, problem.M - 1);
  const int tokens_apart = Config::kWholeBlocks || problem.M > kMmaTokens + token ? kMmaTokens * problem.token_pitch : 0;
  const int lane_offset = token * problem.token_pitch + 16 * (lane % 4) + warp_k * kStepBytes;
  int buffer = 0;
  for (int chunk_k = first_k; chunk_k < k_end; chunk_k += chunk_bytes) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the chunk has landed, and the other buffer is free
    const int other = buffer_bytes - buffer;
    if (chunk_k + chunk_bytes < k_end) stage_tokens<Config>(shared + other, params.tokens, problem, chunk_k + chunk_bytes, k_end);
    const uint8_t* step = shared + buffer + lane_offset;
    const int end = min(chunk_bytes, k_end - chunk_k);
#pragma unroll 1
    for (int k = 0; k < end; k += Config::kSteps * kNext) {
#pragma unroll
      for (int s = 0; s < Config::kSteps; ++s) {
        multiply<Config, Mma, Weights>(sums, raw[s], step + s * kNext, tokens_apart);
        weights.load(raw[s], s);
      }
      weights.advance(Config::kSteps);
      step += Config::kSteps * kNext;
    }
    buffer = other;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // all have read their tokens: the sums take their place
  int* const own = reinterpret_cast<int*>(shared);
  store_sums<Config>(own, sums, problem.M, warp_n, warp_k, lane);
  if (problem.splits > 1) ptx::cluster_wait();
  __syncthreads();
  finish<Config>(own, reinterpret_cast<int4*>(shared + problem.received_at), &barrier, problem, rank, epilogue);
}

}  // namespace kitchen::gemm::decode
