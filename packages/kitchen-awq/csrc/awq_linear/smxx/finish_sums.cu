// What is left of a linear whose product lies in memory as float32: bias, residual, and the one rounding.
//
//   y = sum + bias[n];  y = fma(residual_scale[n], y, residual[m, n]) where there is a residual;  out[m, n] = round(y)
//
// A thread takes every gridDim.x * kThreads-th element of a row. Used where no fused epilogue fits: docs/kernels/awq.md.
#include "awq_linear/awq_linear.h"
#include "awq_linear/epilogue.cuh"
#include "kitchen/host/device.h"

namespace kitchen::awq {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishParams p) {
  const EpilogueParams epilogue = {p.bias, p.residual, p.residual_scale, p.out, p.residual_scale_stride, p.bias_type, p.residual_type,
                                   p.out_type, false};
  const int64_t total = p.M * p.count;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t m = i / p.count, n = p.first + (i - m * p.count);
    finish_one(epilogue, m * p.N + n, n, p.sums[i]);
  }
}

}  // namespace

void finish_sums(const FinishParams& p, int device, cudaStream_t stream) {
  if (p.M == 0 || p.count == 0) return;
  host::DeviceGuard guard(device);
  const int64_t wanted = (p.M * p.count + kThreads - 1) / kThreads, most = 32 * host::attribute(cudaDevAttrMultiProcessorCount, device);
  finish_kernel<<<static_cast<unsigned>(wanted < most ? wanted : most), kThreads, 0, stream>>>(p);
  host::check(cudaGetLastError(), "awq_linear");
}

LinearDevice linear_device(int device) {
  return {host::attribute(cudaDevAttrMultiProcessorCount, device), host::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          host::attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          10 * host::attribute(cudaDevAttrComputeCapabilityMajor, device) + host::attribute(cudaDevAttrComputeCapabilityMinor, device)};
}

}  // namespace kitchen::awq
