// The kernel of awq_linear for 1 to 64 rows of x ("tokens"): see sm80/awq_decode.cu.
//
//   block    Config::kRows weight rows x all tokens x one piece of K; pieces of a tile are the blocks of a cluster
//   warp     16 * kRowBlocks rows, every kWarpsK-th step of 128 columns; weights go from global memory to registers (awq_weights.cuh)
//   tokens   the block's piece of x in shared memory, paired as the weights are, in two buffers where it does not fit at once
//   sums     fp32: over warps in shared memory, then over the cluster in distributed shared memory, both in a fixed order
//
// A group whose zero is tiny beside its scale decodes in fp32 (quant/awq_decode.h). Such groups are looked for on the way; a block
// that met one repeats its sums with the exact decoder, which is slow and hardly ever happens.
#pragma once

#include "awq_linear/decode/awq_weights.cuh"
#include "awq_linear/epilogue.cuh"
#include "kitchen/gemm/decode_smallm.cuh"
#include "kitchen/mma/m16n8k16_f16.h"

namespace kitchen::awq {

namespace decode = gemm::decode;
using gemm::decode::Ownership;
using gemm::decode::Problem;  // steps of 128 columns here; token_pitch and buffers in bytes

constexpr int kStepTokenBytes = 2 * kStepColumns;

struct DecodeParams {
  Problem problem;
  const void* tokens;  // [M, K] of T, rows contiguous, 16-byte aligned
  WeightParams weights;
  EpilogueParams epilogue;
};

// x[0 .. M-1][first_k .. + 128 * steps - 1] to shared memory in the weights' order, columns from k_end on as zeros.
template <class Config>
__device__ __forceinline__ void stage_tokens(uint8_t* buffer, const DecodeParams& p, int first_k, int k_end) {
  constexpr int kAhead = 4, kWarps = Config::kThreads / 32;  // loads under way
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int chunks = p.problem.chunk_steps * (kStepTokenBytes / 16);
  const int warps_per_token = p.problem.M <= 1 ? kWarps : p.problem.M <= kWarps / 2 ? 2 : 1;
  const int apart = 32 * warps_per_token;
#pragma unroll 1
  for (int m = warp / warps_per_token; m < p.problem.M; m += kWarps / warps_per_token) {
    const uint16_t* const row = static_cast<const uint16_t*>(p.tokens) + static_cast<int64_t>(m) * p.problem.K + first_k;
    uint8_t* const to = buffer + m * p.problem.token_pitch;
#pragma unroll 1
    for (int first = lane + 32 * (warp % warps_per_token); first < chunks; first += kAhead * apart) {
      uint4 x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = first + i * apart;
        x[i] = make_uint4(0, 0, 0, 0);
        if (chunk < chunks && first_k + 8 * chunk < k_end) x[i] = *reinterpret_cast<const uint4*>(row + 8 * chunk);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = first + i * apart;
        // Columns 32t + 8w of a step: word w, lane t.
        const int at = chunk / 16 * kStepTokenBytes + 64 * (chunk % 4) + 16 * (chunk / 4 % 4);
        if (chunk < chunks) *reinterpret_cast<uint4*>(to + at) = paired(x[i]);
      }
    }
  }
}

template <class Config>
using Sums = float[Config::kRowBlocks][Config::kTokenBlocks][4];

// One step: `tokens` is where this lane's 16 bytes of word 0 of the first token block lie.
template <class Config, bool kExact, class T, class Weights>
__device__ __forceinline__ void multiply(Sums<Config>& sums, const Weights& weights, const typename Weights::Raw& raw,
                                         const uint8_t* tokens, int tokens_apart) {
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    uint32_t a[Config::kRowBlocks][2][4];
#pragma unroll
    for (int i = 0; i < Config::kRowBlocks; ++i) weights.template decode<kExact>(a[i], raw, i, word);
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) {
      const uint4 b = *reinterpret_cast<const uint4*>(tokens + j * tokens_apart + 64 * word);
#pragma unroll
      for (int i = 0; i < Config::kRowBlocks; ++i) {
        Weights::Mma::multiply(sums[i][j], a[i][0], b.x, b.y);
        Weights::Mma::multiply(sums[i][j], a[i][1], b.z, b.w);
      }
    }
  }
}

