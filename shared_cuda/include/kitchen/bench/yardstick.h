// Yardsticks of the benches (shared_cuda/bench/yardstick.cu). Sizes are rounded down to 16 bytes; pointers are aligned to 16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kitchen::bench {

// Reads ratio * target_bytes, writes target_bytes. ratio: 1, 2, 4 or 8.
void yardstick_copy(const void* source, void* target, int64_t target_bytes, int ratio, int sm_count, cudaStream_t stream);
// Reads `source_bytes`, writes ratio * source_bytes. ratio: 2 or 4.
void yardstick_expand(const void* source, void* target, int64_t source_bytes, int ratio, int sm_count, cudaStream_t stream);
// Reads `bytes`; `sink` is 4 bytes that are never written in practice.
void yardstick_read(const void* source, int64_t bytes, void* sink, int sm_count, cudaStream_t stream);

}  // namespace kitchen::bench
