// The INT8 GEMM on FP16 tensor cores: a [M, K] and b [N, K] are int8 codes, widened to fp16 on their way to shared memory.
//
// acc[m, n] = sum_k a[m, k] * b[n, k] in fp32. A code is exact in fp16, a product in fp32, and so is every sum of at most
// 1024 products, an integer of at most 1024 * 128 * 128 = 2^24; after 1024 columns of its own a warp adds its fp32 sums to
// int32 totals and starts again. So the total is the INT8 GEMM's, to the bit, at any K and in any order of additions.
//
// A block computes one tile (config.h). Two stages in shared memory: while a stage is multiplied, the codes of the next one
// are on their way from global memory to registers; then they are widened and stored to the other stage (no cp.async before
// sm_80).
//
// Source: derived here; PTX ISA for wmma. Measured on an H200 alone: docs/kernels/fallback_volta.md.
#pragma once

#include "int8_scaled_mm/config.h"
#include "int8_scaled_mm/epilogue.cuh"
#include "int8_scaled_mm/int8_scaled_mm.h"
#include "int8_scaled_mm/operands.cuh"
#include "kitchen/mma/wmma_f16.h"

namespace kitchen::volta {

// Where a block works.
struct BlockTile {
  int64_t m, n;

  template <class Config>
  __device__ __forceinline__ static BlockTile of(const ScaledMmParams& p) {
    const unsigned tiles_m = static_cast<unsigned>((p.M + Config::kTileM - 1) / Config::kTileM);
    const unsigned tiles_n = static_cast<unsigned>((p.N + Config::kTileN - 1) / Config::kTileN);
    const unsigned group = blockIdx.x / (p.raster_group * tiles_n), first = group * p.raster_group;
    const unsigned in_group = blockIdx.x - first * tiles_n, rows = min(static_cast<unsigned>(p.raster_group), tiles_m - first);
    return {int64_t{first + in_group % rows} * Config::kTileM, int64_t{in_group / rows} * Config::kTileN};
  }
};

template <class Config>
struct Sums {
  mma::WmmaF16::Accumulator part[Config::kFragsM][Config::kFragsN];  // fp32, of at most 1024 columns
  int total[Config::kFragsM][Config::kFragsN][8];

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < Config::kFragsM * Config::kFragsN * 8; ++i) {
      float& x = part[i / 8 / Config::kFragsN][i / 8 % Config::kFragsN].x[i % 8];
      total[i / 8 / Config::kFragsN][i / 8 % Config::kFragsN][i % 8] += __float2int_rn(x);
      x = 0.0f;
    }
  }
};

// The warp's steps of one stage.
template <class Config>
__device__ __forceinline__ void multiply_stage(Sums<Config>& sums, uint32_t a_smem, uint32_t b_smem) {
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    mma::WmmaF16::Operand b[Config::kFragsN];
#pragma unroll
    for (int n = 0; n < Config::kFragsN; ++n) {
      mma::WmmaF16::load_b(b[n], b_smem + 32 * (n * Config::kPitch + step), Config::kPitch);
    }
#pragma unroll
    for (int m = 0; m < Config::kFragsM; ++m) {
      mma::WmmaF16::Operand a;
      mma::WmmaF16::load_a(a, a_smem + 32 * (m * Config::kPitch + step), Config::kPitch);
#pragma unroll
      for (int n = 0; n < Config::kFragsN; ++n) mma::WmmaF16::multiply(sums.part[m][n], a, b[n]);
    }
  }
}

struct Warp {
  int m, n, k;  // of the warp in its tile: first row, first column, which of the kWarpsK

  template <class Config>
  __device__ __forceinline__ static Warp of() {
    const int warp = threadIdx.x / 32;
    return {warp % Config::kWarpsM * Config::kFragsM * 16, warp / Config::kWarpsM % Config::kWarpsN * Config::kFragsN * 16,
            warp / (Config::kWarpsM * Config::kWarpsN)};
  }
};

