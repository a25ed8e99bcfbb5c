// Every instance of the kernels of this package on small problems, against a loop on the host; a program for compute-sanitizer.
// tools/sanitize.py builds and runs it.
//
// sources: packages/kitchen-w4a8/csrc/decode_w4a8_weight/*.cu packages/kitchen-w4a8/csrc/order_tokens/*.cu
// sources: packages/kitchen-w4a8/csrc/w4a8_scaled_mm/stream/sm80/*.cu packages/kitchen-w4a8/csrc/w4a8_scaled_mm/resident/sm90/*.cu
// sources: packages/kitchen-w4a8/csrc/unpack_w4a8_weight/*.cu
// sources: packages/kitchen-w4a8/csrc/w4a8_scaled_mm/hopper/sm90/*.cu packages/kitchen-w4a8/csrc/quantize_w4a8_weight/*.cu
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "decode_w4a8_weight/decode_w4a8_weight.h"
#include "kitchen/host/check.h"
#include "quantize_w4a8_weight/quantize_w4a8_weight.h"
#include "unpack_w4a8_weight/unpack_w4a8_weight.h"
#include "w4a8_scaled_mm/hopper/hopper.h"
#include "w4a8_scaled_mm/resident/resident.h"
#include "w4a8_scaled_mm/stream/stream.h"

using namespace kitchen;
using namespace kitchen::w4a8;

namespace {

uint32_t next_random() {
  static uint32_t state = 1;
  return state = state * 1664525u + 1013904223u, state >> 8;
}

// An allocation that ends with the array, so that reads and writes beyond it are found.
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

template <class T>
std::vector<T> random_bytes(size_t count, uint32_t most = 256) {
  std::vector<T> values(count);
  for (auto& value : values) value = static_cast<T>(next_random() % most);
  return values;
}
std::vector<float> random_floats(size_t count) {
  std::vector<float> values(count);
  for (auto& value : values) value = (static_cast<int>(next_random() % 2001) - 1000) / 1024.0f;
  return values;
}

float e4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float size = exponent == 0 ? std::ldexp(float(mantissa), -9) : std::ldexp(float(8 + mantissa), exponent - 10);
  return byte & 128 ? -size : size;
}

struct Weight {
  int N, K, bits, group;
  std::vector<uint8_t> codes, s_rel;
  std::vector<float> codebook;
  std::vector<int8_t> decoded;

  Weight(int N_, int K_, int bits_, int group_) : N(N_), K(K_), bits(bits_), group(group_) {
    codes = random_bytes<uint8_t>(size_t(N) * K / 8 * bits);
    s_rel = random_bytes<uint8_t>(size_t(N) * (K / group), 127);
    codebook = random_floats(16);
    std::sort(codebook.begin(), codebook.end());
    for (int c = 0; c < 16; ++c) codebook[c] = c < 8 ? -std::fabs(codebook[c]) : std::fabs(codebook[c]);
    decoded.resize(size_t(N) * K);
    for (int n = 0; n < N; ++n) {
      const uint8_t* const row = codes.data() + size_t(n) * K / 8 * bits;
      for (int k = 0; k < K; ++k) {
        const int nibble = row[k / 2] >> 4 * (k % 2) & 15;
        const float level = bits == 4 ? codebook[nibble] : float((nibble | (row[K / 2 + k / 4] >> 2 * (k % 4) & 3) << 4) - 32);
        const volatile float product = level * e4m3(s_rel[size_t(n) * (K / group) + k / group]);
        decoded[size_t(n) * K + k] = static_cast<int8_t>(std::fmin(std::fmax(std::nearbyintf(product), -127.0f), 127.0f));
      }
    }
  }
};

int cases = 0, failed = 0;

