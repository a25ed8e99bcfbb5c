// INT8 GEMM over a weight that is decoded piece by piece, sm_90a.
//
//   decode_w4a8_weight   rows n0 .. n0 + rows - 1 of the weight to a workspace of at most 64 MB
//   gemm_sm90            out[:, n0 ..] = epilogue(a * piece^T): kitchen/gemm/gemm_sm90.cuh with the epilogue of kitchen-int8
//
// Each kernel starts while the one in front ends. The first piece is decoded beside the quantizer of a, and waits for it only
// at its end; later pieces wait for the GEMM that reads the workspace. Measured: docs/kernels/w4a8.md.
#include "w4a8_scaled_mm/hopper/sm90/chunked.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "decode_w4a8_weight/decode_w4a8_weight.h"
#include "int8_gemm/sm90/scale_epilogue.cuh"
#include "kitchen/gemm/gemm_sm90.cuh"
#include "kitchen/host/device.h"

namespace kitchen::w4a8::chunked {
namespace {

namespace sm90 = kitchen::gemm_sm90;
using int8::ResidualBy;
using sm90::Schedule;
using sm90::TileConfig;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Piece {
  const int8_t* b;  // [rows, K]
  int64_t first, rows;
};

template <class T, class Store>
int8::EpilogueParams<T> epilogue_params(const ScaledMmParams& p, const Piece& piece) {
  const auto map = [&](const void* matrix) {
    return host::encode_matrix_map({int8::kMapType<T>, sizeof(T), static_cast<const T*>(matrix) + piece.first, p.M, piece.rows,
                                    p.N * int64_t{sizeof(T)}, Store::kRows, Store::kColumns,
                                    Store::kSwizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE});
  };
  int8::EpilogueParams<T> e{};
  e.a_scale = p.a_scale;
  e.b_scale = int8::column_vector(p.b_scale + piece.first, 1, DType::kFloat32, 1.0f);
  const void* bias = p.bias == nullptr ? nullptr : static_cast<const uint8_t*>(p.bias) + piece.first * size_of(p.bias_type);
  e.bias = int8::column_vector(bias, 1, p.bias_type, -0.0f);
  const float* gate = p.residual_scale == nullptr ? nullptr : p.residual_scale + piece.first * p.residual_scale_stride;
  e.residual_scale = int8::column_vector(gate, p.residual_scale_stride, DType::kFloat32, 1.0f);
  e.residual = p.residual == nullptr ? nullptr : static_cast<const T*>(p.residual) + piece.first;
  e.out = static_cast<T*>(p.out) + piece.first;
  e.M = static_cast<int>(p.M), e.N = static_cast<int>(piece.rows);
  e.out_mapped = true;
  e.out_map = map(p.out);
  e.residual_mapped = p.residual != nullptr;
  if (e.residual_mapped) e.residual_map = map(p.residual);
  return e;
}

struct Tile {
  int m, n;  // of a block; a cluster is two of them, one above the other
  void (*launch)(const ScaledMmParams&, const Piece&, int grid, cudaStream_t);
};

template <class Config, class T, ResidualBy kBy>
void launch_with(const ScaledMmParams& p, const Piece& piece, int grid, cudaStream_t stream) {
  using Epilogue = int8::ScaleEpilogue<T, Config::kTileM, Config::kTileN, kBy>;
  using Shared = sm90::SharedStorage<Config, Epilogue>;
  static_assert(sizeof(Shared) <= sm90::kSharedLimit, "the stages do not fit shared memory");
  auto* const kernel = sm90::gemm_kernel<Config, int8::MmaS8, Epilogue>;
  host::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)), "w4a8_chunked");
  // Rows of A that are walked together stay in L2 while all of the piece passes once: up to 16 MB of them.
  const int64_t row_bytes = int64_t{Config::kTileM} * Config::kClusterM * p.K;
  sm90::KernelParams<int8::EpilogueParams<T>> params{};
  params.a = int8::operand_map(p.a, p.M, p.K, Config::kBoxM);
  params.b = int8::operand_map(piece.b, piece.rows, p.K, Config::kBoxN);
  params.problem = {static_cast<int>(ceil_div(p.K, sm90::kStageBytesK)),
                    static_cast<int>(ceil_div(p.M, Config::kTileM * Config::kClusterM)),
                    static_cast<int>(ceil_div(piece.rows, Config::kTileN * Config::kClusterN)),
                    static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / row_bytes, 8, 16)), 0, 0,
                    static_cast<int>(p.M), static_cast<int>(piece.rows), p.residual == nullptr};
  params.epilogue = epilogue_params<T, typename Epilogue::Store>(p, piece);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(Config::kClusterSize), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  host::check(cudaLaunchKernelEx(&config, kernel, params), "w4a8_chunked");
}

template <class Config, class T>
void launch_typed(const ScaledMmParams& p, const Piece& piece, int grid, cudaStream_t stream) {
  p.residual == nullptr ? launch_with<Config, T, ResidualBy::kNone>(p, piece, grid, stream)
                        : launch_with<Config, T, ResidualBy::kCopies>(p, piece, grid, stream);
}

