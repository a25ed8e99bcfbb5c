// W4A8 and W6A8 product on Hopper (sm_90a) for more than a few tokens: out^T[N, M] = v8[N, K] * a^T[K, M].
//
// Weights are the m=64 side of wgmma and come from registers: a warp decodes the codes of its 16 outputs while the instructions
// before still run. Tokens are the n side, from shared memory. So codes are read once for each tile of tokens, and decoded
// weights never leave registers.
//
//   tile      kRows outputs (64, 128 or 192) x kTokens tokens x one of `splits` pieces of K (the blocks of a cluster)
//   stage     128 columns: tokens [kTokens][128 bytes], codes [kRows][64 bytes] (and [kRows][32 bytes] of top bits at 6 bits)
//   producers two threads: tensor copies of codes, and of tokens
//   consumers two or three warpgroups of 64 outputs each, or, of tiles of 64 outputs, two or three that take turns of stages,
//             since decoding is then the limit. A lane takes 32 neighbouring columns of rows lane/4 and lane/4 + 8 of its warp,
//             and the tokens have their words in that order (order_tokens.cu). It reads the scales of those columns itself, two
//             of its stages ahead
//   sums      int32: see finish.cuh. Blocks walk over tiles, and the stages of the next tile fill meanwhile. Where K is split,
//             all sums of a tile are added up over the cluster, whose blocks have one tile each
//
// Tiles of 256 tokens are near the rate of the tensor cores and of shared memory, smaller ones are limited by decoding. A
// programmatic launch reads codes and scales before it waits for the kernel in front, tokens after.
// Measured: docs/kernels/w4a8.md.
#pragma once

#include <type_traits>

#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/griddep.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/named_barrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_s8_registers.h"
#include "kitchen/quant/w4a8_decode.h"
#include "w4a8_scaled_mm/hopper/sm90/config.h"
#include "w4a8_scaled_mm/hopper/sm90/finish.cuh"

namespace kitchen::w4a8::hopper {

// The stages of this block's piece of K. Asked for wherever they are wanted: kept in registers, they would be spilled.
struct Piece {
  int first_stage, stages;
  __device__ __forceinline__ explicit Piece(const Tiles& t)
      : first_stage(static_cast<int>(ptx::cluster_rank()) * t.stages_per_split),
        stages(min(t.stages_per_split, (t.K + kStage - 1) / kStage - first_stage)) {}
};

// 256 threads: the rows of all e4m3 bytes, every copy.
template <class Config>
__device__ __forceinline__ void fill_table(uint8_t* table, const float* codebook, int byte) {
  uint8_t* const row = table + byte * Config::kTableRow;
  if constexpr (Config::kBits == 4) {
    float levels[16];
    quant::load_levels(levels, codebook);
    const uint4 values = quant::decode_table_row(levels, quant::e4m3_to_float(byte));
#pragma unroll
    for (int i = 0; i < Config::kCopies; ++i) reinterpret_cast<uint4*>(row)[(i + byte) % Config::kCopies] = values;
  } else {
    const uint32_t scale = quant::negated_scale(byte);
#pragma unroll
    for (int i = 0; i < Config::kCopies; ++i) reinterpret_cast<uint32_t*>(row)[(i + byte) % Config::kCopies] = scale;
  }
}

// f(place in the ring, first column, first output and token of the tile) for each stage that this block multiplies, as soon as
// the place is `empty`.
template <class Config, int kStages, int kTurns, class F>
__device__ __forceinline__ void for_stages(const Tiles& t, uint64_t (&empty)[kStages], const uint64_t (&)[kTurns], const F& f) {
  const Piece piece(t);
  RingPosition<kStages, kTurns> at;
  uint32_t free = 1;  // the parity of `empty`: fresh barriers let the first round pass
  for (Walk<Config> walk(t); !walk.done(); walk.next()) {
    const int2 tile = walk.tile();
    for (int k = 0; k < piece.stages; ++k, at.advance()) {
      ptx::mbarrier_wait(&empty[at.stage], free);
      if (at.stage == kStages - 1) free ^= 1;
      f(at, (piece.first_stage + k) * kStage, tile);
    }
  }
}

// One thread: codes, which do not wait for the kernel in front.
template <class Config>
__device__ __forceinline__ void produce_codes(SharedStorage<Config>& shared, const KernelParams& p) {
  for_stages<Config>(p.tiles, shared.codes_empty, shared.codes_full, [&](const auto& at, int column, int2 tile) {
    uint8_t* const to = shared.codes[at.stage];
    uint64_t* const full = &shared.codes_full[at.turn];
    ptx::mbarrier_arrive_expect(full, Config::kCodeBytes);
    ptx::tma_load(to, &p.nibbles, column / 2, tile.x, full);
    if (Config::kBits == 6) ptx::tma_load(to + Config::kNibbleBytes, &p.tops, column / 4, tile.x, full);
  });
}

// One thread of another warp: tokens, which do.
template <class Config>
__device__ __forceinline__ void produce_tokens(SharedStorage<Config>& shared, const KernelParams& p) {
  ptx::griddep_wait();
  ptx::griddep_launch();
  for_stages<Config>(p.tiles, shared.tokens_empty, shared.tokens_full, [&](const auto& at, int column, int2 tile) {
    uint64_t* const full = &shared.tokens_full[at.turn];
    ptx::mbarrier_arrive_expect(full, p.tiles.box_tokens * kStage);
    ptx::tma_load(shared.tokens[at.stage], &p.tokens, column, tile.y, full);
  });
}

// The scales of a lane: for either of its rows and each stage that its warp takes, the e4m3 byte of 32 columns, or in groups of
// 16 those of the first and the last 16. Two stages are on their way. Beyond K they mean nothing: the tokens there are zeros.
template <class Config>
struct ScaleReader {
  const KernelParams& p;
  uint32_t row[2];  // the first scale of either
  int column;
  uint32_t ahead[2][2];

