// The kernel of awq_linear for 1 to 16 rows of x ("tokens") on Hopper: see awq_stream.cu.
//
//   block      persistent: tiles of warps_n * 16 weight rows, every gridDim-th, times one piece of K; the pieces are the blocks of a
//              cluster
//   last warp  feeds warps_k rings of stages, all rows of the tile x 256 or 512 columns, by bulk tensor copies; it
//              runs on from tile to tile, so that memory never waits for sums
//   others     16 rows of the stages of one ring each
//   tokens     the piece of x, once, in shared memory, paired as the weights are
//   sums       fp32: over warps_k warps in shared memory, by one of the warps that share rows, which changes from tile to tile, while
//              the others go on with the next tile (two buffers); over the cluster in distributed shared memory. Both in a fixed order
//
// A stage is one or two slices of 256 columns. Of a slice, lane l (g = l/4, t = l%4) has rows g and g + 8, columns 64t .. 64t+63, two times 16 bytes; word w of
// the s-th makes the operands of two MMAs, pairs (c, c+4) of its eight columns.
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h): a warp that meets one does so for that stage.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "awq_linear/epilogue.cuh"
#include "awq_linear/stream/barriers.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/receive_phase.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/quant/awq_decode.h"

namespace kitchen::awq::stream {

constexpr int kSliceColumns = 256;
constexpr int kSliceBytes = kSliceColumns / 2;  // of a row: 128, one swizzle atom
constexpr int kRows = 16;                       // of a warp
constexpr int kSumPitch = kRows + 4;            // floats between tokens
constexpr int kQuads = kRows / 4;               // of a token
constexpr int kMostWarps = 15, kMostSplits = 8, kMostStages = 2;

struct StreamProblem {
  int M, N, K;
  int tiles, warps_n, warps_k;          // of warps_n * 16 rows; warps of a block
  int splits, all_stages, per_split;    // pieces of K; stages of the whole K and of a piece
  int ring_log2;                        // stages of a ring
  int stage_groups;                     // groups that a stage may touch
  int scales_at, zeros_at, stage_bytes; // in a stage: codes come first
  bool even_groups;                     // groups divide a slice, or stages a group: scales lie alike in every stage
  uint32_t group_inverse;               // 2^32 / (g/32) + 1: exact division of k/32 while K < 2^19; 0 for groups of 32
  int token_pitch;                      // bytes between tokens in shared memory: 64 modulo 128
  int tokens_at, sums_at, received_at;  // bytes; the rings come first
};

struct StreamParams {
  StreamProblem problem;
  const void* tokens;          // [M, K] of T, rows contiguous, 16-byte aligned
  CUtensorMap codes;           // [N, K/2] in boxes of a tile's rows x 128 bytes, swizzled by 128 bytes
  CUtensorMap scale, zero;     // [K/g, N] of T in boxes of stage_groups x a tile's rows
  EpilogueParams epilogue;
};

struct Barriers {
  uint64_t full[kMostWarps][kMostStages], empty[kMostWarps][kMostStages];  // by ring: a stage has come; all its warps have read it
  uint64_t written[kMostWarps][2], summed[kMostWarps][2];  // by rows of the tile and buffer: warps' sums lie there; they were read
  uint64_t received[kMostWarps];           // by rows of the tile: sums of the cluster have come
  uint64_t read[kMostWarps][kMostSplits];  // what this block sent to that owner has been read
};

struct Block {
  int rank, first_stage, stages;     // of the piece
  int first_tile, tile_step, tiles;  // the tiles of this block

  __device__ __forceinline__ explicit Block(const StreamProblem& q) {
    rank = static_cast<int>(blockIdx.x % q.splits);
    first_stage = rank * q.per_split, stages = min(q.per_split, q.all_stages - first_stage);
    first_tile = static_cast<int>(blockIdx.x / q.splits), tile_step = static_cast<int>(gridDim.x / q.splits);
    tiles = (q.tiles - first_tile + tile_step - 1) / tile_step;
  }

