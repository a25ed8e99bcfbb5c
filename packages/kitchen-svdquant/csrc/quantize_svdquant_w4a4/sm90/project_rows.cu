// x * proj_down for more rows than a few, on Hopper, beside the quantizer: low[m, r] = sum over k of x[m, k] * proj_down[k, r].
//
//   block     64 rows of x, 64 or 128 ranks, and as one of a cluster a piece of K; sums in float32
//   producer  a warp: boxes of 64 columns of x and 64 rows of proj_down through a ring
//   consumer  a warpgroup. Ranks are the m = 64 side of wgmma: proj_down goes to registers by ldmatrix, transposed on its way. Rows
//             of x are the n = 64 side, from shared memory as they lie.
//   sums      meet over the cluster in distributed shared memory, in the order of the blocks
//
// Few threads and registers a block, little arithmetic: the quantizer, which is limited by arithmetic, runs on the same SMs meanwhile
// (host::Launch::programmatic). Measured: docs/kernels/svdquant.md.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/host/tensor_map.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/ldmatrix.h"
#include "kitchen/ptx/load_cluster.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/tma.h"
#include "kitchen/ptx/wgmma_float.h"
#include "kitchen/ptx/wgmma_registers.h"
#include "quantize_svdquant_w4a4/sm90/project_rows.h"

namespace kitchen::svdquant {
namespace {

constexpr int kRows = 64, kPartRanks = 64, kStageK = 64, kMostCluster = 8;
constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kRowBytes = 128, kBoxBytes = 64 * kRowBytes;  // of x and of proj_down
constexpr int kSumPitch = kPartRanks + 4;                   // floats: rows and ranks of a fragment meet in no bank twice

struct Problem {
  CUtensorMap x, down;
  float* low;                   // [M, R], or nullptr
  __nv_bfloat16* low_bfloat16;  // [M, R], or nullptr
  int M, R;
  int stages, stages_each;  // of K; of a block of the cluster
  int rank_blocks;          // clusters that share rows
};

template <int kParts>
struct SharedStorage {
  // Three blocks an SM: where no more than two fit, clusters for two of them do not all run at once.
  static constexpr int kStages = kParts == 1 ? 4 : 3;
  union {
    struct {
      alignas(1024) uint8_t x[kStages][kBoxBytes];
      alignas(1024) uint8_t down[kStages][kParts][kBoxBytes];
    };
    float sums[kParts][kRows][kSumPitch];
  };
  uint64_t full[kStages], empty[kStages];
};

struct Work {
  int row, rank, first_stage, stages;
};

template <int kParts>
__device__ __forceinline__ void produce(SharedStorage<kParts>& shared, const Problem& problem, const Work& work) {
  for (int i = 0; i < work.stages; ++i) {
    constexpr int kStages = SharedStorage<kParts>::kStages;
    const int slot = i % kStages, k = (work.first_stage + i) * kStageK;
    if (i >= kStages) ptx::mbarrier_wait(&shared.empty[slot], (i / kStages + 1) % 2);
    ptx::mbarrier_arrive_expect(&shared.full[slot], (1 + kParts) * kBoxBytes);
    ptx::tma_load(shared.x[slot], &problem.x, k, work.row, &shared.full[slot]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::tma_load(shared.down[slot][part], &problem.down, work.rank + part * kPartRanks, k, &shared.full[slot]);
    }
  }
}

template <class T, int kParts>
__device__ __forceinline__ void consume(float (&sums)[kParts][kRows / 2], SharedStorage<kParts>& shared, int stages) {
  // Matrices of ldmatrix: eight rows of proj_down by eight ranks; the second one has the next ranks, the third the next rows.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int k = lane % 8 + lane / 16 * 8, chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
  const uint32_t down = ptx::smem_address(shared.down) + k * kRowBytes + chunk * 16;
  for (int i = 0; i < stages; ++i) {
    constexpr int kStages = SharedStorage<kParts>::kStages;
    const int slot = i % kStages;
    ptx::mbarrier_wait(&shared.full[slot], i / kStages % 2);
    uint32_t a[kStageK / 16][kParts][4];
#pragma unroll
    for (int step = 0; step < kStageK / 16; ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::ldmatrix_x4_transposed(a[step][part], down + (slot * kParts + part) * kBoxBytes + step * 16 * kRowBytes);
      }
    }
    const uint64_t rows = ptx::descriptor_swizzle128(ptx::smem_address(shared.x[slot]));
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::wgmma_results(sums[part]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStageK / 16; ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) ptx::WgmmaRegisters<T, kRows>::mma(sums[part], a[step][part], rows + 2 * step);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) ptx::wgmma_results(sums[part]);
    __syncwarp();  // every lane has read its part of proj_down
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
  }
}

__device__ __forceinline__ void store_low(const Problem& p, int row, int rank, const float4& sum) {
  if (row >= p.M || rank >= p.R) return;
  const int64_t at = static_cast<int64_t>(row) * p.R + rank;
  if (p.low != nullptr) {
    *reinterpret_cast<float4*>(p.low + at) = sum;
  } else {
    const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y), high = __floats2bfloat162_rn(sum.z, sum.w);
    *reinterpret_cast<uint2*>(p.low_bfloat16 + at) =
        make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  }
}

