// The activation quantizer and x * proj_down in one pass over x:
//
//   codes and scales as quantize_svdquant_w4a4.cu makes them;  low[m, r] = sum over k of x[m, k] * proj_down[k, r]   float32
//
// A block of eight warps has 16 * kRowWarps rows, kRanks ranks and, as one of a cluster along K, some of the groups of 64
// columns; a warp takes 16 rows of a group at a time. The order of k inside of a group is free as long as both operands of
// mma.sync agree: lane 4*g + t has columns 16*t .. 16*t + 15 of rows g and g + 8, which are the words of its A fragments as
// they lie and the sixteen values that it quantizes (group_codes.cuh). Rows of proj_down come by way of shared memory and
// ldmatrix in the order that this makes. Sums meet in the block, then in the cluster, in a fixed order.
//
// Blocks behind those of x decode the weight for the Hopper GEMM. Measured: docs/kernels/svdquant.md.
#include "quantize_svdquant_w4a4/sm90/quantize_project.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "decode_svdquant/decode_codes.cuh"
#include "kitchen/host/device.h"
#include "kitchen/host/launch.h"
#include "kitchen/mma/m16n8k16_f16.h"
#include "kitchen/ptx/cluster.h"
#include "kitchen/ptx/cp_async_group.h"
#include "kitchen/ptx/dependent_launch.h"
#include "kitchen/ptx/mbarrier.h"
#include "kitchen/ptx/store_async.h"
#include "quantize_svdquant_w4a4/group_codes.cuh"
#include "quantize_svdquant_w4a4/sm90/ldmatrix_trans.cuh"

namespace kitchen::svdquant {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kMostCluster = 8;
constexpr int kMmaRows = 16, kMmaRanks = 8, kMmaSteps = kGroup / 16;

template <class T_, int kRowWarps_, int kRanks_>
struct Config {
  using T = T_;
  static constexpr int kRowWarps = kRowWarps_, kGroupWarps = kWarps / kRowWarps;  // warps that share rows have groups of their own
  static constexpr int kRows = kMmaRows * kRowWarps, kRanks = kRanks_;
  static constexpr int kChunks = kRanks / 8;  // of 16 bytes, in a row of proj_down
  static constexpr int kGroupChunks = kGroup * kChunks;
  static constexpr int kQuads = kRows * kRanks / 4;  // of sums, in a block
};

template <class Config>
struct SharedStorage {
  union {
    uint4 down[2][Config::kGroupWarps][Config::kGroupChunks];
    float4 sums[Config::kGroupWarps][Config::kQuads];
  };
  float4 received[Config::kQuads + kMostCluster];  // from every block of the cluster, this block's part of the quads
  float2 smooth[2][Config::kGroupWarps][kGroup];   // factor, and its reciprocal or NaN where x is to be divided by the factor
  uint64_t arrived;
};

struct Problem {
  ProjectParams p;
  int cluster, groups, groups_each;  // of K; of a block of the cluster
  int64_t x_blocks;
  int rank_parts;  // clusters that share rows
  bool decodes;
  DecodeParams weight;
};

// Where a chunk of row k lies: eight rows that ldmatrix reads at once, 16*t + e and their like, never meet in a bank.
template <int kChunks>
__device__ __forceinline__ int chunk_at(int k, int chunk) {
  return k * kChunks + (chunk ^ (kChunks == 4 ? k / 16 : k / 16 * 2 + k % 2));
}

// A smooth factor as it lies in memory: a conversion right behind the load would wait for it.
__device__ __forceinline__ uint32_t load_smooth(const QuantizeParams& q, int64_t column) {
  return q.smooth_type == DType::kFloat32 ? __ldg(static_cast<const uint32_t*>(q.smooth) + column)
                                          : __ldg(static_cast<const uint16_t*>(q.smooth) + column);
}

__device__ __forceinline__ float2 smooth_of(const QuantizeParams& q, uint32_t bits) {
  if (q.smooth_type == DType::kFloat32) return make_float2(__uint_as_float(bits), __uint_as_float(0x7fc00000u));
  const float factor = q.smooth_type == DType::kFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits)))
                                                        : __uint_as_float(bits << 16);
  const bool usable = fabsf(factor) >= kSmoothLow && fabsf(factor) <= kSmoothHigh;
  return make_float2(factor, usable ? __frcp_rn(factor) : __uint_as_float(0x7fc00000u));
}