template <class Config, class Element, bool kFlush>
__device__ __forceinline__ void multiply_tile(Sums<Config>& sums, const ScaledMmParams& p, const BlockTile& tile,
                                              const Warp& warp, uint8_t* shared) {
  constexpr int kStageBytesA = 2 * Config::kPitch * Config::kTileM;
  const int K = static_cast<int>(p.K);
  OperandRows<Config, Element, Config::kTileM> a(p.a, p.a_pitch, p.M, K, tile.m, p.aligned);
  OperandRows<Config, Element, Config::kTileN> b(p.b, p.b_pitch, p.N, K, tile.n, p.aligned);
  const int warp_k = 32 * Config::kSteps * warp.k;  // bytes of a row before the warp's steps
  const uint32_t a_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 2 * Config::kPitch * warp.m + warp_k;
  const uint32_t b_smem = a_smem + kStageBytesA + 2 * Config::kPitch * (warp.n - warp.m);
  const int k_tiles = (K + Config::kTileK - 1) / Config::kTileK;
  // Codes wait a whole stage in registers; fp16 operands, which need twice the registers, are loaded in the stage that
  // stores them.
  constexpr int kAhead = Element::kBytes == 1 ? 2 : 1;
  auto fetch = [&](int k_tile) {
    a.fetch(k_tile);
    b.fetch(k_tile);
  };
  auto put = [&](int stage) {
    a.put(shared + stage * Config::kStageBytes);
    b.put(shared + stage * Config::kStageBytes + kStageBytesA);
  };
  fetch(0);
  {
    const auto first_a = a;  // so that the loads of the second stage need not wait for those of the first
    const auto first_b = b;
    if (kAhead == 2) fetch(1);
    first_a.put(shared);
    first_b.put(shared + kStageBytesA);
  }
  __syncthreads();
  int until_flush = Config::kFlushStages;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
    const int stage = k_tile & 1;
    const bool more = k_tile + 1 < k_tiles;
    if (kAhead == 1 && more) fetch(k_tile + 1);
    multiply_stage<Config>(sums, a_smem + stage * Config::kStageBytes, b_smem + stage * Config::kStageBytes);
    if (kFlush && --until_flush == 0) {
      sums.flush();
      until_flush = Config::kFlushStages;
    }
    if (more) {
      put(stage ^ 1);  // all warps have read it before the last barrier
      if (kAhead == 2) fetch(k_tile + 2);
    }
    __syncthreads();
  }
  if (kFlush) sums.flush();
}

// Fragments to rows, through shared memory, kPassFrags rows of fragments of every warp at a time.
template <class Config, class Finish>
__device__ __forceinline__ void store_tile(Sums<Config>& sums, const BlockTile& tile, const Warp& warp, uint8_t* shared,
                                           Finish& finish) {
  constexpr int kThreadsPerRow = Config::kTileN / kColumns, kRowsAtOnce = Config::kThreads / kThreadsPerRow;
  constexpr int kPassFrags = Finish::kFewRegisters ? 1 : Config::kPassFrags;
  constexpr int kWarpRows = 16 * kPassFrags, kRows = Config::kWarpsM * kWarpRows;  // of a warp and of the tile in a pass
  constexpr int kThreadRows = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;  // of a thread in a pass
  constexpr int kUnroll = Finish::kFewRegisters ? 1 : kThreadRows;
  static_assert(Config::kThreads % kThreadsPerRow == 0 && Config::kFragsM % kPassFrags == 0, "threads and passes are whole");
  const int* const exchange = reinterpret_cast<const int*>(shared);
  const int warp_row = warp.k * kRows + warp.m / (16 * Config::kFragsM) * kWarpRows;
  const uint32_t mine =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 4 * (warp_row * Config::kExchangePitch + warp.n);
  const int first_row = threadIdx.x / kThreadsPerRow, column = threadIdx.x % kThreadsPerRow * kColumns;
#pragma unroll
  for (int first = 0; first < Config::kFragsM; first += kPassFrags) {
    if (first > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kPassFrags * Config::kFragsN; ++i) {
      const int m = i / Config::kFragsN, n = i % Config::kFragsN;
      finish.put(mine + 64 * (m * Config::kExchangePitch + n), sums, first + m, n, Config::kExchangePitch);
    }
    auto row_of = [&](int i) {  // of the output; i: of this thread's rows in the pass
      const int row = first_row + i * kRowsAtOnce;
      return tile.m + row / kWarpRows * Config::kFragsM * 16 + first * 16 + row % kWarpRows;
    };
    float row_scale[kThreadRows];  // on their way while the sums change places
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) row_scale[i] = finish.load_row(row_of(i));
    __syncthreads();
#pragma unroll kUnroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
      int acc[kColumns] = {};
#pragma unroll
      for (int k = 0; k < Config::kWarpsK; ++k) {
        const int at = (k * kRows + row) * Config::kExchangePitch + column;
        const int4 low = *reinterpret_cast<const int4*>(exchange + at);
        const int4 high = *reinterpret_cast<const int4*>(exchange + at + 4);
        const int words[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < kColumns; ++e) acc[e] += words[e];
      }
      finish.store(row_of(i), row_scale[i], acc);
    }
  }
}

