// A row in registers: x is read once, 16 bytes a load.
//
// Work is cut into tiles of 512 columns; a warp holds kTiles neighbouring ones, a CTA (or a cluster of CTAs) a row.
//   layout A: lane l holds columns 16 l .. 16 l + 15 of each tile: two 16-byte loads of a half type, and the butterflies of
//             strides 1 and 4 in registers.
//   layout B: a lane holds all 16 columns of equal remainder mod 16 of a block of 256 (one tile), or both such sets of an even
//             and the next odd remainder (two tiles): strides 16 and 64 in registers.
// One pass through shared memory goes from A to B (wide stores, 4- or 8-byte reads, no bank conflicts): shuffles would take 3
// a value and stage. Codes of layout B are packed four to a word and transposed among 4 (or 2) lanes, so that a store
// instruction writes whole sectors.
// All maths is fp32. The absolute maximum goes lane -> warp (redux) -> CTA (shared memory) -> cluster (remote stores).
#pragma once

#include "kitchen/common/to_float.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/cp_async.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/math.h"
#include "kitchen/quant/apply_input_act.h"
#include "kitchen/quant/hadamard.h"
#include "kitchen/quant/int8_codes.h"
#include "quantize_int8_rowwise/code_order.cuh"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace kitchen::int8 {

constexpr int kTileColumns = 512;
constexpr int kLaneColumns = 16;
constexpr int kMaxCluster = 8;
constexpr int kMaxWarps = 16;       // of a CTA with two tiles a warp
constexpr int kMaxWarpsFast = 12;   // of the fast kernels, of which two CTAs fit an SM by their registers, and of fp32
constexpr int kMaxWarpsSmall = 24;  // with one tile a warp
constexpr int kStageBytes = 1024;   // a tile of a 2-byte type, of one half
constexpr int kAnyGroup = -1;       // the rotation group is read from the parameters

// A tile of fp32 in shared memory. Row r (16 columns) starts at word 16 r + 4 (r / 2), and 16 words later in the upper half:
// 8 lanes that store 16 bytes each, and 32 lanes that read one word each, then touch different banks.
constexpr int kExchangeWords = 592;
__device__ __forceinline__ int exchange_word(int row) { return 16 * row + 4 * (row / 2) + (row >= 16 ? 16 : 0); }

template <class T_, quant::InputAct kAct_, int kGroup_, int kTiles_, bool kExact_>
struct RowConfig {
  using T = T_;
  static constexpr quant::InputAct kAct = kAct_;
  static constexpr int kGroup = kGroup_;
  static constexpr int kTiles = kTiles_;
  static constexpr bool kExact = kExact_;  // K is what the CTA's warps hold: no column needs a check
  static constexpr bool kAnyAct = kAct == quant::InputAct::kAny;
  static constexpr bool kPair = kAnyAct || quant::is_pair(kAct);
  static constexpr int kLoads = kLaneColumns * sizeof(T) / 16;  // 16-byte loads a lane, tile and half
  static constexpr int kValues = kTiles * kLaneColumns;
  static constexpr bool kFast = kTiles == 2 && !kAnyAct;
  static constexpr bool kFewWarps = (kFast && !kPair) || sizeof(T) == 4;  // fp32: its raw tiles take twice the registers
  static constexpr int kMaxThreads = 32 * (kTiles == 1 ? kMaxWarpsSmall : kFewWarps ? kMaxWarpsFast : kMaxWarps);
  static constexpr int kMinCtas = kFast ? 2 : 1;
  static constexpr int kHalves = kPair ? 2 : 1;
  static constexpr int kStageChunks = kTiles * kHalves * 32 * kLoads;  // 16-byte chunks that a warp stages for a row
  static_assert(kTiles == 1 || kTiles == 2, "the exchange of layouts is written for one and two tiles");
  static_assert(kGroup == kAnyGroup || kGroup == 0 || kGroup == 256, "other groups are read from the parameters");
};

// What was loaded for one tile and not converted yet. `second` is the other half of a pair.
template <class C>
struct RawTile {
  uint4 first[C::kLoads];
  uint4 second[C::kPair ? C::kLoads : 1];
};

