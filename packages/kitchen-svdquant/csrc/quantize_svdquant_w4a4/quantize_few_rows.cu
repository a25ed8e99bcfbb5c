// The activation quantizer and x * proj_down for few rows, in one launch:
//
//   codes and scales as quantize_svdquant_w4a4.cu makes them;  low[m, r] = sum over k of x[m, k] * proj_down[k, r]   float32
//
// Some blocks quantize, a lane 16 columns of a row. The others multiply: a cluster of eight has 16 rows, 16 ranks and all of K, a
// warp every 32nd group of 64 columns. Operands of mma.sync come straight from global memory. The order of k inside of a group is
// free: lane 4*g + t has columns 16*t .. 16*t + 15 of rows g and g + 8 of x, which are words of its A fragments as they lie, and
// the same rows of proj_down with ranks 2*g and 2*g + 1, of which pairs of rows make words of B fragments. Sums meet in the block,
// then in the cluster, in an order that depends on K alone. sm_90 and later (clusters).
//
// Starts while the kernel in front ends, and lets the next start at once; everything is read behind its own wait (proj_down comes to L2
// before, which is a hint and reads nothing).
#include <stdexcept>
#include <string>

#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/prefetch.h"
#include "kitchen/ptx/store_async.h"
#include "quantize_svdquant_w4a4/group_codes.cuh"
#include "quantize_svdquant_w4a4/quantize_svdquant_w4a4.h"

namespace kitchen::svdquant {
namespace {

// Four warps a block leave the streaming GEMM room for a block beside.
constexpr int kThreads = 128, kWarps = kThreads / 32, kCluster = 8, kWorkers = kWarps * kCluster;
constexpr int kTokens = 16, kRanks = 16;             // of a cluster
constexpr int kQuads = kTokens * kRanks / 4, kQuadsEach = kQuads / kCluster;  // of neighbouring ranks; that a block finishes
constexpr int kAhead = 3;                            // groups under way

struct Problem {
  FewRowsParams p;
  int project_blocks, rank_parts, chunks;  // chunks: of 16 columns, in a row
};

// Sixteen columns of two rows of x; sixteen rows of two neighbouring ranks of proj_down.
struct Operands {
  uint4 x[2][2];
  uint32_t down[kColumns];
};

template <class T>
__device__ __forceinline__ void load(Operands& operands, const FewRowsParams& p, int first_token, int first_rank, int group) {
  const QuantizeParams& q = p.quantize;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
  const int k = group * kGroup + kColumns * t, rank = first_rank + 2 * g;
  const auto* const down = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.proj_down) + (static_cast<uint32_t>(k) * p.R + rank));
#pragma unroll
  for (int i = 0; i < kColumns; ++i) operands.down[i] = rank < p.R ? __ldg(down + i * (p.R / 2)) : 0u;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = min(first_token + 8 * h + g, static_cast<int>(q.M) - 1);
    const auto* const x = reinterpret_cast<const uint4*>(static_cast<const T*>(q.x) + m * q.x_row_stride + k);
    operands.x[h][0] = x[0], operands.x[h][1] = x[1];
  }
}

// To L2: this lane's share of all rows of proj_down of a warp.
template <class T>
__device__ __forceinline__ void prefetch(const FewRowsParams& p, int first_rank, int first_group) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll 1
  for (int group = first_group; group < static_cast<int>(p.quantize.K / kGroup); group += kWorkers) {
    const auto* const down =
        static_cast<const T*>(p.proj_down) + (static_cast<uint32_t>(group * kGroup + kColumns * t + 2 * g) * p.R + first_rank);
    ptx::prefetch_l2(down);
    ptx::prefetch_l2(down + p.R);
  }
}

