// How the sums of hopper.cuh leave: scaled, by one of five ways (finish_mapped, finish_chunks, finish_whole, finish_alone,
// finish_split).
#pragma once

#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/keep.h"
#include "kitchen/ptx/load_cluster.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/stmatrix.h"
#include "kitchen/ptx/store_async.h"
#include "kitchen/ptx/tma.h"
#include "w4a8_scaled_mm/hopper/sm90/config.h"

namespace kitchen::w4a8::hopper {

__device__ __forceinline__ void finish_quad(const KernelParams& p, const float2* columns, float a_scale, int m, int n,
                                            const int4& sum) {
  const int acc[4] = {sum.x, sum.y, sum.z, sum.w};
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) y[e] = scale(acc[e], a_scale, columns[e].x, columns[e].y);
  finish_four(p.epilogue, m, n, y);
}

// Fragments of 8 * kBlocks tokens to shared memory as [token][kSumPitch], or onto what is there: every kTurns-th of 8 tokens.
template <class Config, int kBlocks, int kTurns>
__device__ __forceinline__ void put_sums(int* sums, const int* acc, int turn, bool add) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int* const mine = sums + static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (kTurns > 1 && j % kTurns != turn) continue;
    int before[4] = {};
#pragma unroll
    for (int store = 0; store < 2; ++store) {  // all loads first: the compiler cannot know that stores leave them alone
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int* const at = mine + (8 * j + 2 * (lane % 4) + e % 2) * Config::kSumPitch + 8 * (e / 2);
        if (store == 1) *at = acc[4 * j + e] + before[e];
        if (store == 0 && add) before[e] = *at;
      }
    }
  }
}

// All consumers: the sums of all groups, each of which adds to other tokens at a time.
template <class Config, int kBlocks>
__device__ __forceinline__ void gather_sums(int* sums, const int* acc) {
  const int group = static_cast<int>(threadIdx.x) / Config::kGroupThreads;
  ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // what lies there has been read
#pragma unroll
  for (int turn = 0; turn < Config::kGroups; ++turn) {
    put_sums<Config, kBlocks, Config::kGroups>(sums, acc, (group + turn) % Config::kGroups, turn > 0);
    ptx::named_barrier_sync<1, Config::kConsumerThreads>();
  }
}

// Tiles of more than 64 outputs: 32 tokens at a time.
template <class Config>
__device__ __forceinline__ void finish_chunks(const KernelParams& p, SharedStorage<Config>& shared,
                                              const TileScales<Config>& scales,
                                              const int (&acc)[Config::kTokens / 2], int2 tile) {
  constexpr int kQuads = Config::kRows / 4;
  int* const sums = reinterpret_cast<int*>(shared.sums);
#pragma unroll
  for (int chunk = 0; chunk < Config::kTokens / kChunkTokens; ++chunk) {
    gather_sums<Config, kChunkTokens / 8>(sums, acc + chunk * kChunkTokens / 2);
#pragma unroll 1
    for (int quad = threadIdx.x; quad < kChunkTokens * kQuads; quad += Config::kConsumerThreads) {
      const int token = quad / kQuads, column = quad % kQuads * 4, local = chunk * kChunkTokens + token, m = tile.y + local;
      if (m >= p.tiles.M) continue;
      const int4 sum = *reinterpret_cast<const int4*>(sums + token * Config::kSumPitch + column);
      finish_quad(p, scales.columns + column, scales.tokens[local], m, tile.x + column, sum);
    }
  }
}

__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  switch (warpgroup) {
    case 0: return ptx::named_barrier_sync<3, 128>();
    case 1: return ptx::named_barrier_sync<4, 128>();
    default: return ptx::named_barrier_sync<5, 128>();
  }
}

