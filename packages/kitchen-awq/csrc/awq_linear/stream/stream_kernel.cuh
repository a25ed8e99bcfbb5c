// The kernel of awq_linear for 1 to 64 rows of x ("tokens") on Hopper: see sm90/awq_stream.cu.
//
//   block      groups_n * 64 weight rows x all tokens x one piece of K; pieces of a tile are the blocks of a cluster
//   last warp  feeds a ring of stages, all rows of the tile x 256 columns, by bulk tensor copies; weights of the first round are on
//              their way before the kernel in front has ended
//   others     warpgroups of 64 rows, groups_k of them in turn along K: codes from shared memory, decoded in registers, multiply as
//              wgmma's A; tokens are its N side, in the weights' order of columns (tokens.cuh)
//   tokens     Tokens::kPiece: the piece of x, once, in shared memory; kImages: images of stages that pair_tokens made, stage by
//              stage; kRows: boxes of x as it is, for weights in the resident order
//   sums       fp32, over groups_k in shared memory, then over the cluster in distributed shared memory, both in a fixed order
//
// Lane l of a warp (g = l/4, t = l%4) owns rows g and g + 8 of its 16, and of a stage's 128 bytes a row bytes 32t .. 32t+31. Each word
// makes the operands of two wgmmas, pairs (c, c+4) of its eight codes. In the stored order these are columns 64t .. 64t+63, and x has
// to follow (tokens.cuh); in the resident order word j has what the lane multiplies of columns 32j .. 32j+31 (resident.py).
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h): a warp that meets one does so for that stage.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "awq_linear/epilogue.cuh"
#include "awq_linear/stream/tokens.cuh"
#include "kitchen/ptx/bulk_copy.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_registers.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq::stream {

constexpr int kGroupRows = 64;                 // of a warpgroup
constexpr int kRowBytes = kStageColumns / 2;   // of a stage: 128, one swizzle atom
constexpr int kMostGroups = 4, kMostSplits = 8, kMostStages = 24;
enum class Tokens { kPiece, kImages, kRows };

// Warpgroups of a block: wide tiles want registers.
constexpr int most_groups(int tokens) { return tokens > 32 ? 3 : kMostGroups; }

struct StreamProblem {
  int M, N, K;
  int groups_n, groups_k;             // warpgroups of a block
  int splits, all_stages, per_split;  // pieces of K; stages of the whole K and of a piece
  int ring;                           // stages
  int stage_groups;                   // groups of K that a stage may touch
  int scales_at, zeros_at, tokens_at, stage_bytes;  // in a stage: codes come first
  bool even_groups;                   // groups divide a stage, or stages a group: scales lie alike in every stage
  uint32_t group_inverse;             // 2^32 / (g/32) + 1: exact division of k/32 while K < 2^19; 0 for groups of 32
  int piece_at;                       // bytes; where the piece of x lies, behind the ring
  int sum_pitch, received_at;         // floats between tokens; bytes: sums take the place of the ring
  int quads_each;                     // of the sums of a tile, four rows each, that a block of the cluster finishes
};

struct StreamParams {
  StreamProblem problem;
  const uint16_t* x;           // [M, K] of T, rows contiguous, 16-byte aligned
  const uint8_t* images;       // kImages: of all stages (tokens.cuh)
  CUtensorMap rows;            // kRows: x in boxes of M rows x 64 columns, swizzled by 128 bytes
  CUtensorMap codes;           // [N, K/2] in boxes of a tile's rows x 128 bytes, swizzled by 128 bytes
  CUtensorMap scale, zero;     // [K/g, N] of T in boxes of stage_groups x a tile's rows
  EpilogueParams epilogue;
};

