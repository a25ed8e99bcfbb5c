// What the programs sanitize_*.cu share: small random problems, their device arrays, and the host's own INT8 GEMM.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "int8_gemm/sm90/int8_gemm.h"
#include "kitchen/testing/device_array.h"

namespace sanitize {

using namespace kitchen;

using testing::DeviceArray, testing::next_random, testing::random_floats;

// Rows `pitch` bytes apart, the last one ending the array.
inline std::vector<int8_t> random_codes(int rows, int K, int pitch) {
  std::vector<int8_t> codes(static_cast<size_t>(rows - 1) * pitch + K);
  for (auto& code : codes) code = static_cast<int8_t>(next_random());
  return codes;
}

// Operands of one GEMM with bias, float32 out; the residual and its scale are used where asked for.
struct GemmProblem {
  int M, N, K, pitch;
  std::vector<int8_t> a, b;
  std::vector<float> a_scale, b_scale, bias, residual, residual_scale;
  DeviceArray<int8_t> a_device, b_device;
  DeviceArray<float> a_scale_device, b_scale_device, bias_device, residual_device, residual_scale_device;

  GemmProblem(int m, int n, int k, int pitch_)
      : M(m), N(n), K(k), pitch(pitch_), a(random_codes(m, k, pitch_)), b(random_codes(n, k, pitch_)),
        a_scale(random_floats(m)), b_scale(random_floats(n)), bias(random_floats(n)), residual(random_floats(m * n)),
        residual_scale(random_floats(n)), a_device(a), b_device(b), a_scale_device(a_scale), b_scale_device(b_scale),
        bias_device(bias), residual_device(residual), residual_scale_device(residual_scale) {}

  int8::Int8GemmParams params(float* out, bool with_residual) const {
    int8::Int8GemmParams p = {};
    p.M = M, p.N = N, p.K = K;
    p.a = a_device.data, p.b = b_device.data;
    p.a_scale = a_scale_device.data, p.b_scale = b_scale_device.data;
    p.bias = bias_device.data;
    if (with_residual) p.residual = residual_device.data, p.residual_scale = residual_scale_device.data;
    p.out = out;
    p.bias_type = p.out_type = DType::kFloat32;
    p.b_scale_stride = p.residual_scale_stride = 1;
    return p;
  }

  std::vector<float> expected(bool with_residual) const {
    std::vector<float> y(static_cast<size_t>(M) * N);
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) {
        int acc = 0;
        for (int k = 0; k < K; ++k) acc += a[static_cast<size_t>(m) * pitch + k] * b[static_cast<size_t>(n) * pitch + k];
        volatile float scaled = static_cast<float>(acc) * a_scale[m];
        float& value = y[static_cast<size_t>(m) * N + n];
        value = std::fmaf(scaled, b_scale[n], bias[n]);
        if (with_residual) value = std::fmaf(residual_scale[n], value, residual[static_cast<size_t>(m) * N + n]);
      }
    }
    return y;
  }
};

// Program arguments: words; only cases whose name holds one of them are run.
struct Tally {
  int cases = 0, failed = 0;
  std::vector<std::string> words;

  explicit Tally(int argc = 0, char** argv = nullptr) {
    for (int i = 1; i < argc; ++i) words.push_back(argv[i]);
  }

  // Runs one case, which launches on the default stream and returns how many results are wrong.
  template <class Case>
  void run(const std::string& name, Case&& one) {
    const auto named = [&](const std::string& word) { return name.find(word) != std::string::npos; };
    if (!words.empty() && std::none_of(words.begin(), words.end(), named)) return;
    ++cases;
    const int wrong = one();
    if (wrong == 0) return;
    ++failed;
    std::printf("%s: %d wrong\n", name.c_str(), wrong);
  }
  int finish() const {
    std::printf("%d cases, %d failed\n", cases, failed);
    return failed != 0 || cases == 0;
  }
};

template <class T>
int differences(const std::vector<T>& got, const std::vector<T>& want) {
  int wrong = got.size() != want.size();
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) wrong += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  return wrong;
}

}  // namespace sanitize