// A 16-bit result without a residual, in rows that the copy engine can write: 32 tokens x 64 outputs of a warpgroup at a time.
template <class Config, bool kHalf>
__device__ __forceinline__ void finish_mapped(const KernelParams& p, SharedStorage<Config>& shared,
                                              const TileScales<Config>& scales,
                                              const int (&acc)[Config::kTokens / 2], int2 tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / 4;
  const float2 low = scales.columns[warp * 16 + lane / 4], high = scales.columns[warp * 16 + lane / 4 + 8];
  uint8_t* const staging = shared.sums + warpgroup * 2 * kStoreBytes;
  const uint32_t place = ptx::smem_address(staging) + (8 * (lane / 16) + lane % 8) * 128 +
                         ((32 * (warp % 4) + 16 * (lane / 8 % 2)) ^ (lane % 8 << 4));
  constexpr DType kType = kHalf ? DType::kFloat16 : DType::kBFloat16;
#pragma unroll
  for (int chunk = 0; chunk < Config::kTokens / kChunkTokens; ++chunk) {
    const int buffer = chunk % 2;
    if (threadIdx.x % 128 == 0) ptx::tma_store_wait_read<1>();
    warpgroup_barrier(warpgroup);  // the buffer's last content has gone
#pragma unroll
    for (int j = 0; j < kChunkTokens / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = chunk * (kChunkTokens / 8) + j + i;
        const float2 a_scale = *reinterpret_cast<const float2*>(scales.tokens + 8 * block + 2 * (lane % 4));
        const int* const sum = acc + 4 * block;
        words[2 * i] = pack_pair(scale(sum[0], a_scale.x, low.x, low.y), scale(sum[1], a_scale.y, low.x, low.y), kType);
        words[2 * i + 1] = pack_pair(scale(sum[2], a_scale.x, high.x, high.y), scale(sum[3], a_scale.y, high.x, high.y), kType);
      }
      ptx::stmatrix_x4_transposed(place + buffer * kStoreBytes + 8 * j * 128, words[0], words[1], words[2], words[3]);
    }
    ptx::fence_async_proxy();
    warpgroup_barrier(warpgroup);
    if (threadIdx.x % 128 == 0) {
      ptx::tma_store(&p.result, staging + buffer * kStoreBytes, tile.x + warpgroup * kStoreColumns,
                     tile.y + chunk * kChunkTokens);
      ptx::tma_store_commit();
    }
  }
}

// Tiles of 64 outputs, of which a block has several: all sums at once.
template <class Config>
__device__ __forceinline__ void finish_whole(const KernelParams& p, SharedStorage<Config>& shared,
                                             const TileScales<Config>& scales,
                                             const int (&acc)[Config::kTokens / 2], int2 tile) {
  constexpr int kQuads = Config::kRows / 4;
  int* const sums = reinterpret_cast<int*>(shared.sums);
  gather_sums<Config, Config::kTokens / 8>(sums, acc);
#pragma unroll 2
  for (int quad = threadIdx.x; quad < Config::kTokens * kQuads; quad += Config::kConsumerThreads) {
    const int token = quad / kQuads, column = quad % kQuads * 4, m = tile.y + token;
    if (m >= p.tiles.M) continue;
    const int4 sum = *reinterpret_cast<const int4*>(sums + token * Config::kSumPitch + column);
    finish_quad(p, scales.columns + column, scales.tokens[token], m, tile.x + column, sum);
  }
}