template <class C>
__device__ __forceinline__ bool reads_pair(const QuantizeParams& p) {
  return C::kAnyAct ? quant::is_pair(p.act) : C::kPair;
}

template <class C>
__device__ __forceinline__ bool holds_column(const QuantizeParams& p, int column) {
  return C::kExact || column < p.K;
}

// x: the lane's first column of tile 0 in this row; `column` its number. Plain loads, not __ldg: in a programmatic launch the kernel in
// front may still be writing x when this grid starts, and the read-only path is for what no one writes while a grid lives.
template <class C>
__device__ __forceinline__ void load_tiles(RawTile<C> (&raw)[C::kTiles], const QuantizeParams& p, const typename C::T* x, int column) {
#pragma unroll
  for (int t = 0; t < C::kTiles; ++t) {
    if (!holds_column<C>(p, column + t * kTileColumns)) continue;
    const uint4* first = reinterpret_cast<const uint4*>(x + t * kTileColumns);
#pragma unroll
    for (int i = 0; i < C::kLoads; ++i) raw[t].first[i] = first[i];
    if (reads_pair<C>(p)) {
      const uint4* second = reinterpret_cast<const uint4*>(x + t * kTileColumns + p.K);
#pragma unroll
      for (int i = 0; i < (C::kPair ? C::kLoads : 1); ++i) raw[t].second[i] = second[i];
    }
  }
}

template <class T>
__device__ __forceinline__ void unpack16(const uint4* raw, float* v) {
  constexpr int kPer = Word<T>::kValues;
#pragma unroll
  for (int i = 0; i < kLaneColumns / (4 * kPer); ++i) {
    Word<T>::unpack(raw[i].x, v + 4 * kPer * i);
    Word<T>::unpack(raw[i].y, v + 4 * kPer * i + kPer);
    Word<T>::unpack(raw[i].z, v + 4 * kPer * i + 2 * kPer);
    Word<T>::unpack(raw[i].w, v + 4 * kPer * i + 3 * kPer);
  }
}

// fp32 values of a tile after the activation, layout A; rms_norm is completed by scale_by_rms. Columns past K are 0.
template <class C>
__device__ __forceinline__ void convert_tile(float* v, const RawTile<C>& raw, const QuantizeParams& p, int column) {
  if (!holds_column<C>(p, column)) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) v[i] = 0.0f;
    return;
  }
  unpack16<typename C::T>(raw.first, v);
  if constexpr (C::kPair) {
    float w[kLaneColumns];
    if (reads_pair<C>(p)) unpack16<typename C::T>(raw.second, w);
    if (!C::kAnyAct || p.act == quant::InputAct::kSwiglu) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) v[i] = quant::swiglu(v[i], w[i]);
    } else if (p.act == quant::InputAct::kGeluTanh) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) v[i] = quant::gelu_tanh(v[i]);
    } else if (p.act == quant::InputAct::kSitu) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) v[i] = quant::situ(v[i], w[i]);
    }
  }
}

template <class C>
__device__ __forceinline__ void convert_tiles(float (&v)[C::kValues], const RawTile<C> (&raw)[C::kTiles], const QuantizeParams& p,
                                              int column) {
#pragma unroll
  for (int t = 0; t < C::kTiles; ++t) convert_tile<C>(v + t * kLaneColumns, raw[t], p, column + t * kTileColumns);
}

// Layout A (v[16 t + i]: column 16 lane + i of tile t) -> layout B.
//   one tile:  v[j] is column (lane & 15) + 16 j of the tile's block lane / 16
//   two tiles: v[2 j + i] is column 2 (lane & 7) + i + 16 j of the pair's block lane / 8
template <int kTiles>
__device__ __forceinline__ void exchange(float (&v)[kTiles * kLaneColumns], float* words, int lane) {
  __syncwarp();  // the reads of the row before
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float4* store = reinterpret_cast<float4*>(words + t * kExchangeWords + exchange_word(lane));
#pragma unroll
    for (int i = 0; i < 16; i += 4) store[i / 4] = make_float4(v[16 * t + i], v[16 * t + i + 1], v[16 * t + i + 2], v[16 * t + i + 3]);
  }
  __syncwarp();
  if constexpr (kTiles == 1) {
    const float* load = words + (lane & 15) + (lane >= 16 ? exchange_word(16) : 0);
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = load[exchange_word(j)];
  } else {
    const float* load = words + 2 * (lane & 7) + (lane & 8 ? exchange_word(16) : 0) + (lane & 16 ? kExchangeWords : 0);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(load + exchange_word(j));
      v[2 * j] = pair.x;
      v[2 * j + 1] = pair.y;
    }
  }
}

