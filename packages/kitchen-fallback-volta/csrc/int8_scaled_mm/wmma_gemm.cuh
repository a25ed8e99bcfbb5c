// The INT8 GEMM on FP16 tensor cores: a [M, K] and b [N, K] are int8 codes, widened to fp16 on their way to shared memory.
//
// acc[m, n] = sum_k a[m, k] * b[n, k] in fp32, flushed to int32 totals at least every 1022 columns (Sums says why that is
// exact). So the total is the INT8 GEMM's, to the bit, at any K and in any order of additions.
//
// A block computes one tile (config.h). Two stages in shared memory: while a stage is multiplied, the codes of the next one
// but one are on their way from global memory to registers, and those of the next one are widened and stored to the other
// stage (no cp.async before sm_80). In the large tile a warp loads its fragments half a step before it multiplies them, over
// the barrier too, so that the tensor cores need not wait for shared memory although one block has the SM for itself.
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

// The sums of a warp, exact integers: total = 2^16 * units + part.
//
// A code is exact in fp16 and a product, at most 2^14, in fp32. A flush leaves at most 2^15 of a part; 1022 columns later it
// is at most 2^15 + 1022 * 2^14 = 2^24, and so is every partial sum on the way: fp32 holds them all. What a flush takes off
// is counted in units of 2^16, two 16-bit counters a word. K is at most 131071, so a total fits int32; and no flush comes after
// column 131008, so a counter is at most 32752 and fits its 16 bits.
template <class Config>
struct Sums {
  mma::WmmaF16::Accumulator part[Config::kFragsM][Config::kFragsN];
  uint32_t units[Config::kFragsM][Config::kFragsN][4];  // of elements 2i and 2i + 1: low + (high << 16)

  __device__ __forceinline__ void flush() {
    constexpr float kUnit = 65536.0f, kToInteger = 12582912.0f;  // 1.5 * 2^23: an fp32 of that size has integers alone,
    constexpr uint32_t kIntegerBits = 0x4B400000u;                // and its bits are these plus the integer
#pragma unroll
    for (int i = 0; i < Config::kFragsM * Config::kFragsN * 4; ++i) {
      const int m = i / 4 / Config::kFragsN, n = i / 4 % Config::kFragsN;
      float& low = part[m][n].x[2 * (i % 4)];
      float& high = part[m][n].x[2 * (i % 4) + 1];
      const float low_units = __fmaf_rn(low, 1.0f / kUnit, kToInteger), high_units = __fmaf_rn(high, 1.0f / kUnit, kToInteger);
      units[m][n][i % 4] += (__float_as_uint(high_units) << 16) + (__float_as_uint(low_units) - kIntegerBits);
      low = __fmaf_rn(__fadd_rn(low_units, -kToInteger), -kUnit, low);
      high = __fmaf_rn(__fadd_rn(high_units, -kToInteger), -kUnit, high);
    }
  }

  __device__ __forceinline__ int total(int m, int n, int i) const {
    const uint32_t word = units[m][n][i / 2];
    const uint32_t low = static_cast<uint32_t>(static_cast<int32_t>(word << 16) >> 16);
    const uint32_t counted = i % 2 == 0 ? word << 16 : word - low;
    return static_cast<int>(counted + static_cast<uint32_t>(__float2int_rn(part[m][n].x[i])));
  }
};

struct Warp {
  int m, n, k;  // of the warp in its tile: first row, first column, which of the kWarpsK

  template <class Config>
  __device__ __forceinline__ static Warp of() {
    const int warp = threadIdx.x / 32;
    return {warp % Config::kWarpsM * Config::kFragsM * 16, warp / Config::kWarpsM % Config::kWarpsN * Config::kFragsN * 16,
            warp / (Config::kWarpsM * Config::kWarpsN)};
  }
};

// The stages in shared memory, and how they are filled.
template <class Config, class Element, bool kWhole>
struct Stages {
  OperandRows<Config, Element, Config::kTileM>& a;
  OperandRows<Config, Element, Config::kTileN>& b;
  uint8_t* shared;
  int k_tiles;

  // What follows the last stage is zeros, or where the tile is whole the codes that were fetched last: nothing reads it.
  __device__ __forceinline__ void fetch(int k_tile) {
    if (kWhole && k_tile >= k_tiles) return;
    a.template fetch<kWhole>(k_tile);
    b.template fetch<kWhole>(k_tile);
  }
  __device__ __forceinline__ void put(int stage) const {
    a.put(shared + stage * Config::kStageBytes);
    b.put(shared + stage * Config::kStageBytes + 2 * Config::kPitch * Config::kTileM);
  }
};

// Where a warp reads its fragments of a stage, as addresses in shared memory.
template <class Config>
struct Fragments {
  static constexpr int kHalf = Config::kFragsN / 2;
  uint32_t a_smem, b_smem;

