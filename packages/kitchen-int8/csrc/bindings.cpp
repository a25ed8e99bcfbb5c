// The module kitchen_int8._C. Tensors arrive as device pointers, sizes and strides, the stream as an integer, all checked by
// the Python functions that call this (kernels.py); nothing here knows of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "dequantize_int8/dequantize_int8.h"
#include "int8_gemm/decode/int8_decode.h"
#include "int8_gemm/portable.h"
#include "int8_gemm/sm90/int8_gemm.h"
#include "int8_gemm/sm90/int8_swiglu.h"
#include "kitchen/bench/bind_yardstick.h"
#include "kitchen/host/device.h"
#include "quantize_int8_rowwise/quantize_arguments.h"
#include "quantize_int8_tensorwise/quantize_int8_tensorwise.h"

namespace py = pybind11;

namespace {

using namespace kitchen;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI
using Plan = std::tuple<int, int, int, int, bool>;  // of QuantizePlan's members

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_int8_rowwise",
      [](uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M, int64_t K, int group, int act,
         uintptr_t act_weight, int act_weight_dtype, float act_eps, uint64_t seed, int device, uintptr_t stream,
         const std::optional<Plan>& plan) {
        const auto p = int8::quantize_params(x, x_row_stride, dtype, codes, scales, M, K, group, act, act_weight, act_weight_dtype, act_eps, seed);
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
        const auto p = int8::quantize_params(x, x_row_stride, dtype, codes, 0, M, K, group, act, 0, 0, 0.0f, seed);
        const auto plan = int8::choose_plan(p, {sm_count, has_clusters, smem_per_cta, smem_per_sm});
        return Plan(plan.tiles, plan.warps, plan.cluster, plan.ctas_per_sm, plan.special);
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("dtype"), py::arg("codes"), py::arg("M"), py::arg("K"), py::arg("group"),
      py::arg("act"), py::arg("seed"), py::arg("sm_count"), py::arg("has_clusters"), py::arg("smem_per_cta"), py::arg("smem_per_sm"),
      "The plan that quantize_int8_rowwise would choose on such a device.");
}