template <class T>
void compare(const std::string& name, const std::vector<T>& got, const std::vector<T>& want) {
  int wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) wrong += std::memcmp(&got[i], &want[i], sizeof(T)) != 0;
  ++cases;
  if (wrong == 0) return;
  ++failed;
  std::printf("%s: %d of %zu wrong\n", name.c_str(), wrong, want.size());
}

struct Problem {
  int M;
  const Weight& w;
  std::vector<int8_t> a;
  std::vector<float> a_scale, b_scale, bias, residual, gate, want;
  std::vector<__half> want_half;  // without the residual
  DeviceArray<int8_t> a_device;
  DeviceArray<uint8_t> codes, s_rel;
  DeviceArray<float> codebook, a_scale_device, b_scale_device, bias_device, residual_device, gate_device;

  Problem(int rows, const Weight& weight)
      : M(rows),
        w(weight),
        a(random_bytes<int8_t>(size_t(M) * w.K)),
        a_scale(random_floats(M)),
        b_scale(random_floats(w.N)),
        bias(random_floats(w.N)),
        residual(random_floats(size_t(M) * w.N)),
        gate(random_floats(w.N)),
        want(size_t(M) * w.N),
        want_half(size_t(M) * w.N),
        a_device(a),
        codes(w.codes),
        s_rel(w.s_rel),
        codebook(w.codebook),
        a_scale_device(a_scale),
        b_scale_device(b_scale),
        bias_device(bias),
        residual_device(residual),
        gate_device(gate) {
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < w.N; ++n) {
        int acc = 0;
        for (int k = 0; k < w.K; ++k) acc += a[size_t(m) * w.K + k] * w.decoded[size_t(n) * w.K + k];
        const volatile float scaled = float(acc) * a_scale[m];
        const float y = std::fmaf(scaled, b_scale[n], bias[n]);
        want[size_t(m) * w.N + n] = std::fmaf(gate[n], y, residual[size_t(m) * w.N + n]);
        want_half[size_t(m) * w.N + n] = __float2half_rn(y);
      }
    }
  }

  template <class T>
  void check_typed(const std::string& name, const std::vector<T>& wanted,
                   const std::function<void(const ScaledMmParams&)>& launch) const {
    constexpr bool kHalf = sizeof(T) == 2;
    std::vector<T> poison(wanted.size());
    std::memset(poison.data(), 0xff, poison.size() * sizeof(T));
    const DeviceArray<T> out(poison);
    const ScaledMmParams p = {M,
                              w.N,
                              w.K,
                              a_device.data,
                              a_scale_device.data,
                              codes.data,
                              s_rel.data,
                              w.bits == 4 ? codebook.data : nullptr,
                              b_scale_device.data,
                              bias_device.data,
                              kHalf ? nullptr : residual_device.data,
                              kHalf ? nullptr : gate_device.data,
                              out.data,
                              DType::kFloat32,
                              kHalf ? DType::kFloat16 : DType::kFloat32,
                              1,
                              w.bits,
                              w.group,
                              false};
    launch(p);
    host::check(cudaDeviceSynchronize(), name.c_str());
    compare(name + (kHalf ? ", half" : ""), out.read(), wanted);
  }
  void check(const std::string& name, const std::function<void(const ScaledMmParams&)>& launch) const {
    check_typed(name, want, launch);
    check_typed(name, want_half, launch);
  }
};

void check_decode(const Weight& w) {
  const DeviceArray<uint8_t> codes(w.codes), s_rel(w.s_rel);
  const DeviceArray<float> codebook(w.codebook);
  const DeviceArray<int8_t> out(std::vector<int8_t>(w.decoded.size(), 0));
  decode_w4a8_weight(
      {codes.data, s_rel.data, w.bits == 4 ? codebook.data : nullptr, out.data, w.N, w.K, w.group, w.bits, false}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "decode");
  compare("decode", out.read(), w.decoded);
  std::vector<float> scales(w.s_rel.size());
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = e4m3(w.s_rel[i]);
  const DeviceArray<float> floats(scales);
  decode_w4a8_weight(
      {codes.data, floats.data, w.bits == 4 ? codebook.data : nullptr, out.data, w.N, w.K, w.group, w.bits, true}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "decode");
  compare("decode, float32 scales", out.read(), w.decoded);
}