// Rows of proj_down of a stage: a group for each of the block's group warps.
template <class Config>
__device__ __forceinline__ void copy_down(SharedStorage<Config>& shared, const ProjectParams& p, int buffer, int first_group,
                                          int end_group, int first_rank) {
  const auto* const down = static_cast<const typename Config::T*>(p.proj_down);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < Config::kGroupWarps * Config::kGroupChunks; i += kThreads) {
    const int group = i / Config::kGroupChunks, k = i % Config::kGroupChunks / Config::kChunks, chunk = i % Config::kChunks;
    const int rank = first_rank + 8 * chunk;
    const bool valid = first_group + group < end_group && rank < p.R;
    const int64_t row = static_cast<int64_t>(first_group + group) * kGroup + k;
    ptx::cp_async_16_or_zeros(ptx::smem_address(&shared.down[buffer][group][chunk_at<Config::kChunks>(k, chunk)]),
                              valid ? down + row * p.R + rank : down, valid ? 16 : 0);
  }
  ptx::cp_async_commit();
}

// This thread's smooth factors of a stage: on their way from `load` to `store`.
template <class Config>
struct SmoothOfStage {
  static constexpr int kCount = (Config::kGroupWarps * kGroup + kThreads - 1) / kThreads;
  uint32_t bits[kCount];

  __device__ __forceinline__ static int column(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }

  __device__ __forceinline__ void load(const QuantizeParams& q, int first_group, int end_group) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column(i) < min(Config::kGroupWarps, end_group - first_group) * kGroup) {
        bits[i] = load_smooth(q, static_cast<int64_t>(first_group) * kGroup + column(i));
      }
    }
  }
  __device__ __forceinline__ void store(const QuantizeParams& q, float2 (&smooth)[Config::kGroupWarps][kGroup], int first_group,
                                        int end_group) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (column(i) < min(Config::kGroupWarps, end_group - first_group) * kGroup) {
        smooth[column(i) / kGroup][column(i) % kGroup] = smooth_of(q, bits[i]);
      }
    }
  }
};

struct Words {
  uint4 row[2][2];  // rows g and g + 8, 16 columns each
};

// This lane's 16 columns of a row; rows beyond the matrix repeat the last, and are not stored.
template <class T>
__device__ __forceinline__ void load_columns(uint4 (&words)[2], const QuantizeParams& q, int row, int group) {
  const int64_t column = static_cast<int64_t>(group) * kGroup + kColumns * (threadIdx.x % kLanesPerGroup);
  const uint4* const from =
      reinterpret_cast<const uint4*>(static_cast<const T*>(q.x) + min(row, static_cast<int>(q.M) - 1) * q.x_row_stride + column);
  words[0] = __ldg(from), words[1] = __ldg(from + 1);
}

