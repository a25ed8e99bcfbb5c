// The epilogue of the INT8 GEMMs on Hopper, and what their launches have in common. The formula is at the top of int8_gemm.cu.
//
// A thread owns, in each block of 64 rows, the rows lane/4 and lane/4 + 8 of its warp's 16, and column pairs 8*j + 2*(lane%4).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <type_traits>

#include "int8_gemm/sm90/int8_gemm.h"
#include "kitchen/gemm/gemm_sm90_tiles.cuh"
#include "kitchen/gemm/staged_store_sm90.cuh"
#include "kitchen/host/check.h"
#include "kitchen/host/tensor_map.h"
#include "kitchen/ptx/prefetch.h"
#include "kitchen/ptx/wgmma.h"

namespace kitchen::int8 {

namespace sm90 = kitchen::gemm_sm90;

struct MmaS8 {
  using Element = int8_t;
  using Accumulator = int;
  static constexpr int kStepK = 32;
  template <int kN>
  using Instruction = ptx::WgmmaS8<kN>;
};

// One value per output column, or one for all of them.
enum class ColumnKind : int { kAbsent, kFloat32, kFloat16, kBfloat16 };

struct ColumnVector {
  const void* data;
  float otherwise;  // the value where absent
  ColumnKind kind;
  int stride;  // 0: one value for all columns
};

__device__ __forceinline__ float2 widen(float2 v) { return v; }
__device__ __forceinline__ float2 widen(__half2 v) { return __half22float2(v); }
__device__ __forceinline__ float2 widen(__nv_bfloat162 v) { return __bfloat1622float2(v); }
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

template <class T>
struct PairOf;
template <>
struct PairOf<float> { using type = float2; };
template <>
struct PairOf<__half> { using type = __half2; };
template <>
struct PairOf<__nv_bfloat16> { using type = __nv_bfloat162; };

template <class T>
__device__ __forceinline__ float element(const void* data, int n) {
  return widen(static_cast<const T*>(data)[n]);
}

__device__ __forceinline__ float column_value(const ColumnVector& v, int n) {
  switch (v.kind) {
    case ColumnKind::kFloat32: return element<float>(v.data, n * v.stride);
    case ColumnKind::kFloat16: return element<__half>(v.data, n * v.stride);
    case ColumnKind::kBfloat16: return element<__nv_bfloat16>(v.data, n * v.stride);
    default: return v.otherwise;
  }
}

template <class T>
struct EpilogueParams {
  const float* a_scale;          // [M]
  ColumnVector b_scale, bias, residual_scale;
  const T* residual;             // [M, N], may be nullptr
  T* out;                        // [M, N]
  CUtensorMap out_map, residual_map;  // valid where out_mapped and residual_mapped
  bool out_mapped, residual_mapped, residual_paired;
  int M, N;
};

// How a residual gets to the epilogue: not at all; by the copy engine, through the staging buffers; or, where its rows are not
// aligned to 16 bytes or no barriers are given, by plain loads.
enum class ResidualBy { kNone, kCopies, kCopiesOrLoads };

template <class T, int kTileM, int kTileN, ResidualBy kBy>
struct ScaleEpilogue {
  static constexpr bool kResidual = kBy != ResidualBy::kNone;
  using Params = EpilogueParams<T>;
  using Store = sm90::StagedStore<T, kTileN>;
  using Pair = typename PairOf<T>::type;
  static constexpr int kStagingBytes = Store::kBytes;
  static constexpr int kPairs = Store::kColumns / 8;  // of a thread, in a row of a chunk
  static constexpr int kChunks = kTileN / Store::kColumns;
  static constexpr int kSome = Store::kPutAtOnce;     // of kPairs, that are made and stored together

  struct Rows {
    float low, high;  // a_scale of the thread's two rows
  };
  struct Scales {
    float4 pairs[kTileN / 2];  // b_scale of two columns, bias of the same two
  };
  struct ScalesOfBoth : Scales {
    float2 residual_pairs[kTileN / 2];  // residual_scale
  };
  // Loaded where it is used, a scale of any type takes registers that the tiles which copy their residual have not (2976 bytes spilled).
  static constexpr bool kStagesBoth = kBy == ResidualBy::kCopies;
  using Columns = std::conditional_t<kStagesBoth, ScalesOfBoth, Scales>;