  __device__ __forceinline__ explicit ScaleReader(const KernelParams& params) : p(params) {}

  __device__ __forceinline__ void start(int first_row, int first_column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int n = first_row + static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) row[i] = static_cast<uint32_t>(min(n + 8 * i, p.tiles.N - 1)) * p.tiles.groups_per_row;
    column = first_column + 32 * (lane % 4);
    read(ahead[0]), read(ahead[1]);
  }
  // Of the next stage; kSlot alternates. NOTE: to move what is on its way from one register to another would be to wait for it.
  template <int kSlot>
  __device__ __forceinline__ void take(uint32_t (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = ahead[kSlot][i];
    read(ahead[kSlot]);
  }

 private:
  __device__ __forceinline__ void read(uint32_t (&scales)[2]) {
    if constexpr (Config::kPairs) {
      const uint32_t at = min(column >> 4, p.tiles.groups_per_row - 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = __ldg(reinterpret_cast<const uint16_t*>(p.s_rel + (row[i] + at)));
    } else {
      const uint32_t at = min(column >> p.tiles.group_log2, p.tiles.groups_per_row - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = __ldg(p.s_rel + (row[i] + at));
    }
    column += kStage * Config::kGroups;
  }
};

// What a thread decodes by: its copy of the decode table and, at 6 bits, quant::kMinusFirst.
template <class Config>
struct Decoding {
  const uint8_t* table;
  uint32_t minus_first = 0;

  __device__ __forceinline__ explicit Decoding(const SharedStorage<Config>& shared)
      : table(shared.table + threadIdx.x % Config::kCopies * (Config::kTableRow / Config::kCopies)) {
    if (Config::kBits == 6) minus_first = __shfl_sync(0xffffffffu, quant::kMinusFirst, 0);  // ptxas does not see through that
  }
};

// Rows of the decode table: of the two outputs of a lane, for the first or the last 16 of its columns.
template <class Config>
struct Rows {
  using Row = std::conditional_t<Config::kBits == 4, uint4, uint32_t>;
  Row row[2];

  template <int kHalf>
  __device__ __forceinline__ void load(const Decoding<Config>& by, const uint32_t (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t byte = !Config::kPairs ? scales[i] : kHalf == 0 ? scales[i] & 255 : scales[i] >> 8;
      row[i] = *reinterpret_cast<const Row*>(by.table + byte * Config::kTableRow);
    }
  }
};

// What a lane decodes of a stage: 32 neighbouring columns of outputs lane/4 and lane/4 + 8 of this warp's 16.
template <class Config>
struct Codes {
  uint4 nibbles[2];
  uint2 tops[2];  // 6 bits
  quant::SixCodes six[2];  // 6 bits: the 16 columns of two instructions

  __device__ __forceinline__ void load(const SharedStorage<Config>& shared, int stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32, q = lane % 4,
              row = static_cast<int>(threadIdx.x) % Config::kGroupThreads / 32 * 16 + lane / 4;
    const uint8_t* const codes = shared.codes[stage];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      nibbles[i] = *reinterpret_cast<const uint4*>(codes + (row + 8 * i) * 64 + 16 * q);
      if (Config::kBits == 6)
        tops[i] = *reinterpret_cast<const uint2*>(codes + Config::kNibbleBytes + (row + 8 * i) * 32 + 8 * q);
    }
  }

  __device__ __forceinline__ static uint32_t word(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
  }

  // The operand of instruction kStep of the stage.
  template <int kStep>
  __device__ __forceinline__ void decode(uint32_t (&a)[4], const Rows<Config>& rows, const Decoding<Config>& by) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Config::kBits == 4) {
        quant::look_up(rows.row[i], word(nibbles[i], kStep), a[i], a[2 + i]);
      } else {
        if constexpr (kStep == 0) six[i] = quant::SixCodes(nibbles[i].x, nibbles[i].y, tops[i].x);
        if constexpr (kStep == 2) six[i] = quant::SixCodes(nibbles[i].z, nibbles[i].w, tops[i].y);
        constexpr uint32_t kInvert = 0x7f7f7f7fu;  // 127 - u for every u in 0..254
        a[i] = six[i].decode_four(kStep % 2 * 2, rows.row[i], by.minus_first) ^ kInvert;
        a[2 + i] = six[i].decode_four(kStep % 2 * 2 + 1, rows.row[i], by.minus_first) ^ kInvert;
      }
    }
  }
};

