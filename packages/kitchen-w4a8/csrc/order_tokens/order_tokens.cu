// Activations for hopper.cuh: within each 128 columns, word w (four columns) goes to 4 * (w % 8) + w / 8, zeros beyond K.
//
// wgmma wants, of each 32 k, words q and 4 + q from lane q of four; a lane that holds 32 neighbouring columns of codes (16
// bytes) gives its words i = 0..7 to the places 4 * i + q, and a sum does not mind the order of k as long as both sides have
// the same.
//
// A thread writes 16 bytes: the words i of the four lanes. Measured: docs/kernels/w4a8.md.
#include "order_tokens/order_tokens.h"

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/ptx/dependent_launch.h"

namespace kitchen::w4a8 {
namespace {

constexpr int kThreads = 256, kBlock = 128;  // columns

__device__ __forceinline__ uint32_t word_at(const int8_t* row, int k, int K) {
  return k < K ? *reinterpret_cast<const uint32_t*>(row + k) : 0;
}

__global__ void __launch_bounds__(kThreads) order_tokens_kernel(const __grid_constant__ OrderTokensParams p, int pieces) {
  ptx::wait_then_launch_dependents();
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;  // of 16 bytes of out
  const int64_t m = piece / pieces;
  if (m >= p.M) return;
  const int at = static_cast<int>(piece - m * pieces), i = at % 8, first = at / 8 * kBlock;
  const int8_t* const row = p.a + m * p.K;
  uint32_t words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int k = first + 32 * q;
    words[q] = word_at(row, k + 4 * i, p.K);
  }
  reinterpret_cast<uint4*>(p.out)[piece] = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace

void order_tokens(const OrderTokensParams& p, int device, cudaStream_t stream) {
  const int pieces = (p.K + kBlock - 1) / kBlock * 8;
  if (p.M == 0) return;
  host::DeviceGuard guard(device);
  const int64_t grid = (p.M * pieces + kThreads - 1) / kThreads;
  host::launch("order_tokens", order_tokens_kernel, {grid, kThreads, 1, 0, stream, p.programmatic_launch}, p, pieces);
}

}  // namespace kitchen::w4a8