  __device__ __forceinline__ Fragments(const Warp& warp, const uint8_t* shared) {
    const int warp_k = 32 * Config::kSteps * warp.k;  // bytes of a row before the warp's steps
    a_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 2 * Config::kPitch * warp.m + warp_k;
    b_smem = a_smem + 2 * Config::kPitch * (Config::kTileM + warp.n - warp.m);
  }
  template <int kCount>
  __device__ __forceinline__ void load_a(mma::WmmaF16::Operand (&a)[kCount], int stage, int step, int first = 0) const {
#pragma unroll
    for (int m = 0; m < kCount; ++m) mma::WmmaF16::load_a(a[m], a_smem + place(stage, step, first + m), Config::kPitch);
  }
  template <int kCount>
  __device__ __forceinline__ void load_b(mma::WmmaF16::Operand (&b)[kCount], int stage, int step, int first = 0) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) mma::WmmaF16::load_b(b[n], b_smem + place(stage, step, first + n), Config::kPitch);
  }

 private:
  __device__ __forceinline__ static int place(int stage, int step, int fragment) {
    return stage * Config::kStageBytes + 32 * (fragment * Config::kPitch + step);
  }
};

// Sums of columns first, ... of the warp's fragments.
template <class Config, int kCount>
__device__ __forceinline__ void multiply(Sums<Config>& sums, const mma::WmmaF16::Operand (&a)[Config::kFragsM],
                                         const mma::WmmaF16::Operand (&b)[kCount], int first) {
#pragma unroll
  for (int m = 0; m < Config::kFragsM; ++m) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) mma::WmmaF16::multiply(sums.part[m][first + n], a[m], b[n]);
  }
}

// The codes of two stages on their way, fragments half a step.
template <class Config, class Element, bool kWhole>
__device__ __forceinline__ void multiply_ahead(Sums<Config>& sums, Stages<Config, Element, kWhole>& stages,
                                               const Fragments<Config>& fragments) {
  constexpr int kHalf = Fragments<Config>::kHalf;
  mma::WmmaF16::Operand a[2][Config::kFragsM], lower[kHalf], upper[kHalf];  // a: of even and of odd steps
  stages.fetch(0);
  stages.put(0);
  stages.fetch(1);
  __syncthreads();
  fragments.load_a(a[0], 0, 0);
  fragments.load_b(lower, 0, 0);
  // Warps w and w + 4, which share a scheduler, flush at different times.
  int until_flush = threadIdx.x < Config::kThreads / 2 ? Config::kFlushStages : Config::kFlushStages / 2;
  for (int k_tile = 0; k_tile < stages.k_tiles; ++k_tile) {
    const int stage = k_tile & 1;
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const bool last = step + 1 == Config::kSteps;
      fragments.load_b(upper, stage, step, kHalf);
      multiply<Config>(sums, a[step % 2], lower, 0);
      if (step == 1) {
        stages.put(stage ^ 1);  // all warps have read it before the last barrier
        stages.fetch(k_tile + 2);
      }
      if (last) __syncthreads();
      fragments.load_a(a[1 - step % 2], last ? stage ^ 1 : stage, last ? 0 : step + 1);
      fragments.load_b(lower, last ? stage ^ 1 : stage, last ? 0 : step + 1);
      multiply<Config>(sums, a[step % 2], upper, kHalf);
    }
    if (--until_flush == 0) {
      sums.flush();
      until_flush = Config::kFlushStages;
    }
  }
  __syncthreads();  // the fragments of the stage after the last one have been read
}

// The small tiles, and the plain GEMM of any. Codes wait a whole stage in registers; fp16 operands, which need twice the
// registers, are loaded in the stage that stores them.
template <class Config, class Element, bool kWhole>
__device__ __forceinline__ void multiply_simple(Sums<Config>& sums, Stages<Config, Element, kWhole>& stages,
                                                const Fragments<Config>& fragments) {
  constexpr bool kCodes = Element::kBytes == 1;
  stages.fetch(0);
  stages.put(0);
  if (kCodes) stages.fetch(1);
  __syncthreads();
  int until_flush = Config::kFlushStages;
  for (int k_tile = 0; k_tile < stages.k_tiles; ++k_tile) {
    const int stage = k_tile & 1;
    const bool more = k_tile + 1 < stages.k_tiles;
    if (!kCodes && more) stages.fetch(k_tile + 1);
#pragma unroll
    for (int step = 0; step < Config::kSteps; ++step) {
      mma::WmmaF16::Operand b[Config::kFragsN];
      fragments.load_b(b, stage, step);
#pragma unroll
      for (int m = 0; m < Config::kFragsM; ++m) {
        mma::WmmaF16::Operand a[1];
        fragments.load_a(a, stage, step, m);
#pragma unroll
        for (int n = 0; n < Config::kFragsN; ++n) mma::WmmaF16::multiply(sums.part[m][n], a[0], b[n]);
      }
    }
    if (kCodes && --until_flush == 0) {
      sums.flush();
      until_flush = Config::kFlushStages;
    }
    if (more) {
      stages.put(stage ^ 1);  // all warps have read it before the last barrier
      if (kCodes) stages.fetch(k_tile + 2);
    }
    __syncthreads();
  }
}