// sums[0]: ranks 2*column; sums[1]: ranks 2*column + 1.
template <class T>
__device__ __forceinline__ void multiply(float (&sums)[2][4], const Operands& operands) {
  const uint4(&x)[2][2] = operands.x;
  const uint32_t words[2][8] = {{x[0][0].x, x[0][0].y, x[0][0].z, x[0][0].w, x[0][1].x, x[0][1].y, x[0][1].z, x[0][1].w},
                                {x[1][0].x, x[1][0].y, x[1][0].z, x[1][0].w, x[1][1].x, x[1][1].y, x[1][1].z, x[1][1].w}};
#pragma unroll
  for (int step = 0; step < kGroup / 16; ++step) {
    const uint32_t a[4] = {words[0][2 * step], words[1][2 * step], words[0][2 * step + 1], words[1][2 * step + 1]};
    const uint32_t* const down = operands.down + 4 * step;
    mma::M16N8K16<T>::multiply(sums[0], a, ptx::pick_bytes(down[0], down[1], 0x5410), ptx::pick_bytes(down[2], down[3], 0x5410));
    mma::M16N8K16<T>::multiply(sums[1], a, ptx::pick_bytes(down[0], down[1], 0x7632), ptx::pick_bytes(down[2], down[3], 0x7632));
  }
}

struct SharedStorage {
  float4 sums[kWarps][kQuads];
  float4 received[kCluster][kQuadsEach];  // from every block of the cluster
  uint64_t arrived;
};

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Quad i: token i / 4, ranks 4 * (i % 4) and on; finished by block i % kCluster.
template <class T>
__device__ __forceinline__ void project(SharedStorage& shared, const Problem& problem) {
  const FewRowsParams& p = problem.p;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int rank = static_cast<int>(blockIdx.x) % kCluster, cluster = static_cast<int>(blockIdx.x) / kCluster;
  const int first_token = cluster / problem.rank_parts * kTokens, first_rank = cluster % problem.rank_parts * kRanks;
  const int groups = static_cast<int>(p.quantize.K / kGroup);
  if (threadIdx.x == 0) {
    ptx::receive_init(&shared.arrived);
    ptx::receive_expect(&shared.arrived, (kCluster - 1) * kQuadsEach * 16);
  }
  __syncthreads();
  ptx::cluster_arrive();  // this block has started
  prefetch<T>(p, first_rank, rank * kWarps + warp);
  ptx::wait_then_launch_dependents();
  float sums[2][4] = {};
#pragma unroll 1
  for (int first = rank * kWarps + warp; first < groups; first += kAhead * kWorkers) {
    Operands operands[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kWorkers < groups) load<T>(operands[i], p, first_token, first_rank, first + i * kWorkers);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kWorkers < groups) multiply<T>(sums, operands[i]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shared.sums[warp][(lane / 4 + 8 * h) * (kRanks / 4) + lane % 4] =
        make_float4(sums[0][2 * h], sums[1][2 * h], sums[0][2 * h + 1], sums[1][2 * h + 1]);
  }
  ptx::cluster_wait();  // every block has started, and set up its barrier
  __syncthreads();
  if (threadIdx.x < kQuads) {
    const int quad = static_cast<int>(threadIdx.x);
    float4 sum = shared.sums[0][quad];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) add(sum, shared.sums[w][quad]);
    float4* const to = &shared.received[rank][quad / kCluster];
    if (quad % kCluster == rank) {
      *to = sum;
    } else {
      ptx::store_async_16(to, &shared.arrived, quad % kCluster, *reinterpret_cast<const int4*>(&sum));
    }
  }
  __syncthreads();
  if (threadIdx.x >= kQuadsEach) return;
  ptx::receive_wait(&shared.arrived);
  const int quad = static_cast<int>(threadIdx.x) * kCluster + rank, m = first_token + quad / (kRanks / 4),
            r = first_rank + quad % (kRanks / 4) * 4;
  float4 sum = shared.received[0][threadIdx.x];
#pragma unroll
  for (int from = 1; from < kCluster; ++from) add(sum, shared.received[from][threadIdx.x]);
  if (m < p.quantize.M && r < p.R) *reinterpret_cast<float4*>(p.low + static_cast<int64_t>(m) * p.R + r) = sum;
}

