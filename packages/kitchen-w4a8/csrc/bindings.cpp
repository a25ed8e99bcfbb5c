// The module kitchen_w4a8._C. Tensors arrive as device pointers and sizes, the stream as an integer, all checked by the Python
// functions that call this (kernels.py); nothing here knows of torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "decode_w4a8_weight/decode_w4a8_weight.h"
#include "kitchen/host/check.h"
#include "kitchen/host/device.h"
#include "quantize_int8_rowwise/code_order.cuh"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"
#include "quantize_w4a8_weight/quantize_w4a8_weight.h"
#include "unpack_w4a8_weight/unpack_w4a8_weight.h"
#include "w4a8_scaled_mm/hopper/hopper.h"
#include "w4a8_scaled_mm/resident/resident.h"
#include "w4a8_scaled_mm/stream/stream.h"

namespace py = pybind11;

namespace {

using namespace kitchen;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI
using Plan = std::pair<int, int>;  // of the members of stream::Plan and resident::Plan
using HopperPlan = std::tuple<int, int, int>;  // of those of hopper::Plan

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_decode(py::module_& m) {
  m.def(
      "decode_w4a8_weight",
      [](uintptr_t codes, uintptr_t s_rel, uintptr_t codebook, uintptr_t out, int64_t N, int64_t K, int group, int bits,
         bool float_scales, int device, uintptr_t stream) {
        const bool whole = (bits == 4 || bits == 6) && K >= 1 && K < (int64_t{1} << 30) && K % (bits == 4 ? 16 : 32) == 0;
        host::require(whole, "decode_w4a8_weight: K must be a multiple of 16 (6 bits: of 32)");
        host::require(group >= 4 && K % group == 0 && (group % 16 == 0 || (bits == 4 && 16 % group == 0)),
                      "decode_w4a8_weight: the group must divide K and 16, or be a multiple of 16");
        const w4a8::DecodeParams p = {pointer<const uint8_t>(codes),
                                      pointer<const void>(s_rel),
                                      pointer<const float>(codebook),
                                      pointer<int8_t>(out),
                                      N,
                                      static_cast<int>(K),
                                      group,
                                      bits,
                                      float_scales};
        w4a8::decode_w4a8_weight(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("codes"), py::arg("s_rel"), py::arg("codebook"), py::arg("out"), py::arg("N"), py::arg("K"), py::arg("group"),
      py::arg("bits"), py::arg("float_scales"), py::arg("device"), py::arg("stream"));
}

void bind_unpack(py::module_& m) {
  m.def(
      "unpack_w4a8_weight",
      [](uintptr_t images, uintptr_t codes, uintptr_t s_rel, int64_t N, int64_t K, int group, int bits, int device, uintptr_t stream) {
        const bool group_fits = group >= 16 && group <= 256 && (group & (group - 1)) == 0;
        host::require(N >= 1 && N % 16 == 0 && K >= 256 && K % 256 == 0 && group_fits && (bits == 4 || bits == 6),
                      "unpack_w4a8_weight: N must be a multiple of 16, K of 256, the group a power of two from 16 to 256");
        const w4a8::UnpackParams p = {pointer<const uint8_t>(images), pointer<uint8_t>(codes), pointer<uint8_t>(s_rel), N, K, group, bits};
        w4a8::unpack_w4a8_weight(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("images"), py::arg("codes"), py::arg("s_rel"), py::arg("N"), py::arg("K"), py::arg("group"), py::arg("bits"),
      py::arg("device"), py::arg("stream"));
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_w4a8_weight",
      [](uintptr_t weight, int64_t row_stride, int weight_type, uintptr_t codebook, uintptr_t codes, uintptr_t s_rel,
         uintptr_t s_channel, uintptr_t correction, int64_t N, int64_t K, int group, int rotation, int levels, bool float_scales,
         bool scale_search, uint64_t seed, int device, uintptr_t stream) {
        host::require(weight_type >= 0 && weight_type <= 2 && levels >= 0 && levels <= 3, "quantize_w4a8_weight: unknown dtype or levels");
        host::require(K >= 16 && K < (int64_t{1} << 30), "quantize_w4a8_weight: K is out of range");
        const w4a8::QuantizeWeightParams p = {pointer<const void>(weight),
                                              row_stride,
                                              pointer<const float>(codebook),
                                              pointer<uint8_t>(codes),
                                              pointer<void>(s_rel),
                                              pointer<float>(s_channel),
                                              pointer<void>(correction),
                                              N,
                                              static_cast<int>(K),
                                              group,
                                              rotation,
                                              static_cast<w4a8::Levels>(levels),
                                              static_cast<DType>(weight_type),
                                              float_scales,
                                              scale_search,
                                              seed};
        w4a8::quantize_w4a8_weight(p, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("weight"), py::arg("row_stride"), py::arg("weight_type"), py::arg("codebook"), py::arg("codes"), py::arg("s_rel"),
      py::arg("s_channel"), py::arg("correction"), py::arg("N"), py::arg("K"), py::arg("group"), py::arg("rotation"),
      py::arg("levels"), py::arg("float_scales"), py::arg("scale_search"), py::arg("seed"), py::arg("device"), py::arg("stream"),
      "levels: 0 table, 1 uniform, 2 asymmetric, 3 six bits.");
}

// The quantizer of activations, as in kitchen-int8: codes and scales of x after activation and rotation.
int8::QuantizeParams activation_params(uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M,
                                       int64_t K, int rotation, int act, uintptr_t act_weight, int act_weight_dtype,
                                       float act_eps, uint64_t seed) {
  host::require(M >= 0 && K >= 1 && K < (int64_t{1} << 30), "quantize_int8_rowwise: K must be in 1 .. 2^30 - 1");
  const bool power_of_4 = rotation >= 4 && rotation <= 4096 && (rotation & (rotation - 1)) == 0 && (rotation & 0x1554) != 0;
  host::require(rotation == 0 || (power_of_4 && K % rotation == 0),
                "quantize_int8_rowwise: the rotation must be 0 or 4, 16, .. 4096 and divide K");
  host::require(dtype >= 0 && dtype <= 2 && act_weight_dtype >= 0 && act_weight_dtype <= 2 && act >= 0 && act <= 4,
                "quantize_int8_rowwise: unknown dtype or activation");
  int8::QuantizeParams p = {};
  p.x = pointer<const void>(x);
  p.x_row_stride = x_row_stride;
  p.act_weight = pointer<const void>(act_weight);
  p.codes = pointer<int8_t>(codes);
  p.scales = pointer<float>(scales);
  p.M = M;
  p.K = static_cast<int>(K);
  p.group = rotation;
  p.act_eps = act_eps;
  p.dtype = static_cast<DType>(dtype);
  p.act_weight_dtype = static_cast<DType>(act_weight_dtype);
  p.act = static_cast<quant::InputAct>(act);
  p.seed = seed;
  return p;
}

void bind_quantize_activation(py::module_& m) {
  m.def(
      "quantize_int8_rowwise",
      [](uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M, int64_t K, int rotation,
         int act, uintptr_t act_weight, int act_weight_dtype, float act_eps, uint64_t seed, int device, uintptr_t stream) {
        const auto p = activation_params(x, x_row_stride, dtype, codes, scales, M, K, rotation, act, act_weight,
                                         act_weight_dtype, act_eps, seed);
        int8::quantize_int8_rowwise(p, nullptr, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("x"), py::arg("x_row_stride"), py::arg("dtype"), py::arg("codes"), py::arg("scales"), py::arg("M"), py::arg("K"),
      py::arg("rotation"), py::arg("act"), py::arg("act_weight"), py::arg("act_weight_dtype"), py::arg("act_eps"),
      py::arg("seed"), py::arg("device"), py::arg("stream"));
}

w4a8::ScaledMmParams scaled_mm_params(int64_t M, int64_t N, int64_t K, int bits, int group, uintptr_t a, uintptr_t a_scale,
                                      uintptr_t codes, uintptr_t s_rel, uintptr_t codebook, uintptr_t b_scale, uintptr_t bias,
                                      int bias_type, uintptr_t residual, uintptr_t residual_scale, int residual_scale_stride,
                                      uintptr_t out, int out_type, bool programmatic) {
  host::require(bias_type >= 0 && bias_type <= 2 && out_type >= 0 && out_type <= 2, "w4a8_scaled_mm: unknown dtype");
  w4a8::ScaledMmParams p = {};
  p.M = M;
  p.N = N;
  p.K = K;
  p.a = pointer<const int8_t>(a);
  p.a_scale = pointer<const float>(a_scale);
  p.codes = pointer<const uint8_t>(codes);
  p.s_rel = pointer<const uint8_t>(s_rel);
  p.codebook = pointer<const float>(codebook);
  p.b_scale = pointer<const float>(b_scale);
  p.bias = pointer<const void>(bias);
  p.residual = pointer<const void>(residual);
  p.residual_scale = pointer<const float>(residual_scale);
  p.out = pointer<void>(out);
  p.bias_type = static_cast<DType>(bias_type);
  p.out_type = static_cast<DType>(out_type);
  p.residual_scale_stride = residual_scale_stride;
  p.bits = bits;
  p.group = group;
  p.programmatic_launch = programmatic;
  return p;
}

// Every product takes the same arguments; `run` gets them with the plan. <name>_linear is the quantizer of activations and the
// product behind it, each a programmatic dependent of the kernel in front: each waits for that before it reads or writes
// anything but weights, and lets the next start only then. `order(plan)` is that of the codes of x that it wants.
template <class Plan, class Order, class Run>
void bind_scaled_mm(py::module_& m, const std::string& name, const char* doc, Order order, Run run) {
  m.def(
      name.c_str(),
      [run](int64_t M, int64_t N, int64_t K, int bits, int group, uintptr_t a, uintptr_t a_scale, uintptr_t codes,
            uintptr_t s_rel, uintptr_t codebook, uintptr_t b_scale, uintptr_t bias, int bias_type, uintptr_t residual,
            uintptr_t residual_scale, int residual_scale_stride, uintptr_t out, int out_type, uintptr_t workspace,
            bool programmatic, const std::optional<Plan>& plan, int device, uintptr_t stream) {
        const auto p = scaled_mm_params(M, N, K, bits, group, a, a_scale, codes, s_rel, codebook, b_scale, bias, bias_type,
                                        residual, residual_scale, residual_scale_stride, out, out_type, programmatic);
        run(p, pointer<int8_t>(workspace), plan, device, reinterpret_cast<cudaStream_t>(stream));
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("bits"), py::arg("group"), py::arg("a"), py::arg("a_scale"),
      py::arg("codes"), py::arg("s_rel"), py::arg("codebook"), py::arg("b_scale"), py::arg("bias"), py::arg("bias_type"),
      py::arg("residual"), py::arg("residual_scale"), py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"),
      py::arg("workspace"), py::arg("programmatic"), py::arg("plan"), py::arg("device"), py::arg("stream"), doc);
  m.def(
      (name + "_linear").c_str(),
      [order, run](uintptr_t x, int64_t x_row_stride, int dtype, int rotation, int act, uintptr_t act_weight, int act_weight_dtype,
            float act_eps, int64_t M, int64_t N, int64_t K, int bits, int group, uintptr_t codes, uintptr_t s_rel,
            uintptr_t codebook, uintptr_t b_scale, uintptr_t bias, int bias_type, uintptr_t residual, uintptr_t residual_scale,
            int residual_scale_stride, uintptr_t out, int out_type, uintptr_t workspace, const std::optional<Plan>& plan,
            int device, uintptr_t stream) {
        const int8::CodeOrder wanted = order(plan);
        const int64_t row_bytes = int8::row_bytes(static_cast<int>(K), wanted);
        const uintptr_t scales = workspace + M * row_bytes;
        auto quantizer = activation_params(x, x_row_stride, dtype, workspace, scales, M, K, rotation, act, act_weight,
                                           act_weight_dtype, act_eps, 0);
        const bool early = host::attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
        quantizer.programmatic_launch = early;
        quantizer.order = wanted;
        auto p = scaled_mm_params(M, N, K, bits, group, workspace, scales, codes, s_rel, codebook, b_scale, bias, bias_type,
                                        residual, residual_scale, residual_scale_stride, out, out_type, early);
        p.ordered = wanted != int8::CodeOrder::kColumns;
        int8::quantize_int8_rowwise(quantizer, nullptr, device, reinterpret_cast<cudaStream_t>(stream));
        run(p, pointer<int8_t>(workspace + ((row_bytes + 4) * M + 255) / 256 * 256), plan, device,
            reinterpret_cast<cudaStream_t>(stream));
      },
      "workspace, aligned to 256: codes and scales of x, (K + 4) * M bytes rounded up to 256, then the product's own; K a "
      "multiple of 16. Hopper's tiles want the rows of codes padded to 128 columns, and nothing more.");
}

int8::CodeOrder by_columns(const std::optional<Plan>&) { return int8::CodeOrder::kColumns; }

#ifdef KITCHEN_HAVE_SM80
void bind_stream(py::module_& m) {
  namespace stream = w4a8::stream;
  bind_scaled_mm<Plan>(m, "w4a8_stream", "1 to 16 rows of a. plan: (warps side by side, pieces of K), None chooses.", by_columns,
                       [](const w4a8::ScaledMmParams& p, int8_t*, const std::optional<Plan>& plan, int device, cudaStream_t on) {
                         const stream::Plan forced = plan ? stream::Plan{plan->first, plan->second} : stream::Plan{};
                         stream::run(p, plan ? &forced : nullptr, device, on);
                       });
  m.def(
      "w4a8_stream_plan",
      [](int64_t M, int64_t N, int64_t K, int bits, int group, int sm_count, int smem_per_block, bool has_clusters,
         const std::optional<Plan>& plan) {
        const stream::Problem problem = {M, N, K, bits, group};
        const stream::Device device = {sm_count, smem_per_block, has_clusters};
        const char* reason = stream::unsupported(problem);
        stream::Plan chosen = {1, 1};
        if (reason == nullptr) {
          chosen = plan ? stream::Plan{plan->first, plan->second} : stream::choose_plan(problem, device);
          reason = stream::rejected(problem, chosen, device);
        }
        return std::make_tuple(Plan(chosen.warps_n, chosen.splits), stream::describe(problem, chosen),
                               std::string(reason == nullptr ? "" : reason), int64_t{0});
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("bits"), py::arg("group"), py::arg("sm_count"),
      py::arg("smem_per_block"), py::arg("has_clusters"), py::arg("plan") = py::none(),
      "(plan, in words, why it cannot run or '', bytes of workspace) on such a device; with a plan, of that one.");
}
#endif

#ifdef KITCHEN_HAVE_SM90
void bind_resident(py::module_& m) {
  namespace resident = w4a8::resident;
  bind_scaled_mm<Plan>(m, "w4a8_resident",
                       "1 to 32 rows of a; codes are the records of the resident layout, s_rel is not looked at. plan: (warps side by side, pieces of K).",
                       by_columns,
                       [](const w4a8::ScaledMmParams& p, int8_t*, const std::optional<Plan>& plan, int device, cudaStream_t on) {
                         const resident::Plan forced = plan ? resident::Plan{plan->first, plan->second} : resident::Plan{};
                         resident::run(p, plan ? &forced : nullptr, device, on);
                       });
  m.def(
      "w4a8_resident_plan",
      [](int64_t M, int64_t N, int64_t K, int bits, int group, int sm_count, int smem_per_block, bool has_clusters,
         const std::optional<Plan>& plan) {
        const resident::Problem problem = {M, N, K, bits, group};
        const resident::Device device = {sm_count, smem_per_block, has_clusters};
        const char* reason = resident::unsupported(problem);
        resident::Plan chosen = {1, 1};
        if (reason == nullptr) {
          chosen = plan ? resident::Plan{plan->first, plan->second} : resident::choose_plan(problem, device);
          reason = resident::rejected(problem, chosen, device);
        }
        return std::make_tuple(Plan(chosen.warps_n, chosen.splits), resident::describe(problem, chosen),
                               std::string(reason == nullptr ? "" : reason), int64_t{0});
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("bits"), py::arg("group"), py::arg("sm_count"),
      py::arg("smem_per_block"), py::arg("has_clusters"), py::arg("plan") = py::none(),
      "(plan, in words, why it cannot run or '', bytes of workspace) on such a device; with a plan, of that one.");
}

void bind_hopper(py::module_& m) {
  namespace hopper = w4a8::hopper;
  const auto plan_of = [](const HopperPlan& p) { return hopper::Plan{std::get<0>(p), std::get<1>(p), std::get<2>(p)}; };
  bind_scaled_mm<HopperPlan>(
      m, "w4a8_hopper",
      "workspace: as w4a8_hopper_plan says. plan: (outputs and tokens of a tile, or 0 and 0; pieces of K), None chooses "
      "(w4a8_hopper_linear wants one).",
      [=](const std::optional<HopperPlan>& plan) {
        host::require(plan.has_value(), "w4a8_hopper_linear: no plan is given, from which the order of the codes of x follows");
        return hopper::token_order(plan_of(*plan));
      },
      [=](const w4a8::ScaledMmParams& p, int8_t* workspace, const std::optional<HopperPlan>& plan, int device, cudaStream_t on) {
        const hopper::Plan forced = plan ? plan_of(*plan) : hopper::Plan{};
        hopper::run(p, workspace, plan ? &forced : nullptr, device, on);
      });
  m.def(
      "w4a8_hopper_plan",
      [=](int64_t M, int64_t N, int64_t K, int bits, int group, bool copies_result, int sm_count,
          const std::optional<HopperPlan>& plan) {
        const hopper::Problem problem = {M, N, K, bits, group, copies_result};
        const hopper::Plan chosen = plan ? plan_of(*plan) : hopper::choose_plan(problem, sm_count);
        const char* const reason = hopper::rejected(problem, chosen);
        const int64_t workspace = reason == nullptr ? hopper::workspace_bytes(problem, chosen) : 0;
        return std::make_tuple(HopperPlan(chosen.rows, chosen.tokens, chosen.splits), hopper::describe(problem, chosen),
                               std::string(reason == nullptr ? "" : reason), workspace);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("bits"), py::arg("group"), py::arg("copies_result"), py::arg("sm_count"),
      py::arg("plan") = py::none(),
      "(plan, in words, why it cannot run or '', bytes of workspace) on a GPU of so many SMs; with a plan, of that one.");
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-w4a8";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] { return std::string(KITCHEN_ARCHS); }, "The CUDA architectures compiled in, comma separated.");
  bind_decode(m);
  bind_unpack(m);
  bind_quantize(m);
  bind_quantize_activation(m);
#ifdef KITCHEN_HAVE_SM80
  bind_stream(m);
#endif
#ifdef KITCHEN_HAVE_SM90
  bind_resident(m);
  bind_hopper(m);
#endif
}