  const Params& params;
  Store staged;
  uint64_t* const arrived;  // two barriers of this warp: the residual is in a staging buffer
  uint32_t phases = 0;      // of those, a bit each

  __device__ __forceinline__ explicit ScaleEpilogue(const Params& p, uint8_t* staging = nullptr,
                                                    uint64_t* barriers = nullptr)
      : params(p), staged{p.out, p.out_map, p.out_mapped, p.M, p.N, staging}, arrived(barriers) {}

  // By one producer warp, while the tile multiplies. Columns from N on repeat the last: they are never stored.
  __device__ __forceinline__ static void load_columns(const Params& params, Columns& columns, int row, int column) {
    const int last = params.N - 1, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int pair = lane; pair < kTileN / 2; pair += 32) {
      const int even = min(column + 2 * pair, last), odd = min(column + 2 * pair + 1, last);
      columns.pairs[pair] = make_float4(column_value(params.b_scale, even), column_value(params.b_scale, odd),
                                        column_value(params.bias, even), column_value(params.bias, odd));
      if constexpr (kStagesBoth) columns.residual_pairs[pair] = residual_scale(params, column + 2 * pair);
    }
    if (kResidual && params.residual != nullptr) {
      constexpr int kLine = 128 / sizeof(T);
#pragma unroll 1
      for (int i = lane; i < kTileM * (kTileN / kLine); i += 32) {
        const int m = min(row + i / (kTileN / kLine), params.M - 1);
        const int n = min(column + i % (kTileN / kLine) * kLine, last);
        ptx::prefetch_l2(params.residual + static_cast<int64_t>(m) * params.N + n);
      }
    }
  }

  __device__ __forceinline__ Rows load_rows(int row) const {
    const int low = row + threadIdx.x % 32 / 4, last = params.M - 1;
    return {params.a_scale[min(low, last)], params.a_scale[min(low + 8, last)]};
  }