template <class Config>
void launch(const ScaledMmParams& p, const Piece& piece, int grid, cudaStream_t stream) {
  switch (p.out_type) {
    case DType::kFloat32: return launch_typed<Config, float>(p, piece, grid, stream);
    case DType::kFloat16: return launch_typed<Config, __half>(p, piece, grid, stream);
    default: return launch_typed<Config, __nv_bfloat16>(p, piece, grid, stream);
  }
}

template <class Config>
constexpr Tile tile() {
  return {Config::kTileM, Config::kTileN, launch<Config>};
}

constexpr int kCluster = 2;
constexpr Tile kTiles[] = {
    tile<TileConfig<128, 192, kCluster, 1, Schedule::kPingPong>>(),
    tile<TileConfig<128, 128, kCluster, 1, Schedule::kPingPong>>(),
};

int64_t clusters(int64_t M, int64_t rows, const Tile& t) { return ceil_div(M, t.m * kCluster) * ceil_div(rows, t.n); }

// Cycles of the busiest block, as kitchen-int8 estimates them (docs/kernels/int8_gemm_sm90.md).
double gemm_cycles(int64_t M, int64_t rows, int64_t K, const Tile& t, int sm_count) {
  constexpr double kLaunch = 3000, kMultipliesPerCycle = 4096 / 0.97, kBytesPerCycle = 52, kBytesWeight = 1.0 / 400;
  constexpr double kStorePerColumn = 24;
  const double multiply = double(t.m) * t.n * sm90::kStageBytesK / kMultipliesPerCycle;
  const double bytes = sm90::kStageBytesK * (t.m + double(t.n) / kCluster);
  const double stage = std::max(multiply + bytes * kBytesWeight, bytes / kBytesPerCycle);
  const double work = double(ceil_div(K, sm90::kStageBytesK)) * stage, store = kStorePerColumn * t.n;
  const double rounds = double(ceil_div(clusters(M, rows, t), sm_count / kCluster));
  return kLaunch + (rounds - 1) * std::max(work, store / 2) + work + store;
}

const Tile& choose_tile(int64_t M, int64_t rows, int64_t K, int sm_count) {
  return *std::min_element(std::begin(kTiles), std::end(kTiles), [&](const Tile& a, const Tile& b) {
    return gemm_cycles(M, rows, K, a, sm_count) < gemm_cycles(M, rows, K, b, sm_count);
  });
}

}  // namespace

int64_t chunk_rows(int64_t N, int64_t K) {
  const int64_t chunks = ceil_div(N * K, kMostWorkspace);
  return chunks <= 1 ? N : std::max<int64_t>(256, ceil_div(N, chunks) / 256 * 256);
}

int64_t workspace_bytes(int64_t N, int64_t K) { return std::min(N, chunk_rows(N, K)) * K; }

double estimated_cycles(const Problem& q, int sm_count) {
  constexpr double kStart = 1300;  // of a piece, beside the quantizer
  constexpr double kDecodedPerCycle = 7.5;  // weights of an SM, by the memory's rate
  double cycles = 0;
  const int64_t rows = chunk_rows(q.N, q.K);
  for (int64_t first = 0; first < q.N; first += rows) {
    const int64_t count = std::min(rows, q.N - first);
    const Tile& tile = choose_tile(q.M, count, q.K, sm_count);
    cycles += kStart + double(count) * q.K / (kDecodedPerCycle * sm_count) + gemm_cycles(q.M, count, q.K, tile, sm_count);
  }
  return cycles;
}

const char* unsupported(const ScaledMmParams& p) {
  const int bytes = size_of(p.out_type);
  if (!int8::mappable(p.out, p.N, bytes) || (p.residual != nullptr && !int8::mappable(p.residual, p.N, bytes)))
    return "rows of the result and the residual must be aligned to 16 bytes";
  return nullptr;
}

void run(const ScaledMmParams& p, int8_t* workspace, int device, cudaStream_t stream) {
  if (const char* reason = unsupported(p)) throw std::invalid_argument(std::string("w4a8_chunked: ") + reason);
  host::DeviceGuard guard(device);
  const int sm_count = host::attribute(cudaDevAttrMultiProcessorCount, device);
  const int64_t rows = chunk_rows(p.N, p.K), code_bytes = p.K / 8 * p.bits, groups = p.K / p.group;
  for (int64_t first = 0; first < p.N; first += rows) {
    const Piece piece = {workspace, first, std::min(rows, p.N - first)};
    DecodeParams decoding = {p.codes + first * code_bytes, p.s_rel + first * groups, p.codebook, workspace, piece.rows,
                             static_cast<int>(p.K), p.group, p.bits, false};
    decoding.launch = first > 0 ? EarlyLaunch::kWaitsFirst : p.programmatic_launch ? EarlyLaunch::kWaitsLast : EarlyLaunch::kNone;
    decode_w4a8_weight(decoding, device, stream);
    const Tile& tile = choose_tile(p.M, piece.rows, p.K, sm_count);
    const int64_t blocks = std::min<int64_t>(clusters(p.M, piece.rows, tile), sm_count / kCluster) * kCluster;
    tile.launch(p, piece, static_cast<int>(blocks), stream);
  }
}

}  // namespace kitchen::w4a8::chunked