// The operand of instruction `step` of a stage.
template <class Config>
__device__ __forceinline__ uint64_t token_descriptor(const SharedStorage<Config>& shared, int stage, int step) {
  const uint64_t first = ptx::descriptor_swizzle128(ptx::smem_address(shared.tokens[stage]));
  return first >> 32 << 32 | (static_cast<uint32_t>(first) + 2 * step);  // no carry: the low half holds an address of 14 bits
}

// This warp reads the stage no more.
__device__ __forceinline__ void release(uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&empty);
}

// Where a group stands in both rings.
template <class Config>
struct Reading {
  TokenPosition<Config> tokens;
  CodePosition<Config> codes;

  __device__ __forceinline__ explicit Reading(int group) {
    tokens.stage = tokens.turn = codes.stage = codes.turn = group;
  }
  // Codes of the group's next stage, to registers. NOTE: they are on their way when this returns, and an arrival does not wait
  // for loads: their place may be given back behind an instruction that has the first operand made of them, and not before.
  // Else the copy engine, where the producer waits for that very place, now and then writes rows that a load has yet to read.
  __device__ __forceinline__ int take_codes(Codes<Config>& to, SharedStorage<Config>& shared) {
    const int stage = codes.stage;
    ptx::mbarrier_wait(&shared.codes_full[codes.turn], codes.phase);
    to.load(shared, stage);
    codes.template advance<Config::kGroups>();
    return stage;
  }
  // The stage of its tokens, which are there.
  __device__ __forceinline__ int take_tokens(SharedStorage<Config>& shared) {
    const int stage = tokens.stage;
    ptx::mbarrier_wait(&shared.tokens_full[tokens.turn], tokens.phase);
    tokens.template advance<Config::kGroups>();
    return stage;
  }
};

// Starts an instruction and waits for the one before it: that held up the warp anyway, since operands lie in registers.
// Whatever follows runs beside the one just started.
template <class Config>
__device__ __forceinline__ void multiply(int (&acc)[Config::kTokens / 2], const uint32_t (&a)[4], uint64_t b) {
  ptx::wgmma_fence();  // NOTE: before each one, or ptxas adds it in a place that serialises them all (C7519, C7520)
  ptx::WgmmaS8Registers<Config::kTokens>::mma(acc, a, b, 1);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
}

