// Activations in front of a linear. One of a pair reads two halves of a row that is 2K wide: [gate | up] for swiglu,
// [hidden | gate] for situ. Numbers are part of the binary boundary; kAny is for kernels that read it from their parameters.
#pragma once

namespace kitchen::quant {

enum class InputAct : int { kNone = 0, kGeluTanh = 1, kSwiglu = 2, kRmsNorm = 3, kSitu = 4, kAny = -1 };

constexpr bool is_pair(InputAct act) { return act == InputAct::kSwiglu || act == InputAct::kSitu; }

}  // namespace kitchen::quant
