// 4-bit codes to e4m3 numbers, and their scales to parts in blocks: what the Hopper GEMM reads. Memory-bound.
#include "decode_svdquant/decode_svdquant.h"

#include "decode_svdquant/decode_codes.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"

namespace kitchen::svdquant {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) decode(const DecodeParams p, const DecodeBlocks blocks) {
  decode_block<kThreads>(p, blocks, blockIdx.x);
}

}  // namespace

void check_decode(const DecodeParams& p) {
  host::require(p.rows >= 0 && p.K >= kGroup && p.K % kGroup == 0, "decode_svdquant: K must be a multiple of 64");
  host::require(p.block >= 1, "decode_svdquant: a block of scales has rows");
  host::require(DecodeBlocks(p, kThreads).all() < (int64_t{1} << 30), "decode_svdquant: too many codes for one launch");
}

void decode_svdquant(const DecodeParams& p, int device, cudaStream_t stream) {
  check_decode(p);
  if (p.rows == 0) return;
  const host::DeviceGuard guard(device);
  const DecodeBlocks blocks(p, kThreads);
  host::launch("decode_svdquant", decode, {blocks.all(), kThreads, 1, 0, stream}, p, blocks);
}

}  // namespace kitchen::svdquant
