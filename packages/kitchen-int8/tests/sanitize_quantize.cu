// Every instance of the quantizers and dequantizers on one small problem each; a program for compute-sanitizer.
// tools/sanitize.py builds and runs it. Results are compared with those of the simplest kernel of each op; that one is compared
// with the reference elsewhere (test_quantize_gpu.py, test_tensorwise_gpu.py, test_dequantize_gpu.py).
//
// sources: packages/kitchen-int8/csrc/quantize_int8_rowwise/*.cu packages/kitchen-int8/csrc/quantize_int8_tensorwise/*.cu
// sources: packages/kitchen-int8/csrc/quantize_int8_rowwise/instantiations/*.cu packages/kitchen-int8/csrc/dequantize_int8/*.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <tuple>

#include "dequantize_int8/dequantize_int8.h"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"
#include "quantize_int8_tensorwise/quantize_int8_tensorwise.h"
#include "sanitize_problem.h"

using namespace sanitize;
using namespace kitchen::int8;
using quant::InputAct;

namespace {

constexpr const char* kTypeNames[] = {"float32", "float16", "bfloat16"};

// Random values as bytes of a type.
std::vector<uint8_t> typed_values(DType type, size_t count) {
  std::vector<uint8_t> bytes(count * size_of(type));
  for (size_t i = 0; i < count; ++i) {
    const float value = (static_cast<int>(next_random() % 2001) - 1000) / 1024.0f;
    const __half half = __float2half(value);
    const __nv_bfloat16 bfloat = __float2bfloat16(value);
    const void* from = type == DType::kFloat32   ? static_cast<const void*>(&value)
                       : type == DType::kFloat16 ? static_cast<const void*>(&half)
                                                 : &bfloat;
    std::memcpy(&bytes[i * size_of(type)], from, size_of(type));
  }
  return bytes;
}

struct Quantized {
  std::vector<int8_t> codes;
  std::vector<float> scales;
};

Quantized quantize_rows(const DeviceArray<uint8_t>& x, const DeviceArray<float>& weight, DType type, int M, int K, InputAct act,
                        int group, const QuantizePlan& plan, uint64_t seed = 0) {
  const DeviceArray<int8_t> codes(static_cast<size_t>(M) * K);
  const DeviceArray<float> scales(M);
  QuantizeParams p = {};
  p.x = x.data, p.x_row_stride = quant::is_pair(act) ? 2 * K : K;
  p.act_weight = act == InputAct::kRmsNorm ? weight.data : nullptr;
  p.codes = codes.data, p.scales = scales.data;
  p.M = M, p.K = K, p.group = group, p.act_eps = 1e-6f;
  p.dtype = type, p.act = act, p.seed = seed;
  quantize_int8_rowwise(p, &plan, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the kernel");
  return {codes.read(), scales.read()};
}

void check_rowwise(Tally& tally) {
  constexpr int M = 5;
  const QuantizePlan plans[] = {{1, 2, 1, 0, true}, {1, 2, 1, 1, true}, {1, 1, 2, 0, true}, {2, 1, 1, 1, true}};
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int K : {1024, 768}) {  // as many columns as the warps hold, and fewer
      for (const auto& [act, group] : {std::pair{InputAct::kNone, 0},
                                       {InputAct::kNone, 256},
                                       {InputAct::kSwiglu, 256},
                                       {InputAct::kGeluTanh, 64},
                                       {InputAct::kSitu, 16},
                                       {InputAct::kRmsNorm, 4}}) {
        const DeviceArray<uint8_t> x(typed_values(type, static_cast<size_t>(M) * K * (quant::is_pair(act) ? 2 : 1)));
        const DeviceArray<float> weight(random_floats(K));
        const QuantizePlan chunks = {0, 8, 1, 0, false};
        const Quantized want = quantize_rows(x, weight, type, M, K, act, group, chunks);
        for (QuantizePlan plan : plans) {
          for (const bool special : {true, false}) {
            plan.special = special && type != DType::kFloat32 && (group == 256 || (group == 0 && act == InputAct::kNone));
            if (special != plan.special || (plan.cluster > 1 && act == InputAct::kRmsNorm)) continue;
            const std::string name = std::string("rowwise ") + kTypeNames[int(type)] + " K=" + std::to_string(K) + " act " +
                                     std::to_string(int(act)) + " tiles " + std::to_string(plan.tiles) + " cluster " +
                                     std::to_string(plan.cluster);
            tally.run(name, [&] {
              const Quantized got = quantize_rows(x, weight, type, M, K, act, group, plan);
              return act == InputAct::kNone ? differences(got.codes, want.codes) + differences(got.scales, want.scales) : 0;
            });
          }
        }
        tally.run("rowwise, stochastic",
                  [&] { return quantize_rows(x, weight, type, M, K, act, group, chunks, 7).codes.empty(); });
      }
    }
  }
}