void bind_tensorwise(py::module_& m) {
  m.def("tensorwise_blocks", &int8::tensorwise_blocks, py::arg("elements"), py::arg("sm_count"),
        "How many words the workspace of quantize_int8_tensorwise has.");
  m.def(
      "quantize_int8_tensorwise",
      [](uintptr_t x, int dtype, int64_t elements, uintptr_t given_scale, uintptr_t codes, uintptr_t scale, uintptr_t workspace,
         uint64_t seed, int device, uintptr_t stream) {
        host::require(dtype >= 0 && dtype <= 2, "quantize_int8_tensorwise: unknown dtype");
        host::require((x | codes) % 16 == 0, "quantize_int8_tensorwise: x and codes must be aligned to 16 bytes");
        host::require((given_scale == 0) != (workspace == 0), "quantize_int8_tensorwise: a scale or a workspace, not both");
        int8::TensorwiseParams p = {};
        p.x = pointer<const void>(x);
        p.given_scale = pointer<const float>(given_scale);
        p.codes = pointer<int8_t>(codes);
        p.scale = pointer<float>(scale);
        p.partial_max = pointer<uint32_t>(workspace);
        p.elements = elements;
        p.dtype = static_cast<DType>(dtype);
        p.seed = seed;
        int8::quantize_int8_tensorwise(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("x"), py::arg("dtype"), py::arg("elements"), py::arg("given_scale"), py::arg("codes"), py::arg("scale"),
      py::arg("workspace"), py::arg("seed"), py::arg("device"), py::arg("stream"),
      "given_scale 0: from the tensor, with a workspace of 4 bytes a block.");
}

void bind_dequantize(py::module_& m) {
  m.def(
      "dequantize_int8",
      [](uintptr_t codes, int64_t pitch, int64_t V, int64_t K, uintptr_t scale, int scale_stride, uintptr_t indices, bool narrow_indices,
         uintptr_t out, int out_type, int64_t M, int group, int device, uintptr_t stream) {
        host::require(M >= 0 && M < (int64_t{1} << 31) && K >= 1 && K < (int64_t{1} << 30), "dequantize_int8: M or K is out of range");
        const bool power_of_4 = group == 0 || group == 4 || group == 16 || group == 64 || group == 256 || group == 1024 || group == 4096;
        host::require(power_of_4 && (group == 0 || K % group == 0), "dequantize_int8: the group must be 0 or 4, 16, .. 4096 and divide K");
        host::require(out_type >= 0 && out_type <= 2 && out % 16 == 0, "dequantize_int8: unknown dtype, or out not aligned to 16 bytes");
        int8::DequantizeParams p = {};
        p.codes = pointer<const int8_t>(codes);
        p.scale = pointer<const float>(scale);
        p.indices = pointer<const void>(indices);
        p.out = pointer<void>(out);
        p.pitch = pitch;
        p.M = M;
        p.V = V;
        p.K = static_cast<int>(K);
        p.group = group;
        p.scale_stride = scale_stride;
        p.narrow_indices = narrow_indices;
        p.out_type = static_cast<DType>(out_type);
        int8::dequantize_int8(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("codes"), py::arg("pitch"), py::arg("V"), py::arg("K"), py::arg("scale"), py::arg("scale_stride"), py::arg("indices"),
      py::arg("narrow_indices"), py::arg("out"), py::arg("out_type"), py::arg("M"), py::arg("group"), py::arg("device"), py::arg("stream"),
      "indices 0: out's row m is row m of codes.");
}

using PortablePlan = std::tuple<int, int, int, int>;  // of portable::LinearPlan's members

int8::portable::LinearPlan portable_plan(const PortablePlan& plan) {
  return {std::get<0>(plan), std::get<1>(plan), std::get<2>(plan), std::get<3>(plan)};
}

// What every INT8 GEMM is given.
int8::Int8GemmParams gemm_params(int64_t M, int64_t N, int64_t K, uintptr_t a, uintptr_t a_scale, uintptr_t b, uintptr_t b_scale,
                                 int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t residual, uintptr_t residual_scale,
                                 int residual_scale_type, int residual_scale_stride, uintptr_t out, int out_type) {
  for (const int type : {bias_type, residual_scale_type, out_type}) host::require(type >= 0 && type <= 2, "int8_gemm: unknown dtype");
  int8::Int8GemmParams p = {};
  p.M = M;
  p.N = N;
  p.K = K;
  p.a = pointer<const int8_t>(a);
  p.b = pointer<const int8_t>(b);
  p.a_scale = pointer<const float>(a_scale);
  p.b_scale = pointer<const float>(b_scale);
  p.bias = pointer<const void>(bias);
  p.residual = pointer<const void>(residual);
  p.residual_scale = pointer<const void>(residual_scale);
  p.out = pointer<void>(out);
  p.bias_type = static_cast<DType>(bias_type);
  p.residual_scale_type = static_cast<DType>(residual_scale_type);
  p.out_type = static_cast<DType>(out_type);
  p.b_scale_stride = b_scale_stride;
  p.residual_scale_stride = residual_scale_stride;
  return p;
}

template <class Gemm>
void bind_portable_gemm(py::module_& m, const char* name, Gemm gemm) {
  m.def(
      name,
      [gemm](int64_t M, int64_t N, int64_t K, uintptr_t a, int64_t a_pitch, uintptr_t a_scale, uintptr_t b, int64_t b_pitch,
             uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t residual, uintptr_t residual_scale,
             int residual_scale_type, int residual_scale_stride, uintptr_t out, int out_type, uintptr_t workspace,
             const PortablePlan& plan, int device, uintptr_t stream) {
        int8::portable::Operands operands = {};
        operands.gemm = gemm_params(M, N, K, a, a_scale, b, b_scale, b_scale_stride, bias, bias_type, residual, residual_scale,
                                    residual_scale_type, residual_scale_stride, out, out_type);
        operands.a_pitch = a_pitch;
        operands.b_pitch = b_pitch;
        operands.partials = pointer<int32_t>(workspace);
        gemm(operands, portable_plan(plan), device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("a"), py::arg("a_pitch"), py::arg("a_scale"), py::arg("b"), py::arg("b_pitch"),
      py::arg("b_scale"), py::arg("b_scale_stride"), py::arg("bias"), py::arg("bias_type"), py::arg("residual"),
      py::arg("residual_scale"), py::arg("residual_scale_type"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"),
      py::arg("workspace"), py::arg("plan"), py::arg("device"), py::arg("stream"), "workspace: as many bytes as the plan says; 0 where it says 0.");
}

void bind_portable_gemms(py::module_& m) {
  namespace portable = int8::portable;
  m.def(
      "int8_gemm_portable_plan",
      [](int path, int64_t M, int64_t N, int64_t K, bool aligned, int sm_count, int smem_per_block, int smem_per_sm,
         const std::optional<PortablePlan>& plan) {
        const portable::Path which = static_cast<portable::Path>(path);
        host::require(which == portable::Path::kSm75 || which == portable::Path::kSm80, "int8_gemm: the path is 75 or 80");
        const portable::LinearProblem problem = {M, N, K, aligned};
        const portable::Device device = {sm_count, smem_per_block, smem_per_sm};
        const auto chosen = plan ? portable_plan(*plan) : portable::choose_plan(which, problem, device);
        const char* const reason = portable::unsupported(which, problem, chosen, device);
        const PortablePlan members(chosen.tile, chosen.stages, chosen.splits, chosen.raster_group);
        return std::make_tuple(members, portable::workspace_bytes(problem, chosen), portable::describe(which, problem, chosen),
                               std::string(reason == nullptr ? "" : reason));
      },
      py::arg("path"), py::arg("M"), py::arg("N"), py::arg("K"), py::arg("aligned"), py::arg("sm_count"), py::arg("smem_per_block"),
      py::arg("smem_per_sm"), py::arg("plan") = py::none(),
      "(plan, workspace bytes, plan in words, why it cannot run or '') of path 75 or 80 on such a device; with a plan, of that one.");
  m.def("int8_gemm_portable_tiles", [](int path) { return portable::tile_count(static_cast<portable::Path>(path)); });
#ifdef KITCHEN_HAVE_SM75
  bind_portable_gemm(m, "int8_gemm_sm75", portable::int8_gemm_sm75);
#endif
#ifdef KITCHEN_HAVE_SM80
  bind_portable_gemm(m, "int8_gemm_sm80", portable::int8_gemm_sm80);
#endif
}

// A GEMM on rows without gaps, aligned to 16 bytes, K a multiple of 16: gemm(params, plan or none, device, stream).
template <class Plan, class Gemm>
void bind_packed_gemm(py::module_& m, const char* name, const char* plan_members, Gemm gemm) {
  const std::string doc = std::string("Rows contiguous, 16-byte aligned, K a multiple of 16. plan: ") + plan_members + "; None chooses.";
  m.def(
      name,
      [gemm](int64_t M, int64_t N, int64_t K, uintptr_t a, uintptr_t a_scale, uintptr_t b, uintptr_t b_scale, int b_scale_stride,
             uintptr_t bias, int bias_type, uintptr_t residual, uintptr_t residual_scale, int residual_scale_type,
             int residual_scale_stride, uintptr_t out, int out_type, const std::optional<Plan>& plan, int device, uintptr_t stream) {
        const auto p = gemm_params(M, N, K, a, a_scale, b, b_scale, b_scale_stride, bias, bias_type, residual, residual_scale,
                                   residual_scale_type, residual_scale_stride, out, out_type);
        gemm(p, plan, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("a"), py::arg("a_scale"), py::arg("b"), py::arg("b_scale"),
      py::arg("b_scale_stride"), py::arg("bias"), py::arg("bias_type"), py::arg("residual"), py::arg("residual_scale"),
      py::arg("residual_scale_type"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"), py::arg("plan"),
      py::arg("device"), py::arg("stream"), doc.c_str());
}

#ifdef KITCHEN_HAVE_SM80
void bind_decode_gemm(py::module_& m) {
  using Plan = std::pair<int, int>;  // of DecodePlan's members
  bind_packed_gemm<Plan>(m, "int8_decode", "(variant, splits), for 1 to 64 rows",
                         [](const int8::Int8GemmParams& p, const std::optional<Plan>& plan, int device, cudaStream_t stream) {
                           int8::DecodePlan forced = {};
                           if (plan) forced = {plan->first, plan->second};
                           int8::int8_decode(p, nullptr, plan ? &forced : nullptr, device, stream);
                         });
}
#endif

#ifdef KITCHEN_HAVE_SM90
using FewRowsPlan = std::tuple<bool, int, int>;  // of int8::FewRowsPlan's members

int8::FewRowsPlan few_rows_plan(const FewRowsPlan& plan) {
  return {std::get<0>(plan), {std::get<1>(plan), std::get<2>(plan)}};
}

void bind_decode_sm90(py::module_& m) {
  bind_packed_gemm<FewRowsPlan>(
      m, "int8_decode_sm90", "(through_shared, variant, splits), for 1 to 16 rows",
      [](const int8::Int8GemmParams& p, const std::optional<FewRowsPlan>& plan, int device, cudaStream_t stream) {
        const auto chosen = plan ? few_rows_plan(*plan) : int8::choose_few_rows_plan({p.M, p.N, p.K}, device);
        int8::int8_few_rows(p, chosen, device, stream);
      });
  m.def(
      "int8_linear_sm90",
      [](uintptr_t x, int64_t x_row_stride, int dtype, int group, int act, uintptr_t act_weight, int act_weight_dtype, float act_eps,
         int64_t M, int64_t N, int64_t K, uintptr_t b, uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type,
         uintptr_t residual, uintptr_t residual_scale, int residual_scale_type, int residual_scale_stride, uintptr_t out, int out_type,
         uintptr_t workspace, const std::optional<FewRowsPlan>& plan, int device, uintptr_t stream) {
        const uintptr_t scales = workspace + M * K;
        auto quantizer = int8::quantize_params(x, x_row_stride, dtype, workspace, scales, M, K, group, act, act_weight, act_weight_dtype, act_eps, 0);
        auto gemm = gemm_params(M, N, K, workspace, scales, b, b_scale, b_scale_stride, bias, bias_type, residual, residual_scale,
                                residual_scale_type, residual_scale_stride, out, out_type);
        // Each waits for the kernel in front before it reads or writes, weights apart, and lets the next start only then.
        quantizer.programmatic_launch = gemm.programmatic_launch = gemm.weights_early = true;
        int8::quantize_int8_rowwise(quantizer, nullptr, device, reinterpret_cast<cudaStream_t>(stream));
        if (plan) return int8::int8_few_rows(gemm, few_rows_plan(*plan), device, reinterpret_cast<cudaStream_t>(stream));
        host::DeviceGuard guard(device);
        int8::int8_gemm_sm90(gemm, reinterpret_cast<cudaStream_t>(stream));
      },
      "Quantizer and GEMM; without a plan, int8_gemm_sm90. workspace: (K + 4) * M bytes, aligned to 16; K a multiple of 16.");
  m.def(
      "int8_decode_sm90_plan",
      [](int64_t M, int64_t N, int64_t K, int device) {
        const auto plan = int8::choose_few_rows_plan({M, N, K}, device);
        return std::make_pair(FewRowsPlan(plan.through_shared, plan.plan.variant, plan.plan.splits), int8::describe_few_rows({M, N, K}, plan));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("device"), "(plan, the plan in words)");
  m.def("int8_decode_sm90_variants", &int8::decode_sm90_variant_count);
  m.def("int8_decode_variants", &int8::decode_variant_count);
}

using HopperPlan = std::tuple<int, int, int>;           // of SwigluPlan's members
using HopperGemmPlan = std::tuple<int, int, int, int>;  // of LinearPlan's members

void bind_hopper_gemm(py::module_& m) {
  bind_packed_gemm<HopperGemmPlan>(
      m, "int8_gemm_sm90", "(variant, grid, raster_group, splits), 0 for the usual",
      [](const int8::Int8GemmParams& p, const std::optional<HopperGemmPlan>& plan, int device, cudaStream_t stream) {
        int8::LinearPlan forced = {};
        if (plan) forced = {std::get<0>(*plan), std::get<1>(*plan), std::get<2>(*plan), std::get<3>(*plan)};
        host::DeviceGuard guard(device);
        int8::int8_gemm_sm90(p, stream, plan ? &forced : nullptr);
      });
  m.def("int8_gemm_sm90_plan", [](int64_t M, int64_t N, int64_t K, int sm_count, bool residual) {
    const auto plan = int8::choose_plan({M, N, K, sm_count, residual});
    return std::make_pair(HopperGemmPlan(plan.variant, plan.grid, plan.raster_group, plan.splits), int8::describe({M, N, K, sm_count, residual}, plan));
  }, py::arg("M"), py::arg("N"), py::arg("K"), py::arg("sm_count"), py::arg("residual"));
  m.def("int8_gemm_sm90_variants", &int8::hopper_variant_count, "So many numbers name a variant; the last three split K.");
}
#endif

#ifdef KITCHEN_HAVE_SM90
int8::SwigluParams swiglu_params(int64_t M, int64_t I, int64_t K, uintptr_t a, int64_t a_pitch, uintptr_t a_scale, uintptr_t b,
                                 int64_t b_pitch, uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t out,
                                 int out_type) {
  host::require(bias_type >= 0 && bias_type <= 2 && out_type >= 0 && out_type <= 2, "int8_swiglu: unknown dtype");
  int8::SwigluParams p = {};
  p.M = M;
  p.I = I;
  p.K = K;
  p.a = pointer<const int8_t>(a);
  p.b = pointer<const int8_t>(b);
  p.a_pitch = a_pitch;
  p.b_pitch = b_pitch;
  p.a_scale = pointer<const float>(a_scale);
  p.b_scale = pointer<const float>(b_scale);
  p.bias = pointer<const void>(bias);
  p.out = pointer<void>(out);
  p.bias_type = static_cast<DType>(bias_type);
  p.out_type = static_cast<DType>(out_type);
  p.b_scale_stride = b_scale_stride;
  return p;
}

void bind_swiglu(py::module_& m) {
  m.def(
      "int8_swiglu_sm90",
      [](int64_t M, int64_t I, int64_t K, uintptr_t a, int64_t a_pitch, uintptr_t a_scale, uintptr_t b, int64_t b_pitch,
         uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t out, int out_type,
         const std::optional<HopperPlan>& plan, int device, uintptr_t stream) {
        const auto p = swiglu_params(M, I, K, a, a_pitch, a_scale, b, b_pitch, b_scale, b_scale_stride, bias, bias_type, out, out_type);
        int8::SwigluPlan forced = {};
        if (plan) forced = {std::get<0>(*plan), std::get<1>(*plan), std::get<2>(*plan)};
        host::DeviceGuard guard(device);
        int8::int8_swiglu_sm90(p, reinterpret_cast<cudaStream_t>(stream), plan ? &forced : nullptr);
      },
      py::arg("M"), py::arg("I"), py::arg("K"), py::arg("a"), py::arg("a_pitch"), py::arg("a_scale"), py::arg("b"), py::arg("b_pitch"),
      py::arg("b_scale"), py::arg("b_scale_stride"), py::arg("bias"), py::arg("bias_type"), py::arg("out"), py::arg("out_type"),
      py::arg("plan"), py::arg("device"), py::arg("stream"),
      "b: 2I rows, the gate's first. Pitches in bytes, multiples of 16. plan: (variant, grid, raster_group), None chooses.");
  m.def(
      "int8_swiglu_linear_sm90",
      [](uintptr_t x, int64_t x_row_stride, int dtype, int group, int64_t M, int64_t I, int64_t K, uintptr_t b, int64_t b_pitch,
         uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t out, int out_type, uintptr_t workspace,
         int device, uintptr_t stream) {
        const uintptr_t scales = workspace + M * K;
        auto quantizer = int8::quantize_params(x, x_row_stride, dtype, workspace, scales, M, K, group, 0, 0, 0, 0.0f, 0);
        auto gemm = swiglu_params(M, I, K, workspace, K, scales, b, b_pitch, b_scale, b_scale_stride, bias, bias_type, out, out_type);
        // As in int8_linear_sm90: each waits for the kernel in front, weights apart, and lets the next start only then.
        quantizer.programmatic_launch = gemm.programmatic_launch = gemm.weights_early = true;
        int8::quantize_int8_rowwise(quantizer, nullptr, device, reinterpret_cast<cudaStream_t>(stream));
        host::DeviceGuard guard(device);
        int8::int8_swiglu_sm90(gemm, reinterpret_cast<cudaStream_t>(stream));
      },
      "Quantizer and int8_swiglu_sm90. workspace: (K + 4) * M bytes, aligned to 16; K a multiple of 16.");
  m.def("int8_swiglu_sm90_variants", &int8::swiglu_variants);
  m.def("int8_swiglu_sm90_plan", [](int64_t M, int64_t I, int64_t K, int sm_count) {
    const auto plan = int8::choose_plan(int8::SwigluProblem{M, I, K, sm_count});
    return std::make_pair(HopperPlan(plan.variant, plan.grid, plan.raster_group), int8::describe({M, I, K, sm_count}, plan));
  }, py::arg("M"), py::arg("I"), py::arg("K"), py::arg("sm_count"));
}
#endif

void bind_yardsticks(py::module_& m) {
  m.def("yardstick_copy", [](uintptr_t source, uintptr_t target, int64_t target_bytes, int ratio, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    bench::yardstick_copy(pointer<const void>(source), pointer<void>(target), target_bytes, ratio,
                          host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
  m.def("yardstick_expand", [](uintptr_t source, uintptr_t target, int64_t source_bytes, int ratio, int device, uintptr_t stream) {
    host::DeviceGuard guard(device);
    bench::yardstick_expand(pointer<const void>(source), pointer<void>(target), source_bytes, ratio,
                            host::attribute(cudaDevAttrMultiProcessorCount, device), reinterpret_cast<cudaStream_t>(stream));
  });
  bench::bind_yardstick_read(m);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-int8";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] { return std::string(KITCHEN_ARCHS); }, "The CUDA architectures compiled in, comma separated.");
  bind_quantize(m);
  bind_tensorwise(m);
  bind_dequantize(m);
  bind_portable_gemms(m);
  bind_yardsticks(m);
#ifdef KITCHEN_HAVE_SM80
  bind_decode_gemm(m);
#endif
#ifdef KITCHEN_HAVE_SM90
  bind_decode_sm90(m);
  bind_hopper_gemm(m);
  bind_swiglu(m);
#endif
}