// Passes over the ring have two sets of `full` in turn. Groups along K share slots where the ring is no multiple of them, and copies may
// land out of order: a group that waits for its pass of a slot may be there before the pass before it, another group's, has landed, and
// by one barrier would take the pass before that for its own, whose parity is the same. It is never two passes ahead: a stage that it has
// read was issued after all stages one ring before had been read.
struct Shared {
  uint64_t full[2][kMostStages], empty[kMostStages];  // a stage has come; all its warps have read it
  uint64_t received;                               // sums of the cluster have come
  float bias[kMostGroups * kGroupRows];
};

struct Piece {
  int first_row, rank, first_stage, stages;

  __device__ __forceinline__ explicit Piece(const StreamProblem& q) {
    const int tile = static_cast<int>(blockIdx.x) / q.splits;
    rank = static_cast<int>(blockIdx.x) - tile * q.splits;
    first_row = tile * q.groups_n * kGroupRows;
    first_stage = rank * q.per_split, stages = min(q.per_split, q.all_stages - first_stage);
  }
};

__device__ __forceinline__ int group_of(const StreamProblem& q, int blocks_of_32) {
  return q.group_inverse == 0 ? blocks_of_32 : static_cast<int>(__umulhi(static_cast<uint32_t>(blocks_of_32), q.group_inverse));
}

// The thread that feeds the ring.
template <int kTokens, Tokens kFrom>
struct Producer {
  const StreamParams& p;
  const Piece& piece;
  Shared& shared;
  uint8_t* ring;

  __device__ __forceinline__ int token_bytes() const {
    return kFrom == Tokens::kPiece ? 0 : kImageRowBytes * (kFrom == Tokens::kImages ? kTokens : p.problem.M);
  }

  __device__ __forceinline__ void load_weights(int i, int slot, int pass) const {
    const StreamProblem& q = p.problem;
    const int rows = q.groups_n * kGroupRows, stage = piece.first_stage + i, group = group_of(q, stage * (kStageColumns / 32));
    uint8_t* const to = ring + slot * q.stage_bytes;
    uint64_t* const full = &shared.full[pass % 2][slot];
    ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(rows * (kRowBytes + 4 * q.stage_groups) + token_bytes()));
    ptx::tma_load(to, &p.codes, stage * kRowBytes, piece.first_row, full);
    ptx::tma_load(to + q.scales_at, &p.scale, piece.first_row, group, full);
    ptx::tma_load(to + q.zeros_at, &p.zero, piece.first_row, group, full);
  }

  __device__ __forceinline__ void load_tokens(int i, int slot, int pass) const {
    uint8_t* const to = ring + slot * p.problem.stage_bytes + p.problem.tokens_at;
    uint64_t* const full = &shared.full[pass % 2][slot];
    const int stage = piece.first_stage + i;
    if constexpr (kFrom == Tokens::kImages) {
      ptx::bulk_load(to, p.images + static_cast<int64_t>(stage) * token_bytes(), token_bytes(), full);
    } else if constexpr (kFrom == Tokens::kRows) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        ptx::tma_load(to + block * (kTokens * 128), &p.rows, stage * kStageColumns + 64 * block, 0, full);
      }
    }
  }

  // Weights of the first round: before anything else.
  __device__ __forceinline__ void start() const {
#pragma unroll 1
    for (int i = 0; i < min(piece.stages, p.problem.ring); ++i) load_weights(i, i, 0);
  }

  // Waits for the kernel in front; then tokens of the first round, and what follows.
  __device__ __forceinline__ void run() const {
    const int ring_stages = p.problem.ring;
    ptx::griddep_wait();
#pragma unroll 1
    for (int i = 0; i < min(piece.stages, ring_stages); ++i) load_tokens(i, i, 0);
    int slot = 0, pass = 1;
#pragma unroll 1
    for (int i = ring_stages; i < piece.stages; ++i) {
      ptx::mbarrier_wait(&shared.empty[slot], static_cast<uint32_t>(pass - 1) % 2);
      load_weights(i, slot, pass);
      load_tokens(i, slot, pass);
      if (++slot == ring_stages) slot = 0, ++pass;
    }
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& words, int w) {
  return w == 0 ? words.x : w == 1 ? words.y : w == 2 ? words.z : words.w;
}