  // Chunk by chunk, and within a chunk block by block: blocks share their columns' scales. Buffers alternate from the
  // tile's first on, which may be the one that was used last.
  template <int kBlocks>
  __device__ __forceinline__ void store(const int (&acc)[kBlocks][kTileN / 2], const Rows (&rows)[kBlocks],
                                        const Columns& columns, int row, int column) {
    constexpr int kItems = kBlocks * kChunks;
    const auto where = [&](int item) -> int2 {
      return {row + item % kBlocks * 64, column + item / kBlocks * Store::kColumns};
    };
    if constexpr (kResidual || kBlocks * kTileN > 256 || kItems % 2) {  // registers are short: one chunk at a time
      staged.template acquire<0>();
      fetch_residual(0, where(0));
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        if (item > 0) staged.template acquire<1>();
        if (item + 1 < kItems) fetch_residual((item + 1) % 2, where(item + 1));
        await_residual(item % 2);
        put_chunk<1, kResidual>(item % 2, acc[item % kBlocks], item / kBlocks, rows[item % kBlocks], columns, where(item));
        const int2 at[1] = {where(item)};
        staged.send(item % 2, at);
      }
    } else {  // two at a time: one fence and one wait serve both
#pragma unroll
      for (int item = 0; item < kItems; item += 2) {
        float y[2][kPairs][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int block = (item + i) % kBlocks, pair = (item + i) / kBlocks * kPairs;
#pragma unroll
          for (int j = 0; j < kPairs; ++j) {
            scale(y[i][j], &acc[block][4 * (pair + j)], rows[block], columns.pairs[4 * (pair + j) + threadIdx.x % 4]);
          }
        }
        staged.template acquire<0>();
#pragma unroll
        for (int i = 0; i < 2; ++i) staged.put(i, y[i]);
        const int2 at[2] = {where(item), where(item + 1)};
        staged.send(0, at);
      }
    }
  }

  // For gemm_sm90_split.cuh: one of the chunks of 16 rows, through the buffer at `staging`. The residual may be absent.
  __device__ __forceinline__ void store_chunk(const int (&acc)[kTileN / 2], int chunk, Rows rows, const Columns& columns,
                                              int row, int column, void* staging) {
    staged.staging = static_cast<uint8_t*>(staging);
    const int2 where[1] = {{row, column + chunk * Store::kColumns}};
    if (kResidual && params.residual != nullptr) {
      put_chunk<1, kResidual>(0, acc, chunk, rows, columns, where[0]);
    } else {
      put_chunk<kPairs % 4 == 0 ? 4 : kPairs, false>(0, acc, chunk, rows, columns, where[0]);
    }
    staged.send(0, where);
  }

  // Scales one chunk and puts it into a staging buffer. kAhead pairs' columns are loaded together.
  template <int kAhead, bool kAdds>
  __device__ __forceinline__ void put_chunk(int buffer, const int (&acc)[kTileN / 2], int chunk, Rows rows,
                                            const Columns& columns, int2 at) {
    constexpr int kAtOnce = kAhead > kSome ? kAhead : kSome;
    const uint32_t base = staged.buffer_address(buffer);
#pragma unroll
    for (int j = 0; j < kPairs; j += kAtOnce) {
      asm volatile("" ::: "memory");  // keeps the loads of columns where they are used
      float4 c[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) c[i] = columns.pairs[4 * (chunk * kPairs + j + i) + threadIdx.x % 4];
#pragma unroll
      for (int i = 0; i < kAtOnce; i += kSome) {
        float y[kSome][4];
#pragma unroll
        for (int h = 0; h < kSome; ++h) scale(y[h], &acc[4 * (chunk * kPairs + j + i + h)], rows, c[i + h]);
        if constexpr (kAdds) add_residual(y, base, chunk * kPairs, j + i, columns, at);
        staged.put_some(base, j + i, y);
      }
    }
  }

  __device__ __forceinline__ static void scale(float (&y)[4], const int* acc, Rows rows, float4 columns) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float t = __fmul_rn(__int2float_rn(acc[e]), e < 2 ? rows.low : rows.high);
      y[e] = __fmaf_rn(t, e % 2 ? columns.y : columns.x, e % 2 ? columns.w : columns.z);
    }
  }

  __device__ __forceinline__ bool fetched() const {
    return kBy == ResidualBy::kCopies || (kResidual && arrived != nullptr && params.residual_mapped);
  }

  __device__ __forceinline__ void fetch_residual(int buffer, int2 at) {
    if (!fetched() || threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive_expect(&arrived[buffer], Store::kBufferBytes);
    ptx::tma_load(staged.staging + buffer * Store::kBufferBytes, &params.residual_map, at.y, at.x, &arrived[buffer]);
  }

  __device__ __forceinline__ void await_residual(int buffer) {
    if (!fetched()) return;
    ptx::mbarrier_wait(&arrived[buffer], phases >> buffer & 1);
    phases ^= 1u << buffer;
  }

  // y: of pairs j to j + kSome - 1 of the chunk at `at`, which is staged at `base` and begins at pair `first` of the tile.
  __device__ __forceinline__ void add_residual(float (&y)[kSome][4], uint32_t base, int first, int j, const Columns& columns,
                                               int2 at) const {
    float r[kSome][4];
    if (fetched()) {
      staged.get_some(base, j, r);
    } else if constexpr (kBy == ResidualBy::kCopiesOrLoads) {
#pragma unroll
      for (int h = 0; h < kSome; ++h) load_residual(r[h], at.x, at.y + 8 * (j + h));
    }
#pragma unroll
    for (int h = 0; h < kSome; ++h) {
      const int lane = threadIdx.x % 4;
      float2 scale;
      if constexpr (kStagesBoth) {
        scale = columns.residual_pairs[4 * (first + j + h) + lane];
      } else {
        scale = residual_scale(params, at.y + 8 * (j + h) + 2 * lane);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) y[h][e] = __fmaf_rn(e % 2 ? scale.y : scale.x, y[h][e], r[h][e]);
    }
  }

  // Two columns of the thread's two rows. What lies beyond the last row or column repeats it.
  __device__ __forceinline__ void load_residual(float (&r)[4], int row, int column) const {
    const int even = column + 2 * static_cast<int>(threadIdx.x % 4), last = params.N - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = min(row + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half, params.M - 1);
      const T* const data = params.residual + static_cast<int64_t>(m) * params.N;
      if (params.residual_paired && even + 1 < params.N) {
        const float2 pair = widen(*reinterpret_cast<const Pair*>(data + even));
        r[2 * half] = pair.x, r[2 * half + 1] = pair.y;
      } else {
        r[2 * half] = widen(data[min(even, last)]), r[2 * half + 1] = widen(data[min(even + 1, last)]);
      }
    }
  }

  // Of columns n and n + 1.
  __device__ __forceinline__ static float2 residual_scale(const Params& params, int n) {
    const int last = params.N - 1;
    return {column_value(params.residual_scale, min(n, last)), column_value(params.residual_scale, min(n + 1, last))};
  }

  __device__ __forceinline__ void finish() { staged.finish(); }
};