// Each block of the cluster finishes its share of the rows.
template <int kParts>
__device__ __forceinline__ void finish(const SharedStorage<kParts>& shared, const Problem& problem, const Work& work,
                                       int cluster, int rank) {
  constexpr int kQuads = kPartRanks / 4;
  const int each = kRows / cluster;
  for (int i = static_cast<int>(threadIdx.x); i < each * kParts * kQuads; i += kConsumers) {
    const int quad = i % kQuads, part = i / kQuads % kParts, row = rank * each + i / (kQuads * kParts);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int from = 0; from < cluster; ++from) {
      const int4 bits = ptx::load_cluster_16(&shared.sums[part][row][4 * quad], from);
      sum.x += __int_as_float(bits.x), sum.y += __int_as_float(bits.y), sum.z += __int_as_float(bits.z),
          sum.w += __int_as_float(bits.w);
    }
    store_low(problem, work.row + row, work.rank + part * kPartRanks + 4 * quad, sum);
  }
}

template <class T, int kParts>
__global__ void __launch_bounds__(kThreads, 2) project(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<kParts>*>(bytes);
  const int cluster = static_cast<int>(ptx::cluster_size()), rank = static_cast<int>(ptx::cluster_rank());
  const int tile = static_cast<int>(blockIdx.x) / cluster, first = rank * problem.stages_each;
  const Work work = {tile / problem.rank_blocks * kRows, tile % problem.rank_blocks * kParts * kPartRanks, first,
                     max(0, min(problem.stages_each, problem.stages - first))};
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SharedStorage<kParts>::kStages; ++slot) {
      ptx::mbarrier_init(&shared.full[slot], 1), ptx::mbarrier_init(&shared.empty[slot], kConsumers / 32);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::wait_then_launch_dependents();

  if (threadIdx.x == kConsumers) produce(shared, problem, work);
  __syncwarp();
  float sums[kParts][kRows / 2] = {};
  if (threadIdx.x < kConsumers) consume<T>(sums, shared, work.stages);
  __syncthreads();  // the sums take the place of the ring
  if (threadIdx.x < kConsumers) {
    // wgmma's layout, the ranks down: rank 16*warp + lane/4 + 8*(e/2), row 8*j + 2*(lane%4) + e%2.
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        shared.sums[part][8 * (i / 4) + 2 * (lane % 4) + i % 2][16 * warp + lane / 4 + 8 * (i / 2 % 2)] = sums[part][i];
      }
    }
  }
  ptx::cluster_sync();
  if (threadIdx.x < kConsumers) finish(shared, problem, work, cluster, rank);
  __syncwarp();
  ptx::cluster_sync();  // a block outlives the reads of the others
}

template <class T, int kParts>
void launch(const ProjectParams& p, int device, cudaStream_t stream) {
  Problem problem{};
  problem.x = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, p.x, p.M, p.K, 2 * p.x_row_stride, kRows, kStageK,
                                       CU_TENSOR_MAP_SWIZZLE_128B});
  problem.down = host::encode_matrix_map({CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, p.proj_down, p.K, p.R, 2 * int64_t{p.R}, kStageK,
                                          kPartRanks, CU_TENSOR_MAP_SWIZZLE_128B});
  problem.low = p.low, problem.low_bfloat16 = p.low_bfloat16;
  problem.M = static_cast<int>(p.M), problem.R = p.R;
  problem.stages = static_cast<int>(p.K / kStageK);
  problem.rank_blocks = (p.R + kParts * kPartRanks - 1) / (kParts * kPartRanks);
  // Two blocks an SM, if the stages of K suffice.
  const int64_t tiles = (p.M + kRows - 1) / kRows * problem.rank_blocks;
  const int64_t most = 2 * host::attribute(cudaDevAttrMultiProcessorCount, device);
  int cluster = 1;
  while (cluster < kMostCluster && 2 * cluster * tiles <= most && problem.stages >= 8 * cluster) cluster *= 2;
  problem.stages_each = (problem.stages + cluster - 1) / cluster;
  host::require(tiles * cluster < (int64_t{1} << 31), "project_rows: more than 2^31 - 1 blocks");
  host::launch("project_rows", project<T, kParts>, {tiles * cluster, kThreads, cluster, sizeof(SharedStorage<kParts>), stream},
               problem);
}

template <class T>
void launch_ranks(const ProjectParams& p, int device, cudaStream_t stream) {
  p.R <= kPartRanks ? launch<T, 1>(p, device, stream) : launch<T, 2>(p, device, stream);
}

}  // namespace

const char* project_rows_unsupported(const ProjectParams& p) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (p.type == DType::kFloat32) return "x must have 16 bits";
  if (p.K < kStageK || p.K % kStageK != 0 || p.K > (int64_t{1} << 30)) return "K must be a multiple of 64";
  if (p.M < 0 || p.M > (int64_t{1} << 30)) return "M is out of range";
  if (p.R < 8 || p.R % 8 != 0) return "the rank must be a multiple of 8";
  if (!aligned(p.x) || p.x_row_stride % 8 != 0 || !aligned(p.proj_down)) return "rows must be aligned to 16 bytes";
  if ((p.low == nullptr) == (p.low_bfloat16 == nullptr)) return "there is one output";
  if (host::find_tensor_map_encoder() == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

void project_rows(const ProjectParams& p, int device, cudaStream_t stream) {
  if (const char* const reason = project_rows_unsupported(p)) {
    throw std::runtime_error(std::string("project_rows: ") + reason);
  }
  if (p.M == 0) return;
  const host::DeviceGuard guard(device);
  p.type == DType::kFloat16 ? launch_ranks<__half>(p, device, stream) : launch_ranks<__nv_bfloat16>(p, device, stream);
}

}  // namespace kitchen::svdquant
