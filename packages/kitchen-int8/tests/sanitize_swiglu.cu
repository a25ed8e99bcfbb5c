// Every instance of the SwiGLU GEMM on small problems, against a loop on the host; for compute-sanitizer. tools/sanitize.py
// builds and runs it.
//
// sources: packages/kitchen-int8/csrc/int8_gemm/sm90/int8_swiglu.cu
#include "int8_gemm/sm90/int8_swiglu.h"

#include <cuda_bf16.h>

#include "sanitize_problem.h"

using namespace sanitize;
using namespace kitchen::int8;

namespace {

// What a result may be off by: kitchen_core.testing.swiglu_bound.
double bound(double gate, double up, double unit_roundoff) {
  const double sigmoid = 1 / (1 + std::exp(-gate)), v = std::ldexp(1.0, -24);
  const double relative = unit_roundoff + (2 * std::fabs(gate) * (1 - sigmoid) + 10) * v;
  return relative * std::fabs(gate * sigmoid * up) + std::ldexp(1.0, -126) * (std::fabs(gate * up) + 1);
}

double widen(float value) { return value; }
double widen(__nv_bfloat16 value) { return __bfloat162float(value); }

// `linear` is the problem's GEMM of 2I columns: gate, then up.
template <class T>
int check(int variant, const GemmProblem& problem, const std::vector<float>& linear, DType type, double unit_roundoff) {
  const int I = problem.N / 2;
  const DeviceArray<T> out(static_cast<size_t>(problem.M) * I);
  host::check(cudaMemset(out.data, 0xff, out.count * sizeof(T)), "cudaMemset");  // initcheck does not see the copy engine write
  const auto gemm = problem.params(nullptr, false);
  SwigluParams p = {};
  p.M = problem.M, p.I = I, p.K = problem.K;
  p.a = gemm.a, p.b = gemm.b;
  p.a_pitch = p.b_pitch = problem.pitch;
  p.a_scale = gemm.a_scale, p.b_scale = gemm.b_scale, p.bias = gemm.bias;
  p.b_scale_stride = 1;
  p.out = out.data;
  p.bias_type = DType::kFloat32, p.out_type = type;
  const SwigluPlan plan = {variant, variant % 2 ? 4 : 0, 2};
  int8_swiglu_sm90(p, nullptr, &plan);
  host::check(cudaDeviceSynchronize(), "the kernel");
  const auto got = out.read();
  int wrong = 0;
  for (int m = 0; m < problem.M; ++m) {
    for (int n = 0; n < I; ++n) {
      const double gate = linear[static_cast<size_t>(m) * problem.N + n], up = linear[static_cast<size_t>(m) * problem.N + I + n];
      const double off = std::fabs(widen(got[static_cast<size_t>(m) * I + n]) - gate / (1 + std::exp(-gate)) * up);
      wrong += !(off <= bound(gate, up, unit_roundoff));
    }
  }
  return wrong;
}

}  // namespace

int main() {
  Tally tally;
  const GemmProblem whole(197, 2 * 264, 1040, 1040), ragged(197, 2 * 133, 1037, 1040);
  for (const auto* problem : {&whole, &ragged}) {
    auto linear = problem->expected(false);
    for (int variant = 0; variant < swiglu_variants(); ++variant) {
      const std::string name = "variant " + std::to_string(variant) + (problem == &whole ? "" : ", ragged");
      tally.run(name + ", float32", [&] { return check<float>(variant, *problem, linear, DType::kFloat32, std::ldexp(1.0, -24)); });
      tally.run(name + ", bfloat16", [&] { return check<__nv_bfloat16>(variant, *problem, linear, DType::kBFloat16, std::ldexp(1.0, -8)); });
    }
  }
  return tally.finish();
}
