// Every kernel on small, ragged problems, for compute-sanitizer: each buffer is an allocation of exactly its size.
// tools/sanitize.py builds and runs it; results are compared by test_wmma_gpu.py, not here. With an argument, many more
// problems: seconds under memcheck and initcheck, minutes under racecheck.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.cu"

namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Device memory of exactly that size, filled with bytes of a counter, freed at the end.
struct Buffer {
  void* data = nullptr;
  explicit Buffer(size_t bytes, bool filled = true) {
    check(cudaMalloc(&data, bytes), "cudaMalloc");
    if (!filled) return;
    std::vector<unsigned char> host(bytes);
    for (size_t i = 0; i < bytes; ++i) host[i] = static_cast<unsigned char>(37 * i % 61);  // small finite floats of any type
    check(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Buffer() { cudaFree(data); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

using kitchen::DType;

int cases = 0;

template <class Config>
void multiply(void (*kernel)(ScaledMmParams), int M, int N, int K, DType type, bool extras) {
  const size_t size = kitchen::size_of(type);
  Buffer a(size_t(M) * K), b(size_t(N) * K), a_scale(4 * M), b_scale(4 * N), bias(4 * N), residual(size * M * N);
  Buffer out(size * M * N, false);
  ScaledMmParams p = {};
  p.a = a.as<uint8_t>(), p.b = b.as<uint8_t>(), p.a_scale = a_scale.as<float>(), p.b_scale = b_scale.as<float>();
  p.out = out.data, p.M = M, p.N = N, p.K = K, p.a_pitch = K, p.b_pitch = K, p.b_scale_stride = extras;
  if (extras) {
    p.bias = bias.data, p.residual = residual.data;
    p.residual_scale = b_scale.as<float>(), p.residual_scale_stride = 1;
  }
  p.bias_type = DType::kFloat32, p.residual_type = type, p.out_type = type, p.raster_group = 2;
  p.aligned = K % 16 == 0, p.vectors = N % 8 == 0;
  const int blocks = (M + Config::kTileM - 1) / Config::kTileM * ((N + Config::kTileN - 1) / Config::kTileN);
  allow_shared(kernel, Config::kSharedBytes);
  kernel<<<blocks, Config::kThreads, Config::kSharedBytes>>>(p);
  check(cudaDeviceSynchronize(), "int8_scaled_mm");
  ++cases;
}

void quantize(int M, int K, int group, DType type, int act, bool vectors, uint64_t seed) {
  const size_t size = kitchen::size_of(type);
  Buffer x(size * 2 * M * K), weight(4 * K), codes(size_t(M) * K, false), scales(4 * M, false);
  QuantizeParams p = {};
  p.x = x.data, p.act_weight = weight.data, p.codes = codes.as<int8_t>(), p.scales = scales.as<float>();
  p.x_row_stride = 2 * K, p.seed = seed, p.K = K, p.group = group, p.act_eps = 1e-6f, p.dtype = type;
  p.act_weight_dtype = DType::kFloat32, p.act = static_cast<kitchen::quant::InputAct>(act), p.vectors = vectors;
  const int unit = group >= 1024 ? 256 : 32, wanted = ((K + 15) / 16 + unit - 1) / unit * unit;
  const int threads = wanted < kMaxQuantizeThreads ? wanted : kMaxQuantizeThreads;
  const int shared = group >= 64 ? quantize_shared_bytes(threads) : 0;
  allow_shared(quantize_int8_rowwise, 80 * 1024);
  quantize_int8_rowwise<<<M, threads, shared>>>(p);
  check(cudaDeviceSynchronize(), "quantize_int8_rowwise");
  ++cases;
}

}  // namespace

int main(int argc, char**) {
  const bool few = argc == 1;
  const DType types[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (int K : few ? std::vector<int>{300} : std::vector<int>{1, 63, 128, 1040, 2100}) {
    for (int M : few ? std::vector<int>{40} : std::vector<int>{1, 40, 129}) {
      for (int N : few ? std::vector<int>{131} : std::vector<int>{1, 72, 131}) {
        const DType type = types[(M + N + K) % 3];
        multiply<Small>(int8_scaled_mm_small, M, N, K, type, K % 2);
        multiply<Medium>(int8_scaled_mm_medium, M, N, K, type, K % 2 == 0);
        multiply<Large>(int8_scaled_mm_large, M, N, K, type, N > 1);
      }
    }
  }
  // Tiles that lie whole in their matrices, in stages that lie whole in K, through a flush: a path of its own.
  multiply<Small>(int8_scaled_mm_small, 32, 32, 1152, DType::kFloat16, true);
  multiply<Medium>(int8_scaled_mm_medium, 64, 64, 1088, DType::kFloat16, true);
  multiply<Large>(int8_scaled_mm_large, 128, 136, 1088, DType::kFloat16, true);
  for (DType type : types) {
    for (int group : {0, 4, 16, 64, 256, 1024, 4096}) {
      const int unit = group == 0 ? 1 : group;
      for (int K : few ? std::vector<int>{3 * unit} : std::vector<int>{unit, 3 * unit, 20480}) {
        for (int act = 0; act < 5; act += group == 256 ? 1 : 5) quantize(2, K, group, type, act, K % 16 == 0, 0);
        if (!few) quantize(2, K, group, type, 0, false, 5);
      }
    }
  }
  std::printf("%d cases, results not compared\n", cases);
  return 0;
}