void check_stream(const Weight& w, const std::vector<stream::Plan>& plans = {{2, 1}, {4, 2}}) {
  for (const int M : {3, 13}) {
    const Problem problem(M, w);
    for (const stream::Plan& plan : plans) {
      if (stream::rejected({M, w.N, w.K, w.bits, w.group}, plan, stream::query(0)) != nullptr) continue;
      problem.check("stream", [&](const ScaledMmParams& p) { stream::run(p, &plan, 0, nullptr); });
    }
  }
}

// The resident layout of a weight (resident.py), written down a second time.
std::vector<uint8_t> records_of(const Weight& w) {
  const size_t code_row = size_t(w.K) / 8 * w.bits, scale_row = w.K / w.group;
  std::vector<uint8_t> records;
  const auto append = [&](const std::vector<uint8_t>& from, size_t at, size_t count) {
    records.insert(records.end(), from.begin() + at, from.begin() + at + count);
  };
  for (int block = 0; block < w.N; block += 16) {
    for (int step = 0; step < w.K / 256; ++step) {
      for (int h = 0; h < 2; ++h)
        for (int row = 0; row < 16; ++row) append(w.codes, (block + row) * code_row + 128 * step + 64 * h, 64);
      for (int row = 0; row < 16 && w.bits == 6; ++row)
        for (int q = 0; q < 4; ++q)
          for (int h = 0; h < 2; ++h) append(w.codes, (block + row) * code_row + w.K / 2 + 64 * step + 32 * h + 8 * q, 8);
      for (int row = 0; row < 16 && w.group > 16; ++row) append(w.s_rel, (block + row) * scale_row + step * (256 / w.group), 256 / w.group);
      for (int lane = 0; lane < 32 && w.group == 16; ++lane)
        for (int i = 0; i < 2; ++i)
          for (int h = 0; h < 2; ++h)
            append(w.s_rel, (block + lane / 4 + 8 * i) * scale_row + 16 * step + 8 * h + 2 * (lane % 4), 2);
    }
  }
  return records;
}

void check_resident(const Weight& w) {
  const DeviceArray<uint8_t> records(records_of(w));
  for (const int M : {3, 13, 29}) {
    const Problem problem(M, w);
    for (const resident::Plan plan : {resident::Plan{2, 1}, resident::Plan{4, 2}}) {
      if (resident::rejected({M, w.N, w.K, w.bits, w.group}, plan, resident::query(0)) != nullptr) continue;
      problem.check("resident", [&](ScaledMmParams p) {
        p.codes = records.data, p.s_rel = nullptr;
        resident::run(p, &plan, 0, nullptr);
      });
    }
  }
  const DeviceArray<uint8_t> codes(std::vector<uint8_t>(w.codes.size())), s_rel(std::vector<uint8_t>(w.s_rel.size()));
  unpack_w4a8_weight({records.data, codes.data, s_rel.data, w.N, w.K, w.group, w.bits}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "unpack");
  compare("unpack, codes", codes.read(), w.codes);
  compare("unpack, scales", s_rel.read(), w.s_rel);
}

