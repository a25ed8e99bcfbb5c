// The module kitchen_awq._C. Tensors arrive as device pointers, sizes and strides, the stream as an integer, all checked by
// the Python functions that call this (_linear.py); nothing here knows of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "awq_linear/awq_linear.h"
#include "dequantize_awq/dequantize_awq.h"
#include "kitchen/bench/yardstick.h"
#include "kitchen/host/device.h"

namespace py = pybind11;

namespace {

using namespace kitchen;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI
using Plan = std::pair<int, int>;  // of awq::LinearPlan's members
using Device = std::tuple<int, int, int, int>;  // of awq::LinearDevice's members

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType dtype(int code) {
  host::require(code >= 0 && code <= 2, "awq: unknown dtype");
  return static_cast<DType>(code);
}

void bind_dequantize(py::module_& m) {
  m.def(
      "dequantize_awq",
      [](int64_t N, int64_t K, int64_t group, uintptr_t codes, uintptr_t scale, uintptr_t zero, int64_t parameter_pitch,
         int parameter_type, uintptr_t out, int out_type, int round_type, int device, uintptr_t stream) {
        const awq::DequantizeParams p = {pointer<const uint8_t>(codes), pointer<const void>(scale), pointer<const void>(zero),
                                         pointer<void>(out), N, K, group, parameter_pitch, dtype(parameter_type), dtype(out_type),
                                         dtype(round_type)};
        awq::dequantize_awq(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("N"), py::arg("K"), py::arg("group"), py::arg("codes"), py::arg("scale"), py::arg("zero"), py::arg("parameter_pitch"),
      py::arg("parameter_type"), py::arg("out"), py::arg("out_type"), py::arg("round_type"), py::arg("device"), py::arg("stream"));
  m.def(
      "finish_sums",
      [](int64_t M, int64_t N, int64_t first, int64_t count, uintptr_t sums, uintptr_t bias, int bias_type, uintptr_t residual,
         int residual_type, uintptr_t residual_scale, int residual_scale_stride, uintptr_t out, int out_type, int device,
         uintptr_t stream) {
        const awq::FinishParams p = {M, N, first, count, pointer<const float>(sums), pointer<const void>(bias),
                                     pointer<const void>(residual), pointer<const float>(residual_scale), pointer<void>(out),
                                     dtype(bias_type), dtype(residual_type), dtype(out_type), residual_scale_stride};
        awq::finish_sums(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("first"), py::arg("count"), py::arg("sums"), py::arg("bias"), py::arg("bias_type"),
      py::arg("residual"), py::arg("residual_type"), py::arg("residual_scale"), py::arg("residual_scale_stride"), py::arg("out"),
      py::arg("out_type"), py::arg("device"), py::arg("stream"), "The epilogue over columns [first, first + count) of fp32 sums.");
}

using Launch = void (*)(const awq::LinearParams&, void*, const awq::LinearPlan*, int, cudaStream_t);
using Workspace = int64_t (*)(const awq::LinearParams&, const awq::LinearPlan&, const awq::LinearDevice&);
using Choose = awq::LinearPlan (*)(const awq::LinearParams&, const awq::LinearDevice&);
using Reject = const char* (*)(const awq::LinearParams&, const awq::LinearPlan&, const awq::LinearDevice&);
using Describe = std::string (*)(const awq::LinearParams&, const awq::LinearPlan&);

void bind_linear(py::module_& m, const std::string& name, Launch launch, Workspace workspace_bytes, Choose choose, Reject reject,
                 Describe describe, int variants) {
  m.def(
      name.c_str(),
      [launch](int64_t M, int64_t N, int64_t K, int64_t group, uintptr_t x, int x_type, uintptr_t codes, uintptr_t scale, uintptr_t zero,
               int parameter_type, uintptr_t bias, int bias_type, uintptr_t residual, int residual_type, uintptr_t residual_scale,
               int residual_scale_stride, uintptr_t out, int out_type, uintptr_t workspace, const std::optional<Plan>& plan,
               int device, uintptr_t stream, bool resident, int64_t part_first, int64_t part_of) {
        const awq::LinearParams p = {M, N, K, group, pointer<const void>(x), pointer<const uint8_t>(codes), pointer<const void>(scale),
                                     pointer<const void>(zero), pointer<const void>(bias), pointer<const void>(residual),
                                     pointer<const float>(residual_scale), pointer<void>(out), dtype(x_type), dtype(parameter_type),
                                     dtype(bias_type), dtype(residual_type), dtype(out_type), residual_scale_stride, resident,
                                     part_first, part_of};
        awq::LinearPlan forced = {};
        if (plan) forced = {plan->first, plan->second};
        launch(p, pointer<void>(workspace), plan ? &forced : nullptr, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("group"), py::arg("x"), py::arg("x_type"), py::arg("codes"), py::arg("scale"),
      py::arg("zero"), py::arg("parameter_type"), py::arg("bias"), py::arg("bias_type"), py::arg("residual"), py::arg("residual_type"),
      py::arg("residual_scale"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"), py::arg("workspace"),
      py::arg("plan"), py::arg("device"), py::arg("stream"), py::arg("resident") = false, py::arg("part_first") = 0,
      py::arg("part_of") = 0, "Rows contiguous, x and codes 16-byte aligned. plan: (variant, splits), None chooses.");
  m.def(
      (name + "_plan").c_str(),
      [workspace_bytes, choose, reject, describe](int64_t M, int64_t N, int64_t K, int64_t group, int x_type, int parameter_type, const Device& device,
                                 const std::optional<Plan>& plan, bool resident, int64_t part_first, int64_t part_of) {
        awq::LinearParams q = {};
        q.M = M, q.N = N, q.K = K, q.group = group, q.resident = resident, q.part_first = part_first, q.part_of = part_of;
        q.x_type = dtype(x_type), q.parameter_type = dtype(parameter_type);
        const awq::LinearDevice facts = {std::get<0>(device), std::get<1>(device), std::get<2>(device), std::get<3>(device)};
        const awq::LinearPlan chosen = plan ? awq::LinearPlan{plan->first, plan->second} : choose(q, facts);
        const char* const reason = reject(q, chosen, facts);
        return std::make_tuple(Plan(chosen.variant, chosen.splits), workspace_bytes(q, chosen, facts), describe(q, chosen),
                               std::string(reason == nullptr ? "" : reason));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("group"), py::arg("x_type"), py::arg("parameter_type"), py::arg("device"),
      py::arg("plan") = py::none(), py::arg("resident") = false, py::arg("part_first") = 0, py::arg("part_of") = 0,
      "(plan, workspace bytes, itself in words, why it cannot run or '') on a device (SMs, shared memory of a block, of an SM, compute capability).");
  m.def((name + "_variants").c_str(), [variants] { return variants; });
}

int64_t none(const awq::LinearParams&, const awq::LinearPlan&, const awq::LinearDevice&) { return 0; }

void bind_float32(py::module_& m) {
  m.def(
      "awq_float32",
      [](int64_t M, int64_t N, int64_t K, int64_t group, uintptr_t x, uintptr_t codes, uintptr_t scale, uintptr_t zero, int parameter_type,
         int weight_type, uintptr_t bias, int bias_type, uintptr_t residual, int residual_type, uintptr_t residual_scale,
         int residual_scale_stride, uintptr_t out, int out_type, int device, uintptr_t stream) {
        const awq::LinearParams p = {M, N, K, group, pointer<const void>(x), pointer<const uint8_t>(codes), pointer<const void>(scale),
                                     pointer<const void>(zero), pointer<const void>(bias), pointer<const void>(residual),
                                     pointer<const float>(residual_scale), pointer<void>(out), DType::kFloat32, dtype(parameter_type),
                                     dtype(bias_type), dtype(residual_type), dtype(out_type), residual_scale_stride};
        awq::awq_float32(p, dtype(weight_type), device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("group"), py::arg("x"), py::arg("codes"), py::arg("scale"), py::arg("zero"),
      py::arg("parameter_type"), py::arg("weight_type"), py::arg("bias"), py::arg("bias_type"), py::arg("residual"),
      py::arg("residual_type"), py::arg("residual_scale"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"),
      py::arg("device"), py::arg("stream"), "float32 x; rows contiguous, x and codes 16-byte aligned.");
}

void bind_yardsticks(py::module_& m) {
  m.def("yardstick_read", [](uintptr_t source, int64_t bytes, uintptr_t sink, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    bench::yardstick_read(pointer<const void>(source), bytes, pointer<void>(sink),
                          host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-awq";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] { return std::string(KITCHEN_ARCHS); }, "The CUDA architectures compiled in, comma separated.");
  bind_dequantize(m);
  bind_float32(m);
  bind_yardsticks(m);
#ifdef KITCHEN_HAVE_SM75
  bind_linear(m, "awq_decode_sm75", awq::awq_decode_sm75, none, awq::choose_decode_sm75_plan, awq::decode_sm75_plan_rejected,
              awq::describe_decode_sm75, awq::decode_sm75_variant_count());
#endif
#ifdef KITCHEN_HAVE_SM80
  bind_linear(m, "awq_decode", awq::awq_decode, none, awq::choose_decode_plan, awq::decode_plan_rejected, awq::describe_decode,
              awq::decode_variant_count());
#endif
#ifdef KITCHEN_HAVE_SM90
  bind_linear(m, "awq_stream", awq::awq_stream, awq::stream_workspace, awq::choose_stream_plan, awq::stream_plan_rejected, awq::describe_stream,
              awq::stream_variant_count());
  bind_linear(m, "awq_gemm_sm90", awq::awq_gemm_sm90, awq::gemm_sm90_workspace, awq::choose_gemm_sm90_plan,
              awq::gemm_sm90_plan_rejected, awq::describe_gemm_sm90, awq::gemm_sm90_variant_count());
#endif
}