// Tiles of 64 outputs where no block has a second tile: the sums of each group lie in the place of the stages, which nothing
// fills again. Where K is split, block r of the cluster finishes every token t with t % splits == r, and is sent the sums of the
// others.
template <class Config>
__device__ __forceinline__ void finish_alone(const KernelParams& p, SharedStorage<Config>& shared,
                                            const TileScales<Config>& scales,
                                            const int (&acc)[Config::kTokens / 2], int2 tile, int rank) {
  constexpr int kQuads = Config::kRows / 4, kGroupSums = Config::kSumPitch * Config::kTokens;
  const int thread = static_cast<int>(threadIdx.x), splits = p.tiles.splits, last = splits - 1;
  const int share = Config::kTokens / splits * kQuads;  // quads that a block finishes
  int* const sums = reinterpret_cast<int*>(&shared);
  int4* const received = reinterpret_cast<int4*>(shared.sums);
  if (thread == 0 && last > 0) ptx::receive_expect(&shared.received, last * share * sizeof(int4));
  ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // every instruction that reads the stages has ended
  put_sums<Config, Config::kTokens / 8, 1>(sums + thread / Config::kGroupThreads * kGroupSums, acc, 0, false);
  ptx::named_barrier_sync<1, Config::kConsumerThreads>();
  const auto own_sum = [&](int token, int column) {
    int4 sum = *reinterpret_cast<const int4*>(sums + token * Config::kSumPitch + column);
#pragma unroll
    for (int group = 1; group < Config::kGroups; ++group) {
      const int4 more = *reinterpret_cast<const int4*>(sums + group * kGroupSums + token * Config::kSumPitch + column);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
  };
  __syncwarp();
  if (last > 0) ptx::cluster_wait();  // the others have started
#pragma unroll 1
  for (int other = 1; other < splits; ++other) {
    const int owner = (rank + other) & last;
    for (int quad = thread; quad < share; quad += Config::kConsumerThreads) {
      ptx::store_async_16(received + (other - 1) * share + quad, &shared.received, owner,
                          own_sum(quad / kQuads * splits + owner, quad % kQuads * 4));
    }
  }
  if (last > 0) ptx::receive_wait(&shared.received);
#pragma unroll 1
  for (int quad = thread; quad < share; quad += Config::kConsumerThreads) {
    const int token = quad / kQuads * splits + rank, column = quad % kQuads * 4, m = tile.y + token;
    if (m >= p.tiles.M) continue;
    int4 sum = own_sum(token, column);
    for (int other = 0; other < last; ++other) {
      const int4 more = received[other * share + quad];
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    finish_quad(p, scales.columns + column, scales.tokens[token], m, tile.x + column, sum);
  }
}

// Tiles of more outputs and a split K: all sums in the place of the stages, which nothing fills again; the blocks of a cluster
// take turns of tokens. Loads from the others are all on their way before the first is used. NOTE: every one is waited for, also
// where its token is none: the blocks part when all have arrived, and one that has ended must not be read.
template <class Config, int kSplits>
__device__ __forceinline__ void finish_split(const KernelParams& p, SharedStorage<Config>& shared,
                                             const TileScales<Config>& scales, int2 tile, int rank) {
  constexpr int kQuads = Config::kRows / 4, kTokensAtOnce = Config::kConsumerThreads / kQuads;  // of a block
  constexpr int kRounds = (Config::kTokens + kSplits * kTokensAtOnce - 1) / (kSplits * kTokensAtOnce);
  constexpr int kTogether = 12 / kSplits;
  const int* const sums = reinterpret_cast<const int*>(&shared);
  const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
#pragma unroll 1
  for (int round = 0; round < kRounds; round += kTogether) {
    int4 sum[kTogether][kSplits];
    int token[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      token[i] = ((round + i) * kTokensAtOnce + static_cast<int>(threadIdx.x) / kQuads) * kSplits + rank;
      const bool wanted = token[i] < Config::kTokens && tile.y + token[i] < p.tiles.M;
      const int* const own = sums + min(token[i], Config::kTokens - 1) * Config::kSumPitch + column;
#pragma unroll
      for (int other = 0; other < kSplits; ++other) {
        const int block = wanted ? rank + other : rank;
        sum[i][other] = other == 0 ? *reinterpret_cast<const int4*>(own)
                                   : ptx::load_cluster_16(own, block < kSplits ? block : block - kSplits);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int other = 1; other < kSplits; ++other) {
        sum[i][0].x += sum[i][other].x, sum[i][0].y += sum[i][other].y;
        sum[i][0].z += sum[i][other].z, sum[i][0].w += sum[i][other].w;
      }
      ptx::keep(sum[i][0].x);  // or the compiler adds, and so waits, only where the token is wanted
      const int m = tile.y + token[i];
      if (token[i] < Config::kTokens && m < p.tiles.M)
        finish_quad(p, scales.columns + column, scales.tokens[token[i]], m, tile.x + column, sum[i][0]);
    }
  }
}

}  // namespace kitchen::w4a8::hopper
