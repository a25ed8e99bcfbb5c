// Tensor maps for the bulk copy engine, encoded without linking libcuda: the encoder is looked up through the
// runtime, so a library that includes this loads on a machine without a driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kitchen::host {

using TensorMapEncoder = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                      CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// nullptr when the driver is missing or older than CUDA 12.0.
inline TensorMapEncoder find_tensor_map_encoder() {
  static const TensorMapEncoder encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status);
    const bool found = error == cudaSuccess && status == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<TensorMapEncoder>(entry) : nullptr;
  }();
  return encoder;
}

// A row-major [rows, columns] matrix, moved in boxes of [box_rows, box_columns].
struct MatrixMap {
  CUtensorMapDataType type;
  int element_bytes;
  const void* data;         // 16-byte aligned
  int64_t rows, columns;
  int64_t pitch_bytes;      // from row to row, a multiple of 16
  int box_rows, box_columns;
  CUtensorMapSwizzle swizzle;
};

inline CUtensorMap encode_matrix_map(const MatrixMap& m) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t pitches[1] = {static_cast<cuuint64_t>(m.pitch_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(m.box_columns), static_cast<cuuint32_t>(m.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const TensorMapEncoder encode = find_tensor_map_encoder();
  if (encode == nullptr) {
    throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: CUDA 12.0 or later is needed");
  }
  CUtensorMap map;
  const CUresult result = encode(&map, m.type, 2, const_cast<void*>(m.data), sizes, pitches, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, m.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result) + " for a [" +
                             std::to_string(m.rows) + ", " + std::to_string(m.columns) + "] matrix, row pitch " +
                             std::to_string(m.pitch_bytes) + " bytes, box [" + std::to_string(m.box_rows) + ", " +
                             std::to_string(m.box_columns) + "]");
  }
  return map;
}

}  // namespace kitchen::host