// The totals travel as they are; scales, bias and residual follow.
template <class Config>
struct FinishCodes {
  static constexpr bool kFewRegisters = false;
  ScaleEpilogue epilogue;

  __device__ __forceinline__ FinishCodes(const ScaledMmParams& p, int64_t column) : epilogue(p, column) {}
  __device__ __forceinline__ void put(uint32_t address, const Sums<Config>& sums, int m, int n, int pitch) const {
    mma::WmmaF16::Accumulator bits;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits.x[i] = __int_as_float(sums.total[m][n][i]);
    mma::WmmaF16::store(address, bits, pitch);
  }
  __device__ __forceinline__ float load_row(int64_t row) const {
    return row < epilogue.p.M ? epilogue.p.a_scale[row] : 0.0f;
  }
  __device__ __forceinline__ void store(int64_t row, float row_scale, const int (&acc)[kColumns]) const {
    epilogue.store(row, row_scale, acc);
  }
};

// The plain GEMM: fp32 sums, rounded to fp16. N a multiple of 8.
template <class Config>
struct FinishHalves {
  static constexpr bool kFewRegisters = true;  // two blocks then fit an SM of an H200: the better yardstick
  const ScaledMmParams& p;
  int64_t column;

  __device__ __forceinline__ FinishHalves(const ScaledMmParams& params, int64_t column) : p(params), column(column) {}
  __device__ __forceinline__ void put(uint32_t address, const Sums<Config>& sums, int m, int n, int pitch) const {
    mma::WmmaF16::store(address, sums.part[m][n], pitch);
  }
  __device__ __forceinline__ float load_row(int64_t) const { return 1.0f; }
  __device__ __forceinline__ void store(int64_t row, float, const int (&acc)[kColumns]) const {
    if (row >= p.M || column >= p.N) return;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack_rounded(__int_as_float(acc[2 * i]), __int_as_float(acc[2 * i + 1]), DType::kFloat16);
    }
    uint16_t* const to = static_cast<uint16_t*>(p.out) + row * p.N + column;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <class Config, class Element, bool kFlush, class Finish>
__device__ __forceinline__ void compute_tile(const ScaledMmParams& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto tile = BlockTile::of<Config>(p);
  const auto warp = Warp::of<Config>();
  Sums<Config> sums = {};
  multiply_tile<Config, Element, kFlush>(sums, p, tile, warp, shared);
  Finish finish(p, tile.n + threadIdx.x % (Config::kTileN / kColumns) * kColumns);
  store_tile<Config>(sums, tile, warp, shared, finish);
}

}  // namespace kitchen::volta