template <class C>
__device__ __forceinline__ int rotation_group(const QuantizeParams& p) {
  return C::kGroup == kAnyGroup ? p.group : C::kGroup;
}

// Whether the values end in layout B.
template <class C>
__device__ __forceinline__ bool ends_in_layout_b(const QuantizeParams& p) {
  return rotation_group<C>(p) >= 64;
}

template <class C>
__device__ __forceinline__ void rotate(float (&v)[C::kValues], const QuantizeParams& p, float* words, int lane) {
  const int group = rotation_group<C>(p);
  if (group >= 4) quant::butterflies<1>(v);
  if (group >= 16) quant::butterflies<4>(v);
  if (group >= 64) {
    exchange<C::kTiles>(v, words, lane);
    quant::butterflies<C::kTiles>(v);
  }
  if (group >= 256) quant::butterflies<4 * C::kTiles>(v);
}

// The byte at position j of lane i of each 4 lanes goes to position i of lane j.
__device__ __forceinline__ uint32_t transpose_bytes(uint32_t word, int lane) {
  const uint32_t next = __shfl_xor_sync(0xffffffffu, word, 1);
  word = ptx::pick_bytes(word, next, lane & 1 ? 0x3715 : 0x6240);
  const uint32_t over = __shfl_xor_sync(0xffffffffu, word, 2);
  return ptx::pick_bytes(word, over, lane & 2 ? 0x3276 : 0x5410);
}

// The same for the two halves of a word and each 2 lanes.
__device__ __forceinline__ uint32_t transpose_halves(uint32_t word, int lane) {
  const uint32_t next = __shfl_xor_sync(0xffffffffu, word, 1);
  return ptx::pick_bytes(word, next, lane & 1 ? 0x3276 : 0x5410);
}

// In another order, layout B: `words[i]` holds the four columns from `column + kStep * i` on, `column` as in store_tiles.
template <class C>
__device__ __forceinline__ void store_ordered(const uint32_t (&words)[4], int8_t* codes, int column, int left) {
  if constexpr (C::kTiles == 2) {  // the four words are neighbours
    if (C::kExact || column < left)
      *reinterpret_cast<uint4*>(codes + ordered_word(column)) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (C::kExact || column + 64 * i < left) *reinterpret_cast<uint32_t*>(codes + ordered_word(column + 64 * i)) = words[i];
    }
  }
}

// The same of layout A: `words` are the lane's 16 columns.
template <class C>
__device__ __forceinline__ void store_ordered_columns(const uint32_t (&words)[4], int8_t* codes, int column, int left) {
  if (!C::kExact && column >= left) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(codes + ordered_word(column + 4 * i)) = words[i];
}