void check_hopper(const Weight& w) {
  struct Case {
    hopper::Plan plan;
    int M;
  };
  for (const auto& [plan, M] : {Case{{64, 32, 1}, 37}, Case{{64, 64, 2}, 69}, Case{{64, 128, 1}, 133}, Case{{64, 160, 1}, 165},
                                Case{{64, 160, 2}, 165}, Case{{64, 256, 1}, 261}, Case{{64, 256, 2}, 261}, Case{{192, 64, 1}, 40},
                                Case{{192, 128, 1}, 100}, Case{{192, 160, 3}, 165}, Case{{192, 192, 1}, 197}, Case{{192, 192, 2}, 197},
                                Case{{128, 256, 1}, 261}, Case{{128, 256, 2}, 261}, Case{{0, 0, 1}, 5}}) {
    const Problem problem(M, w);
    const std::string name = "hopper " + std::to_string(plan.rows) + " x " + std::to_string(plan.tokens);
    problem.check(name, [&, plan = plan](const ScaledMmParams& p) {
      const hopper::Problem asked = hopper::problem_of(p);
      const hopper::Plan used = hopper::rejected(asked, plan) == nullptr ? plan : hopper::Plan{64, 32, 1};
      int8_t* workspace = nullptr;  // not initialised: nothing may rely on what is in it
      host::check(cudaMalloc(&workspace, hopper::workspace_bytes(asked, used)), "cudaMalloc");
      hopper::run(p, workspace, &used, 0, nullptr);
      host::check(cudaDeviceSynchronize(), "hopper");
      host::check(cudaFree(workspace), "cudaFree");
    });
  }
}

// Only that it writes all of its outputs and nothing else: its results are those of test_quantize_gpu.py.
void check_quantize() {
  constexpr int kN = 5, kK = 608;
  const DeviceArray<float> weight(random_floats(size_t(kN) * kK)), codebook(random_floats(16));
  for (const Levels levels : {Levels::kTable, Levels::kUniform, Levels::kAsymmetric, Levels::kSixBits}) {
    for (const int group : {4, 8, 16, 32}) {
      const bool six = levels == Levels::kSixBits;
      if (six && group < 16) continue;
      const DeviceArray<uint8_t> codes(std::vector<uint8_t>(size_t(kN) * kK / 8 * (six ? 6 : 4)));
      const DeviceArray<uint8_t> s_rel(std::vector<uint8_t>(size_t(kN) * (kK / group), 0x7f));
      const DeviceArray<float> s_channel(std::vector<float>(kN, 0.0f));
      const DeviceArray<float> correction(std::vector<float>(size_t(kN) * (kK / group), NAN));
      quantize_w4a8_weight({weight.data, kK, codebook.data, codes.data, s_rel.data, s_channel.data, correction.data, kN, kK, group,
                            16, levels, DType::kFloat32, false, true, 7},
                           0, nullptr);
      host::check(cudaDeviceSynchronize(), "quantize_w4a8_weight");
      int missing = 0;
      for (const uint8_t scale : s_rel.read()) missing += scale == 0x7f;
      for (const float scale : s_channel.read()) missing += !(scale > 0.0f);
      if (levels == Levels::kAsymmetric) {
        for (const float c : correction.read()) missing += std::isnan(c);
      }
      ++cases;
      if (missing > 0) ++failed, std::printf("quantize_w4a8_weight: %d values missing\n", missing);
    }
  }
}

}  // namespace

// Arguments: what to run ("quantize", "decode", "stream", "hopper", "resident"); none is all of it.
int main(int count, char** words) {
  const auto wanted = [&](const char* word) {
    return count < 2 || std::any_of(words + 1, words + count, [&](const char* given) { return std::strcmp(given, word) == 0; });
  };
  if (wanted("quantize")) check_quantize();
  for (const int bits : {4, 6}) {
    for (const int group : {16, 64}) {
      // Stores of elements, and by the copy engine: one with either group, since racecheck takes long.
      const Weight w((group == 16) == (bits == 4) ? 137 : 136, 576, bits, group);
      if (wanted("decode")) check_decode(w);
      if (wanted("stream")) check_stream(w);
      if (wanted("stream") && group == 16) check_stream(Weight(2200, 256, bits, group), {{1, 1}});  // more tiles than SMs
      if (wanted("hopper")) check_hopper(w);
      if (wanted("resident")) check_resident(Weight(144, 768, bits, group));
    }
  }
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}
