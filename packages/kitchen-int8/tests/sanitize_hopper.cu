// Every instance of the Hopper INT8 GEMM and of the decode kernels on one small problem each, against a loop on the host; a
// program for compute-sanitizer. tools/sanitize.py builds and runs it.
//
// sources: packages/kitchen-int8/csrc/int8_gemm/sm90/int8_gemm*.cu packages/kitchen-int8/csrc/int8_gemm/decode/sm80/*.cu
// sources: packages/kitchen-int8/csrc/int8_gemm/decode/sm90/*.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "int8_gemm/decode/int8_decode.h"
#include "sanitize_problem.h"

using namespace sanitize;
using namespace kitchen::int8;

namespace {

// Two bytes an element: the values rounded once, as the kernel's last step.
template <class T>
std::vector<T> rounded(const std::vector<float>& values) {
  std::vector<T> narrow(values.size());
  for (size_t i = 0; i < values.size(); ++i) narrow[i] = T(values[i]);
  return narrow;
}

template <class T, class Launch>
int check(const GemmProblem& problem, const std::vector<float>& want, bool with_residual, DType type, Launch&& launch) {
  const DeviceArray<T> out(want.size()), residual(rounded<T>(problem.residual));
  // initcheck does not see what the copy engine stores: without this it reports every result when it is read.
  host::check(cudaMemset(out.data, 0xff, out.count * sizeof(T)), "cudaMemset");
  Int8GemmParams p = problem.params(reinterpret_cast<float*>(out.data), with_residual);
  p.out_type = type;
  if (with_residual) p.residual = residual.data;
  launch(p);
  host::check(cudaDeviceSynchronize(), "the kernel");
  if (with_residual && type != DType::kFloat32) return 0;  // the host's residual is not rounded to the type
  return differences(out.read(), rounded<T>(want));
}

template <class Launch>
void check_types(Tally& tally, const std::string& name, const GemmProblem& problem, bool with_residual, Launch&& launch) {
  const auto want = problem.expected(with_residual);
  tally.run(name + " float32", [&] { return check<float>(problem, want, with_residual, DType::kFloat32, launch); });
  tally.run(name + " float16", [&] { return check<__half>(problem, want, with_residual, DType::kFloat16, launch); });
  tally.run(name + " bfloat16", [&] { return check<__nv_bfloat16>(problem, want, with_residual, DType::kBFloat16, launch); });
}

// Every variant, those that split K in 1 to 4 pieces; what refuses a residual that the copy engine cannot read is left out.
void check_large_tiles(Tally& tally) {
  const GemmProblem problem(261, 392, 528, 528), odd(70, 133, 528, 528), few(37, 136, 528, 528);
  for (int variant = 0; variant < hopper_variant_count(); ++variant) {
    for (const auto* one : {&problem, &odd, &few}) {
      for (const bool with_residual : {false, true}) {
        for (const int splits : {1, 2, 3, 4}) {
          const LinearPlan plan = {variant, 4, 2, splits};
          const std::string name = "sm90 variant " + std::to_string(variant) + ", " + std::to_string(splits) + " pieces";
          try {
            check_types(tally, name, *one, with_residual,
                        [&](const Int8GemmParams& p) { int8_gemm_sm90(p, nullptr, &plan); });
          } catch (const std::runtime_error& refused) {
            --tally.cases;
            const char* const why = refused.what();
            if (std::strstr(why, "residual") == nullptr && std::strstr(why, "pieces of K") == nullptr) throw;
          }
        }
      }
    }
  }
}

void check_decode(Tally& tally) {
  const DecodeDevice device = decode_device(0);
  for (int variant = 0; variant < decode_variant_count(); ++variant) {
    const GemmProblem problem(decode_variant_tokens(variant), 200, 1040, 1040);
    for (const int splits : {1, 2}) {
      const DecodePlan plan = {variant, splits};
      if (decode_plan_rejected({problem.M, problem.N, problem.K}, plan, device) != nullptr) continue;
      check_types(tally, "decode variant " + std::to_string(variant) + ", " + std::to_string(splits) + " pieces", problem,
                  splits == 2, [&](const Int8GemmParams& p) { int8_decode(p, nullptr, &plan, 0, nullptr); });
    }
  }
}

void check_decode_sm90(Tally& tally) {
  for (const int tokens : {8, 16}) {
    const GemmProblem problem(tokens - 1, 200, 1040, 1040);
    for (int variant = 0; variant < decode_sm90_variant_count(); ++variant) {
      for (const int splits : {1, 2}) {
        const DecodePlan plan = {variant, splits};
        if (decode_sm90_plan_rejected({problem.M, problem.N, problem.K}, plan) != nullptr) continue;
        check_types(tally, "decode sm90 variant " + std::to_string(variant) + ", " + std::to_string(splits) + " pieces",
                    problem, splits == 2, [&](const Int8GemmParams& p) { int8_decode_sm90(p, &plan, 0, nullptr); });
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  Tally tally(argc, argv);
  check_large_tiles(tally);
  check_decode(tally);
  check_decode_sm90(tally);
  return tally.finish();
}