struct Piece {
  int first_row, first_k, k_end, warp_n, warp_k, lane;
};

// The block's sums over its piece of K. Answers whether a group needs the exact decoder.
template <class Config, bool kExact, class T, class Weights>
__device__ __forceinline__ uint32_t accumulate(Sums<Config>& sums, uint8_t* shared, const DecodeParams& p, const Piece& piece) {
  constexpr int kSteps = kExact ? 1 : Config::kSteps, kNext = Config::kWarpsK * kStepColumns;  // from a warp's step to its next
  const Problem& problem = p.problem;
  Weights weights(p.weights, piece.first_row + piece.warp_n * 16 * Config::kRowBlocks, piece.first_k + piece.warp_k * kStepColumns,
                  piece.k_end);
  typename Weights::Raw raw[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) weights.load(raw[s], s * kNext);
  weights.advance(kSteps * kNext);
  stage_tokens<Config>(shared, p, piece.first_k, piece.k_end);
  // Tokens beyond the last repeat one, or are whatever lies there: their sums are not stored.
  const int token = Config::kWholeBlocks ? piece.lane / 4 : min(piece.lane / 4, problem.M - 1);
  const int apart = Config::kWholeBlocks || problem.M > decode::kMmaTokens + token ? decode::kMmaTokens * problem.token_pitch : 0;
  const int lane_offset = token * problem.token_pitch + 16 * (piece.lane % 4) + piece.warp_k * kStepTokenBytes;
  const int chunk = problem.chunk_steps * kStepColumns;
  uint32_t found = 0;
  int buffer = 0;
  for (int chunk_k = piece.first_k; chunk_k < piece.k_end; chunk_k += chunk) {
    __syncthreads();  // the chunk lies there, and the other buffer is free
    const int other = problem.buffer_bytes - buffer;
    if (chunk_k + chunk < piece.k_end) stage_tokens<Config>(shared + other, p, chunk_k + chunk, piece.k_end);
    const uint8_t* step = shared + buffer + lane_offset;
    const int end = min(chunk, piece.k_end - chunk_k);
#pragma unroll 1
    for (int k = 0; k < end; k += kSteps * kNext) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        if constexpr (!kExact) found |= Weights::needs_exact(raw[s]);
        multiply<Config, kExact, T>(sums, weights, raw[s], step + s * (kNext * 2), apart);
        weights.load(raw[s], s * kNext);
      }
      weights.advance(kSteps * kNext);
      step += kSteps * kNext * 2;
    }
    buffer = other;
  }
  return found;
}

// Fragments to shared memory as [kWarpsK][M][kSumPitch].
template <class Config>
__device__ __forceinline__ void store_sums(float* shared, const Sums<Config>& sums, int M, const Piece& piece) {
  float* const mine = shared + piece.warp_k * M * Config::kSumPitch + piece.warp_n * 16 * Config::kRowBlocks + piece.lane / 4;
#pragma unroll
  for (int i = 0; i < Config::kRowBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kTokenBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = decode::kMmaTokens * j + 2 * (piece.lane % 4) + e % 2;
        if (token < M) mine[token * Config::kSumPitch + 16 * i + 8 * (e / 2)] = sums[i][j][e];
      }
    }
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

template <int kRows>
__device__ __forceinline__ void store_quad(const EpilogueParams& p, const float* bias, const Problem& problem, int first_row, int token,
                                           int column, const float4& sum) {
  const int n = first_row + column;
  if (n >= problem.N) return;
  float y[4] = {sum.x, sum.y, sum.z, sum.w};
  if (p.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] += bias[column + e];
  }
  finish_four(p, static_cast<int64_t>(token) * problem.N + n, n, problem.N - n, y);
}