  // Stages of a ring in each tile.
  __device__ __forceinline__ int count(const StreamProblem& q, int ring) const { return (stages - ring + q.warps_k - 1) / q.warps_k; }
};

struct Warp {
  int lane, n, k;  // its rows in the tile, its ring
};

__device__ __forceinline__ int group_of(const StreamProblem& q, int blocks_of_32) {
  return q.group_inverse == 0 ? blocks_of_32 : static_cast<int>(__umulhi(static_cast<uint32_t>(blocks_of_32), q.group_inverse));
}

// One thread feeds all rings, in the order in which their stages are wanted.
template <int kSlices>
__device__ __forceinline__ void produce(const StreamParams& p, const Block& block, Barriers& barriers, uint8_t* rings) {
  const StreamProblem& q = p.problem;
  const int rows = q.warps_n * kRows, ring = 1 << q.ring_log2, code_bytes = rows * kSliceBytes;
  const uint32_t bytes = static_cast<uint32_t>(kSlices * code_bytes + 4 * q.stage_groups * rows);
#pragma unroll 1
  for (int i = 0; i < block.tiles; ++i) {
    const int row = (block.first_tile + i * block.tile_step) * rows;
#pragma unroll 1
    for (int local = 0, k = 0, j = 0; local < block.stages; ++local) {
      const int use = i * block.count(q, k) + j, slot = use & (ring - 1), stage = block.first_stage + local;
      uint64_t* const full = &barriers.full[k][slot];
      uint8_t* const to = rings + (k * ring + slot) * q.stage_bytes;
      if (use >= ring) ptx::mbarrier_wait(&barriers.empty[k][slot], ((use >> q.ring_log2) - 1) & 1);
      ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
      for (int h = 0; h < kSlices; ++h) ptx::tma_load(to + h * code_bytes, &p.codes, (stage * kSlices + h) * kSliceBytes, row, full);
      const int group = group_of(q, stage * (kSlices * kSliceColumns / 32));
      ptx::tma_load(to + q.scales_at, &p.scale, row, group, full);
      ptx::tma_load(to + q.zeros_at, &p.zero, row, group, full);
      if (++k == q.warps_k) k = 0, ++j;
    }
  }
}

// x[0 .. M-1] of the block's piece to shared memory in the weights' order, columns from K on as zeros: a warp takes 256 columns.
template <int kSlices>
__device__ __forceinline__ void stage_tokens(uint8_t* shared, const StreamParams& p, const Block& block, const Warp& warp) {
  constexpr int kAhead = 4;  // loads under way
  const StreamProblem& q = p.problem;
  const int own = static_cast<int>(threadIdx.x) / 32, warps = q.warps_n * q.warps_k, slices = q.per_split * kSlices, units = q.M * slices;
  const int column = 64 * (warp.lane % 4) + 32 * (warp.lane / 16) + 8 * (warp.lane / 4 % 4);
#pragma unroll 1
  for (int first = own; first < units; first += kAhead * warps) {
    uint4 x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * warps, m = unit / slices;
      const int k = (block.first_stage * kSlices + unit - m * slices) * kSliceColumns + column;
      x[i] = make_uint4(0, 0, 0, 0);
      if (unit < units && k < q.K) x[i] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.tokens) + static_cast<int64_t>(m) * q.K + k);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int unit = first + i * warps, m = unit / slices;
      if (unit >= units) continue;
      uint4* const to = reinterpret_cast<uint4*>(shared + m * q.token_pitch + (unit - m * slices) * (2 * kSliceColumns) + 16 * warp.lane);
      *to = make_uint4(__byte_perm(x[i].x, x[i].z, 0x5410), __byte_perm(x[i].x, x[i].z, 0x7632), __byte_perm(x[i].y, x[i].w, 0x5410),
                       __byte_perm(x[i].y, x[i].w, 0x7632));
    }
  }
}

