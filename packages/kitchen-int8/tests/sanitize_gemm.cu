// Every instance of the portable INT8 GEMM on one small problem each, against a loop on the host: a program without torch, for
// compute-sanitizer, under which importing torch takes longer than the kernels. tools/sanitize.py builds and runs it.
//
// sources: packages/kitchen-int8/csrc/int8_gemm/smxx/*.cu packages/kitchen-int8/csrc/int8_gemm/sm75/*.cu
// sources: packages/kitchen-int8/csrc/int8_gemm/sm80/*.cu
#include "int8_gemm/smxx/tiles.h"
#include "sanitize_problem.h"

using namespace sanitize;
using namespace kitchen::int8;

namespace {

int check(portable::Path path, int tile, int splits, int stages, const GemmProblem& problem, const std::vector<float>& want) {
  const DeviceArray<float> out(want.size());
  const DeviceArray<int32_t> partials(static_cast<size_t>(splits) * want.size());
  portable::Operands o = {};
  o.gemm = problem.params(out.data, true);
  o.a_pitch = o.b_pitch = problem.pitch;
  o.partials = partials.data;
  const auto run = path == portable::Path::kSm80 ? portable::int8_gemm_sm80 : portable::int8_gemm_sm75;
  run(o, {tile, stages, splits, 2}, 0, nullptr);
  host::check(cudaDeviceSynchronize(), "the kernel");
  return differences(out.read(), want);
}

}  // namespace

int main(int argc, char** argv) {
  Tally tally(argc, argv);
  for (const auto path : {portable::Path::kSm75, portable::Path::kSm80}) {
    const auto table = portable::table_of(path);
    for (int tile = 0; tile < table.count; ++tile) {
      const int M = table.tiles[tile].m + 5, N = table.tiles[tile].n + 8, stages = path == portable::Path::kSm75 ? 2 : 3;
      const GemmProblem aligned(M, N, 1040, 1040), ragged(M, N + 1, 1037, 1039);
      for (const auto* problem : {&aligned, &ragged}) {
        if (problem == &ragged && !table.tiles[tile].any_alignment) continue;
        const auto want = problem->expected(true);
        for (const int splits : {1, 2}) {
          const std::string name =
              "sm_" + std::to_string(int(path)) + " tile " + std::to_string(tile) + ", " + std::to_string(splits) + " splits";
          tally.run(name, [&] { return check(path, tile, splits, stages, *problem, want); });
        }
      }
    }
  }
  return tally.finish();
}