// The operands of a word's two wgmmas: `low` of row g, `high` of row g + 8.
template <class T, bool kExact>
__device__ __forceinline__ void decode(uint32_t (&a)[2][4], const quant::AwqGroup<T, true> (&rows)[2], uint32_t low, uint32_t high) {
  using P = quant::AwqPairs<T>;
  a[0][0] = rows[0].template apply<kExact>(P::template levels<0>(low)), a[0][1] = rows[1].template apply<kExact>(P::template levels<0>(high));
  a[0][2] = rows[0].template apply<kExact>(P::template levels<1>(low)), a[0][3] = rows[1].template apply<kExact>(P::template levels<1>(high));
  a[1][0] = rows[0].template apply<kExact>(P::template levels<2>(low)), a[1][1] = rows[1].template apply<kExact>(P::template levels<2>(high));
  a[1][2] = rows[0].template apply<kExact>(P::template levels<3>(low)), a[1][3] = rows[1].template apply<kExact>(P::template levels<3>(high));
}

// Where a lane's scales lie in a stage, for each part of its eight words that may have a group of its own: in the stored order 1 or 2
// parts, in the resident order as many as the stage has groups.
template <Tokens kFrom, int kParts>
struct Places {
  int at[kParts];

  __device__ __forceinline__ Places(const StreamProblem& q, int stage, int row) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = stage * (kStageColumns / 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int group = kFrom == Tokens::kRows ? part : group_of(q, first + 2 * (lane % 4) + part) - group_of(q, first);
      at[part] = q.scales_at + (group * q.groups_n * kGroupRows + row) * 2;
    }
  }
};

// A lane's share of a stage in registers.
template <class T, Tokens kFrom, int kParts>
struct StageWords {
  uint4 words[2][2];  // the first and the second 16 bytes of rows g and g + 8
  quant::AwqGroup<T, true> groups[kParts][2];

  // `codes`: of row g. Answers whether a group needs the exact decoder.
  __device__ __forceinline__ uint32_t load(const uint8_t* stage, const uint8_t* codes, int zeros_apart, const Places<kFrom, kParts>& places) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i / 2][i % 2] = *reinterpret_cast<const uint4*>(codes + ((2 * t + i / 2) ^ g) * 16 + i % 2 * 8 * kRowBytes);
    }
    uint32_t found = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint8_t *const scale = stage + places.at[part], *const zero = scale + zeros_apart;
      const uint32_t s[2] = {*reinterpret_cast<const uint16_t*>(scale), *reinterpret_cast<const uint16_t*>(scale + 16)};
      const uint32_t z[2] = {*reinterpret_cast<const uint16_t*>(zero), *reinterpret_cast<const uint16_t*>(zero + 16)};
      groups[part][0].set(s[0], z[0]), groups[part][1].set(s[1], z[1]);
      found |= quant::awq_needs_exact<T>(__byte_perm(s[0], s[1], 0x5410), __byte_perm(z[0], z[1], 0x5410));
    }
    return found;
  }
};

template <int kTokens>
using Sums = float[kTokens / 2];

