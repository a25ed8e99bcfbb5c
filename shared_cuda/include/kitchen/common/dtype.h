// Element types of activations. Numbers are part of the binary boundary: bindings pass them as integers.
#pragma once

namespace kitchen {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace kitchen
