// The second phase of a split K: sums the partial results [splits, M, N] in order, and finishes them as scale_epilogue.cuh says.
// A thread has 8 neighbouring columns of one row; int32 sums are exact, so the order decides no bit.
#include "int8_gemm/smxx/scale_epilogue.cuh"
#include "kitchen/host/launch.h"

namespace kitchen::int8::portable {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) reduce_splits_kernel(EpilogueParams params, const int32_t* partials, int splits) {
  const int64_t pieces = (params.N + kColumns - 1) / kColumns;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (piece >= pieces * params.M) return;
  const int row = static_cast<int>(piece / pieces), column = static_cast<int>(piece % pieces) * kColumns;
  const int64_t at = static_cast<int64_t>(row) * params.N + column, step = params.M * params.N;
  const ScaleEpilogue epilogue(params, 0);
  const auto columns = epilogue.load_columns(column);
  const float a_scale = epilogue.load_row(row);
  const auto ahead = epilogue.load_ahead(row, column);
  int acc[kColumns] = {};
  if (params.vectors) {
    for (int split = 0; split < splits; ++split) {
      const int4* const from = reinterpret_cast<const int4*>(partials + at + split * step);
      const int4 low = from[0], high = from[1];
      acc[0] += low.x, acc[1] += low.y, acc[2] += low.z, acc[3] += low.w;
      acc[4] += high.x, acc[5] += high.y, acc[6] += high.z, acc[7] += high.w;
    }
  } else {
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        if (column + e < params.N) acc[e] += partials[at + split * step + e];
      }
    }
  }
  epilogue.store(row, column, columns, a_scale, ahead, acc);
}

}  // namespace

void reduce_splits(const EpilogueParams& params, int splits, cudaStream_t stream) {
  EpilogueParams last = params;
  last.partials = nullptr;
  const int64_t pieces = (params.N + kColumns - 1) / kColumns * params.M;
  const int32_t* const partials = params.partials;
  const int64_t blocks = (pieces + kThreads - 1) / kThreads;
  host::launch("int8_gemm: the sum of the splits", reduce_splits_kernel, {blocks, kThreads, 1, 0, stream}, last, partials, splits);
}

}  // namespace kitchen::int8::portable