// While an instruction runs, the operand of the next is decoded, from what was loaded one step earlier. Returns the stage of tokens;
// `taken` is that of the codes, before and after.
template <class Config, int kSlot, bool kLast>
__device__ __forceinline__ int multiply_stage(int (&acc)[Config::kTokens / 2], uint32_t (&a)[2][4], Codes<Config>& codes,
                                              Rows<Config> (&rows)[2], uint32_t (&scales)[2], SharedStorage<Config>& shared,
                                              Reading<Config>& at, ScaleReader<Config>& reader, int previous, int& taken,
                                              const Decoding<Config>& by) {
  const int stage = at.take_tokens(shared);
  multiply<Config>(acc, a[0], token_descriptor(shared, stage, 0));
  release(shared.codes_empty[taken]);  // a[0] was made of both loads of every lane: they have ended
  if (Config::kPairs) rows[1].template load<1>(by, scales);
  if (!kLast) reader.template take<kSlot>(scales);
  codes.template decode<1>(a[1], rows[0], by);
  if (!Config::kPairs) rows[1] = rows[0];
  if (previous >= 0) release(shared.tokens_empty[previous]);
  multiply<Config>(acc, a[1], token_descriptor(shared, stage, 1));
  codes.template decode<2>(a[0], rows[1], by);
  multiply<Config>(acc, a[0], token_descriptor(shared, stage, 2));
  Codes<Config> next;
  if constexpr (!kLast) {
    rows[0].template load<0>(by, scales);
    taken = at.take_codes(next, shared);
  }
  codes.template decode<3>(a[1], rows[1], by);
  multiply<Config>(acc, a[1], token_descriptor(shared, stage, 3));
  if constexpr (!kLast) {
    codes = next;
    codes.template decode<0>(a[0], rows[0], by);
  }
  return stage;
}

template <class Config>
__device__ __forceinline__ void multiply_stages(int (&acc)[Config::kTokens / 2], SharedStorage<Config>& shared,
                                                Reading<Config>& at, ScaleReader<Config>& reader, int count) {
  const Decoding<Config> by(shared);
  uint32_t a[2][4], scales[2];
  Codes<Config> codes;
  Rows<Config> rows[2];
  reader.template take<0>(scales);
  rows[0].template load<0>(by, scales);
  int taken = at.take_codes(codes, shared), previous = -1;
  codes.template decode<0>(a[0], rows[0], by);
  const auto one = [&](auto slot, auto last) {
    previous =
        multiply_stage<Config, slot.value, last.value>(acc, a, codes, rows, scales, shared, at, reader, previous, taken, by);
  };
#pragma unroll 1
  for (; count > 2; count -= 2) {
    one(std::integral_constant<int, 1>{}, std::false_type{});
    one(std::integral_constant<int, 0>{}, std::false_type{});
  }
  if (count == 2) one(std::integral_constant<int, 1>{}, std::false_type{});
  one(std::integral_constant<int, 0>{}, std::true_type{});
  ptx::wgmma_wait<0>();
  release(shared.tokens_empty[previous]);
}

template <class Config>
__device__ __forceinline__ void finish(const KernelParams& p, SharedStorage<Config>& shared, const TileScales<Config>& scales,
                                       const int (&acc)[Config::kTokens / 2], int2 tile) {
  const int rank = static_cast<int>(ptx::cluster_rank());
  if constexpr (Config::kWhole) {
    if (Config::kAlone || p.tiles.alone) return finish_alone<Config>(p, shared, scales, acc, tile, rank);
    finish_whole<Config>(p, shared, scales, acc, tile);
  } else if (p.tiles.splits > 1) {
    ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // every instruction that reads the stages has ended
    put_sums<Config, Config::kTokens / 8, 1>(reinterpret_cast<int*>(&shared), acc, 0, false);
    ptx::cluster_sync_diverged();
    switch (p.tiles.splits) {
      case 2: return finish_split<Config, 2>(p, shared, scales, tile, rank);
      case 3: return finish_split<Config, 3>(p, shared, scales, tile, rank);
      default: return finish_split<Config, 4>(p, shared, scales, tile, rank);
    }
  } else if (!p.tiles.result_mapped) {
    finish_chunks<Config>(p, shared, scales, acc, tile);
  } else {
    ptx::named_barrier_sync<1, Config::kConsumerThreads>();  // scales of columns and tokens are there
    p.epilogue.out_type == DType::kFloat16 ? finish_mapped<Config, true>(p, shared, scales, acc, tile)
                                           : finish_mapped<Config, false>(p, shared, scales, acc, tile);
  }
}

