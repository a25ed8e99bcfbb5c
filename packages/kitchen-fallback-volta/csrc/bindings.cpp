// The module kitchen_fallback_volta._C. Tensors arrive as device pointers, sizes and strides, the stream as an integer, all
// checked by the Python functions that call this (_gemm.py, _quantize.py); nothing here knows of torch, of nvcc or of the
// CUDA runtime.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "int8_scaled_mm/config.h"
#include "int8_scaled_mm/int8_scaled_mm.h"
#include "quantize_int8_rowwise/quantize_int8_rowwise.h"

namespace py = pybind11;

namespace {

using namespace kitchen;
using namespace kitchen::volta;

constexpr int kAbi = 1;  // kitchen_core.abi.KITCHEN_ABI

template <class Config>
constexpr Tile tile_of(const char* kernel) {
  return {kernel, Config::kTileM, Config::kTileN, Config::kThreads, Config::kSharedBytes};
}
// Numbered as TILES of _gemm.py.
constexpr Tile kTiles[] = {tile_of<Small>("int8_scaled_mm_small"), tile_of<Medium>("int8_scaled_mm_medium"),
                           tile_of<Large>("int8_scaled_mm_large")};
constexpr Tile kPlainTile = tile_of<Large>("plain_fp16_mm_large");

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Bugs of the calling Python function, which checks arguments first: the message says what it broke.
void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

bool aligned(uintptr_t bits) { return bits % 16 == 0; }

void launch_tile(const Tile& tile, const ScaledMmParams& p, int device, uintptr_t stream, int shared_bytes = 0) {
  const int64_t blocks = (p.M + tile.m - 1) / tile.m * ((p.N + tile.n - 1) / tile.n);
  require(blocks < (int64_t{1} << 31), "int8_scaled_mm: more than 2^31 tiles");
  if (blocks > 0) launch({tile.kernel, blocks, tile.threads, std::max(tile.shared_bytes, shared_bytes), device, stream}, &p);
}

void int8_scaled_mm(int64_t M, int64_t N, int64_t K, uintptr_t a, int64_t a_pitch, uintptr_t a_scale, uintptr_t b,
                    int64_t b_pitch, uintptr_t b_scale, int b_scale_stride, uintptr_t bias, int bias_type, uintptr_t residual,
                    int residual_type, uintptr_t residual_scale, int residual_scale_stride, uintptr_t out, int out_type,
                    int tile, int raster_group, int device, uintptr_t stream) {
  require(K >= 1 && K <= 131071, "int8_scaled_mm: K must be in 1 .. 131071, which int32 sums hold");
  require(tile >= 0 && tile < 3 && raster_group >= 1, "int8_scaled_mm: no such tile");
  require(std::min({bias_type, residual_type, out_type}) >= 0 && std::max({bias_type, residual_type, out_type}) <= 2,
          "int8_scaled_mm: unknown dtype");
  ScaledMmParams p = {};
  p.a = pointer<const uint8_t>(a);
  p.b = pointer<const uint8_t>(b);
  p.a_scale = pointer<const float>(a_scale);
  p.b_scale = pointer<const float>(b_scale);
  p.bias = pointer<const void>(bias);
  p.residual = pointer<const void>(residual);
  p.residual_scale = pointer<const float>(residual_scale);
  p.out = pointer<void>(out);
  p.M = M, p.N = N, p.K = K;
  p.a_pitch = a_pitch, p.b_pitch = b_pitch;
  p.b_scale_stride = b_scale_stride, p.residual_scale_stride = residual_scale_stride;
  p.bias_type = static_cast<DType>(bias_type);
  p.residual_type = static_cast<DType>(residual_type);
  p.out_type = static_cast<DType>(out_type);
  p.raster_group = raster_group;
  p.aligned = aligned(a | b | static_cast<uintptr_t>(a_pitch) | static_cast<uintptr_t>(b_pitch));
  p.vectors = N % 8 == 0 && aligned(out | residual);
  launch_tile(kTiles[tile], p, device, stream);
}

void plain_fp16_mm(int64_t M, int64_t N, int64_t K, uintptr_t a, uintptr_t b, uintptr_t out, int raster_group,
                   int shared_bytes, int device, uintptr_t stream) {
  require(K % 64 == 0 && N % 8 == 0 && aligned(a | b | out), "plain_fp16_mm: K in 64s, N in 8s, pointers aligned to 16 bytes");
  ScaledMmParams p = {};
  p.a = pointer<const uint8_t>(a);
  p.b = pointer<const uint8_t>(b);
  p.out = pointer<void>(out);
  p.M = M, p.N = N, p.K = K;
  p.a_pitch = p.b_pitch = 2 * K;
  p.raster_group = raster_group;
  p.aligned = p.vectors = true;
  launch_tile(kPlainTile, p, device, stream, shared_bytes);
}

void quantize_int8_rowwise(uintptr_t x, int64_t x_row_stride, int dtype, uintptr_t codes, uintptr_t scales, int64_t M,
                           int64_t K, int group, int act, uintptr_t act_weight, int act_weight_dtype, float act_eps,
                           uint64_t seed, int device, uintptr_t stream) {
  require(M >= 0 && M < (int64_t{1} << 31), "quantize_int8_rowwise: M must be in 0 .. 2^31 - 1");
  require(K >= 1 && K < (int64_t{1} << 30), "quantize_int8_rowwise: K must be in 1 .. 2^30 - 1");
  constexpr int kGroups[] = {0, 4, 16, 64, 256, 1024, 4096};
  const bool known = std::find(std::begin(kGroups), std::end(kGroups), group) != std::end(kGroups);
  require(known && (group == 0 || K % group == 0), "quantize_int8_rowwise: the group must be 0 or 4, 16, .. 4096 and divide K");
  require(std::min(dtype, act_weight_dtype) >= 0 && std::max(dtype, act_weight_dtype) <= 2,
          "quantize_int8_rowwise: unknown dtype");
  require(act >= 0 && act <= 4, "quantize_int8_rowwise: unknown activation");
  if (M == 0) return;
  QuantizeParams p = {};
  p.x = pointer<const void>(x);
  p.act_weight = pointer<const void>(act_weight);
  p.codes = pointer<int8_t>(codes);
  p.scales = pointer<float>(scales);
  p.x_row_stride = x_row_stride;
  p.seed = seed;
  p.K = static_cast<int>(K);
  p.group = group;
  p.act_eps = act_eps;
  p.dtype = static_cast<DType>(dtype);
  p.act_weight_dtype = static_cast<DType>(act_weight_dtype);
  p.act = static_cast<quant::InputAct>(act);
  p.vectors = K % 16 == 0 && aligned(x | codes) && x_row_stride * size_of(p.dtype) % 16 == 0;
  const int64_t unit = group >= 1024 ? 256 : 32;  // threads that an exchange of strides 256 and 1024 joins
  const int64_t wanted = ((K + kThreadColumns - 1) / kThreadColumns + unit - 1) / unit * unit;
  const int threads = static_cast<int>(std::min<int64_t>(wanted, kMaxQuantizeThreads));
  launch({"quantize_int8_rowwise", M, threads, group >= 64 ? quantize_shared_bytes(threads) : 0, device, stream}, &p);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of kitchen-fallback-volta";
  m.def("abi", [] { return kAbi; }, "The number that must equal kitchen_core.abi.KITCHEN_ABI.");
  m.def("archs", [] {
    std::string all;
    for (const Cubin& cubin : cubins()) all += (all.empty() ? "" : ",") + std::string(cubin.arch);
    return all;
  }, "The CUDA architectures compiled in, comma separated.");
  m.def("int8_scaled_mm", &int8_scaled_mm, py::arg("M"), py::arg("N"), py::arg("K"), py::arg("a"), py::arg("a_pitch"),
        py::arg("a_scale"), py::arg("b"), py::arg("b_pitch"), py::arg("b_scale"), py::arg("b_scale_stride"), py::arg("bias"),
        py::arg("bias_type"), py::arg("residual"), py::arg("residual_type"), py::arg("residual_scale"),
        py::arg("residual_scale_stride"), py::arg("out"), py::arg("out_type"), py::arg("tile"), py::arg("raster_group"),
        py::arg("device"), py::arg("stream"));
  m.def("quantize_int8_rowwise", &quantize_int8_rowwise);
  m.def("plain_fp16_mm", &plain_fp16_mm, 
        "The large tile on fp16 operands, for measurements. shared_bytes: more than it needs, to fit fewer blocks on an SM.");
}
