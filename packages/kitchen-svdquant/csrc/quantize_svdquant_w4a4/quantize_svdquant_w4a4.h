// Activations to 4-bit codes in groups of 64 columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "decode_svdquant/decode_svdquant.h"
#include "kitchen/common/dtype.h"

namespace kitchen::svdquant {

enum class CodeForm : int { kPacked = 0, kE4m3 = 1 };  // two codes a byte; an e4m3 number each

struct QuantizeParams {
  const void* x;  // [M, K] of type, rows x_row_stride elements apart
  int64_t x_row_stride;
  const void* smooth;  // [K] of smooth_type
  uint8_t* codes;      // [M, K / 2], or e4m3 numbers [M, K]
  void* scales;        // float32 [K / 64, M]; for e4m3 their parts in blocks of 64 rows: svdquant_gemm/scale_layout.h
  int64_t M, K;
  float shift;       // added to x in fp32 before the division; 0 adds nothing
  bool is_unsigned;  // codes 0..15, else -7..7
  CodeForm form;
  DType type, smooth_type;
  uint32_t* cleared = nullptr;  // set to zero on the way, for the kernel behind; may be nullptr
  int cleared_count = 0;
};

// With x * proj_down beside it, for few rows on GPUs with clusters (sm_90 and later). Codes are packed.
struct FewRowsParams {
  QuantizeParams quantize;  // x of 16 bits, rows aligned to 16 bytes
  const void* proj_down;    // [K, R] of down_type, which is x's, aligned to 4 bytes; may be nullptr where R is 0
  float* low;               // [M, R]
  int R;                    // a multiple of 4
  DType down_type;
};

constexpr int kMostFewRows = 96, kMostFewRowsK = 1 << 20;

// nullptr, or why these operands cannot run.
const char* quantize_few_rows_unsupported(const FewRowsParams& params);
void quantize_few_rows(const FewRowsParams& params, int device, cudaStream_t stream);

// `weight`: decoded by blocks of the same launch; may be nullptr. `beside`: it runs beside the kernel in front, which it does not
// depend on (it ends after that one), and which lets it start (ptx/griddep.h).
void quantize_svdquant_w4a4(const QuantizeParams& params, const DecodeParams* weight, int device, cudaStream_t stream,
                            bool beside = false);

}  // namespace kitchen::svdquant