template <int kTokenBlocks>
using Sums = float[2][kTokenBlocks][4];  // of the two MMAs of a word

__device__ __forceinline__ uint32_t word_of(const uint4& words, int w) {
  return w == 0 ? words.x : w == 1 ? words.y : w == 2 ? words.z : words.w;
}

// The operands of a word's two MMAs: `low` of row g, `high` of row g + 8.
template <class T, bool kExact>
__device__ __forceinline__ void decode(uint32_t (&a)[2][4], const quant::AwqGroup<T, true> (&rows)[2], uint32_t low, uint32_t high) {
  using P = quant::AwqPairs<T>;
  a[0][0] = rows[0].template apply<kExact>(P::template levels<0>(low)), a[0][1] = rows[1].template apply<kExact>(P::template levels<0>(high));
  a[0][2] = rows[0].template apply<kExact>(P::template levels<1>(low)), a[0][3] = rows[1].template apply<kExact>(P::template levels<1>(high));
  a[1][0] = rows[0].template apply<kExact>(P::template levels<2>(low)), a[1][1] = rows[1].template apply<kExact>(P::template levels<2>(high));
  a[1][2] = rows[0].template apply<kExact>(P::template levels<3>(low)), a[1][3] = rows[1].template apply<kExact>(P::template levels<3>(high));
}

// A word of 8 columns: `tokens` + `at` is where this lane's 16 bytes of it lie for each block of 8 tokens.
template <class T, bool kExact, int kTokenBlocks>
__device__ __forceinline__ void multiply(Sums<kTokenBlocks>& sums, const quant::AwqGroup<T, true> (&groups)[2], uint32_t low, uint32_t high,
                                         const uint8_t* const (&tokens)[kTokenBlocks], int at) {
  uint32_t a[2][4];
  decode<T, kExact>(a, groups, low, high);
#pragma unroll
  for (int j = 0; j < kTokenBlocks; ++j) {
    const uint4 b = *reinterpret_cast<const uint4*>(tokens[j] + at);
    mma::M16N8K16<T>::multiply(sums[0][j], a[0], b.x, b.y);
    mma::M16N8K16<T>::multiply(sums[1][j], a[1], b.z, b.w);
  }
}

// Where a lane's scales lie in a stage, for each slice and each part of its 64 columns that may have a group of its own.
template <int kSlices, int kParts>
struct Places {
  int at[kSlices][kParts];

  __device__ __forceinline__ Places(const StreamProblem& q, int stage, int n) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = stage * (kSlices * kSliceColumns / 32);
#pragma unroll
    for (int i = 0; i < kSlices * kParts; ++i) {
      const int block = i / kParts * (kSliceColumns / 32) + 2 * (lane % 4) + i % kParts;
      const int group = group_of(q, first + block) - group_of(q, first);
      at[i / kParts][i % kParts] = q.scales_at + (group * q.warps_n + n) * (2 * kRows) + lane / 4 * 2;
    }
  }
};

// A stage in registers. kParts: groups that a lane's 64 columns of a slice may touch, 1 or 2.
template <class T, int kSlices, int kParts>
struct StageWords {
  uint4 words[kSlices][2][2];  // the first and the second 16 bytes of rows g and g + 8
  quant::AwqGroup<T, true> groups[kSlices][kParts][2];

