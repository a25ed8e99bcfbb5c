// The module kitchen_svdquant._C. Tensors arrive as device pointers, sizes and strides, the stream as an integer, all
// checked by the Python functions that call this (kernels.py); nothing here knows of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "decode_svdquant/decode_svdquant.h"
#include "kitchen/bench/yardstick.h"
#include "kitchen/host/device.h"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"
#include "quantize_svdquant_w4a4/sm90/project_rows.h"
#include "svdquant_gemm/sm75/svdquant_gemm.h"
#include "svdquant_gemm/sm80/svdquant_gemm.h"
#include "svdquant_gemm/sm90/packed_gemm.h"
#include "svdquant_gemm/sm90/stream_gemm.h"
#include "svdquant_gemm/sm90/svdquant_gemm.h"

namespace py = pybind11;

namespace {

using namespace kitchen;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType dtype(int code) {
  host::require(code >= 0 && code <= 2, "svdquant: unknown dtype");
  return static_cast<DType>(code);
}

svdquant::CodeForm code_form(int code) {
  host::require(code >= 0 && code <= 1, "svdquant: unknown form of codes");
  return static_cast<svdquant::CodeForm>(code);
}

// The weight that a quantizer decodes beside x: address of the codes (0: none) and of their scales, pitch and type of the scales,
// where both go, rows, and rows of a block of scales.
using WeightArguments = std::tuple<uintptr_t, uintptr_t, int64_t, int, uintptr_t, uintptr_t, int64_t, int>;
// float32 [rows, R] that is rounded to bfloat16 [rows, out_R] on the way; address 0: none.
using LowArguments = std::tuple<uintptr_t, uintptr_t, int64_t, int, int>;

svdquant::DecodeParams decode_params(const WeightArguments& weight, const LowArguments& low, int64_t K) {
  svdquant::DecodeParams p = {};
  p.codes = pointer<const uint8_t>(std::get<0>(weight)), p.scales = pointer<const void>(std::get<1>(weight));
  p.scales_pitch = std::get<2>(weight), p.scale_type = dtype(std::get<3>(weight));
  p.out = pointer<uint8_t>(std::get<4>(weight)), p.out_scales = pointer<uint4>(std::get<5>(weight));
  p.rows = std::get<6>(weight), p.K = K, p.block = std::get<7>(weight);
  p.low = pointer<const float>(std::get<0>(low)), p.out_low = pointer<__nv_bfloat16>(std::get<1>(low));
  p.low_rows = std::get<2>(low), p.R = std::get<3>(low), p.out_R = std::get<4>(low);
  return p;
}

// Numbers that the quantizer sets to zero for the GEMM behind it: address (0: none) and count.
using ClearedArguments = std::tuple<uintptr_t, int>;

const ClearedArguments kNoneCleared(0, 0);

void set_cleared(svdquant::QuantizeParams& p, const ClearedArguments& cleared) {
  p.cleared = pointer<uint32_t>(std::get<0>(cleared)), p.cleared_count = std::get<1>(cleared);
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_svdquant_w4a4",
      [](uintptr_t x, int64_t x_row_stride, int type, uintptr_t smooth, int smooth_type, uintptr_t codes, uintptr_t scales,
         int64_t M, int64_t K, float shift, bool is_unsigned, int form, const WeightArguments& weight,
         const LowArguments& low, bool beside, int device, uintptr_t stream, const ClearedArguments& cleared) {
        svdquant::QuantizeParams p = {pointer<const void>(x),
                                            x_row_stride,
                                            pointer<const void>(smooth),
                                            pointer<uint8_t>(codes),
                                            pointer<void>(scales),
                                            M,
                                            K,
                                            shift,
                                            is_unsigned,
                                            code_form(form),
                                            dtype(type),
                                            dtype(smooth_type)};
        set_cleared(p, cleared);
        const svdquant::DecodeParams decoded = decode_params(weight, low, K);
        svdquant::quantize_svdquant_w4a4(p, std::get<0>(weight) == 0 ? nullptr : &decoded, device,
                                         pointer<CUstream_st>(stream), beside);
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("type"), py::arg("smooth"), py::arg("smooth_type"), py::arg("codes"),
      py::arg("scales"), py::arg("M"), py::arg("K"), py::arg("shift"), py::arg("is_unsigned"), py::arg("form"),
      py::arg("weight"), py::arg("low"), py::arg("beside"), py::arg("device"), py::arg("stream"),
      py::arg("cleared") = kNoneCleared,
      "form: 0 two codes a byte, 1 an e4m3 number each with scales in blocks of 64 rows.");
  m.def(
      "decode_svdquant",
      [](uintptr_t codes, uintptr_t scales, int64_t scales_pitch, int scale_type, uintptr_t out, uintptr_t out_scales,
         int64_t rows, int64_t K, int block, bool is_a, bool is_unsigned, uintptr_t low, uintptr_t out_low,
         int64_t low_rows, int R, int out_R, int device, uintptr_t stream) {
        const svdquant::DecodeParams p = {pointer<const uint8_t>(codes),
                                          pointer<const void>(scales),
                                          pointer<uint8_t>(out),
                                          pointer<uint4>(out_scales),
                                          rows,
                                          K,
                                          scales_pitch,
                                          block,
                                          is_a,
                                          is_unsigned,
                                          dtype(scale_type),
                                          pointer<const float>(low),
                                          pointer<__nv_bfloat16>(out_low),
                                          low_rows,
                                          R,
                                          out_R};
        svdquant::decode_svdquant(p, device, pointer<CUstream_st>(stream));
      },
      py::arg("codes"), py::arg("scales"), py::arg("scales_pitch"), py::arg("scale_type"), py::arg("out"),
      py::arg("out_scales"), py::arg("rows"), py::arg("K"), py::arg("block"), py::arg("is_a"), py::arg("is_unsigned"),
      py::arg("low"), py::arg("out_low"), py::arg("low_rows"), py::arg("R"), py::arg("out_R"), py::arg("device"),
      py::arg("stream"));
  m.def(
      "quantize_few_rows",
      [](uintptr_t x, int64_t x_row_stride, int type, uintptr_t smooth, int smooth_type, uintptr_t codes, uintptr_t scales,
         int64_t M, int64_t K, float shift, bool is_unsigned, uintptr_t proj_down, int down_type, uintptr_t low, int R,
         int device, uintptr_t stream, const ClearedArguments& cleared) {
        svdquant::FewRowsParams p = {
            {pointer<const void>(x), x_row_stride, pointer<const void>(smooth), pointer<uint8_t>(codes),
             pointer<void>(scales), M, K, shift, is_unsigned, svdquant::CodeForm::kPacked, dtype(type), dtype(smooth_type)},
            pointer<const void>(proj_down),
            pointer<float>(low),
            R,
            dtype(down_type)};
        set_cleared(p.quantize, cleared);
        svdquant::quantize_few_rows(p, device, pointer<CUstream_st>(stream));
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("type"), py::arg("smooth"), py::arg("smooth_type"), py::arg("codes"),
      py::arg("scales"), py::arg("M"), py::arg("K"), py::arg("shift"), py::arg("is_unsigned"), py::arg("proj_down"),
      py::arg("down_type"), py::arg("low"), py::arg("R"), py::arg("device"), py::arg("stream"), py::arg("cleared") = kNoneCleared);
}

#if defined(KITCHEN_HAVE_SM75) || defined(KITCHEN_HAVE_SM80) || defined(KITCHEN_HAVE_SM90)
// Of PackedPlan, of PackedWorkspace, and the pitch of b_scale.
using PackedArguments = std::tuple<int, int, uintptr_t, uintptr_t, bool, int64_t>;
const PackedArguments kNotPacked(0, 1, 0, 0, false, 0);

template <class Launch>
void bind_stream(py::module_& m, const char* name, const Launch& launch) {
  m.def(
      name,
      [launch](int64_t M, int64_t N, int64_t K, uintptr_t a, uintptr_t a_scale, uintptr_t b, uintptr_t b_scale,
               int b_scale_type, int R, uintptr_t low, uintptr_t up, int up_type, uintptr_t bias, int bias_type,
               uintptr_t residual, uintptr_t residual_scale, int residual_scale_stride, uintptr_t out, int out_type,
               bool is_unsigned, bool int4, bool programmatic_launch, int device, uintptr_t stream, const PackedArguments& packed) {
        svdquant::StreamOperands o = {};
        o.M = M, o.N = N, o.K = K, o.R = R;
        o.a = pointer<const uint8_t>(a), o.a_scale = pointer<const float>(a_scale);
        o.b = pointer<const uint8_t>(b), o.b_scale = pointer<const void>(b_scale), o.b_scale_type = dtype(b_scale_type);
        o.low = pointer<const float>(low), o.up = pointer<const void>(up), o.up_type = dtype(up_type);
        o.bias = pointer<const void>(bias), o.bias_type = dtype(bias_type);
        o.residual = pointer<const void>(residual);
        o.residual_scale = pointer<const float>(residual_scale), o.residual_scale_stride = residual_scale_stride;
        o.out = pointer<void>(out), o.out_type = dtype(out_type);
        o.is_unsigned = is_unsigned, o.int4 = int4, o.programmatic_launch = programmatic_launch;
        o.plan = {std::get<0>(packed), std::get<1>(packed)};
        o.workspace = {pointer<float>(std::get<2>(packed)), pointer<uint32_t>(std::get<3>(packed)), std::get<4>(packed)};
        o.b_scale_pitch = std::get<5>(packed);
        launch(o, device, pointer<CUstream_st>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("a"), py::arg("a_scale"), py::arg("b"), py::arg("b_scale"),
      py::arg("b_scale_type"), py::arg("R"), py::arg("low"), py::arg("up"), py::arg("up_type"), py::arg("bias"),
      py::arg("bias_type"), py::arg("residual"), py::arg("residual_scale"), py::arg("residual_scale_stride"),
      py::arg("out"), py::arg("out_type"), py::arg("is_unsigned"), py::arg("int4"), py::arg("programmatic_launch"),
      py::arg("device"), py::arg("stream"), py::arg("packed") = kNotPacked);
}
#endif

#ifdef KITCHEN_HAVE_SM90
void bind_project(py::module_& m) {
  m.def(
      "project_rows",
      [](uintptr_t x, int64_t x_row_stride, int type, int64_t M, int64_t K, uintptr_t proj_down, int R, uintptr_t low,
         bool low_is_bfloat16, int device, uintptr_t stream) {
        svdquant::ProjectParams p = {};
        p.x = pointer<const void>(x), p.x_row_stride = x_row_stride, p.type = dtype(type), p.M = M, p.K = K;
        p.proj_down = pointer<const void>(proj_down), p.R = R;
        p.low = low_is_bfloat16 ? nullptr : pointer<float>(low);
        p.low_bfloat16 = low_is_bfloat16 ? pointer<__nv_bfloat16>(low) : nullptr;
        svdquant::project_rows(p, device, pointer<CUstream_st>(stream));
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("type"), py::arg("M"), py::arg("K"), py::arg("proj_down"), py::arg("R"),
      py::arg("low"), py::arg("low_is_bfloat16"), py::arg("device"), py::arg("stream"));
}

void bind_packed_plan(py::module_& m) {
  m.def(
      "svdquant_packed_sm90_plan",
      [](int64_t M, int64_t N, int64_t K, int sm_count, const std::optional<std::tuple<int, int>>& forced) {
        host::require(!forced || (std::get<0>(*forced) >= 0 && std::get<0>(*forced) < svdquant::packed_variant_count()),
                      "svdquant_packed_sm90: there is no such variant");
        const svdquant::PackedPlan plan = forced ? svdquant::PackedPlan{std::get<0>(*forced), std::get<1>(*forced)}
                                                 : svdquant::packed_plan(M, N, K, sm_count);
        return std::make_tuple(plan.variant, plan.splits);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("sm_count"), py::arg("forced") = py::none(),
      "(variant, pieces of K): those that are chosen, or the given ones.");
  m.def(
      "svdquant_packed_sm90_workspace",
      [](int64_t M, int64_t N, int variant, int splits) {
        const svdquant::PackedPlan plan = {variant, splits};
        return std::make_tuple(svdquant::packed_sums(M, N, plan), svdquant::packed_tiles(M, N, plan));
      },
      py::arg("M"), py::arg("N"), py::arg("variant"), py::arg("splits"), "Sums and counts of a plan.");
  m.def("svdquant_packed_sm90_variants", svdquant::packed_variant_count);
}

using HopperPlan = std::tuple<int, int, int, int>;  // of HopperPlan's members

void bind_hopper_gemm(py::module_& m) {
  m.def(
      "svdquant_gemm_sm90_plan",
      [](int64_t M, int64_t N, int64_t K, int sm_count, const std::optional<int>& variant) {
        host::require(!variant || (*variant >= 0 && *variant < svdquant::hopper_variant_count()),
                      "svdquant_gemm_sm90: there is no such variant");
        const auto plan = variant ? svdquant::hopper_plan_for(M, N, K, sm_count, *variant)
                                  : svdquant::choose_hopper_plan(M, N, K, sm_count);
        return std::make_tuple(HopperPlan(plan.variant, plan.grid, plan.raster_group, plan.splits),
                               svdquant::hopper_variant(plan.variant).tile_n, svdquant::describe(M, N, K, sm_count, plan));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("sm_count"), py::arg("variant") = py::none(),
      "(plan, tile_n, plan in words): the one that is chosen, or of the given variant.");
  m.def("svdquant_gemm_sm90_variants", svdquant::hopper_variant_count);
  m.def(
      "svdquant_gemm_sm90",
      [](int64_t M, int64_t N, int64_t K, uintptr_t a, uintptr_t a_scale, uintptr_t b, uintptr_t b_scale, int R,
         uintptr_t low, uintptr_t up, uintptr_t bias, int bias_type, uintptr_t residual, uintptr_t residual_scale,
         int residual_scale_stride, uintptr_t out, int out_type, int64_t pitch, const HopperPlan& plan,
         bool programmatic_launch, int device, uintptr_t stream) {
        svdquant::HopperOperands o = {};
        o.M = M, o.N = N, o.K = K, o.R = R;
        o.a = pointer<const uint8_t>(a), o.a_scale = pointer<const void>(a_scale);
        o.b = pointer<const uint8_t>(b), o.b_scale = pointer<const void>(b_scale);
        o.low = pointer<const void>(low), o.up = pointer<const void>(up);
        o.bias = pointer<const void>(bias), o.bias_type = dtype(bias_type);
        o.residual = pointer<const void>(residual);
        o.residual_scale = pointer<const float>(residual_scale), o.residual_scale_stride = residual_scale_stride;
        o.out = pointer<void>(out), o.out_type = dtype(out_type), o.pitch = pitch;
        o.programmatic_launch = programmatic_launch;
        const host::DeviceGuard guard(device);
        svdquant::svdquant_gemm_sm90(o, {std::get<0>(plan), std::get<1>(plan), std::get<2>(plan), std::get<3>(plan)},
                                     pointer<CUstream_st>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("a"), py::arg("a_scale"), py::arg("b"), py::arg("b_scale"),
      py::arg("R"), py::arg("low"), py::arg("up"), py::arg("bias"), py::arg("bias_type"), py::arg("residual"),
      py::arg("residual_scale"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"), py::arg("pitch"),
      py::arg("plan"), py::arg("programmatic_launch"), py::arg("device"), py::arg("stream"),
      "Operands as decode_svdquant and quantize_svdquant_w4a4 write them; low and up bfloat16, R a multiple of 8.");
}
#endif

void bind_yardstick(py::module_& m) {
  m.def("yardstick_read", [](uintptr_t source, int64_t bytes, uintptr_t sink, int device, uintptr_t stream) {
    const host::DeviceGuard guard(device);
    bench::yardstick_read(pointer<const void>(source), bytes, pointer<void>(sink),
                          host::attribute(cudaDevAttrMultiProcessorCount, device), pointer<CUstream_st>(stream));
  });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-svdquant";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] { return std::string(KITCHEN_ARCHS); }, "The CUDA architectures compiled in, comma separated.");
  bind_quantize(m);
  bind_yardstick(m);
#ifdef KITCHEN_HAVE_SM75
  bind_stream(m, "svdquant_gemm_sm75", svdquant::svdquant_gemm_sm75);
#endif
#ifdef KITCHEN_HAVE_SM80
  bind_stream(m, "svdquant_gemm_sm80", svdquant::svdquant_gemm_sm80);
#endif
#ifdef KITCHEN_HAVE_SM90
  bind_project(m);
  bind_stream(m, "svdquant_stream_sm90", svdquant::svdquant_stream_sm90);
  bind_stream(m, "svdquant_packed_sm90", svdquant::svdquant_packed_sm90);
  bind_packed_plan(m);
  bind_hopper_gemm(m);
#endif
}
