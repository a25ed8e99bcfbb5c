// Every instance of the AWQ kernels on one small problem each, against a loop on the host: a program without torch, for
// compute-sanitizer, under which importing torch takes longer than the kernels. tools/sanitize.py builds and runs it.
//
// sources: packages/kitchen-awq/csrc/dequantize_awq/*.cu packages/kitchen-awq/csrc/awq_linear/smxx/*.cu
// sources: packages/kitchen-awq/csrc/awq_linear/decode/sm75/*.cu packages/kitchen-awq/csrc/awq_linear/decode/sm80/*.cu
// sources: packages/kitchen-awq/csrc/awq_linear/sm90/*.cu
// sources: packages/kitchen-awq/csrc/awq_linear/stream/sm90/*.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "awq_linear/awq_linear.h"
#include "dequantize_awq/dequantize_awq.h"
#include "kitchen/host/check.h"
#include "kitchen/testing/device_array.h"

using namespace kitchen;
using namespace kitchen::awq;
using testing::DeviceArray;
using testing::next_random;

namespace {

template <class T>
T rounded(float value);
template <>
__nv_bfloat16 rounded(float value) { return __float2bfloat16_rn(value); }
template <>
__half rounded(float value) { return __float2half_rn(value); }

template <class T>
std::vector<T> random_numbers(size_t count, float size = 1) {
  std::vector<T> made;
  made.reserve(count);
  for (float value : testing::random_floats(count)) made.push_back(rounded<T>(size * value));
  return made;
}

struct Case {
  int M, N, K, group;
  bool tiny;  // zeros so small that the exact decoder is needed
};

// x, scales and bias of T, float32 out.
template <class T>
struct AwqProblem {
  Case shape;
  std::vector<uint8_t> codes;
  std::vector<T> x, scale, zero, bias;
  DeviceArray<uint8_t> codes_device;
  DeviceArray<T> x_device, scale_device, zero_device, bias_device;

  static std::vector<uint8_t> random_codes(size_t count) {
    std::vector<uint8_t> made(count);
    for (auto& code : made) code = static_cast<uint8_t>(next_random());
    return made;
  }

  explicit AwqProblem(const Case& c)
      : shape(c), codes(random_codes(size_t(c.N) * c.K / 2)), x(random_numbers<T>(size_t(c.M) * c.K)),
        scale(random_numbers<T>(size_t(c.K / c.group) * c.N)),
        zero(random_numbers<T>(size_t(c.K / c.group) * c.N, c.tiny ? 0x1p-22f : 1)), bias(random_numbers<T>(c.N)), codes_device(codes),
        x_device(x), scale_device(scale), zero_device(zero), bias_device(bias) {}

  float weight(int n, int k) const {
    const size_t at = size_t(k / shape.group) * shape.N + n;
    const int q = codes[size_t(n) * (shape.K / 2) + k / 2] >> (4 * (k % 2)) & 15;
    return static_cast<float>(rounded<T>(std::fmaf(float(q - 8), static_cast<float>(scale[at]), static_cast<float>(zero[at]))));
  }

  LinearParams params(float* out) const {
    LinearParams p = {};
    p.M = shape.M, p.N = shape.N, p.K = shape.K, p.group = shape.group;
    p.x = x_device.data, p.codes = codes_device.data, p.scale = scale_device.data, p.zero = zero_device.data;
    p.bias = bias_device.data, p.out = out;
    p.x_type = p.parameter_type = p.bias_type = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    p.out_type = DType::kFloat32;
    return p;
  }

