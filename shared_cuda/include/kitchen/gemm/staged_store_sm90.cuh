// Writes a warp's 16 rows of a wgmma result to a row-major matrix through a small piece of shared memory.
//
// The result goes in chunks of kColumns columns (128 or 96 bytes a row), one or two at a time: acquire, put, send.
// Needs no barrier beyond the warp. Where the matrix's rows are not 16-byte aligned, the lanes copy the chunks out
// element by element instead.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kitchen/ptx/fence.h"
#include "kitchen/ptx/ldmatrix.h"
#include "kitchen/ptx/stmatrix.h"
#include "kitchen/ptx/store_shared.h"
#include "kitchen/ptx/tma.h"

namespace kitchen::gemm_sm90 {

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack_pair(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <class T, int kTileN>
struct StagedStore {
  static constexpr int kRows = 16;
  static constexpr bool kSwizzled = kTileN % (128 / sizeof(T)) == 0;
  // 96-byte rows need no swizzle: 8 rows of 16 bytes at that pitch meet in a bank at most twice.
  static constexpr int kRowBytes = kSwizzled ? 128 : 96;
  static constexpr int kColumns = kRowBytes / sizeof(T);
  static constexpr int kBufferBytes = kRows * kRowBytes;
  static constexpr int kBytes = 2 * kBufferBytes;
  static constexpr int kPutAtOnce = sizeof(T) == 2 ? 2 : 1;  // of put's j, in put_some
  static_assert(kTileN % kColumns == 0, "a tile is a whole number of chunks");

  T* out;                  // [M, N]
  const CUtensorMap& map;  // of out, in boxes of [kRows, kColumns]
  const bool& mapped;      // false: rows are not 16-byte aligned, and there is no map
  int M, N;
  uint8_t* staging;

  __device__ __forceinline__ static uint32_t offset(int row, int byte) {
    return row * kRowBytes + (kSwizzled ? byte ^ ((row & 7) << 4) : byte);
  }

  // Until all but the kPending sends before this are done with their buffers.
  template <int kPending>
  __device__ __forceinline__ void acquire() {
    if (threadIdx.x % 32 == 0) ptx::tma_store_wait_read<kPending>();
    __syncwarp();
  }

  // values[j][e]: wgmma's layout, column 8*j + 2*(lane%4) + e%2, row lane/4 + 8*(e/2) of the chunk.
  __device__ __forceinline__ void put(int buffer, const float (&values)[kColumns / 8][4]) {
    const uint32_t base = buffer_address(buffer);
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += kPutAtOnce) put_some(base, j, &values[j]);
  }

  __device__ __forceinline__ uint32_t buffer_address(int buffer) const {
    uint32_t base = ptx::smem_address(staging) + buffer * kBufferBytes;
    asm volatile("" : "+r"(base));  // or the addresses of every chunk are kept in registers all along
    return base;
  }

  // The part of `put` for j to j + kPutAtOnce - 1: an epilogue that makes values one by one need not keep a chunk of them.
  __device__ __forceinline__ void put_some(uint32_t base, int j, const float (*values)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      ptx::stmatrix_x4(base + offset(lane % 16, (j + lane / 16) * 16), pack_pair(values[0][0], values[0][1], T{}),
                       pack_pair(values[0][2], values[0][3], T{}), pack_pair(values[1][0], values[1][1], T{}),
                       pack_pair(values[1][2], values[1][3], T{}));
    } else {
      const int byte = (8 * j + 2 * (lane % 4)) * 4;
      ptx::store_shared(base + offset(lane / 4, byte), values[0][0], values[0][1]);
      ptx::store_shared(base + offset(lane / 4 + 8, byte), values[0][2], values[0][3]);
    }
  }

  // Reads what put_some would write there: a matrix that was copied into the buffer in the same layout.
  __device__ __forceinline__ void get_some(uint32_t base, int j, float (*values)[4]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4(pairs, base + offset(lane % 16, (j + lane / 16) * 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_pair(pairs[i], T{});
        values[i / 2][i % 2 * 2] = pair.x, values[i / 2][i % 2 * 2 + 1] = pair.y;
      }
    } else {
      const int byte = (8 * j + 2 * (lane % 4)) * 4;
      const float2 low = ptx::load_shared(base + offset(lane / 4, byte));
      const float2 high = ptx::load_shared(base + offset(lane / 4 + 8, byte));
      values[0][0] = low.x, values[0][1] = low.y, values[0][2] = high.x, values[0][3] = high.y;
    }
  }

  // Sends kCount buffers, from `buffer` on, to the (row, column) of each.
  template <int kCount>
  __device__ __forceinline__ void send(int buffer, const int2 (&where)[kCount]) {
    const uint8_t* const chunk = staging + buffer * kBufferBytes;
    if (mapped) {
      ptx::fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) ptx::tma_store(&map, chunk + i * kBufferBytes, where[i].y, where[i].x);
        ptx::tma_store_commit();
      }
    } else {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kCount; ++i) copy_out(chunk + i * kBufferBytes, where[i].x, where[i].y);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void copy_out(const uint8_t* chunk, int row, int column) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kRows * kColumns; i += 32) {
      const int r = i / kColumns, c = i % kColumns;
      if (row + r < M && column + c < N) {
        out[static_cast<int64_t>(row + r) * N + column + c] =
            *reinterpret_cast<const T*>(chunk + offset(r, c * static_cast<int>(sizeof(T))));
      }
    }
  }

  // Shared memory must stay until the copy engine has read it.
  __device__ __forceinline__ void finish() {
    if (threadIdx.x % 32 == 0) ptx::tma_store_wait_read<0>();
  }
};

}  // namespace kitchen::gemm_sm90
