// Warpgroup matrix multiply (PTX ISA, "wgmma"): D[64 x N] (+)= A[64 x k] * B[N x k]^T, A and B in shared memory,
// both with k contiguous ("K-major"), D in the registers of 4 warps. sm_90a only.
//
//   d[4*j + e] of lane l in warp w:  row 16*w + l/4 + 8*(e/2),  column 8*j + 2*(l%4) + e%2
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "kitchen/ptx/wgmma.h: wgmma and setmaxnreg exist on sm_90a only (-gencode=arch=compute_90a,code=sm_90a)"
#endif

namespace kitchen::ptx {

// Orders register and shared-memory accesses before the first wgmma of a group.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers move between warpgroups; counts are multiples of 8, and every warp of a warpgroup takes part.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a K-major operand whose rows are 128 bytes, stored with the copy engine's 128-byte swizzle:
// groups of 8 rows lie 1024 bytes apart, and the tile starts at a multiple of 1024. Moving along k inside the
// 128 bytes, or down by whole groups, is adding (bytes / 16): the swizzle works on address bits.
__device__ __forceinline__ uint64_t descriptor_swizzle128(uint32_t smem_address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kGroupStride = uint64_t{1024 / 16} << 32, kUnusedStride = 1ull << 16;
  return kSwizzle128 | kGroupStride | kUnusedStride | ((smem_address & 0x3FFFFu) >> 4);
}

// Wgmma*<N>::mma(d, a, b, accumulate): one instruction; accumulate == 0 overwrites d.
template <int kN>
struct WgmmaS8;  // int8 x int8 -> int32, 32 columns of k

// Operand lists. PTX names operands by number: KITCHEN_TEN(12) is %120 to %129.
#define KITCHEN_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define KITCHEN_30 KITCHEN_TEN() KITCHEN_TEN(1) KITCHEN_TEN(2)
#define KITCHEN_60 KITCHEN_30 KITCHEN_TEN(3) KITCHEN_TEN(4) KITCHEN_TEN(5)
#define KITCHEN_90 KITCHEN_60 KITCHEN_TEN(6) KITCHEN_TEN(7) KITCHEN_TEN(8)
#define KITCHEN_NUMBERS_4 "%0,%1,%2,%3"
#define KITCHEN_NUMBERS_8 KITCHEN_NUMBERS_4 ",%4,%5,%6,%7"
#define KITCHEN_NUMBERS_16 KITCHEN_TEN() "%10,%11,%12,%13,%14,%15"
#define KITCHEN_NUMBERS_32 KITCHEN_30 "%30,%31"
#define KITCHEN_NUMBERS_48 KITCHEN_30 KITCHEN_TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define KITCHEN_NUMBERS_64 KITCHEN_60 "%60,%61,%62,%63"
#define KITCHEN_NUMBERS_72 KITCHEN_60 KITCHEN_TEN(6) "%70,%71"
#define KITCHEN_NUMBERS_96 KITCHEN_90 "%90,%91,%92,%93,%94,%95"
#define KITCHEN_NUMBERS_128 \
  KITCHEN_90 KITCHEN_TEN(9) KITCHEN_TEN(10) KITCHEN_TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127"
#define KITCHEN_R4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define KITCHEN_R8(c, i) KITCHEN_R4(c, i), KITCHEN_R4(c, i + 4)
#define KITCHEN_R16(c, i) KITCHEN_R8(c, i), KITCHEN_R8(c, i + 8)
#define KITCHEN_R32(c, i) KITCHEN_R16(c, i), KITCHEN_R16(c, i + 16)
#define KITCHEN_R64(c, i) KITCHEN_R32(c, i), KITCHEN_R32(c, i + 32)

// name, accumulator type, its constraint, instruction types, text after the predicate, N, operand numbers of
// (a, b, accumulate), operand numbers of d, operands of d.
#define KITCHEN_WGMMA(name, type, types, tail, n, a_at, b_at, p_at, numbers, ...)                               \
  template <>                                                                                                  \
  struct name<n> {                                                                                             \
    static __device__ __forceinline__ void mma(type (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_at ", 0;\n"                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n types " {" numbers "}, %" #a_at ", %" #b_at ", p" tail \
                   ";\n}"                                                                                      \
                   : __VA_ARGS__                                                                               \
                   : "l"(a), "l"(b), "r"(accumulate));                                                         \
    }                                                                                                          \
  };

#define KITCHEN_WGMMA_S8(n, a_at, b_at, p_at, numbers, ...) \
  KITCHEN_WGMMA(WgmmaS8, int, "k32.s32.s8.s8", "", n, a_at, b_at, p_at, numbers, __VA_ARGS__)

KITCHEN_WGMMA_S8(8, 4, 5, 6, KITCHEN_NUMBERS_4, KITCHEN_R4("+r", 0))
KITCHEN_WGMMA_S8(16, 8, 9, 10, KITCHEN_NUMBERS_8, KITCHEN_R8("+r", 0))
KITCHEN_WGMMA_S8(32, 16, 17, 18, KITCHEN_NUMBERS_16, KITCHEN_R16("+r", 0))
KITCHEN_WGMMA_S8(64, 32, 33, 34, KITCHEN_NUMBERS_32, KITCHEN_R32("+r", 0))
KITCHEN_WGMMA_S8(96, 48, 49, 50, KITCHEN_NUMBERS_48, KITCHEN_R32("+r", 0), KITCHEN_R16("+r", 32))
KITCHEN_WGMMA_S8(128, 64, 65, 66, KITCHEN_NUMBERS_64, KITCHEN_R64("+r", 0))
KITCHEN_WGMMA_S8(144, 72, 73, 74, KITCHEN_NUMBERS_72, KITCHEN_R64("+r", 0), KITCHEN_R8("+r", 64))
KITCHEN_WGMMA_S8(192, 96, 97, 98, KITCHEN_NUMBERS_96, KITCHEN_R64("+r", 0), KITCHEN_R32("+r", 64))
KITCHEN_WGMMA_S8(256, 128, 129, 130, KITCHEN_NUMBERS_128, KITCHEN_R64("+r", 0), KITCHEN_R64("+r", 64))

#undef KITCHEN_WGMMA_S8
#undef KITCHEN_WGMMA
#undef KITCHEN_R64
#undef KITCHEN_R32
#undef KITCHEN_R16
#undef KITCHEN_R8
#undef KITCHEN_R4
#undef KITCHEN_NUMBERS_128
#undef KITCHEN_NUMBERS_96
#undef KITCHEN_NUMBERS_72
#undef KITCHEN_NUMBERS_64
#undef KITCHEN_NUMBERS_48
#undef KITCHEN_NUMBERS_32
#undef KITCHEN_NUMBERS_16
#undef KITCHEN_NUMBERS_8
#undef KITCHEN_NUMBERS_4
#undef KITCHEN_90
#undef KITCHEN_60
#undef KITCHEN_30
#undef KITCHEN_TEN

}  // namespace kitchen::ptx