// Every four neighbouring columns of a token: summed over the block's warps, sent to the block that finishes them, summed over the
// cluster in the order of its blocks, and stored.
template <class Config>
__device__ __forceinline__ void finish(const float* sums, const float* bias, int4* received, uint64_t* barrier, const DecodeParams& p,
                                       unsigned rank, int first_row) {
  const Problem& problem = p.problem;
  const Ownership<Config> ownership(problem);
  constexpr int kQuads = Ownership<Config>::kQuads;
  const int slots = (ownership.count_of(0) + 7) / 8 * 8;  // of each sender
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < ownership.quads; quad += Config::kThreads) {
    const int token = quad / kQuads, column = quad % kQuads * decode::kColumns;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < Config::kWarpsK; ++w) {
      add(sum, *reinterpret_cast<const float4*>(sums + (w * problem.M + token) * Config::kSumPitch + column));
    }
    if (problem.splits == 1) {
      store_quad<Config::kRows>(p.epilogue, bias, problem, first_row, token, column, sum);
    } else {
      ptx::store_async_16(received + rank * slots + ownership.slot_of(quad), barrier, ownership.owner_of(quad),
                          reinterpret_cast<const int4&>(sum));
    }
  }
  if (problem.splits == 1) return;
  ptx::receive_wait(barrier);
  const int count = ownership.count_of(rank);
#pragma unroll 1
  for (int slot = static_cast<int>(threadIdx.x); slot < count; slot += Config::kThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int s = 0; s < problem.splits; ++s) add(sum, reinterpret_cast<const float4&>(received[s * slots + slot]));
    const int quad = ownership.quad_of(slot, rank);
    store_quad<Config::kRows>(p.epilogue, bias, problem, first_row, quad / kQuads, quad % kQuads * decode::kColumns, sum);
  }
}

// Grid: tiles * splits blocks.
template <class Config, class T, class Weights>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) awq_decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float bias[Config::kRows];
  __shared__ uint64_t barrier;
  const Problem& problem = p.problem;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned rank = blockIdx.x & (problem.splits - 1);
  Piece piece;
  piece.first_row = static_cast<int>(blockIdx.x >> problem.splits_log2) * Config::kRows;
  piece.first_k = static_cast<int>(rank) * problem.steps_per_split * kStepColumns;
  piece.k_end = min(problem.K, piece.first_k + problem.steps_per_split * kStepColumns);
  piece.warp_n = warp % Config::kWarpsN, piece.warp_k = warp / Config::kWarpsN, piece.lane = static_cast<int>(threadIdx.x) % 32;

  if (problem.splits > 1) {
    if (threadIdx.x == 0) {
      ptx::receive_init(&barrier);
      ptx::receive_expect(&barrier, Ownership<Config>(problem).count_of(rank) * problem.splits * sizeof(int4));
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // this block has started: others may write to its shared memory
  }
  if (p.epilogue.bias != nullptr && threadIdx.x < Config::kRows) {
    const int n = min(piece.first_row + static_cast<int>(threadIdx.x), problem.N - 1);
    bias[threadIdx.x] = load_as_float(p.epilogue.bias, n, p.epilogue.bias_type);
  }

  Sums<Config> sums = {};
  const uint32_t found = accumulate<Config, false, T, Weights>(sums, shared, p, piece);
  if constexpr (Weights::kPacked) {
    if (__syncthreads_or(static_cast<int>(found))) {
#pragma unroll
      for (int i = 0; i < Config::kRowBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < Config::kTokenBlocks; ++j) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0.0f;
      }
      accumulate<Config, true, T, Weights>(sums, shared, p, piece);
      __syncthreads();
    }
  } else {
    __syncthreads();  // all have read their tokens: the sums take their place
  }
  float* const own = reinterpret_cast<float*>(shared);
  store_sums<Config>(own, sums, problem.M, piece);
  if (problem.splits > 1) ptx::cluster_wait();
  __syncthreads();
  finish<Config>(own, bias, reinterpret_cast<int4*>(shared + problem.received_at), &barrier, p, rank, piece.first_row);
}

}  // namespace kitchen::awq
