// 16 bytes from an address of any alignment, without reading outside of their row.
#pragma once

#include <cstdint>

namespace kitchen::copy {

// Bytes row[k .. k+15], those from `row_bytes` on as zeros. Inside of a row: five aligned words and funnel shifts, which touch
// up to 3 bytes on either side; at its ends: byte by byte.
__device__ __forceinline__ uint4 load_16_unaligned(const uint8_t* row, int k, int row_bytes) {
  uint32_t words[4];
  const uint8_t* const first = row + k;
  if (k >= 4 && k + 20 <= row_bytes) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(first) % 4);
    const uint32_t* const aligned = reinterpret_cast<const uint32_t*>(first - shift);
    uint32_t low = aligned[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = aligned[i + 1];
      words[i] = __funnelshift_r(low, high, 8 * shift);
      low = high;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int at = 4 * i + byte;
        if (k + at < row_bytes) words[i] |= static_cast<uint32_t>(first[at]) << (8 * byte);
      }
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The same from an address aligned to 16: one load inside of the row.
__device__ __forceinline__ uint4 load_16_aligned(const uint8_t* row, int k, int row_bytes) {
  if (k + 16 <= row_bytes) return *reinterpret_cast<const uint4*>(row + k);
  return load_16_unaligned(row, k, row_bytes);
}

}  // namespace kitchen::copy
