// Every kernel of the package on small problems whose results are exact, against loops on the host: a program without torch,
// for compute-sanitizer, under which importing torch takes longer than the kernels.
//
// sources: packages/kitchen-svdquant/csrc/*/*.cu packages/kitchen-svdquant/csrc/*/sm75/*.cu
// sources: packages/kitchen-svdquant/csrc/*/sm80/*.cu packages/kitchen-svdquant/csrc/*/sm90/*.cu
#include <cstdio>
#include <cstring>
#include <vector>

#include "decode_svdquant/decode_svdquant.h"
#include "kitchen/host/check.h"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"
#include "quantize_svdquant_w4a4/sm90/project_rows.h"
#include "svdquant_gemm/scale_layout.h"
#include "svdquant_gemm/sm75/svdquant_gemm.h"
#include "svdquant_gemm/sm80/svdquant_gemm.h"
#include "svdquant_gemm/sm90/packed_gemm.h"
#include "svdquant_gemm/sm90/stream_gemm.h"
#include "svdquant_gemm/sm90/svdquant_gemm.h"

using namespace kitchen;
using namespace kitchen::svdquant;

namespace {

uint32_t random_state = 1;
uint32_t next_random() { return random_state = random_state * 1664525u + 1013904223u, random_state >> 8; }

template <class T>
struct DeviceArray {
  T* data = nullptr;
  size_t count;
  explicit DeviceArray(const std::vector<T>& host) : count(host.size()) {
    host::check(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
    host::check(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  explicit DeviceArray(size_t n) : DeviceArray(std::vector<T>(n)) {}
  ~DeviceArray() { cudaFree(data); }
  std::vector<T> read() const {
    std::vector<T> host(count);
    host::check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

int code_at(const std::vector<uint8_t>& packed, int64_t at, bool is_unsigned) {
  const int nibble = packed[at / 2] >> (at % 2 * 4) & 15;
  return is_unsigned || nibble < 8 ? nibble : nibble - 16;
}

// 8-bit MMA, 4-bit MMA, that of sm_75, and behind the copy engine of sm_90 for up to 64 rows, with scales and proj_up of float32 and
// of bfloat16.
constexpr int kStreams = 5, kMostStreamed = 64;
int streams_of(int M) { return M <= kMostStreamed ? kStreams : 3; }

// Plans of packed_gemm: each tile with K whole and in pieces, where no piece would have nothing. It takes even ranks.
std::vector<PackedPlan> packed_plans(int K, int R) {
  constexpr int kStageColumns = 4 * kGroup;
  const int stages = (K + kStageColumns - 1) / kStageColumns;
  std::vector<PackedPlan> plans;
  for (int variant = 0; R % 2 == 0 && variant < packed_variant_count(); ++variant) {
    plans.push_back({variant, 1});
    if (stages >= 2) plans.push_back({variant, stages >= 5 ? 3 : 2});
  }
  return plans;
}

template <class To>
std::vector<To> converted(const std::vector<float>& from) {
  return std::vector<To>(from.begin(), from.end());
}

// Scales are powers of two and everything else small integers: all sums are exact, in every order.
int check_gemms(int M, int N, int K, int R, bool is_unsigned) {
  std::vector<uint8_t> a(int64_t(M) * K / 2), b(int64_t(N) * K / 2);
  for (auto& byte : a) byte = static_cast<uint8_t>(next_random());
  for (auto& byte : b) byte = static_cast<uint8_t>(next_random());
  const int groups = K / kGroup, padded = (R + 7) / 8 * 8;
  std::vector<float> a_scale(groups * M), b_scale(groups * N), low(M * R), up(N * R), bias(N), residual(M * N);
  for (auto& s : a_scale) s = float(1 << next_random() % 3);
  for (auto& s : b_scale) s = float(1 << next_random() % 3);
  for (auto* v : {&low, &up, &bias, &residual}) {
    for (auto& x : *v) x = float(int(next_random() % 17) - 8);
  }
  std::vector<float> want(M * N);
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float sum = bias[n] + residual[m * N + n];
      for (int r = 0; r < R; ++r) sum += low[m * R + r] * up[n * R + r];
      for (int g = 0; g < groups; ++g) {
        int dot = 0;
        for (int k = g * kGroup; k < (g + 1) * kGroup; ++k) {
          dot += code_at(a, int64_t(m) * K + k, is_unsigned) * code_at(b, int64_t(n) * K + k, false);
        }
        sum += float(dot) * a_scale[g * M + m] * b_scale[g * N + n];
      }
      want[m * N + n] = sum;
    }
  }
  const DeviceArray<uint8_t> a_dev(a), b_dev(b);
  const DeviceArray<float> a_scale_dev(a_scale), b_scale_dev(b_scale), low_dev(low), up_dev(up), bias_dev(bias),
      residual_dev(residual);
  const DeviceArray<__nv_bfloat16> b_scale_half(converted<__nv_bfloat16>(b_scale)), up_plain(converted<__nv_bfloat16>(up));
  int wrong = 0;
  const auto compare = [&](const DeviceArray<float>& out, const char* what, int which) {
    host::check(cudaDeviceSynchronize(), what);
    const auto got = out.read();
    int differ = 0;
    for (size_t i = 0; i < got.size(); ++i) differ += got[i] != want[i];
    if (differ) std::printf("%s %d, M=%d N=%d K=%d R=%d: %d wrong\n", what, which, M, N, K, R, differ);
    wrong += differ != 0;
  };
  for (int which = 0; which < streams_of(M); ++which) {
    const DeviceArray<float> out(std::vector<float>(M * N, -1));
    StreamOperands o = {M,
                        N,
                        K,
                        R,
                        a_dev.data,
                        a_scale_dev.data,
                        b_dev.data,
                        b_scale_dev.data,
                        low_dev.data,
                        up_dev.data,
                        bias_dev.data,
                        residual_dev.data,
                        nullptr,
                        out.data,
                        DType::kFloat32,
                        DType::kFloat32,
                        DType::kFloat32,
                        DType::kFloat32,
                        0,
                        is_unsigned,
                        which == 1,
                        false};
    if (which == 4) {
      o.b_scale = b_scale_half.data, o.up = up_plain.data, o.b_scale_type = o.up_type = DType::kBFloat16;
    }
    if (which < 2) {
      svdquant_gemm_sm80(o, 0, nullptr);
    } else {
      which == 2 ? svdquant_gemm_sm75(o, 0, nullptr) : svdquant_stream_sm90(o, 0, nullptr);
    }
    compare(out, "streaming kernel", which);
  }
  const int pitch = (N + 7) / 8 * 8;
  std::vector<__nv_bfloat16> padded_scales(size_t(groups) * pitch, __float2bfloat16(0.0f));
  for (int i = 0; i < groups * N; ++i) padded_scales[i / N * pitch + i % N] = __float2bfloat16(b_scale[i]);
  const DeviceArray<__nv_bfloat16> padded_dev(padded_scales);
  for (const PackedPlan& plan : packed_plans(K, R)) {
    const DeviceArray<float> out(std::vector<float>(M * N, -1));
    float* sums = nullptr;  // nothing has written them
    uint32_t* arrived = nullptr;
    host::check(cudaMalloc(&sums, packed_sums(M, N, plan) * sizeof(float) + 16), "cudaMalloc");
    host::check(cudaMalloc(&arrived, packed_tiles(M, N, plan) * sizeof(uint32_t) + 16), "cudaMalloc");
    StreamOperands o = {};
    o.M = M, o.N = N, o.K = K, o.R = R, o.a = a_dev.data, o.a_scale = a_scale_dev.data, o.b = b_dev.data;
    o.b_scale = padded_dev.data, o.b_scale_type = DType::kBFloat16, o.b_scale_pitch = pitch;
    o.low = low_dev.data, o.up = up_plain.data, o.up_type = DType::kBFloat16, o.is_unsigned = is_unsigned;
    o.bias = bias_dev.data, o.residual = residual_dev.data, o.out = out.data, o.bias_type = o.out_type = DType::kFloat32;
    o.plan = plan, o.workspace = {sums, arrived, false};
    svdquant_packed_sm90(o, 0, nullptr);
    compare(out, "svdquant_packed_sm90", 10 * plan.variant + plan.splits);
    cudaFree(sums), cudaFree(arrived);
  }
  std::vector<__nv_bfloat16> up_half(N * padded);
  for (int i = 0; i < N * R; ++i) up_half[i / R * padded + i % R] = __float2bfloat16(up[i]);
  const DeviceArray<__nv_bfloat16> up_half_dev(up_half), low_half(size_t(M) * padded);
  const int even = even_groups(groups), a_rows = (M + kBlockRows - 1) / kBlockRows * kBlockRows;
  const DeviceArray<uint8_t> a_codes(a.size() * 2), b_codes(b.size() * 2);
  const DeviceArray<uint4> a_parts(size_t(a_rows) * even);
  decode_svdquant({a_dev.data, a_scale_dev.data, a_codes.data, a_parts.data, M, K, M, kBlockRows, true, is_unsigned,
                   DType::kFloat32, low_dev.data, low_half.data, M, R, padded},
                  0, nullptr);
  for (int variant = 0; variant < hopper_variant_count(); ++variant) {
    const HopperPlan plan = hopper_plan_for(M, N, K, 132, variant);
    const int tile = hopper_variant(variant).tile_n;
    const DeviceArray<uint4> b_parts(size_t((N + tile - 1) / tile * tile) * even);
    decode_svdquant({b_dev.data, b_scale_dev.data, b_codes.data, b_parts.data, N, K, N, tile, false, false, DType::kFloat32,
                     nullptr, nullptr, 0, 0, 0},
                    0, nullptr);
    const DeviceArray<float> out(std::vector<float>(M * N, -1));
    HopperOperands o = {M,
                        N,
                        K,
                        a_codes.data,
                        a_parts.data,
                        b_codes.data,
                        b_parts.data,
                        padded,
                        low_half.data,
                        up_half_dev.data,
                        bias_dev.data,
                        residual_dev.data,
                        nullptr,
                        out.data,
                        N,
                        DType::kFloat32,
                        DType::kFloat32,
                        0};
    svdquant_gemm_sm90(o, plan, nullptr);
    compare(out, "svdquant_gemm_sm90", variant);
  }
  return wrong;
}

// Both quantizers make the same codes and scales, of float32 and of float16 numbers.
int check_quantizers(int M, int K, int R, bool is_unsigned) {
  std::vector<float> x(M * K), smooth(K), down(K * R), want(M * R);
  for (auto& v : x) v = float(int(next_random() % 2001) - 1000);
  for (auto& v : smooth) v = float(1 + next_random() % 7);
  for (auto& v : down) v = float(int(next_random() % 3) - 1);
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      for (int k = 0; k < K; ++k) want[m * R + r] += x[m * K + k] * down[k * R + r];
    }
  }
  const DeviceArray<float> x_dev(x), smooth_dev(smooth), scales(size_t(M) * K / kGroup), few_scales(scales.count),
      low(want.size());
  const DeviceArray<__half> x_half(converted<__half>(x)), down_half(converted<__half>(down));
  const DeviceArray<uint8_t> codes(size_t(M) * K / 2), few_codes(codes.count), numbers(size_t(M) * K);
  const DeviceArray<uint4> parts(size_t((M + kBlockRows - 1) / kBlockRows * kBlockRows) * even_groups(K / kGroup));
  QuantizeParams p = {x_dev.data, K,         smooth_dev.data, codes.data,        scales.data,     M,
                      K,          0.171875f, is_unsigned,     CodeForm::kPacked, DType::kFloat32, DType::kFloat32};
  quantize_svdquant_w4a4(p, nullptr, 0, nullptr);
  QuantizeParams e4m3 = p;
  e4m3.codes = numbers.data, e4m3.scales = parts.data, e4m3.form = CodeForm::kE4m3;
  quantize_svdquant_w4a4(e4m3, nullptr, 0, nullptr);
  p.x = x_half.data, p.type = DType::kFloat16, p.codes = few_codes.data, p.scales = few_scales.data;
  quantize_few_rows({p, down_half.data, low.data, R, DType::kFloat16}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the quantizers");
  const bool same = codes.read() == few_codes.read() && scales.read() == few_scales.read() && low.read() == want;
  if (!same) std::printf("quantizers differ: M=%d K=%d R=%d\n", M, K, R);
  return !same;
}

// The quantizer with the product and the weight's decoding beside it, against kernels that do these one by one.
int check_beside(int M, int K, int R, int N, bool is_unsigned) {
  std::vector<__nv_bfloat16> x(M * K), smooth(K), down(K * R);
  std::vector<float> want(M * R);
  for (auto& v : x) v = __float2bfloat16(float(int(next_random() % 257) - 128));
  for (auto& v : smooth) v = __float2bfloat16(float(1 + next_random() % 7));
  for (auto& v : down) v = __float2bfloat16(float(int(next_random() % 3) - 1));
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      for (int k = 0; k < K; ++k) want[m * R + r] += __bfloat162float(x[m * K + k]) * __bfloat162float(down[k * R + r]);
    }
  }
  std::vector<uint8_t> weight(size_t(N) * K / 2);
  std::vector<float> weight_scale(K / kGroup * N);
  for (auto& byte : weight) byte = static_cast<uint8_t>(next_random());
  for (auto& scale : weight_scale) scale = float(1 + next_random() % 100);
  constexpr int kBlock = 96;
  const int even = even_groups(K / kGroup);
  const size_t parts = size_t((M + kBlockRows - 1) / kBlockRows * kBlockRows) * even;
  const size_t weight_parts = size_t((N + kBlock - 1) / kBlock * kBlock) * even;
  const DeviceArray<__nv_bfloat16> x_dev(x), smooth_dev(smooth), down_dev(down);
  const DeviceArray<float> weight_scale_dev(weight_scale), low(want.size());
  const DeviceArray<__nv_bfloat16> rounded(want.size());
  const DeviceArray<uint8_t> weight_dev(weight), numbers(size_t(M) * K), numbers_beside(numbers.count), decoded(size_t(N) * K),
      decoded_beside(decoded.count);
  const DeviceArray<uint4> a_parts(std::vector<uint4>(parts, uint4{})), a_parts_beside(std::vector<uint4>(parts, uint4{})),
      b_parts(weight_parts), b_parts_beside(weight_parts);
  QuantizeParams q = {x_dev.data, K,         smooth_dev.data, numbers.data,      a_parts.data,      M,
                      K,          0.171875f, is_unsigned,     CodeForm::kE4m3,   DType::kBFloat16, DType::kBFloat16};
  DecodeParams w = {weight_dev.data, weight_scale_dev.data, decoded.data, b_parts.data, N, K, N, kBlock, false, false,
                    DType::kFloat32, nullptr, nullptr, 0, 0, 0};
  quantize_svdquant_w4a4(q, nullptr, 0, nullptr);
  decode_svdquant(w, 0, nullptr);
  q.codes = numbers_beside.data, q.scales = a_parts_beside.data, w.out = decoded_beside.data, w.out_scales = b_parts_beside.data;
  project_rows({x_dev.data, K, DType::kBFloat16, M, K, down_dev.data, R, nullptr, rounded.data}, 0, nullptr);
  project_rows({x_dev.data, K, DType::kBFloat16, M, K, down_dev.data, R, low.data, nullptr}, 0, nullptr);
  quantize_svdquant_w4a4(q, &w, 0, nullptr, true);
  host::check(cudaDeviceSynchronize(), "project_rows");
  const auto equal = [](const DeviceArray<uint4>& a, const DeviceArray<uint4>& b) {
    const auto first = a.read(), second = b.read();
    return std::memcmp(first.data(), second.data(), first.size() * sizeof(uint4)) == 0;
  };
  bool same = low.read() == want && numbers.read() == numbers_beside.read() && equal(a_parts, a_parts_beside) &&
              decoded.read() == decoded_beside.read() && equal(b_parts, b_parts_beside);
  const auto low_half = rounded.read();
  for (size_t i = 0; i < want.size(); ++i) {
    same = same && __bfloat162float(low_half[i]) == __bfloat162float(__float2bfloat16(want[i]));
  }
  if (!same) std::printf("what runs beside differs: M=%d K=%d R=%d N=%d\n", M, K, R, N);
  return !same;
}

}  // namespace