// Rows longer than one CTA holds: clusters, some of whose warps and CTAs hold no column, against chunks of all sizes.
void check_long_rows(Tally& tally) {
  constexpr int M = 3;
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [K, act, group] : {std::tuple{16'400, InputAct::kNone, 0},
                                        {28'672, InputAct::kNone, 256},
                                        {28'672, InputAct::kSwiglu, 256},
                                        {24'576, InputAct::kGeluTanh, 64},
                                        {24'577, InputAct::kSitu, 0},
                                        {20'480, InputAct::kRmsNorm, 4096}}) {
      const DeviceArray<uint8_t> x(typed_values(type, static_cast<size_t>(M) * K * (quant::is_pair(act) ? 2 : 1)));
      const DeviceArray<float> weight(random_floats(K));
      const int tiles = (K + 511) / 512;
      const Quantized want = quantize_rows(x, weight, type, M, K, act, group, {0, 32, 1, 0, false});
      std::vector<QuantizePlan> plans = {{0, 16, 1, 0, false}, {0, 32, 1, 0, false}};
      if (group <= 2048) plans.push_back({0, 8, 1, 0, false});
      if (K % 16 == 0 && act != InputAct::kRmsNorm) {
        const bool special = type != DType::kFloat32 && (group == 256 || (group == 0 && act == InputAct::kNone));
        for (const QuantizePlan& plan : {QuantizePlan{1, (tiles + 7) / 8, 8, 0, special}, {1, (tiles + 3) / 4, 4, 0, special},
                                         {1, 24, 8, 0, special}, {1, (tiles + 7) / 8, 8, 0, false}})
          plans.push_back(plan);
      }
      for (const QuantizePlan& plan : plans) {
        const std::string name = std::string("long row ") + kTypeNames[int(type)] + " K=" + std::to_string(K) + " act " +
                                 std::to_string(int(act)) + " tiles " + std::to_string(plan.tiles) + " warps " +
                                 std::to_string(plan.warps) + " cluster " + std::to_string(plan.cluster);
        tally.run(name, [&] {
          const Quantized got = quantize_rows(x, weight, type, M, K, act, group, plan);
          return act == InputAct::kNone ? differences(got.codes, want.codes) + differences(got.scales, want.scales) : 0;
        });
      }
    }
  }
}

std::vector<int8_t> quantize_tensor(const DeviceArray<uint8_t>& x, DType type, int count, const float* given, uint64_t seed) {
  const DeviceArray<int8_t> codes(static_cast<size_t>(count));
  const DeviceArray<float> scale(size_t{1});
  const DeviceArray<uint32_t> partials(tensorwise_blocks(count, 132));
  TensorwiseParams p = {};
  p.x = x.data, p.given_scale = given, p.codes = codes.data, p.scale = scale.data;
  p.partial_max = given == nullptr ? partials.data : nullptr;
  p.elements = count, p.dtype = type, p.seed = seed;
  quantize_int8_tensorwise(p, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the kernel");
  return codes.read();
}

void check_tensorwise(Tally& tally) {
  const DeviceArray<float> given(std::vector<float>{0.01f});
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int count : {7, 40'013}) {
      const DeviceArray<uint8_t> x(typed_values(type, count));
      for (const uint64_t seed : {0, 5}) {
        for (const float* scale : {static_cast<const float*>(nullptr), static_cast<const float*>(given.data)}) {
          tally.run(std::string("tensorwise ") + kTypeNames[int(type)],
                    [&] { return quantize_tensor(x, type, count, scale, seed).empty(); });
        }
      }
    }
  }
}

std::vector<uint8_t> dequantize_rows(const DeviceArray<int8_t>& codes, const DeviceArray<float>& scale, int V, int K, int pitch,
                                     int group, DType type, const void* indices, bool narrow, int M) {
  const DeviceArray<uint8_t> out(static_cast<size_t>(M) * K * size_of(type));
  DequantizeParams p = {};
  p.codes = codes.data, p.scale = scale.data, p.indices = indices, p.out = out.data;
  p.pitch = pitch, p.M = M, p.V = V, p.K = K, p.group = group, p.scale_stride = 1;
  p.narrow_indices = narrow, p.out_type = type;
  dequantize_int8(p, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the kernel");
  return out.read();
}

void check_dequantize(Tally& tally) {
  constexpr int V = 21, M = 6;
  const std::vector<int64_t> wide = {3, 20, -1, -21, 21, 7};  // one of them out of range
  const DeviceArray<int64_t> wide_device(wide);
  const DeviceArray<int32_t> narrow_device(std::vector<int32_t>(wide.begin(), wide.end()));
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [K, group] : {std::pair{1040, 0}, {1001, 0}, {768, 256}, {320, 64}, {48, 16}, {20, 4}, {2048, 1024}}) {
      const DeviceArray<int8_t> packed(random_codes(V, K, K)), odd(random_codes(V, K, K + 1));
      const DeviceArray<float> scale(random_floats(V));
      const std::string name =
          std::string("dequantize ") + kTypeNames[int(type)] + " K=" + std::to_string(K) + " group " + std::to_string(group);
      tally.run(name, [&] { return dequantize_rows(packed, scale, V, K, K, group, type, nullptr, false, V).empty(); });
      tally.run(name + ", odd pitch",
                [&] { return dequantize_rows(odd, scale, V, K, K + 1, group, type, nullptr, false, V).empty(); });
      tally.run(name + ", indices", [&] {
        return differences(dequantize_rows(packed, scale, V, K, K, group, type, wide_device.data, false, M),
                           dequantize_rows(packed, scale, V, K, K, group, type, narrow_device.data, true, M));
      });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Tally tally(argc, argv);
  check_rowwise(tally);
  check_long_rows(tally);
  check_tensorwise(tally);
  check_dequantize(tally);
  return tally.finish();
}