  // How many results are farther off than fp32 sums in any order can be.
  int differences(const std::vector<float>& got) const {
    int wrong = 0;
    for (int n = 0; n < shape.N; ++n) {
      std::vector<float> row(shape.K);
      for (int k = 0; k < shape.K; ++k) row[k] = weight(n, k);
      for (int m = 0; m < shape.M; ++m) {
        double sum = static_cast<float>(bias[n]), size = std::fabs(sum);
        for (int k = 0; k < shape.K; ++k) {
          const double product = double(row[k]) * static_cast<float>(x[size_t(m) * shape.K + k]);
          sum += product, size += std::fabs(product);
        }
        wrong += !(std::fabs(got[size_t(m) * shape.N + n] - sum) <= 2 * (shape.K + 3) * 0x1p-24 * size);
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
template <class T, class Launch, class Rejected>
void run_route(const char* name, int variants, int step, Rejected rejected, Launch launch) {
  const LinearDevice device = linear_device(0);
  for (const Case& c : {Case{5, 136, 640, 32, true}, {5, 136, 640, 160, false}, {13, 136, 640, 64, false}, {20, 136, 640, 32, false},
                        {40, 136, 640, 32, true}, {40, 136, 640, 160, false}, {64, 136, 640, 128, false}, {150, 136, 640, 64, true}, {150, 136, 640, 128, false}, {300, 136, 640, 128, true}}) {
    const AwqProblem<T> problem(c);
    for (int variant = 0; variant < variants; variant += step) {
      for (const int splits : {1, 2, 4}) {
        const LinearPlan plan = {variant, splits};
        const DeviceArray<float> out(std::vector<float>(size_t(c.M) * c.N, -1.0f));
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

void run_dequantize() {
  for (const int K : {544, 36}) {
    const AwqProblem<__nv_bfloat16> problem({1, 37, K, K == 36 ? 12 : 32, false});
    const DeviceArray<float> out(std::vector<float>(size_t(37) * K, -1.0f));
    const DequantizeParams p = {problem.codes_device.data, problem.scale_device.data, problem.zero_device.data, out.data, 37, K,
                                problem.shape.group, 37, DType::kBFloat16, DType::kFloat32, DType::kBFloat16};
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

// Codes in the resident order: word j of lane t in a step of 256 columns has the columns 2t, 2t + 8, .. and their neighbours of block j.
std::vector<uint8_t> resident_order(const std::vector<uint8_t>& codes) {
  std::vector<uint8_t> ordered(codes.size());
  const auto code = [&](size_t column) { return codes[column / 2] >> (4 * (column % 2)) & 15; };
  for (size_t word = 0; word < codes.size() / 4; ++word) {
    const size_t first = word / 32 * 256 + word % 8 * 32 + word / 8 % 4 * 2;
    for (size_t nibble = 0; nibble < 8; ++nibble) {
      ordered[4 * word + nibble / 2] |= static_cast<uint8_t>(code(first + nibble % 4 * 8 + nibble / 4) << (4 * (nibble % 2)));
    }
  }
  return ordered;
}

void run_resident() {
  const LinearDevice device = linear_device(0);
  for (const int M : {5, 13, 20, 40, 64}) {
    const AwqProblem<__nv_bfloat16> problem({M, 136, 768, M == 13 ? 128 : M == 20 ? 256 : 64, M == 5});
    const DeviceArray<uint8_t> codes(resident_order(problem.codes));
    for (int variant = 0; variant < stream_variant_count(); variant += 5) {
      for (const int splits : {1, 2}) {
        const LinearPlan plan = {variant, splits};
        const DeviceArray<float> out(std::vector<float>(size_t(M) * 136, -1.0f));
        LinearParams p = problem.params(out.data);
        p.codes = codes.data, p.resident = true;
        if (stream_plan_rejected(p, plan, device) != nullptr) continue;
        awq_stream(p, nullptr, &plan, 0, nullptr);
        host::check(cudaDeviceSynchronize(), "awq_stream");
        report("awq_stream resident variant " + std::to_string(variant) + " splits " + std::to_string(splits), problem.differences(out.read()));
      }
    }
  }
}

void launch_gemm(const LinearParams& p, const LinearPlan& plan) {
  const DeviceArray<uint8_t> workspace(static_cast<size_t>(gemm_sm90_workspace(p, plan, linear_device(0))));
  awq_gemm_sm90(p, workspace.data, &plan, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "awq_gemm_sm90");
}

// Rows from the middle of a tile of a larger weight on, whose tiles are cut where blocks need it.
void run_part() {
  for (const Case& c : {Case{150, 136, 640, 64, true}, {300, 456, 640, 128, false}}) {
    const AwqProblem<__nv_bfloat16> problem(c);
    for (int variant = 0; variant < gemm_sm90_variant_count(); ++variant) {
      for (const int first : {200, 968, 1544, 9400}) {
        const DeviceArray<float> out(std::vector<float>(size_t(c.M) * c.N, -1.0f));
        LinearParams p = problem.params(out.data);
        p.part_first = first, p.part_of = 9856;
        launch_gemm(p, {variant, 2});
        report("awq_gemm_sm90 part variant " + std::to_string(variant) + " from " + std::to_string(first), problem.differences(out.read()));
      }
    }
  }
}

void run_float32() {
  for (const int M : {1, 2, 7}) {
    const AwqProblem<__nv_bfloat16> problem({M, 37, 544, 32, false});
    std::vector<float> wide;
    for (const auto value : problem.x) wide.push_back(static_cast<float>(value));
    const DeviceArray<float> x(wide), out(std::vector<float>(size_t(M) * 37, -1.0f));
    LinearParams p = problem.params(out.data);
    p.x = x.data, p.x_type = DType::kFloat32;
    awq_float32(p, DType::kBFloat16, 0, nullptr);
    host::check(cudaDeviceSynchronize(), "awq_float32");
    report("awq_float32 M=" + std::to_string(M), problem.differences(out.read()));
  }
}

}  // namespace

int main() {
  run_dequantize();
  run_route<__nv_bfloat16>("awq_decode", decode_variant_count(), 1, decode_plan_rejected,
            [](const LinearParams& p, const LinearPlan& plan) { awq_decode(p, nullptr, &plan, 0, nullptr); });
  run_route<__half>("awq_decode_sm75", decode_sm75_variant_count(), 1, decode_sm75_plan_rejected,
                    [](const LinearParams& p, const LinearPlan& plan) { awq_decode_sm75(p, nullptr, &plan, 0, nullptr); });
  run_float32();
  run_resident();
  run_route<__nv_bfloat16>("awq_stream", stream_variant_count(), 5, stream_plan_rejected, [](const LinearParams& p, const LinearPlan& plan) {
    const DeviceArray<uint8_t> workspace(static_cast<size_t>(stream_workspace(p, plan, linear_device(0))));
    awq_stream(p, workspace.data, &plan, 0, nullptr);
    host::check(cudaDeviceSynchronize(), "awq_stream");
  });
  run_route<__nv_bfloat16>("awq_gemm_sm90", gemm_sm90_variant_count(), 1, gemm_sm90_plan_rejected, launch_gemm);
  run_part();
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}
