// Every instance of the portable INT8 GEMM on one small problem each, against a loop on the host: a program without torch, for
// compute-sanitizer, under which importing torch takes longer than the kernels.
//
//   nvcc -std=c++17 -O2 -arch=sm_90a --expt-relaxed-constexpr -I shared_cuda/include -I packages/kitchen-int8/csrc -o sanitize_gemm
//     packages/kitchen-int8/tests/sanitize_gemm.cu packages/kitchen-int8/csrc/int8_gemm/{smxx,sm75,sm80}/*.cu
//   compute-sanitizer --tool memcheck ./sanitize_gemm && compute-sanitizer --tool racecheck ./sanitize_gemm
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "int8_gemm/smxx/portable_gemm.cuh"

using namespace kitchen;
using namespace kitchen::int8;

namespace {

uint32_t random_state = 1;
uint32_t next_random() { return random_state = random_state * 1664525u + 1013904223u, random_state >> 8; }

template <class T>
struct DeviceArray {
  T* data = nullptr;
  explicit DeviceArray(const std::vector<T>& host) {
    host::check(cudaMalloc(&data, host.size() * sizeof(T)), "cudaMalloc");
    host::check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data); }
  std::vector<T> read(size_t count) const {
    std::vector<T> host(count);
    host::check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

// Rows `pitch` bytes apart, the allocation ending with the last row's last byte: reads beyond it are found.
std::vector<int8_t> random_codes(int rows, int K, int pitch) {
  std::vector<int8_t> codes(static_cast<size_t>(rows - 1) * pitch + K);
  for (auto& code : codes) code = static_cast<int8_t>(next_random());
  return codes;
}
std::vector<float> random_floats(int count) {
  std::vector<float> values(count);
  for (auto& value : values) value = (static_cast<int>(next_random() % 2001) - 1000) / 1024.0f;
  return values;
}

int check(portable::Path path, int tile, int splits, int stages, int M, int N, int K, int pitch) {
  const auto a = random_codes(M, K, pitch), b = random_codes(N, K, pitch);
  const auto a_scale = random_floats(M), b_scale = random_floats(N), bias = random_floats(N), residual = random_floats(M * N),
             residual_scale = random_floats(N);
  const DeviceArray<int8_t> a_device(a), b_device(b);
  const DeviceArray<float> a_scale_device(a_scale), b_scale_device(b_scale), bias_device(bias), residual_device(residual),
      residual_scale_device(residual_scale), out(std::vector<float>(M * N, NAN));
  const DeviceArray<int32_t> partials(std::vector<int32_t>(static_cast<size_t>(splits) * M * N, -1));
  portable::Operands o = {};
  o.gemm = {M, N, K, a_device.data, b_device.data, a_scale_device.data, b_scale_device.data, bias_device.data, residual_device.data,
            residual_scale_device.data, out.data, DType::kFloat32, DType::kFloat32, 1, 1, false};
  o.a_pitch = o.b_pitch = pitch;
  o.partials = partials.data;
  const auto run = path == portable::Path::kSm80 ? portable::int8_gemm_sm80 : portable::int8_gemm_sm75;
  run(o, {tile, stages, splits, 2}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the kernel");
  const auto got = out.read(M * N);
  int wrong = 0;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      int acc = 0;
      for (int k = 0; k < K; ++k) acc += a[static_cast<size_t>(m) * pitch + k] * b[static_cast<size_t>(n) * pitch + k];
      volatile float scaled = static_cast<float>(acc) * a_scale[m];
      const float y = std::fmaf(residual_scale[n], std::fmaf(scaled, b_scale[n], bias[n]), residual[m * N + n]);
      wrong += std::memcmp(&y, &got[m * N + n], 4) != 0;
    }
  }
  if (wrong) std::printf("sm_%d tile %d, %d splits, %d stages, M=%d N=%d K=%d: %d wrong\n", int(path), tile, splits, stages, M, N, K, wrong);
  return wrong != 0;
}

}  // namespace

int main() {
  int cases = 0, failed = 0;
  for (const auto path : {portable::Path::kSm75, portable::Path::kSm80}) {
    const auto table = portable::table_of(path);
    for (int tile = 0; tile < table.count; ++tile) {
      const int M = table.tiles[tile].m + 5, N = table.tiles[tile].n + 8, stages = path == portable::Path::kSm75 ? 2 : 3;
      for (const int splits : {1, 2}) {
        cases += 1, failed += check(path, tile, splits, stages, M, N, 1040, 1040);
        if (table.tiles[tile].any_alignment) cases += 1, failed += check(path, tile, splits, stages, M, N + 1, 1037, 1039);
      }
    }
  }
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}
