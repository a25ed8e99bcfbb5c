// x in the order of the weights' columns, as it lies in shared memory beside a stage of 256 columns.
//
// An image of a stage: [4 blocks of 64 columns][tokens] rows of 128 bytes, swizzled by 128 bytes: the K-major operand of wgmma. Columns
// are not in their own order: codes come in words of eight columns, and a lane of a quad (t) has words of columns 64t + 32s + 8w of a
// stage; pair (c, c + 4) of such a word is one register of A. So the pairs c = 0 .. 3 of x go to 4-byte place t of 16-byte chunks
// 4 (w % 2) + c of block 2s + w/2.
#pragma once

#include <cstdint>

namespace kitchen::awq::stream {

constexpr int kStageColumns = 256;
constexpr int kImageRowBytes = 2 * kStageColumns;  // of a token in an image, all blocks together
constexpr int kStageUnits = 8;                     // of a token's stage: words (s, w) of the four lanes of a quad

// Unit (s, w) of row m of x, columns `first` .. `first` + 255, to its place in an image of kTokens rows; zeros beyond M and K.
template <int kTokens>
__device__ __forceinline__ void pair_unit(uint8_t* image, const uint16_t* x, int m, int unit, int first, int M, int K) {
  const int s = unit / 4, w = unit % 4;
  uint4 from[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int k = first + 64 * t + 32 * s + 8 * w;
    from[t] = m < M && k < K ? *reinterpret_cast<const uint4*>(x + static_cast<int64_t>(m) * K + k) : make_uint4(0, 0, 0, 0);
  }
  uint8_t* const row = image + (2 * s + w / 2) * (kTokens * 128) + m * 128;
  const auto store = [&](int c, const uint4& value) { *reinterpret_cast<uint4*>(row + ((4 * (w % 2) + c) ^ (m % 8)) * 16) = value; };
  store(0, make_uint4(__byte_perm(from[0].x, from[0].z, 0x5410), __byte_perm(from[1].x, from[1].z, 0x5410),
                      __byte_perm(from[2].x, from[2].z, 0x5410), __byte_perm(from[3].x, from[3].z, 0x5410)));
  store(1, make_uint4(__byte_perm(from[0].x, from[0].z, 0x7632), __byte_perm(from[1].x, from[1].z, 0x7632),
                      __byte_perm(from[2].x, from[2].z, 0x7632), __byte_perm(from[3].x, from[3].z, 0x7632)));
  store(2, make_uint4(__byte_perm(from[0].y, from[0].w, 0x5410), __byte_perm(from[1].y, from[1].w, 0x5410),
                      __byte_perm(from[2].y, from[2].w, 0x5410), __byte_perm(from[3].y, from[3].w, 0x5410)));
  store(3, make_uint4(__byte_perm(from[0].y, from[0].w, 0x7632), __byte_perm(from[1].y, from[1].w, 0x7632),
                      __byte_perm(from[2].y, from[2].w, 0x7632), __byte_perm(from[3].y, from[3].w, 0x7632)));
}

// Images of `stages` stages from column first_k on, by `threads` threads. Rows beyond M stay as they are: their sums are not stored.
template <int kTokens>
__device__ __forceinline__ void pair_piece(uint8_t* images, const uint16_t* x, int first_k, int stages, int M, int K, int thread, int threads) {
  const int units = M * stages * kStageUnits;
#pragma unroll 1
  for (int i = thread; i < units; i += threads) {
    const int unit = i % kStageUnits, at = i / kStageUnits, m = at / stages, stage = at - m * stages;
    pair_unit<kTokens>(images + stage * (kTokens * kImageRowBytes), x, m, unit, first_k + stage * kStageColumns, M, K);
  }
}

}  // namespace kitchen::awq::stream