int main() {
  int cases = 0, failed = 0;
  const auto gemms = [&](int M, int N, int K, int R, bool is_unsigned) {
    failed += check_gemms(M, N, K, R, is_unsigned), cases += streams_of(M) + hopper_variant_count() + static_cast<int>(packed_plans(K, R).size());
  };
  const auto quantizers = [&](int M, int K, int R, bool is_unsigned) {
    failed += check_quantizers(M, K, R, is_unsigned), cases += 1;
  };
  const auto beside = [&](int M, int K, int R, int N, bool is_unsigned) {
    failed += check_beside(M, K, R, N, is_unsigned), cases += 1;
  };
  for (const bool is_unsigned : {false, true}) {
    gemms(1, 33, 64, 0, is_unsigned);
    gemms(6, 50, 2240, 34, is_unsigned);
    gemms(13, 130, 192, 17, is_unsigned);
    gemms(16, 3200, 1088, 32, is_unsigned);  // tiles of 32 rows
    gemms(11, 4304, 2112, 256, is_unsigned);
    gemms(3, 2904, 128, 16, is_unsigned);  // tiles of 24 rows
    gemms(40, 2904, 320, 24, is_unsigned);
    gemms(20, 72, 1088, 16, is_unsigned);
    gemms(64, 40, 9280, 96, is_unsigned);  // a ring that goes round
    gemms(2, 24, 20544, 8, is_unsigned);
    gemms(131, 101, 448, 72, is_unsigned);
    quantizers(1, 64, 20, is_unsigned);
    quantizers(5, 1088, 36, is_unsigned);
    quantizers(16, 7168, 8, is_unsigned);
    quantizers(37, 192, 128, is_unsigned);
    beside(1, 64, 8, 5, is_unsigned);
    beside(9, 1088, 40, 100, is_unsigned);
    beside(30, 640, 32, 33, is_unsigned);
    beside(77, 192, 136, 97, is_unsigned);
    beside(300, 320, 64, 64, is_unsigned);
    beside(270, 128, 128, 64, is_unsigned);
  }
  std::printf("%d cases, %d failed\n", cases, failed);
  return failed != 0;
}
