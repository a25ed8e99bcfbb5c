// The module kitchen_int8._C. Tensors arrive as device pointers, sizes and strides, the stream as an integer, all checked by
// the Python functions that call this (kernels.py); nothing here knows of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "kitchen/bench/yardstick.h"
#include "kitchen/host/device.h"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace py = pybind11;

namespace {

using namespace kitchen;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI
using Plan = std::tuple<int, int, int, int, bool>;  // of QuantizePlan's members

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

int8::QuantizeParams quantize_params(uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M,
                                     int64_t K, int group, int act, uintptr_t act_weight, int act_weight_dtype, float act_eps,
                                     uint64_t seed) {
  host::require(M >= 0 && K >= 1 && K < (int64_t{1} << 30), "quantize_int8_rowwise: K must be in 1 .. 2^30 - 1");
  const bool power_of_4 = group == 0 || group == 4 || group == 16 || group == 64 || group == 256 || group == 1024 || group == 4096;
  host::require(power_of_4 && (group == 0 || K % group == 0), "quantize_int8_rowwise: the group must be 0 or 4, 16, .. 4096 and divide K");
  host::require(dtype >= 0 && dtype <= 2 && act_weight_dtype >= 0 && act_weight_dtype <= 2, "quantize_int8_rowwise: unknown dtype");
  host::require(act >= 0 && act <= 4, "quantize_int8_rowwise: unknown activation");
  int8::QuantizeParams p = {};
  p.x = pointer<const void>(x);
  p.x_row_stride = x_row_stride;
  p.act_weight = pointer<const void>(act_weight);
  p.codes = pointer<int8_t>(codes);
  p.scales = pointer<float>(scales);
  p.M = M;
  p.K = static_cast<int>(K);
  p.group = group;
  p.act_eps = act_eps;
  p.dtype = static_cast<DType>(dtype);
  p.act_weight_dtype = static_cast<DType>(act_weight_dtype);
  p.act = static_cast<quant::InputAct>(act);
  p.seed = seed;
  return p;
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_int8_rowwise",
      [](uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M, int64_t K, int group, int act,
         uintptr_t act_weight, int act_weight_dtype, float act_eps, uint64_t seed, int device, uintptr_t stream,
         const std::optional<Plan>& plan) {
        const auto p = quantize_params(x, x_row_stride, dtype, codes, scales, M, K, group, act, act_weight, act_weight_dtype, act_eps, seed);
        int8::QuantizePlan forced = {};
        if (plan) forced = {std::get<0>(*plan), std::get<1>(*plan), std::get<2>(*plan), std::get<3>(*plan), std::get<4>(*plan)};
        int8::quantize_int8_rowwise(p, plan ? &forced : nullptr, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("dtype"), py::arg("codes"), py::arg("scales"), py::arg("M"), py::arg("K"),
      py::arg("group"), py::arg("act"), py::arg("act_weight"), py::arg("act_weight_dtype"), py::arg("act_eps"), py::arg("seed"),
      py::arg("device"), py::arg("stream"), py::arg("plan") = py::none(),
      "plan: (tiles, warps, cluster, ctas_per_sm, special), for measurements; None chooses.");
  m.def(
      "quantize_plan",
      [](uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, int64_t M, int64_t K, int group, int act, uint64_t seed,
         int sm_count, bool has_clusters, int smem_per_cta, int smem_per_sm) {
        const auto p = quantize_params(x, x_row_stride, dtype, codes, 0, M, K, group, act, 0, 0, 0.0f, seed);
        const auto plan = int8::choose_plan(p, {sm_count, has_clusters, smem_per_cta, smem_per_sm});
        return Plan(plan.tiles, plan.warps, plan.cluster, plan.ctas_per_sm, plan.special);
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("dtype"), py::arg("codes"), py::arg("M"), py::arg("K"), py::arg("group"),
      py::arg("act"), py::arg("seed"), py::arg("sm_count"), py::arg("has_clusters"), py::arg("smem_per_cta"), py::arg("smem_per_sm"),
      "The plan that quantize_int8_rowwise would choose on such a device.");
}

void bind_yardsticks(py::module_& m) {
  m.def("yardstick_copy", [](uintptr_t source, uintptr_t target, int64_t target_bytes, int ratio, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    bench::yardstick_copy(pointer<const void>(source), pointer<void>(target), target_bytes, ratio,
                          host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
  m.def("yardstick_read", [](uintptr_t source, int64_t bytes, uintptr_t sink, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    bench::yardstick_read(pointer<const void>(source), bytes, pointer<void>(sink),
                          host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-int8";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] { return std::string(KITCHEN_ARCHS); }, "The CUDA architectures compiled in, comma separated.");
  bind_quantize(m);
  bind_yardsticks(m);
}