template <class Config, class Element, bool kWhole>
__device__ __forceinline__ void multiply_tile(Sums<Config>& sums, OperandRows<Config, Element, Config::kTileM>& a,
                                              OperandRows<Config, Element, Config::kTileN>& b, const Warp& warp,
                                              uint8_t* shared) {
  Stages<Config, Element, kWhole> stages{a, b, shared, (a.K + Config::kTileK - 1) / Config::kTileK};
  const Fragments<Config> fragments(warp, shared);
  if constexpr (Config::kFragmentsAhead && Element::kBytes == 1) {
    multiply_ahead(sums, stages, fragments);
  } else {
    multiply_simple(sums, stages, fragments);
  }
}

// Fragments to rows, through shared memory, kPassFrags rows of fragments of every warp at a time.
template <class Config, class Finish>
__device__ __forceinline__ void store_tile(Sums<Config>& sums, const BlockTile& tile, const Warp& warp, uint8_t* shared,
                                           Finish& finish) {
  constexpr int kThreadsPerRow = Config::kTileN / kColumns, kRowsAtOnce = Config::kThreads / kThreadsPerRow;
  constexpr int kPassFrags = Finish::kScaled ? Config::kPassFrags : 1;
  constexpr int kWarpRows = 16 * kPassFrags, kRows = Config::kWarpsM * kWarpRows;  // of a warp and of the tile in a pass
  static_assert(Config::kThreads % kThreadsPerRow == 0 && Config::kFragsM % kPassFrags == 0, "threads and passes are whole");
  static_assert(Config::kTileM <= Config::kThreads, "a thread brings a scale");
  const int* const exchange = reinterpret_cast<const int*>(shared);
  float* const row_scale = reinterpret_cast<float*>(shared + Config::kExchangeBytes);
  const int warp_row = warp.k * kRows + warp.m / (16 * Config::kFragsM) * kWarpRows;
  const uint32_t mine =
      static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 4 * (warp_row * Config::kExchangePitch + warp.n);
  const int first_row = threadIdx.x / kThreadsPerRow, column = threadIdx.x % kThreadsPerRow * kColumns;
  if (Finish::kScaled && threadIdx.x < Config::kTileM) row_scale[threadIdx.x] = finish.load_row(tile.m + threadIdx.x);
#pragma unroll
  for (int first = 0; first < Config::kFragsM; first += kPassFrags) {
    if (first > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < kPassFrags * Config::kFragsN; ++i) {
      const int m = i / Config::kFragsN, n = i % Config::kFragsN;
      finish.put(mine + 64 * (m * Config::kExchangePitch + n), sums, first + m, n, Config::kExchangePitch);
    }
    __syncthreads();
#pragma unroll 1
    for (int row = first_row; row < kRows; row += kRowsAtOnce) {
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
      const int in_tile = row / kWarpRows * Config::kFragsM * 16 + first * 16 + row % kWarpRows;
      finish.store(tile.m + in_tile, Finish::kScaled ? row_scale[in_tile] : 1.0f, acc);
    }
  }
}

// The totals travel as they are; scales, bias and residual follow.
template <class Config>
struct FinishCodes {
  static constexpr bool kScaled = true;
  ScaleEpilogue epilogue;

  __device__ __forceinline__ FinishCodes(const ScaledMmParams& p, int64_t column) : epilogue(p, column) {}
  __device__ __forceinline__ void put(uint32_t address, const Sums<Config>& sums, int m, int n, int pitch) const {
    mma::WmmaF16::Accumulator bits;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits.x[i] = __int_as_float(sums.total(m, n, i));
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
  static constexpr bool kScaled = false;
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

template <class Config, class Element, class Finish>
__device__ __forceinline__ void compute_tile(const ScaledMmParams& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto tile = BlockTile::of<Config>(p);
  const auto warp = Warp::of<Config>();
  const int K = static_cast<int>(p.K);
  OperandRows<Config, Element, Config::kTileM> a(p.a, p.a_pitch, p.M, K, tile.m, p.aligned);
  OperandRows<Config, Element, Config::kTileN> b(p.b, p.b_pitch, p.N, K, tile.n, p.aligned);
  Sums<Config> sums = {};
  if (a.whole && b.whole && K % Config::kTileK == 0) {  // a loop without the code for ragged edges fits the instruction cache
    multiply_tile<Config, Element, true>(sums, a, b, warp, shared);
  } else {
    multiply_tile<Config, Element, false>(sums, a, b, warp, shared);
  }
  Finish finish(p, tile.n + threadIdx.x % (Config::kTileN / kColumns) * kColumns);
  store_tile<Config>(sums, tile, warp, shared, finish);
}

}  // namespace kitchen::volta