  // `codes`: of slice 0, row g. Answers whether a group needs the exact decoder.
  __device__ __forceinline__ uint32_t load(const uint8_t* stage, const uint8_t* codes, int slice_apart, int zeros_apart,
                                           const Places<kSlices, kParts>& places) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    uint32_t found = 0;
#pragma unroll
    for (int h = 0; h < kSlices; ++h) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint8_t *const scale = stage + places.at[h][part], *const zero = scale + zeros_apart;
        const uint32_t s[2] = {*reinterpret_cast<const uint16_t*>(scale), *reinterpret_cast<const uint16_t*>(scale + 16)};
        const uint32_t z[2] = {*reinterpret_cast<const uint16_t*>(zero), *reinterpret_cast<const uint16_t*>(zero + 16)};
        groups[h][part][0].set(s[0], z[0]), groups[h][part][1].set(s[1], z[1]);
        found |= quant::awq_needs_exact<T>(__byte_perm(s[0], s[1], 0x5410), __byte_perm(z[0], z[1], 0x5410));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[h][i / 2][i % 2] = *reinterpret_cast<const uint4*>(codes + h * slice_apart + ((2 * t + i / 2) ^ g) * 16 + i % 2 * 8 * kSliceBytes);
      }
    }
    return found;
  }

  // `at`: of the stage in a token's row.
  template <bool kExact, int kTokenBlocks>
  __device__ __forceinline__ void multiply_all(Sums<kTokenBlocks>& sums, const uint8_t* const (&tokens)[kTokenBlocks], int at) const {
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i) {
      const int h = i / 2, s = i % 2;
      if constexpr (kExact) {
#pragma unroll 1
        for (int w = 0; w < 4; ++w) word<kExact>(sums, tokens, at, h, s, w);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) word<kExact>(sums, tokens, at, h, s, w);
      }
    }
  }

 private:
  template <bool kExact, int kTokenBlocks>
  __device__ __forceinline__ void word(Sums<kTokenBlocks>& sums, const uint8_t* const (&tokens)[kTokenBlocks], int at, int h, int s, int w) const {
    multiply<T, kExact>(sums, groups[h][s * (kParts - 1)], word_of(words[h][s][0], w), word_of(words[h][s][1], w), tokens,
                        at + 512 * h + 256 * s + 64 * w);
  }
};

__device__ __forceinline__ void add(float4& sum, const float4& other) { sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w; }

__device__ __forceinline__ void store_quad(const StreamParams& p, int first_row, int quad, const float4& sum) {
  const int token = quad / kQuads, n = first_row + quad % kQuads * 4;
  if (n >= p.problem.N) return;
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
  if (p.epilogue.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] += load_as_float(p.epilogue.bias, n + e, p.epilogue.bias_type);
  }
  finish_four(p.epilogue, static_cast<int64_t>(token) * p.problem.N + n, n, p.problem.N - n, y);
}

// What the blocks of a cluster send each other. The i-th tile of a cluster is finished by its block i % splits.
struct Exchange {
  const StreamParams& p;
  Barriers& barriers;
  float4* received;  // of these rows: [splits][M * kQuads]
  int n, rank, lane, tiles;  // row block of the tile; tiles of this cluster

  __device__ __forceinline__ int owner_of(int i) const { return i & (p.problem.splits - 1); }
  __device__ __forceinline__ uint32_t round_of(int i) const { return static_cast<uint32_t>(i / p.problem.splits); }

  // One thread of the block for each row block, before any other block may send.
  __device__ __forceinline__ static void prepare(Barriers& barriers, const StreamProblem& q, int n) {
    ptx::receive_init(&barriers.received[n]);
    for (int rank = 0; rank < q.splits; ++rank) ptx::receive_init(&barriers.read[n][rank]);
    ptx::receive_expect(&barriers.received[n], q.splits * q.M * kQuads * sizeof(float4));
  }

  __device__ __forceinline__ void await_place(int i) const {
    if (round_of(i) > 0) ptx::receive_wait_phase(&barriers.read[n][owner_of(i)], (round_of(i) - 1) & 1);
  }

  __device__ __forceinline__ void send(int i, int quad, const float4& sum) const {
    ptx::store_async_16(received + rank * p.problem.M * kQuads + quad, &barriers.received[n], owner_of(i), reinterpret_cast<const int4&>(sum));
  }