template <class Config>
__device__ __forceinline__ void multiply(float (&sums)[Config::kRanks / kMmaRanks][4], const Words& x, const uint4* down) {
  // Row 16*t + e of the matrix 4*step + 2*k_half further; its swizzle depends on t and e alone.
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 8 / 2, e = lane % 2, k_half = lane / 8 % 2;
  const uint32_t rows = ptx::smem_address(down) + 16 * Config::kChunks * (16 * t + e + 2 * k_half);
  const int swizzle = Config::kChunks == 4 ? t : 2 * t + e, rank_half = lane / 16;
  const uint32_t words[2][8] = {
      {x.row[0][0].x, x.row[0][0].y, x.row[0][0].z, x.row[0][0].w, x.row[0][1].x, x.row[0][1].y, x.row[0][1].z, x.row[0][1].w},
      {x.row[1][0].x, x.row[1][0].y, x.row[1][0].z, x.row[1][0].w, x.row[1][1].x, x.row[1][1].y, x.row[1][1].z, x.row[1][1].w}};
#pragma unroll
  for (int step = 0; step < kMmaSteps; ++step) {
    const uint32_t a[4] = {words[0][2 * step], words[1][2 * step], words[0][2 * step + 1], words[1][2 * step + 1]};
#pragma unroll
    for (int pair = 0; pair < Config::kChunks / 2; ++pair) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, rows + 16 * (4 * step * Config::kChunks + ((2 * pair + rank_half) ^ swizzle)));
      mma::M16N8K16<typename Config::T>::multiply(sums[2 * pair], a, b[0], b[1]);
      mma::M16N8K16<typename Config::T>::multiply(sums[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// 16 values of a row; the shift is added.
template <class T>
__device__ __forceinline__ void unpack(float (&v)[kColumns], const uint4 (&x)[2], float shift) {
  const uint32_t words[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) Word<T>::unpack(words[i], v + 2 * i);
  if (shift == 0.0f) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) v[i] = __fadd_rn(v[i], shift);
}

// What quantize_svdquant_w4a4.cu does with 16 values of a row, for two rows at once: the chains of one fill the gaps of the
// other. A quotient that is large or NaN stands for all that may not be multiplied by a reciprocal (group_codes.cuh).
template <class T, bool kUnsigned, CodeForm kForm>
__device__ __forceinline__ void quantize_pair(const QuantizeParams& q, const Words& x, const float2* smooth, int row, int group,
                                              int groups) {
  constexpr float kLargestQuotient = kLargest / kSmoothHigh / 2;
  const int t = static_cast<int>(threadIdx.x) % kLanesPerGroup;
  float v[2][kColumns], absmax[2], scale[2];
  unpack<T>(v[0], x.row[0], q.shift), unpack<T>(v[1], x.row[1], q.shift);
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    const float4 f = *reinterpret_cast<const float4*>(smooth + kColumns * t + i);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      v[h][i] = divide_by_reciprocal(v[h][i], f.x, f.y), v[h][i + 1] = divide_by_reciprocal(v[h][i + 1], f.z, f.w);
    }
  }
  absmax[0] = absmax_of(v[0]), absmax[1] = absmax_of(v[1]);
  if (!(absmax[0] < kLargestQuotient && absmax[1] < kLargestQuotient)) {  // rare
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 again[2];  // not kept: that would take registers all along
      load_columns<T>(again, q, row + 8 * h, group);
      unpack<T>(v[h], again, q.shift);
#pragma unroll 1
      for (int i = 0; i < kColumns; ++i) {  // one at a time, round and round: sixteen divisions side by side take registers
        const float quotient = __fdiv_rn(v[h][0], smooth[kColumns * t + i].x);
#pragma unroll
        for (int j = 0; j + 1 < kColumns; ++j) v[h][j] = v[h][j + 1];
        v[h][kColumns - 1] = quotient;
      }
      absmax[h] = absmax_of(v[h]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = group_codes<kUnsigned>(v[h], absmax[h]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int m = row + 8 * h;
    if (m >= q.M) continue;
    store_codes<kForm>(q.codes, static_cast<int64_t>(m) * q.K + static_cast<int64_t>(group) * kGroup + kColumns * t, v[h]);
    if (t == 0) store_scale<kForm>(q, m, group, groups, scale[h]);
  }
}

template <class T>
__device__ __forceinline__ void quantize_pair(const QuantizeParams& q, const Words& x, const float2* smooth, int row, int group,
                                              int groups) {
  if (q.form == CodeForm::kE4m3) {
    q.is_unsigned ? quantize_pair<T, true, CodeForm::kE4m3>(q, x, smooth, row, group, groups)
                  : quantize_pair<T, false, CodeForm::kE4m3>(q, x, smooth, row, group, groups);
  } else {
    q.is_unsigned ? quantize_pair<T, true, CodeForm::kPacked>(q, x, smooth, row, group, groups)
                  : quantize_pair<T, false, CodeForm::kPacked>(q, x, smooth, row, group, groups);
  }
}

__device__ __forceinline__ void store_low(const ProjectParams& p, int64_t row, int rank, const float4& sum) {
  if (row >= p.quantize.M || rank >= p.R) return;
  const int64_t at = row * p.R + rank;
  if (p.low != nullptr) {
    *reinterpret_cast<float4*>(p.low + at) = sum;
  } else {
    const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y), high = __floats2bfloat162_rn(sum.z, sum.w);
    *reinterpret_cast<uint2*>(p.low_bfloat16 + at) =
        make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& other) {
  sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
}

// Over the block's group warps, then over the cluster: quad i is finished by block i % cluster, by the thread that has it in
// every block.
template <class Config>
__device__ __forceinline__ void reduce(SharedStorage<Config>& shared, const Problem& problem, int64_t first_row, int first_rank,
                                       int rank) {
  const int cluster = problem.cluster, each = (Config::kQuads + cluster - 1) / cluster;
  const auto store = [&](int quad, const float4& sum) {
    store_low(problem.p, first_row + quad / (Config::kRanks / 4), first_rank + quad % (Config::kRanks / 4) * 4, sum);
  };
  if (cluster > 1) ptx::cluster_wait();  // every block has started, and set up its barrier
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < Config::kQuads; quad += kThreads) {
    float4 sum = shared.sums[0][quad];
#pragma unroll
    for (int w = 1; w < Config::kGroupWarps; ++w) add(sum, shared.sums[w][quad]);
    if (cluster == 1) {
      store(quad, sum);
      continue;
    }
    float4* const to = &shared.received[rank * each + quad / cluster];
    if (quad % cluster == rank) {
      *to = sum;
    } else {
      ptx::store_async_16(to, &shared.arrived, quad % cluster, *reinterpret_cast<const int4*>(&sum));
    }
  }
  if (cluster == 1) return;
  ptx::receive_wait(&shared.arrived);
#pragma unroll 1
  for (int quad = static_cast<int>(threadIdx.x); quad < Config::kQuads; quad += kThreads) {
    if (quad % cluster != rank) continue;
    float4 sum = shared.received[quad / cluster];
    for (int from = 1; from < cluster; ++from) add(sum, shared.received[from * each + quad / cluster]);
    store(quad, sum);
  }
}

template <class Config>
__device__ __forceinline__ void quantize_and_project(SharedStorage<Config>& shared, const Problem& problem) {
  using T = typename Config::T;
  const QuantizeParams& q = problem.p.quantize;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int row_warp = warp % Config::kRowWarps, group_warp = warp / Config::kRowWarps;
  const int cluster = problem.cluster, rank = static_cast<int>(blockIdx.x) % cluster;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) / cluster;
  const int part = static_cast<int>(tile % problem.rank_parts), first_rank = part * Config::kRanks;
  const int first_row = static_cast<int>(tile / problem.rank_parts) * Config::kRows, row = first_row + kMmaRows * row_warp + lane / 4;
  const int begin = rank * problem.groups_each, end = min(problem.groups, begin + problem.groups_each);
  const int stages = (end - begin + Config::kGroupWarps - 1) / Config::kGroupWarps;

  if (cluster > 1) {
    if (threadIdx.x == 0) {
      const int each = (Config::kQuads + cluster - 1) / cluster;
      const int own = min(each, (Config::kQuads - rank + cluster - 1) / cluster);
      ptx::receive_init(&shared.arrived);
      ptx::receive_expect(&shared.arrived, (cluster - 1) * own * 16);
    }
    __syncthreads();
    ptx::cluster_arrive();
  }

  const auto load_x = [&](Words& x, int group) {
    if (group >= end) return;
    load_columns<T>(x.row[0], q, row, group), load_columns<T>(x.row[1], q, row + 8, group);
  };

  float sums[Config::kRanks / kMmaRanks][4] = {};
  Words next;
  SmoothOfStage<Config> factors;
  if (stages > 0) {
    copy_down<Config>(shared, problem.p, 0, begin, end, first_rank);
    factors.load(q, begin, end);
    load_x(next, begin + group_warp);
    factors.store(q, shared.smooth[0], begin, end);
  }
  for (int stage = 0; stage < stages; ++stage) {
    const int group = begin + stage * Config::kGroupWarps + group_warp, following = begin + (stage + 1) * Config::kGroupWarps;
    const Words x = next;
    load_x(next, group + Config::kGroupWarps);
    factors.load(q, following, end);
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // this stage has landed, and every warp is done with the one before
    if (stage + 1 < stages) copy_down<Config>(shared, problem.p, (stage + 1) % 2, following, end, first_rank);
    if (group < end) {
      multiply<Config>(sums, x, shared.down[stage % 2][group_warp]);
      if (stage % problem.rank_parts == part) {
        quantize_pair<T>(q, x, shared.smooth[stage % 2][group_warp], row, group, problem.groups);
      }
    }
    factors.store(q, shared.smooth[(stage + 1) % 2], following, end);
  }
  __syncthreads();  // the sums take the place of proj_down
  float* const mine = reinterpret_cast<float*>(shared.sums[group_warp]) + kMmaRows * row_warp * Config::kRanks;
#pragma unroll
  for (int j = 0; j < Config::kRanks / kMmaRanks; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(mine + (lane / 4 + 8 * half) * Config::kRanks + kMmaRanks * j + 2 * (lane % 4)) =
          make_float2(sums[j][2 * half], sums[j][2 * half + 1]);
    }
  }
  __syncthreads();
  reduce<Config>(shared, problem, first_row, first_rank, rank);
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 2) project(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(128) uint8_t bytes[];
  ptx::wait_then_launch_dependents();
  if (blockIdx.x >= problem.x_blocks) {
    const DecodeBlocks blocks(problem.weight, kThreads);
    const int64_t block = blockIdx.x - problem.x_blocks;
    if (block < blocks.all()) decode_block<kThreads>(problem.weight, blocks, block);
    return;
  }
  quantize_and_project(*reinterpret_cast<SharedStorage<Config>*>(bytes), problem);
}