template <class T, bool kUnsigned>
__device__ __forceinline__ void quantize(const QuantizeParams& q, int item, int chunks) {
  const bool inside = item < q.M * chunks;  // whole groups of lanes are
  const int m = inside ? item / chunks : 0, column = inside ? item % chunks * kColumns : 0;
  Loaded<T> x;
  x.load(static_cast<const T*>(q.x) + m * q.x_row_stride + column, true);
  const Smooth smooth(q.smooth, column, q.smooth_type);
  float v[kColumns];
  x.unpack(v);
  if (q.shift != 0.0f) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) v[i] = __fadd_rn(v[i], q.shift);
  }
  smooth.divide(v);
  const float scale = group_codes<kUnsigned>(v);
  if (!inside) return;
  store_codes<CodeForm::kPacked>(q.codes, m * q.K + column, v);
  if (threadIdx.x % kLanesPerGroup == 0) static_cast<float*>(q.scales)[column / kGroup * q.M + m] = scale;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) quantize_few(const __grid_constant__ Problem problem) {
  __shared__ SharedStorage shared;
  const int item = (static_cast<int>(blockIdx.x) - problem.project_blocks) * kThreads + static_cast<int>(threadIdx.x);
  if (item < 0) return project<T>(shared, problem);
  ptx::wait_then_launch_dependents();
  const QuantizeParams& q = problem.p.quantize;
  if (blockIdx.x == problem.project_blocks) clear(q);
  q.is_unsigned ? quantize<T, true>(q, item, problem.chunks) : quantize<T, false>(q, item, problem.chunks);
}

}  // namespace

const char* quantize_few_rows_unsupported(const FewRowsParams& p) {
  const QuantizeParams& q = p.quantize;
  if (q.type == DType::kFloat32 || q.form != CodeForm::kPacked) return "x must have 16 bits, and codes are packed";
  if (q.M < 0 || q.M > kMostFewRows) return "for up to 96 rows";
  if (q.K < kGroup || q.K % kGroup != 0 || q.K > kMostFewRowsK) return "K must be a multiple of 64 and at most 2^20";
  if (reinterpret_cast<uintptr_t>(q.x) % 16 != 0 || q.x_row_stride % 8 != 0) return "rows must be aligned to 16 bytes";
  if (p.R == 0) return nullptr;
  if (p.R < 0 || p.R > 1024 || p.R % 4 != 0) return "the rank must be a multiple of 4 and at most 1024";
  if (p.down_type != q.type) return "proj_down must have x's type";
  if (reinterpret_cast<uintptr_t>(p.proj_down) % 4 != 0) return "proj_down must be aligned to 4 bytes";
  return nullptr;
}

void quantize_few_rows(const FewRowsParams& p, int device, cudaStream_t stream) {
  if (const char* const reason = quantize_few_rows_unsupported(p)) {
    throw std::runtime_error(std::string("quantize_few_rows: ") + reason);
  }
  if (p.quantize.M == 0) return;
  const host::DeviceGuard guard(device);
  const int M = static_cast<int>(p.quantize.M);
  Problem problem{p, 0, (p.R + kRanks - 1) / kRanks, static_cast<int>(p.quantize.K / kColumns)};
  problem.project_blocks = (M + kTokens - 1) / kTokens * problem.rank_parts * kCluster;
  const int cluster = p.R == 0 ? 1 : kCluster, quantize_blocks = (M * problem.chunks + kThreads - 1) / kThreads;
  const int blocks = problem.project_blocks + (quantize_blocks + cluster - 1) / cluster * cluster;  // whole clusters
  host::launch("quantize_few_rows", p.quantize.type == DType::kFloat16 ? quantize_few<__half> : quantize_few<__nv_bfloat16>,
               {blocks, kThreads, cluster, 0, stream, true}, problem);
}

}  // namespace kitchen::svdquant