// codes: of this row, from the warp's first column on; `left` the number of bytes from there to the row's end.
template <class C>
__device__ __forceinline__ void store_tiles(const float (&v)[C::kValues], const quant::RowScale& scale, const QuantizeParams& p,
                                            int8_t* codes, int left, int lane) {
#pragma unroll
  for (int t = 0; t < C::kTiles; ++t) {  // 16 values at a time: registers of codes and values are freed as they are stored
    uint32_t words[4];
    quant::pack_codes(v + t * kLaneColumns, scale, words);
    if (!ends_in_layout_b<C>(p)) {
      const int column = t * kTileColumns + lane * kLaneColumns;
      if (p.order != CodeOrder::kColumns) {
        store_ordered_columns<C>(words, codes, column, left);
      } else if (C::kExact || column < left) {
        *reinterpret_cast<uint4*>(codes + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
      continue;
    }
    const int column = C::kTiles == 1 ? 256 * (lane / 16) + 16 * (lane & 3) + (lane & 12)
                                      : 256 * (lane / 8) + 128 * t + 16 * (lane & 1) + 2 * (lane & 6);
    constexpr int kStep = C::kTiles == 1 ? 64 : 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = C::kTiles == 1 ? transpose_bytes(words[i], lane) : transpose_halves(words[i], lane);
    if (p.order != CodeOrder::kColumns) {
      store_ordered<C>(words, codes, column, left);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (C::kExact || column + kStep * i < left) *reinterpret_cast<uint32_t*>(codes + column + kStep * i) = words[i];
    }
  }
}

struct RowShared {
  uint32_t warp_max[2][32];  // by the parity of the row: one barrier a row is enough
  float warp_sum[32];
  uint32_t cta_max[kMaxCluster];
};

__device__ __forceinline__ uint32_t reduce_max(uint32_t value, uint32_t* slots) {
  const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
  value = ptx::warp_max(value);
  if (warps == 1) return value;
  if (lane == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  return ptx::warp_max(lane < warps ? slots[lane] : 0u);
}

__device__ __forceinline__ float reduce_sum(float value, float* slots) {
  const int lane = threadIdx.x & 31, warps = blockDim.x / 32;
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  __syncthreads();  // the reads of the row before
  if (lane == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < warps; ++warp) value += slots[warp];  // the same order in every thread
  return value;
}

// x * rsqrt(mean(x^2) + eps) * weight, for the kernel that reads the activation from its parameters. Never in a cluster.
template <class C>
__device__ __forceinline__ void scale_by_rms(float (&v)[C::kValues], const QuantizeParams& p, RowShared& shared, int column) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < C::kValues; ++i) sum = __fmaf_rn(v[i], v[i], sum);
  const float factor = rsqrtf(reduce_sum(sum, shared.warp_sum) / static_cast<float>(p.K) + p.act_eps);
#pragma unroll
  for (int t = 0; t < C::kTiles; ++t) {
    const int first = column + t * kTileColumns;
    if (first >= p.K) continue;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      const float weight = load_as_float(p.act_weight, first + i, p.act_weight_dtype);
      v[t * kLaneColumns + i] = v[t * kLaneColumns + i] * factor * weight;
    }
  }
}