// ---------------------------------------------------------------- launch

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Config>
void launch(const ProjectParams& p, const DecodeParams* weight, int device, cudaStream_t stream) {
  Problem problem{};
  problem.p = p;
  problem.groups = static_cast<int>(p.quantize.K / kGroup);
  problem.rank_parts = static_cast<int>(ceil_div(p.R, Config::kRanks));
  // Two blocks an SM, if the groups of K suffice.
  const int64_t tiles = ceil_div(p.quantize.M, Config::kRows) * problem.rank_parts;
  const int64_t wanted = 2 * host::attribute(cudaDevAttrMultiProcessorCount, device);
  problem.cluster = 1;
  while (problem.cluster < kMostCluster && tiles * problem.cluster < wanted &&
         2 * problem.cluster * Config::kGroupWarps / 2 <= problem.groups) {
    problem.cluster *= 2;
  }
  problem.groups_each = static_cast<int>(ceil_div(problem.groups, problem.cluster));
  problem.x_blocks = tiles * problem.cluster;
  int64_t blocks = problem.x_blocks;
  if (weight != nullptr) {
    problem.weight = *weight;
    blocks += ceil_div(DecodeBlocks(*weight, kThreads).all(), problem.cluster) * problem.cluster;  // whole clusters
  }
  host::require(blocks < (int64_t{1} << 31), "quantize_project: more than 2^31 - 1 blocks");
  host::launch("quantize_project", project<Config>,
               {blocks, kThreads, problem.cluster, sizeof(SharedStorage<Config>), stream}, problem);
}