// ---------------------------------------------------------------- launch

inline bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline ColumnVector column_vector(const void* data, int stride, DType type, float otherwise) {
  const ColumnKind typed = type == DType::kFloat32   ? ColumnKind::kFloat32
                           : type == DType::kFloat16 ? ColumnKind::kFloat16
                                                        : ColumnKind::kBfloat16;
  return {data, otherwise, data == nullptr ? ColumnKind::kAbsent : typed, stride};
}

template <class T>
constexpr CUtensorMapDataType kMapType = sizeof(T) == 4                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                         : std::is_same<T, __half>::value     ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Whether results may be stored twice: not where the residual lies under them, which would be added twice.
inline bool stores_may_repeat(const Int8GemmParams& p) {
  const auto begin = [](const void* matrix) { return reinterpret_cast<uintptr_t>(matrix); };
  const uint64_t bytes = static_cast<uint64_t>(p.M) * p.N * size_of(p.out_type);
  return p.residual == nullptr || begin(p.residual) + bytes <= begin(p.out) || begin(p.out) + bytes <= begin(p.residual);
}

// Whether the copy engine can read or write such a matrix.
inline bool mappable(const void* matrix, int64_t N, int element_bytes) {
  return N * element_bytes % 16 == 0 && aligned(matrix, 16);
}

template <class T, int kTileN>
EpilogueParams<T> epilogue_params(const Int8GemmParams& p) {
  using Store = sm90::StagedStore<T, kTileN>;
  EpilogueParams<T> e{};
  e.a_scale = p.a_scale;
  e.b_scale = column_vector(p.b_scale, p.b_scale_stride, DType::kFloat32, 1.0f);
  // t * s + (-0) is t * s to the bit, signed zeros included.
  e.bias = column_vector(p.bias, 1, p.bias_type, -0.0f);
  e.residual_scale = column_vector(p.residual_scale, p.residual_scale_stride, p.residual_scale_type, 1.0f);
  e.residual = static_cast<const T*>(p.residual);
  e.out = static_cast<T*>(p.out);
  e.M = static_cast<int>(p.M);
  e.N = static_cast<int>(p.N);
  e.residual_paired = p.N % 2 == 0 && aligned(p.residual, 2 * sizeof(T));
  const auto map = [&](const void* matrix) {
    return host::encode_matrix_map({kMapType<T>, sizeof(T), matrix, p.M, p.N, p.N * int64_t{sizeof(T)}, Store::kRows,
                                    Store::kColumns,
                                    Store::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
  };
  e.out_mapped = mappable(p.out, p.N, sizeof(T));
  e.residual_mapped = p.residual != nullptr && e.out_mapped && mappable(p.residual, p.N, sizeof(T));
  if (e.out_mapped) e.out_map = map(p.out);
  if (e.residual_mapped) e.residual_map = map(p.residual);
  return e;
}

inline CUtensorMap operand_map(const int8_t* data, int64_t rows, int64_t K, int box_rows) {
  return host::encode_matrix_map(
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, data, rows, K, K, box_rows, sm90::kStageBytesK, CU_TENSOR_MAP_SWIZZLE_128B});
}

// More shared memory than 48 KB has to be asked for, once a kernel and device.
template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes, std::atomic<uint64_t>& devices_done) {
  int device = 0;
  host::check(cudaGetDevice(&device), "int8_gemm_sm90: cudaGetDevice");
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices_done.load() & bit) return;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              "int8_gemm_sm90: cudaFuncSetAttribute");
  devices_done.fetch_or(bit);
}

}  // namespace kitchen::int8
