// wgmma.h for floating-point operands: D[64 x N] (+)= A[64 x k] * B[N x k]^T in fp32, B in shared memory, A there too or in
// registers, both with k contiguous; D's layout and the descriptors are those of wgmma.h. sm_90a only.
//
//   a[i] of lane l in warp w:  row 16*w + l/4 + 8*(i%2), bytes 4*(l%4) .. 4*(l%4) + 3 of the 32 that an instruction takes, 16 more
//                              for i >= 2: what ldmatrix_x4 loads. They stay as they are until wgmma_wait.
// PTX ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "kitchen/ptx/wgmma_float.h: wgmma exists on sm_90a only (-gencode=arch=compute_90a,code=sm_90a)"
#endif

namespace kitchen::ptx {

// Keeps a use of d behind a wgmma_wait: an asm statement alone does not hold back arithmetic on registers.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Wgmma*<N>::mma(d, a, b, accumulate): one instruction; accumulate == 0 overwrites d. `a`: a descriptor, or four registers.
template <int kN>
struct WgmmaE4m3;  // e4m3 x e4m3, 32 columns of k. Integers of 4 bits are exact, and so are their sums over 64 columns.
template <int kN>
struct WgmmaBf16;  // bfloat16 x bfloat16, 16 columns of k

#define KITCHEN_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KITCHEN_F8(i) KITCHEN_F4(i), KITCHEN_F4(i + 4)
#define KITCHEN_F16(i) KITCHEN_F8(i), KITCHEN_F8(i + 8)
#define KITCHEN_LIST_12 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
#define KITCHEN_LIST_16 KITCHEN_LIST_12 ",%12,%13,%14,%15"
#define KITCHEN_LIST_24 KITCHEN_LIST_12 ",%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define KITCHEN_LIST_32 KITCHEN_LIST_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define KITCHEN_LIST_48 KITCHEN_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define KITCHEN_LIST_64 KITCHEN_LIST_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// name, N, instruction types, what follows the predicate with A in shared memory and in registers, operand list, operand numbers of
// (a, b, accumulate) and of (a[0] to a[3], b, accumulate), operands of d
#define KITCHEN_WGMMA_FLOAT(name, n, types, tail, tail_registers, list, a_at, b_at, p_at, registers_at, rb_at, rp_at, ...)      \
  template <>                                                                                                                \
  struct name<n> {                                                                                                           \
    static __device__ __forceinline__ void mma(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at ", 0;\n"                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n types " {" list "}, " a_at ", " b_at ", p, 1, 1" tail ";\n}"        \
                   : __VA_ARGS__                                                                                             \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                       \
    }                                                                                                                        \
    static __device__ __forceinline__ void mma(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " rp_at ", 0;\n"                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n types " {" list "}, {" registers_at "}, " rb_at                    \
                   ", p, 1, 1" tail_registers ";\n}"                                                                         \
                   : __VA_ARGS__                                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                   \
    }                                                                                                                        \
  };

#define KITCHEN_WGMMA_ALL(name, types, tail, tail_registers)                                                                  \
  KITCHEN_WGMMA_FLOAT(name, 24, types, tail, tail_registers, KITCHEN_LIST_12, "%12", "%13", "%14", "%12,%13,%14,%15", "%16",  \
                      "%17", KITCHEN_F8(0), KITCHEN_F4(8))                                                                    \
  KITCHEN_WGMMA_FLOAT(name, 32, types, tail, tail_registers, KITCHEN_LIST_16, "%16", "%17", "%18", "%16,%17,%18,%19", "%20",  \
                      "%21", KITCHEN_F16(0))                                                                                  \
  KITCHEN_WGMMA_FLOAT(name, 48, types, tail, tail_registers, KITCHEN_LIST_24, "%24", "%25", "%26", "%24,%25,%26,%27", "%28",  \
                      "%29", KITCHEN_F16(0), KITCHEN_F8(16))                                                                  \
  KITCHEN_WGMMA_FLOAT(name, 64, types, tail, tail_registers, KITCHEN_LIST_32, "%32", "%33", "%34", "%32,%33,%34,%35", "%36",  \
                      "%37", KITCHEN_F16(0), KITCHEN_F16(16))                                                                 \
  KITCHEN_WGMMA_FLOAT(name, 96, types, tail, tail_registers, KITCHEN_LIST_48, "%48", "%49", "%50", "%48,%49,%50,%51", "%52",  \
                      "%53", KITCHEN_F16(0), KITCHEN_F16(16), KITCHEN_F16(32))                                                \
  KITCHEN_WGMMA_FLOAT(name, 128, types, tail, tail_registers, KITCHEN_LIST_64, "%64", "%65", "%66", "%64,%65,%66,%67", "%68", \
                      "%69", KITCHEN_F16(0), KITCHEN_F16(16), KITCHEN_F16(32), KITCHEN_F16(48))

KITCHEN_WGMMA_ALL(WgmmaE4m3, "k32.f32.e4m3.e4m3", "", "")
KITCHEN_WGMMA_ALL(WgmmaBf16, "k16.f32.bf16.bf16", ", 0, 0", ", 0")

#undef KITCHEN_WGMMA_ALL
#undef KITCHEN_WGMMA_FLOAT
#undef KITCHEN_LIST_64
#undef KITCHEN_LIST_48
#undef KITCHEN_LIST_32
#undef KITCHEN_LIST_24
#undef KITCHEN_LIST_16
#undef KITCHEN_LIST_12
#undef KITCHEN_F16
#undef KITCHEN_F8
#undef KITCHEN_F4

}  // namespace kitchen::ptx
