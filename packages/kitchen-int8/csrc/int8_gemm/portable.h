// The INT8 GEMM of sm90/int8_gemm.h for every GPU with INT8 tensor cores, any size and any alignment: see smxx/portable_gemm.cuh.
#pragma once
#include "int8_gemm/sm90/int8_gemm.h"

namespace kitchen::int8::portable {
enum class Path : int { kSm75 = 75, kSm80 = 80 };  // m8n8k16 and a register-staged loader; m16n8k32 and cp.async

struct LinearProblem {
  int64_t M, N, K;
  bool aligned;  // a and b and their pitches, to 16 bytes
};
struct Device {
  int sm_count, smem_per_block, smem_per_sm;  // bytes, as a kernel may ask for
};
struct LinearPlan {
  int tile;  // an index into smxx/tiles.h
  int stages, splits, raster_group;
};
struct Operands {
  Int8GemmParams gemm;        // its programmatic_launch is ignored
  int64_t a_pitch, b_pitch;   // bytes from row to row, 0 .. 2^31 - 1
  int32_t* partials;          // [splits, M, N] where the plan splits K, else may be nullptr
};

int tile_count(Path path);
LinearPlan choose_plan(Path path, const LinearProblem& problem, const Device& device);
std::string describe(Path path, const LinearProblem& problem, const LinearPlan& plan);
// nullptr, or why not.
const char* unsupported(Path path, const LinearProblem& problem, const LinearPlan& plan, const Device& device);
int64_t workspace_bytes(const LinearProblem& problem, const LinearPlan& plan);

void int8_gemm_sm80(const Operands& operands, const LinearPlan& plan, int device, cudaStream_t stream);
void int8_gemm_sm75(const Operands& operands, const LinearPlan& plan, int device, cudaStream_t stream);
}  // namespace kitchen::int8::portable