template <class T>
void launch_rows(const ProjectParams& p, const DecodeParams* weight, int device, cudaStream_t stream) {
  if (p.quantize.M <= 16) return launch<Config<T, 1, 32>>(p, weight, device, stream);
  if (p.quantize.M <= 32) return launch<Config<T, 2, 32>>(p, weight, device, stream);
  launch<Config<T, 4, 32>>(p, weight, device, stream);
}

}  // namespace

const char* quantize_project_unsupported(const ProjectParams& p) {
  const QuantizeParams& q = p.quantize;
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (q.type == DType::kFloat32) return "x must have 16 bits";
  if (q.K < kGroup || q.K % kGroup != 0 || q.K > (int64_t{1} << 30)) return "K must be a multiple of 64";
  if (q.M > (int64_t{1} << 30)) return "M is out of range";
  if (p.R < 8 || p.R % 8 != 0) return "the rank must be a multiple of 8";
  if (!aligned(q.x) || q.x_row_stride % 8 != 0 || !aligned(p.proj_down)) return "rows must be aligned to 16 bytes";
  if ((p.low == nullptr) == (p.low_bfloat16 == nullptr)) return "there is one output for x * proj_down";
  return nullptr;
}

void quantize_project(const ProjectParams& p, const DecodeParams* weight, int device, cudaStream_t stream) {
  if (const char* const reason = quantize_project_unsupported(p)) {
    throw std::runtime_error(std::string("quantize_project: ") + reason);
  }
  if (weight != nullptr) check_decode(*weight);
  if (p.quantize.M == 0) return;
  const host::DeviceGuard guard(device);
  p.quantize.type == DType::kFloat16 ? launch_rows<__half>(p, weight, device, stream)
                                     : launch_rows<__nv_bfloat16>(p, weight, device, stream);
}

}  // namespace kitchen::svdquant