  // The i-th tile, if this block owns it.
  __device__ __forceinline__ void finish(int i, int first_row) const {
    const StreamProblem& q = p.problem;
    if (owner_of(i) != rank) return;
    ptx::receive_wait_phase(&barriers.received[n], round_of(i) & 1);
    const int quads = q.M * kQuads;
    for (int quad = lane; quad < quads; quad += 32) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int s = 0; s < q.splits; ++s) add(sum, received[s * quads + quad]);
      store_quad(p, first_row, quad, sum);
    }
    __syncwarp();
    if (i + q.splits >= tiles) return;  // nobody sends to this place again
    if (lane == 0) ptx::receive_expect(&barriers.received[n], q.splits * quads * sizeof(float4));
    if (lane < q.splits) arrive_in_cluster(&barriers.read[n][rank], lane);
  }
};

// The consumer warps: all tiles of the block.
template <class T, int kTokenBlocks, int kSlices, int kParts>
__device__ __forceinline__ void consume(const StreamParams& p, const Block& block, const Warp& warp, Barriers& barriers, uint8_t* shared) {
  const StreamProblem& q = p.problem;
  const int count = block.count(q, warp.k), ring_mask = (1 << q.ring_log2) - 1;
  // Tokens beyond the last repeat it: their sums are not stored.
  const uint8_t* tokens[kTokenBlocks];
#pragma unroll
  for (int j = 0; j < kTokenBlocks; ++j) {
    tokens[j] = shared + q.tokens_at + min(8 * j + warp.lane / 4, q.M - 1) * q.token_pitch + 16 * (warp.lane % 4);
  }
  const uint8_t* const ring = shared + (warp.k << q.ring_log2) * q.stage_bytes;
  const int codes_at = (warp.n * kRows + warp.lane / 4) * kSliceBytes, slice_apart = q.warps_n * kRows * kSliceBytes;
  const int block_sums = q.M * kSumPitch;  // floats of a warp
  const Exchange exchange = {p, barriers, reinterpret_cast<float4*>(shared + q.received_at) + warp.n * q.splits * q.M * kQuads,
                             warp.n, block.rank, warp.lane, block.tiles};
  Places<kSlices, kParts> places(q, block.first_stage + warp.k, warp.n);
  uint32_t use = 0;
  int turn = 0;
#pragma unroll 1
  for (int i = 0; i < block.tiles; ++i) {
    Sums<kTokenBlocks> sums = {};
#pragma unroll 1
    for (int j = 0, local = warp.k; j < count; ++j, local += q.warps_k, ++use) {
      const uint32_t slot = use & ring_mask;
      const uint8_t* const stage = ring + slot * q.stage_bytes;
      if (!q.even_groups) places = Places<kSlices, kParts>(q, block.first_stage + local, warp.n);
      ptx::mbarrier_wait(&barriers.full[warp.k][slot], (use >> q.ring_log2) & 1);
      StageWords<T, kSlices, kParts> words;
      const uint32_t found = words.load(stage, stage + codes_at, slice_apart, q.zeros_at - q.scales_at, places);
      const bool exact = __any_sync(0xffffffffu, found != 0);
      __syncwarp();
      if (warp.lane == 0) ptx::mbarrier_arrive(&barriers.empty[warp.k][slot]);
      const int at = local * (2 * kSlices * kSliceColumns);
      if (exact) words.template multiply_all<true>(sums, tokens, at);
      else words.template multiply_all<false>(sums, tokens, at);
    }
    // Of the warps that share rows, the one whose turn it is finishes the tile.
    const int buffer = i & 1, first_row = ((block.first_tile + i * block.tile_step) * q.warps_n + warp.n) * kRows;
    float* const all = reinterpret_cast<float*>(shared + q.sums_at) + (buffer * q.warps_n + warp.n) * q.warps_k * block_sums;
    uint64_t *const written = &barriers.written[warp.n][buffer], *const summed = &barriers.summed[warp.n][buffer];
    if (i >= 2) ptx::mbarrier_wait(summed, (i / 2 - 1) & 1);
    float* const mine = all + warp.k * block_sums + warp.lane / 4;
#pragma unroll
    for (int j = 0; j < kTokenBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = 8 * j + 2 * (warp.lane % 4) + e % 2;
        if (token < q.M) mine[token * kSumPitch + 8 * (e / 2)] = sums[0][j][e] + sums[1][j][e];
      }
    }
    __syncwarp();
    if (warp.lane == 0) ptx::mbarrier_arrive(written);
    if (warp.k == turn) {
      ptx::mbarrier_wait(written, (i / 2) & 1);
      if (q.splits > 1) exchange.await_place(i);
      for (int quad = warp.lane; quad < q.M * kQuads; quad += 32) {
        float4 sum = make_float4(0, 0, 0, 0);
        const float* const from = all + quad / kQuads * kSumPitch + quad % kQuads * 4;
#pragma unroll 4
        for (int w = 0; w < q.warps_k; ++w) add(sum, *reinterpret_cast<const float4*>(from + w * block_sums));
        if (q.splits > 1) exchange.send(i, quad, sum);
        else store_quad(p, first_row, quad, sum);
      }
      __syncwarp();
      if (warp.lane == 0) ptx::mbarrier_arrive(summed);
      if (q.splits > 1) {  // a tile late, when the sums have had time to come
        if (i > 0) exchange.finish(i - 1, first_row - block.tile_step * q.warps_n * kRows);
        if (i + 1 == block.tiles) exchange.finish(i, first_row);
      }
    }
    if (++turn == q.warps_k) turn = 0;
  }
}