template <class Config>
__device__ __forceinline__ void consume(SharedStorage<Config>& shared, const KernelParams& p) {
  const int thread = static_cast<int>(threadIdx.x), group = thread / Config::kGroupThreads;
  // Of all stages of all tiles, in a row, a group takes every kGroups-th: so many of the first `count`.
  const auto taken = [&](int count) { return (count + Config::kGroups - 1 - group) / Config::kGroups; };
  int begun = 0;  // stages of the tiles before
  ScaleReader<Config> reader(p);
  const auto start_scales = [&](int2 tile) {
    reader.start(tile.x, (Piece(p.tiles).first_stage + taken(begun) * Config::kGroups + group - begun) * kStage);
  };
  Reading<Config> at(group);
  Walk<Config> walk(p.tiles);
  start_scales(walk.tile());
  // Others may still finish the tile before, by the other set of scales; these are seen after a barrier in `finish`.
  for (int set = 0; !walk.done(); set ^= 1) {
    const int2 tile = walk.tile();
    const int n = min(tile.x + thread, p.tiles.N - 1);
    TileScales<Config>& scales = shared.scales[set];
    if (thread < Config::kRows) scales.columns[thread] = make_float2(p.epilogue.b_scale[n], bias_of(p.epilogue, n));
    ptx::griddep_wait();
    if (thread < Config::kTokens) scales.tokens[thread] = p.epilogue.a_scale[min(tile.y + thread, p.tiles.M - 1)];
    int acc[Config::kTokens / 2];
#pragma unroll
    for (int i = 0; i < Config::kTokens / 2; ++i) acc[i] = 0;
    const int stages = Piece(p.tiles).stages, count = taken(begun + stages) - taken(begun);
    if (count > 0) multiply_stages<Config>(acc, shared, at, reader, count);  // none: fewer stages than groups
    begun += stages;
    walk.next();
    if (!walk.done()) start_scales(walk.tile());
    finish<Config>(p, shared, scales, acc, tile);
  }
  if (!Config::kWhole && thread % 128 == 0) ptx::tma_store_wait_read<0>();
}

// One thread.
template <int kCount>
__device__ __forceinline__ void init_barriers(uint64_t (&barriers)[kCount], int arrivals) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) ptx::mbarrier_init(&barriers[i], arrivals);
  ptx::mbarrier_init_fence();
}

template <class Config>
__global__ void __launch_bounds__(Config::kMostThreads, 1) w4a8_hopper(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  SharedStorage<Config>& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kProducerWarp = Config::kConsumerThreads / 32;
  if (warp == kProducerWarp || warp == kProducerWarp + 1) {  // whose first copies do not wait for the table
    constexpr int kReaders = Config::kGroupThreads / 32;
    if (threadIdx.x == Config::kConsumerThreads) {
      ptx::tma_prefetch_map(&p.nibbles);
      init_barriers(shared.codes_full, 1), init_barriers(shared.codes_empty, kReaders);
    } else if (threadIdx.x == Config::kConsumerThreads + 32) {
      ptx::tma_prefetch_map(&p.tokens);
      init_barriers(shared.tokens_full, 1), init_barriers(shared.tokens_empty, kReaders);
      if (Config::kWhole) ptx::receive_init(&shared.received);
    }
    __syncwarp();
    ptx::named_barrier_arrive<2, Config::kThreads>();
  } else {
    if (threadIdx.x < 256) fill_table<Config>(shared.table, p.codebook, threadIdx.x);
    ptx::named_barrier_sync<2, Config::kThreads>();
  }

  if (Config::kWhole && p.tiles.splits > 1) ptx::cluster_arrive_relaxed();  // this block has started
  if (warp >= kProducerWarp) {
    ptx::setmaxnreg_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == Config::kConsumerThreads) produce_codes<Config>(shared, p);
    if (threadIdx.x == Config::kConsumerThreads + 32) produce_tokens<Config>(shared, p);
    __syncwarp();
    if (p.tiles.splits > 1) Config::kWhole ? ptx::cluster_wait() : ptx::cluster_sync_diverged();
  } else {
    ptx::setmaxnreg_grow<Config::kConsumerRegisters>();
    consume<Config>(shared, p);
  }
  // A block must outlive the loads of its sums by the others.
  if (!Config::kWhole && p.tiles.splits > 1) ptx::cluster_meet_diverged();
}

}  // namespace kitchen::w4a8::hopper