// A warpgroup: every groups_k-th stage of the piece.
template <class T, int kTokens, Tokens kFrom, int kParts>
__device__ __forceinline__ void accumulate(Sums<kTokens>& sums, const StreamParams& p, const Piece& piece, Shared& shared, const uint8_t* memory,
                                           int n, int k) {
  constexpr bool kByStage = kFrom != Tokens::kPiece;
  const StreamProblem& q = p.problem;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = n * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  Places<kFrom, kParts> places(q, piece.first_stage + k, row);
  uint32_t a[2][2][4];
  int slot = k, previous = -1, pass = 0;
#pragma unroll 1
  for (int i = k; i < piece.stages; i += q.groups_k) {
    const uint8_t* const stage = memory + slot * q.stage_bytes;
    // The same in all lanes, and known to be: descriptors are scalar operands.
    const uint8_t* const image = kByStage ? stage + q.tokens_at : memory + q.piece_at + i * (kTokens * kImageRowBytes);
    const uint64_t b = ptx::descriptor_swizzle128(__shfl_sync(0xffffffffu, ptx::smem_address(image), 0));
    if (!q.even_groups) places = Places<kFrom, kParts>(q, piece.first_stage + i, row);
    ptx::mbarrier_wait(&shared.full[pass % 2][slot], static_cast<uint32_t>(pass) / 2 % 2);
    StageWords<T, kFrom, kParts> own;
    const uint32_t found = own.load(stage, stage + row * kRowBytes, q.zeros_at - q.scales_at, places);
    const bool exact = __any_sync(0xffffffffu, found != 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t(&operand)[2][4] = a[j % 2];
      const quant::AwqGroup<T, true>(&groups)[2] = own.groups[j * kParts / 8];
      const uint32_t low = word_of(own.words[j / 4][0], j % 4), high = word_of(own.words[j / 4][1], j % 4);
      if (exact) decode<T, true>(operand, groups, low, high);
      else decode<T, false>(operand, groups, low, high);
      ptx::wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // 16 columns are 32 of the 128 bytes of a token's row
        const int step = 2 * j + half;
        ptx::WgmmaRegisters<T, kTokens>::mma(sums, operand[half], b + step / 4 * (kTokens * 128 / 16) + step % 4 * 2);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the operands of the next word may be overwritten
      // NOTE: an arrival does not wait for loads, and the copy engine may overtake those on their way. So a stage is given back behind
      // what was made of all of its words: tokens of its own, which the last wgmmas read, one stage later, else at word 4.
      const int done = kByStage ? previous : slot;
      if (j == (kByStage ? 0 : 4) && done >= 0) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.empty[done]);
      }
    }
    previous = slot, slot += q.groups_k;
    if (slot >= q.ring) slot -= q.ring, ++pass;
  }
  ptx::wgmma_wait<0>();
}

// Fragments to shared memory as [groups_k][M][sum_pitch].
template <int kTokens>
__device__ __forceinline__ void store_sums(float* memory, const Sums<kTokens>& sums, const StreamProblem& q, int n, int k) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = n * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
  float* const mine = memory + k * q.M * q.sum_pitch + row;
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (token < q.M) mine[token * q.sum_pitch + 8 * (i / 2 % 2)] = sums[i];
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) { sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w; }

__device__ __forceinline__ void store_quad(const StreamParams& p, const Shared& shared, int first_row, int token, int column, const float4& sum) {
  const int n = first_row + column;
  if (n >= p.problem.N) return;
  float y[4] = {sum.x + shared.bias[column], sum.y + shared.bias[column + 1], sum.z + shared.bias[column + 2], sum.w + shared.bias[column + 3]};
  finish_four(p.epilogue, static_cast<int64_t>(token) * p.problem.N + n, n, p.problem.N - n, y);
}

// Every four neighbouring rows of a token: summed over the block's warpgroups, sent to the block that finishes them, summed over the
// cluster in the order of its blocks, and stored.
__device__ __forceinline__ void finish(const StreamParams& p, const Piece& piece, Shared& shared, uint8_t* memory) {
  const StreamProblem& q = p.problem;
  const int in_row = q.groups_n * (kGroupRows / 4), quads = q.M * in_row, threads = static_cast<int>(blockDim.x);
  const float* const sums = reinterpret_cast<const float*>(memory);
  float4* const received = reinterpret_cast<float4*>(memory + q.received_at);
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += threads) {
    const int token = quad / in_row, column = (quad - token * in_row) * 4;
    float4 sum = *reinterpret_cast<const float4*>(sums + token * q.sum_pitch + column);
#pragma unroll 1
    for (int k = 1; k < q.groups_k; ++k) add(sum, *reinterpret_cast<const float4*>(sums + (k * q.M + token) * q.sum_pitch + column));
    if (q.splits == 1) {
      store_quad(p, shared, piece.first_row, token, column, sum);
    } else {
      const int owner = quad / q.quads_each;
      ptx::store_async_16(received + piece.rank * q.quads_each + quad - owner * q.quads_each, &shared.received, owner,
                          reinterpret_cast<const int4&>(sum));
    }
  }
  if (q.splits == 1) return;
  ptx::receive_wait(&shared.received);
  const int first = piece.rank * q.quads_each, count = min(q.quads_each, quads - first);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
    float4 sum = received[i];