// Grid: blocks that all fit the chip at once, a multiple of splits. Threads: 32 * (warps_n * warps_k + 1).
template <class T, int kTokenBlocks, int kSlices, int kParts>
__global__ void __launch_bounds__(32 * (kMostWarps + 1), 1) awq_stream_kernel(const __grid_constant__ StreamParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ Barriers barriers;
  const StreamProblem& q = p.problem;
  const int index = static_cast<int>(threadIdx.x) / 32, consumers = q.warps_n * q.warps_k;
  const Block block(q);
  Warp warp;
  warp.lane = static_cast<int>(threadIdx.x) % 32, warp.n = index / q.warps_k, warp.k = index - warp.n * q.warps_k;
  const bool producer = index == consumers;
  if (producer) {
    for (int i = warp.lane; i < q.warps_k << q.ring_log2; i += 32) {
      ptx::mbarrier_init(&barriers.full[i >> q.ring_log2][i & ((1 << q.ring_log2) - 1)], 1);
      ptx::mbarrier_init(&barriers.empty[i >> q.ring_log2][i & ((1 << q.ring_log2) - 1)], q.warps_n);
    }
    if (warp.lane < q.warps_n) {
      for (int buffer = 0; buffer < 2; ++buffer) {
        ptx::mbarrier_init(&barriers.written[warp.lane][buffer], q.warps_k);
        ptx::mbarrier_init(&barriers.summed[warp.lane][buffer], 1);
      }
      if (q.splits > 1) Exchange::prepare(barriers, q, warp.lane);
    }
    ptx::mbarrier_init_fence();
  }
  // Weights, too, may have been written by the kernel in front: a block is there early, and reads nothing before the wait.
  ptx::griddep_wait();
  ptx::griddep_launch();
  __syncthreads();
  if (q.splits > 1) ptx::cluster_arrive_relaxed();  // this block's barriers may be used by the others
  if (producer) {
    if (warp.lane == 0) produce<kSlices>(p, block, barriers, shared);
    __syncwarp();
    if (q.splits > 1) ptx::cluster_wait();
  } else {
    stage_tokens<kSlices>(shared + q.tokens_at, p, block, warp);
    if (q.splits > 1) ptx::cluster_wait();
    meet_consumers(32 * consumers);
    consume<T, kTokenBlocks, kSlices, kParts>(p, block, warp, barriers, shared);
  }
  if (q.splits > 1) {
    __syncwarp();
    ptx::cluster_sync();  // no block ends while others send to it
  }
}

}  // namespace kitchen::awq::stream
