// Every instance of the AWQ kernels on one small problem each, against a loop on the host: a program without torch, for
// compute-sanitizer, under which importing torch takes longer than the kernels. tools/sanitize.py builds and runs it.
//
// sources: packages/kitchen-awq/csrc/dequantize_awq/*.cu packages/kitchen-awq/csrc/awq_linear/smxx/*.cu
// sources: packages/kitchen-awq/csrc/awq_linear/decode/sm80/*.cu packages/kitchen-awq/csrc/awq_linear/sm90/*.cu
// sources: packages/kitchen-awq/csrc/awq_linear/stream/sm90/*.cu
#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "awq_linear/awq_linear.h"
#include "dequantize_awq/dequantize_awq.h"
#include "kitchen/host/check.h"

using namespace kitchen;
using namespace kitchen::awq;

namespace {

uint32_t next_random() {
  static uint32_t state = 1;
  return state = state * 1664525u + 1013904223u, state >> 8;
}

// An allocation that ends with the array, filled before: initcheck does not see what the copy engine writes.
template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t count;
  explicit DeviceArray(const std::vector<T>& host) : count(host.size()) {
    host::check(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
    host::check(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  std::vector<T> read() const {
    std::vector<T> host(count);
    host::check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

std::vector<float> random_floats(size_t count, float size) {
  std::vector<float> values(count);
  for (auto& value : values) value = size * (static_cast<int>(next_random() % 2001) - 1000) / 1024.0f;
  return values;
}

std::vector<__nv_bfloat16> rounded(const std::vector<float>& values) {
  std::vector<__nv_bfloat16> made(values.size());
  for (size_t i = 0; i < values.size(); ++i) made[i] = __float2bfloat16_rn(values[i]);
  return made;
}

// bfloat16 x, scales and bias, float32 out. `tiny`: zeros so small that blocks repeat with the exact decoder.
struct AwqProblem {
  int M, N, K, group;
  std::vector<uint8_t> codes;
  std::vector<__nv_bfloat16> x, scale, zero, bias;
  DeviceArray<uint8_t> codes_device;
  DeviceArray<__nv_bfloat16> x_device, scale_device, zero_device, bias_device;

  static std::vector<uint8_t> random_codes(size_t count) {
    std::vector<uint8_t> made(count);
    for (auto& code : made) code = static_cast<uint8_t>(next_random());
    return made;
  }

  AwqProblem(int m, int n, int k, int g, bool tiny)
      : M(m), N(n), K(k), group(g), codes(random_codes(size_t(n) * k / 2)), x(rounded(random_floats(size_t(m) * k, 1))),
        scale(rounded(random_floats(size_t(k / g) * n, 1))), zero(rounded(random_floats(size_t(k / g) * n, tiny ? 0x1p-22f : 1))),
        bias(rounded(random_floats(n, 1))), codes_device(codes), x_device(x), scale_device(scale), zero_device(zero),
        bias_device(bias) {}

  float weight(int n, int k) const {
    const size_t at = size_t(k / group) * N + n;
    const int q = codes[size_t(n) * (K / 2) + k / 2] >> (4 * (k % 2)) & 15;
    const float value = std::fmaf(float(q - 8), __bfloat162float(scale[at]), __bfloat162float(zero[at]));
    return __bfloat162float(__float2bfloat16_rn(value));
  }

  LinearParams params(float* out) const {
    LinearParams p = {};
    p.M = M, p.N = N, p.K = K, p.group = group;
    p.x = x_device.data, p.codes = codes_device.data, p.scale = scale_device.data, p.zero = zero_device.data;
    p.bias = bias_device.data, p.out = out;
    p.x_type = p.parameter_type = p.bias_type = DType::kBFloat16;
    p.out_type = DType::kFloat32;
    return p;
  }

  // How many results are farther off than fp32 sums in any order can be.
  int differences(const std::vector<float>& got) const {
    int wrong = 0;
    for (int n = 0; n < N; ++n) {
      std::vector<float> row(K);
      for (int k = 0; k < K; ++k) row[k] = weight(n, k);
      for (int m = 0; m < M; ++m) {
        double sum = __bfloat162float(bias[n]), size = std::fabs(sum);
        for (int k = 0; k < K; ++k) {
          const double product = double(row[k]) * __bfloat162float(x[size_t(m) * K + k]);
          sum += product, size += std::fabs(product);
        }
        wrong += !(std::fabs(got[size_t(m) * N + n] - sum) <= 2 * (K + 3) * 0x1p-24 * size);
      }
    }
    return wrong;
  }
};

int cases = 0, failed = 0;

void report(const std::string& name, int wrong) {
  ++cases;
  if (wrong == 0) return;
  ++failed;
  std::printf("%s: %d wrong\n", name.c_str(), wrong);
}

// Every step-th variant: those of awq_stream are shapes of one kernel.
template <class Launch, class Rejected>
void run_route(const char* name, int variants, int step, Rejected rejected, Launch launch) {
  const LinearDevice device = linear_device(0);
  for (const bool tiny : {false, true}) {
    for (const int M : {5, 40, 150}) {
      const AwqProblem problem(M, 136, 544, tiny ? 32 : 136 * 4, tiny);
      for (int variant = 0; variant < variants; variant += step) {
        for (const int splits : {1, 2, 4}) {
          const LinearPlan plan = {variant, splits};
          const DeviceArray<float> out(std::vector<float>(size_t(M) * problem.N, -1.0f));
          const LinearParams params = problem.params(out.data);
          if (rejected(params, plan, device) != nullptr) continue;
          launch(params, plan);
          host::check(cudaDeviceSynchronize(), name);
          const std::string plan_words = " variant " + std::to_string(variant) + " splits " + std::to_string(splits);
          report(name + plan_words, problem.differences(out.read()));
        }
      }
    }
  }
}

void run_dequantize() {
  for (const int K : {544, 36}) {
    const AwqProblem problem(1, 37, K, K == 36 ? 12 : 32, false);
    const DeviceArray<float> out(std::vector<float>(size_t(37) * K, -1.0f));
    const DequantizeParams p = {problem.codes_device.data, problem.scale_device.data, problem.zero_device.data, out.data, 37, K,
                                problem.group, 37, DType::kBFloat16, DType::kFloat32, DType::kBFloat16};
    dequantize_awq(p, 0, nullptr);
    host::check(cudaDeviceSynchronize(), "dequantize_awq");
    const auto got = out.read();
    int wrong = 0;
    for (int n = 0; n < 37; ++n) {
      for (int k = 0; k < K; ++k) wrong += got[size_t(n) * K + k] != problem.weight(n, k);
    }
    report("dequantize K=" + std::to_string(K), wrong);
  }
}

}  // namespace

int main() {
  run_dequantize();
  run_route("awq_decode", decode_variant_count(), 1, decode_plan_rejected,
            [](const LinearParams& p, const LinearPlan& plan) { awq_decode(p, nullptr, &plan, 0, nullptr); });
  run_route("awq_stream", stream_variant_count(), 4, stream_plan_rejected,
            [](const LinearParams& p, const LinearPlan& plan) { awq_stream(p, nullptr, &plan, 0, nullptr); });
  run_route("awq_gemm_sm90", gemm_sm90_variant_count(), 1, gemm_sm90_plan_rejected, [](const LinearParams& p, const LinearPlan& plan) {
    const DeviceArray<uint8_t> workspace(std::vector<uint8_t>(static_cast<size_t>(gemm_sm90_workspace(p, plan, linear_device(0)))));
    awq_gemm_sm90(p, workspace.data, &plan, 0, nullptr);
    host::check(cudaDeviceSynchronize(), "awq_gemm_sm90");
  });
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}