#pragma unroll 1
    for (int s = 1; s < q.splits; ++s) add(sum, received[s * q.quads_each + i]);
    const int token = (first + i) / in_row;
    store_quad(p, shared, piece.first_row, token, (first + i - token * in_row) * 4, sum);
  }
}

// Grid: tiles * splits blocks. Threads: 128 * groups_n * groups_k + 32.
template <class T, int kTokens, Tokens kFrom, int kParts>
__global__ void __launch_bounds__(128 * most_groups(kTokens) + 32, 1) awq_stream_kernel(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ Shared shared;
  const StreamProblem& q = p.problem;
  const Piece piece(q);
  const int consumers = 128 * q.groups_n * q.groups_k;
  const bool producer = static_cast<int>(threadIdx.x) == consumers;
  const Producer<kTokens, kFrom> feed = {p, piece, shared, memory};
  if (producer) {
    ptx::tma_prefetch_map(&p.codes);
    ptx::tma_prefetch_map(&p.scale);
    ptx::tma_prefetch_map(&p.zero);
    for (int i = 0; i < q.ring; ++i) {
      ptx::mbarrier_init(&shared.full[0][i], 1);
      ptx::mbarrier_init(&shared.full[1][i], 1);
      ptx::mbarrier_init(&shared.empty[i], 4 * q.groups_n);
    }
    ptx::mbarrier_init_fence();
    feed.start();
    if (q.splits > 1) {
      ptx::receive_init(&shared.received);
      const int owned = max(0, min(q.quads_each, q.M * q.groups_n * (kGroupRows / 4) - piece.rank * q.quads_each));
      ptx::receive_expect(&shared.received, q.splits * owned * sizeof(float4));
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < q.groups_n * kGroupRows; i += static_cast<int>(blockDim.x)) {
    const int n = min(piece.first_row + i, q.N - 1);
    shared.bias[i] = p.epilogue.bias == nullptr ? 0.0f : load_as_float(p.epilogue.bias, n, p.epilogue.bias_type);
  }
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x) / 128, n = group / q.groups_k, k = group - n * q.groups_k;
  if constexpr (kFrom == Tokens::kPiece) {
    ptx::griddep_wait();
    if (static_cast<int>(threadIdx.x) < consumers) {
      pair_piece<kTokens>(memory + q.piece_at, p.x, piece.first_stage * kStageColumns, piece.stages, q.M, q.K, static_cast<int>(threadIdx.x),
                          consumers);
      ptx::fence_async_proxy();
    }
    __syncthreads();
  }
  Sums<kTokens> sums = {};
  if (producer) {
    feed.run();
  } else {
    ptx::griddep_wait();
  }
  if (static_cast<int>(threadIdx.x) < consumers) accumulate<T, kTokens, kFrom, kParts>(sums, p, piece, shared, memory, n, k);
  // After this block's loads: the next kernel's blocks need no place before.
  ptx::griddep_launch();
  __syncthreads();  // all have read their stages: the sums take their place
  if (q.splits > 1) ptx::cluster_arrive_relaxed();  // the others may send theirs
  if (static_cast<int>(threadIdx.x) < consumers) store_sums<kTokens>(reinterpret_cast<float*>(memory), sums, q, n, k);
  if (q.splits > 1) ptx::cluster_wait();
  __syncthreads();
  finish(p, piece, shared, memory);
}

}  // namespace kitchen::awq::stream