template <int kValues>
__device__ __forceinline__ uint32_t thread_max(const float (&v)[kValues]) {
  float absmax[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // four short chains instead of a long one
#pragma unroll
  for (int i = 0; i < kValues; ++i) absmax[i % 4] = ptx::abs_max_nan(absmax[i % 4], v[i]);
  const float low = ptx::abs_max_nan(absmax[0], absmax[1]), high = ptx::abs_max_nan(absmax[2], absmax[3]);
  return __float_as_uint(ptx::abs_max_nan(low, high));
}

// grid: CTAs that walk over rows, each loading its next row before it computes this one.
template <class C>
__global__ void __launch_bounds__(C::kMaxThreads, C::kMinCtas) quantize_rows(const QuantizeParams p) {
  extern __shared__ float4 exchange_memory[];
  __shared__ RowShared shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  float* words = reinterpret_cast<float*>(exchange_memory) + warp * C::kTiles * kExchangeWords;
  const int warp_column = warp * C::kTiles * kTileColumns, column = warp_column + lane * kLaneColumns;
  const int64_t x_step = gridDim.x * p.x_row_stride, codes_step = static_cast<int64_t>(gridDim.x) * p.row_bytes;
  const typename C::T* x = static_cast<const typename C::T*>(p.x) + blockIdx.x * p.x_row_stride + column;
  int8_t* codes = p.codes + static_cast<int64_t>(blockIdx.x) * p.row_bytes + warp_column;

  ptx::wait_then_launch_dependents();
  RawTile<C> raw[C::kTiles];
  load_tiles<C>(raw, p, x, column);

  int parity = 0;
  for (int64_t row = blockIdx.x; row < p.M; row += gridDim.x, parity ^= 1, codes += codes_step) {
    float v[C::kValues];
    convert_tiles<C>(v, raw, p, column);
    x += x_step;
    if (row + gridDim.x < p.M) load_tiles<C>(raw, p, x, column);
    if (C::kAnyAct && p.act == quant::InputAct::kRmsNorm) scale_by_rms<C>(v, p, shared, column);
    rotate<C>(v, p, words, lane);
    const quant::RowScale scale = quant::row_scale(reduce_max(thread_max(v), shared.warp_max[parity]));
    if (threadIdx.x == 0) p.scales[row] = scale.scale;
    store_tiles<C>(v, scale, p, codes, p.row_bytes - warp_column, lane);
  }
}

// Where chunk c of one tile and half lies in its stage: 8 lanes that write neighbouring chunks, or read the chunks of 8
// neighbouring lanes, touch different banks.
template <class C>
__device__ __forceinline__ int staged_chunk(int c) {
  return c ^ ((c >> 3) & (C::kLoads - 1));
}

// Starts copying a warp's part of a row into its stage, neighbouring lanes copying neighbouring chunks. x: the warp's first
// column in this row; `left` the number of columns from there to K.
template <class C>
__device__ __forceinline__ void start_copy(uint4* stage, const QuantizeParams& p, const typename C::T* x, int left, int lane) {
  constexpr int kChunkColumns = 16 / sizeof(typename C::T);
#pragma unroll
  for (int t = 0; t < C::kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < C::kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < C::kLoads; ++i) {
        const int chunk = 32 * i + lane, column = t * kTileColumns + chunk * kChunkColumns;
        uint4* to = stage + (t * C::kHalves + half) * 32 * C::kLoads + 32 * i + staged_chunk<C>(lane);
        if (C::kExact || column < left) ptx::cp_async_16(to, x + half * p.K + column);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void read_stage(RawTile<C>& raw, const uint4* stage, int t, int lane) {
  const uint4* from = stage + t * C::kHalves * 32 * C::kLoads;
#pragma unroll
  for (int i = 0; i < C::kLoads; ++i) {
    const int chunk = staged_chunk<C>(lane * C::kLoads + i);
    raw.first[i] = from[chunk];
    if (C::kPair) raw.second[i] = from[32 * C::kLoads + chunk];
  }
}

// As quantize_rows, with the next row on its way to shared memory instead of to registers. For pairs: their two halves would
// take 32 registers more (120, so one CTA of 12 warps an SM; with the stage 64, so two: 88% -> 94% of copy at 8192 x 12288). A
// single input gains nothing from it and pays the reads of the stage (92% -> 88%). Measured on an H200, 2026-11-30.
// Dynamic shared memory: the exchanges of all warps, if there is a rotation, then their stages.
template <class C>
__global__ void __launch_bounds__(C::kMaxThreads, C::kMinCtas) quantize_rows_staged(const QuantizeParams p) {
  extern __shared__ float4 exchange_memory[];
  __shared__ RowShared shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int exchange_words = C::kGroup == 0 ? 0 : C::kTiles * kExchangeWords;
  float* words = reinterpret_cast<float*>(exchange_memory) + warp * exchange_words;
  uint4* stage = reinterpret_cast<uint4*>(reinterpret_cast<float*>(exchange_memory) + warps * exchange_words) + warp * C::kStageChunks;
  const int warp_column = warp * C::kTiles * kTileColumns, left = p.K - warp_column;
  const int64_t x_step = gridDim.x * p.x_row_stride;
  const typename C::T* x = static_cast<const typename C::T*>(p.x) + blockIdx.x * p.x_row_stride + warp_column;

  ptx::wait_then_launch_dependents();
  start_copy<C>(stage, p, x, left, lane);
  int parity = 0;
  for (int64_t row = blockIdx.x; row < p.M; row += gridDim.x, parity ^= 1) {
    ptx::cp_async_wait_all();
    __syncwarp();  // every lane's copies have landed
    float v[C::kValues];
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
      RawTile<C> raw;
      read_stage<C>(raw, stage, t, lane);
      convert_tile<C>(v + t * kLaneColumns, raw, p, warp_column + t * kTileColumns + lane * kLaneColumns);
    }
    __syncwarp();  // every lane has read the stage
    x += x_step;
    if (row + gridDim.x < p.M) start_copy<C>(stage, p, x, left, lane);
    rotate<C>(v, p, words, lane);
    const quant::RowScale scale = quant::row_scale(reduce_max(thread_max(v), shared.warp_max[parity]));
    if (threadIdx.x == 0) p.scales[row] = scale.scale;
    store_tiles<C>(v, scale, p, p.codes + row * p.row_bytes + warp_column, p.row_bytes - warp_column, lane);
  }
}

// One row a cluster, for few rows and for rows that one CTA does not hold: CTA `rank` holds tiles rank * warps and on. The maxima
// meet in every CTA's shared memory.
// CTAs and warps behind the row's end hold zeros and take part: the barriers count them.
template <class C>
__global__ void __launch_bounds__(C::kMaxThreads) quantize_rows_cluster(const QuantizeParams p) {
  static_assert(C::kTiles == 1, "a cluster is for short latency: one tile a warp");
  extern __shared__ float4 exchange_memory[];
  __shared__ RowShared shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t rank = ptx::cluster_rank(), ranks = ptx::cluster_size();
  const int warp_column = (rank * warps + warp) * kTileColumns, column = warp_column + lane * kLaneColumns;
  const int64_t row = blockIdx.x / ranks;
  const typename C::T* x = static_cast<const typename C::T*>(p.x) + row * p.x_row_stride + column;

  ptx::wait_then_launch_dependents();
  RawTile<C> raw[1];
  load_tiles<C>(raw, p, x, column);
  ptx::cluster_arrive();  // every CTA of the cluster runs before its shared memory is written; waits while the loads fly
  float v[C::kValues];
  convert_tiles<C>(v, raw, p, column);
  rotate<C>(v, p, reinterpret_cast<float*>(exchange_memory) + warp * kExchangeWords, lane);
  const uint32_t own = reduce_max(thread_max(v), shared.warp_max[0]);
  ptx::cluster_wait();
  if (threadIdx.x < ranks) ptx::store_in_cluster(&shared.cta_max[rank], threadIdx.x, own);
  ptx::cluster_sync();
  const quant::RowScale scale = quant::row_scale(ptx::warp_max(lane < ranks ? shared.cta_max[lane] : 0u));
  if (rank == 0 && threadIdx.x == 0) p.scales[row] = scale.scale;
  const int bytes = p.row_bytes;
  store_tiles<C>(v, scale, p, p.codes + row * bytes + warp_column, bytes - warp_column, lane);
}

using RowKernel = void (*)(QuantizeParams);

// The instance for a plan. One explicit instantiation per type in instantiations/.
template <class T>
RowKernel find_row_kernel(const QuantizeParams& p, const QuantizePlan& plan);

// For an activation and a group known at compile time.
template <class T, quant::InputAct kAct, int kGroup>
RowKernel pick_special(const QuantizeParams& p, const QuantizePlan& plan) {
  using Exact1 = RowConfig<T, kAct, kGroup, 1, true>;
  using Ragged1 = RowConfig<T, kAct, kGroup, 1, false>;
  using Exact2 = RowConfig<T, kAct, kGroup, 2, true>;
  using Ragged2 = RowConfig<T, kAct, kGroup, 2, false>;
  const bool exact = p.K == plan.tiles * plan.warps * plan.cluster * kTileColumns;
  if (plan.cluster > 1) return exact ? quantize_rows_cluster<Exact1> : quantize_rows_cluster<Ragged1>;
  if (plan.tiles == 1) return exact ? quantize_rows<Exact1> : quantize_rows<Ragged1>;
  if constexpr (quant::is_pair(kAct)) {
    static_assert(Exact2::kStageChunks * 16 == 2 * Exact2::kHalves * kStageBytes, "the launcher sizes shared memory by this");
    return exact ? quantize_rows_staged<Exact2> : quantize_rows_staged<Ragged2>;
  } else {
    return exact ? quantize_rows<Exact2> : quantize_rows<Ragged2>;
  }
}

// For the others: activation and group are read from the parameters.
template <class T>
RowKernel pick_general(const QuantizePlan& plan) {
  using Ragged1 = RowConfig<T, quant::InputAct::kAny, kAnyGroup, 1, false>;
  using Ragged2 = RowConfig<T, quant::InputAct::kAny, kAnyGroup, 2, false>;
  if (plan.cluster > 1) return quantize_rows_cluster<Ragged1>;
  return plan.tiles == 1 ? quantize_rows<Ragged1> : quantize_rows<Ragged2>;
}

}  // namespace kitchen::int8
