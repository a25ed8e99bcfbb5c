// How fast this GPU issues the INT8 tensor-core instructions of mma.sync: registers alone, no memory, many accumulators.
//
//   nvcc -std=c++17 -O3 -arch=sm_90a -I shared_cuda/include shared_cuda/bench/imma_rate.cu -o /tmp/imma_rate && /tmp/imma_rate
//
// Each warp repeats one instruction on `kAccumulators` independent sums; the table says, for 1 to 16 warps an SM, how many
// clock cycles an SM sub-partition takes for one, and how many operations a second the chip reaches. It is the ceiling of
// every kernel that multiplies by that instruction: docs/kernels/int8_gemm_portable.md.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kitchen/mma/m16n8k32_s8.h"
#include "kitchen/mma/m8n8k16_s8.h"

namespace {

constexpr int kAccumulators = 16, kRounds = 2048;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct M8N8K16 {
  static constexpr const char* kName = "m8n8k16";
  static constexpr int kProducts = 8 * 8 * 16, kSums = 2;
  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t) {
    kitchen::mma::m8n8k16_s8(d[0], d[1], a[0], b0);
  }
};
struct M16N8K32 {
  static constexpr const char* kName = "m16n8k32";
  static constexpr int kProducts = 16 * 8 * 32, kSums = 4;
  __device__ __forceinline__ static void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    kitchen::mma::M16N8K32S8::multiply(d, a, b0, b1);
  }
};

// Operands differ from accumulator to accumulator, as in a GEMM whose warp multiplies four blocks of rows by four of columns.
template <class Mma>
__global__ void repeat(const uint32_t* operands, int* sink, long long* cycles) {
  uint32_t a[4][4], b[4][2];
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = operands[threadIdx.x % 32 + 32 * i];
  for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = operands[threadIdx.x % 32 + 32 * (16 + i)];
  int sums[kAccumulators][4] = {};
  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) Mma::multiply(sums[i], a[i / 4], b[i % 4][0], b[i % 4][1]);
  }
  const long long end = clock64();
  int all = 0;
  for (int i = 0; i < kAccumulators; ++i) {
    for (int j = 0; j < Mma::kSums; ++j) all ^= sums[i][j];
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
}

template <class Mma>
void measure(int sms) {
  std::vector<uint32_t> host(32 * 24);
  for (auto& word : host) word = static_cast<uint32_t>(std::rand()) * 2654435761u;
  uint32_t* operands;
  int* sink;
  long long* cycles;
  check(cudaMalloc(&operands, host.size() * 4), "cudaMalloc");
  check(cudaMalloc(&sink, sms * 512 * 4), "cudaMalloc");
  check(cudaMalloc(&cycles, sms * 8), "cudaMalloc");
  check(cudaMemcpy(operands, host.data(), host.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (const int warps : {1, 4, 8, 16}) {
    std::vector<float> times;
    for (int run = 0; run < 12; ++run) {
      check(cudaEventRecord(begin), "cudaEventRecord");
      repeat<Mma><<<sms, 32 * warps>>>(operands, sink, cycles);
      check(cudaEventRecord(end), "cudaEventRecord");
      check(cudaEventSynchronize(end), "the kernel");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
      if (run >= 2) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    std::vector<long long> counted(sms);
    check(cudaMemcpy(counted.data(), cycles, sms * 8, cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::sort(counted.begin(), counted.end());
    const double instructions = double(kRounds) * kAccumulators, sub_partition = std::max(1.0, warps / 4.0);
    const double operations = 2.0 * Mma::kProducts * instructions * warps * sms, ms = times[times.size() / 2];
    std::printf("%-9s %2d warps an SM: %6.3f cycles an instruction and sub-partition, %5.0f products a cycle and SM, %7.1f TOPS\n",
                Mma::kName, warps, counted[sms / 2] / (instructions * sub_partition),
                Mma::kProducts * instructions * warps / counted[sms / 2], operations / (ms * 1e-3) * 1e-12);
  }
  check(cudaFree(operands), "cudaFree");
  check(cudaFree(sink), "cudaFree");
  check(cudaFree(cycles), "cudaFree");
}

}  // namespace

int main() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s, %d SMs\n", properties.name, properties.multiProcessorCount);
  measure<M8N8K16>(properties.multiProcessorCount);
  if (properties.major >= 8) measure<M16N8K32>(properties.multiProcessorCount);
}
