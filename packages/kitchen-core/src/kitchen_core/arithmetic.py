"""The written-down arithmetic: every rule that decides bits, once, in plain fp32 PyTorch.

The CUDA headers (shared_cuda/include/kitchen/quant) compute the same with explicit intrinsics. Rules:

- activations are taken to fp32 first and stay there; the only rounding to another dtype is at the output;
- ConvRot is a chain of radix-4 butterflies with strides 1, 4, 16, 64, ... (``hadamard_rotate``);
- a quotient is an IEEE fp32 division, rounded to an integer ties-to-even;
- the epilogue is ``fma(float(acc) * x_scale, weight_scale, bias)``, then ``fma(residual_scale, y, residual)``;
- a row with an inf or a NaN gets the scale NaN and codes 0, so its output is NaN, and no other row is touched.
"""

from __future__ import annotations

import torch

from .errors import UnsupportedError

INT8_SCALE_FLOOR = 1e-30
INT8_LEVELS = 127
MAX_EXACT_INT32_K = 131_071  # K * 128 * 128 < 2^31: no INT32 accumulator can overflow up to here

INPUT_ACTS = ("none", "gelu_tanh", "swiglu", "rms_norm", "situ")
PAIR_ACTS = ("swiglu", "situ")  # these read two halves of the last dim, so their input is 2K wide


# ---------------------------------------------------------------------------------------------------- ConvRot


def is_power_of_4(n: int) -> bool:
    """1, 4, 16, 64, 256, ..."""
    return n > 0 and n & (n - 1) == 0 and n.bit_length() % 2 == 1


def check_rotation_group(group: int, in_features: int) -> None:
    """Raises UnsupportedError unless ``group`` is 0 (no rotation) or a power of 4 that divides ``in_features``."""
    if group == 0:
        return
    if group < 4 or not is_power_of_4(group):
        raise UnsupportedError(f"convrot_groupsize must be 0 (none) or a power of 4 (4, 16, 64, 256, ...), got {group}")
    if in_features % group:
        raise UnsupportedError(
            f"convrot_groupsize {group} does not divide in_features K={in_features}; "
            f"use {rotation_group(in_features, group) or 'no rotation'} for this layer"
        )


def rotation_group(in_features: int, wanted: int = 256) -> int:
    """The rule for layers that ``wanted`` does not divide: the largest power of 4, at most ``wanted``, that divides K.

    Below 16 rotation does not pay for itself, and the answer is 0 (no rotation). The choice is recorded per layer.
    """
    if wanted != 0 and (wanted < 4 or not is_power_of_4(wanted)):
        raise UnsupportedError(f"convrot_groupsize must be 0 (none) or a power of 4 (16, 64, 256, ...), got {wanted!r}")
    group = wanted
    while group >= 16 and in_features % group:
        group //= 4
    return group if group >= 16 else 0


def hadamard_rotate(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rotate the last dim in blocks of ``group`` by the regular Hadamard matrix over sqrt(group). fp32 in and out.

    The matrix is symmetric and orthogonal, so the same function rotates weights, rotates activations and un-rotates.
    One stage maps (a, b, c, d), ``stride`` apart, to (h-d, h-c, h-b, h-a) with h = ((a+b) + (c+d)) / 2.
    """
    if group == 0:
        return x
    shape = x.shape
    stride = 1
    while stride < group:
        a, b, c, d = x.reshape(*shape[:-1], shape[-1] // (4 * stride), 4, stride).unbind(-2)
        h = 0.5 * ((a + b) + (c + d))
        x = torch.stack((h - d, h - c, h - b, h - a), dim=-2)
        stride *= 4
    return x.reshape(shape)


# ------------------------------------------------------------------------------------------- input activations


def input_width(in_features: int, input_act: str) -> int:
    """Width of x for a layer of ``in_features``: twice it for an activation of two halves."""
    return 2 * in_features if input_act in PAIR_ACTS else in_features


def apply_input_act(
    x: torch.Tensor, input_act: str, weight: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """The activation in front of a linear, in fp32.

    gelu_tanh; swiglu on [gate | up]: silu(gate) * up; rms_norm with weight [K] and eps;
    situ on [hidden | gate]: 4 tanh(gate/4) sigmoid(gate) * 25 tanh(hidden/25).
    """
    if input_act == "none":
        return x
    if input_act == "gelu_tanh":
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if input_act == "rms_norm":
        x = x.contiguous()  # torch sums in another order over other strides
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.reshape(-1).float()
    first, second = x.chunk(2, dim=-1)
    if input_act == "swiglu":
        return first * torch.sigmoid(first) * second
    if input_act == "situ":
        return 4.0 * torch.tanh(second / 4.0) * torch.sigmoid(second) * 25.0 * torch.tanh(first / 25.0)
    raise UnsupportedError(f"unsupported input_act {input_act!r}; allowed: {', '.join(INPUT_ACTS)}")


# --------------------------------------------------------------------------------------------------- rounding


def uniform_stream(start: int, count: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` fp32 numbers in [0, 1) of the counter-based generator, for element indices from ``start`` on.

    The 64-bit counter index + seed is folded to 32 bits and hashed by PCG-RXS-M-XS; the top 24 bits are used, so the
    bits are the same on every device.
    """
    mask = 0xFFFFFFFF
    key = torch.arange(start, start + count, dtype=torch.int64, device=device) + seed
    folded = ((key >> 32) & mask) ^ (key & mask)
    state = (folded * 747796405 + 2891336453) & mask
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & mask
    word = (word >> 22) ^ word
    return (word >> 8).to(torch.float32) * 2.0**-24


def uniform_like(x: torch.Tensor, seed: int, first_element: int = 0) -> torch.Tensor:
    """The generator's number for each element of ``x`` in row-major order, the first having index ``first_element``."""
    return uniform_stream(first_element, x.numel(), seed, x.device).reshape(x.shape)


def round_codes(quotient: torch.Tensor, low: int, high: int, seed: int = 0, first_element: int = 0) -> torch.Tensor:
    """Integer-valued fp32 codes: ties to even, or, with ``seed`` > 0, floor(quotient + u). Clamped to [low, high]."""
    if seed > 0:
        quotient = torch.floor(quotient + uniform_like(quotient, seed, first_element))
    return quotient.round().clamp(low, high)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32 with one rounding, through fp64.

    The fp64 product of two fp32 numbers is exact; the sum is rounded twice (to 53, then to 24 bits), which differs
    from a hardware FMA only where the first rounding lands on a tie of the second: about once in 2^29.
    """
    return (a.double() * b.double() + c.double()).float()


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """IEEE fp32 division by a constant. (``x / 127`` multiplies by a rounded reciprocal on CUDA, a tensor does not.)"""
    return x / x.new_full((), divisor)


# ----------------------------------------------------------------------------------------------- INT8 pieces


def quantize_rowwise(x: torch.Tensor, seed: int = 0, first_element: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., K] -> int8 codes [..., K] and fp32 scales [..., 1]: scale = max(absmax / 127, 1e-30)."""
    if x.shape[-1] == 0 or x.numel() == 0:
        return x.to(torch.int8), x.new_full((*x.shape[:-1], 1), INT8_SCALE_FLOOR)
    absmax = x.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(absmax)
    scale = divide(absmax, INT8_LEVELS).clamp_min(INT8_SCALE_FLOOR)
    codes = round_codes(torch.where(finite, x / scale, 0.0), -128, 127, seed, first_element)
    return codes.to(torch.int8).contiguous(), torch.where(finite, scale, float("nan")).contiguous()


def settled(x: torch.Tensor) -> torch.Tensor:
    """x contiguous and at an address that BLAS calls aligned, copied where it is not.

    For fp32 products: neither strides nor alignment then choose the routine, and with it the order of the sum.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 64 else x


def fp16_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 rows whose absmax lies in [1, 2), and the power of two per row that takes them back."""
    absmax = rows.abs().amax(-1, keepdim=True) if rows.numel() else rows.new_ones(rows.shape[0], 1)
    finite = torch.isfinite(absmax)
    exponent = torch.frexp(absmax).exponent.clamp(-120, 127) - 1
    scale = torch.ldexp(torch.ones_like(absmax), exponent)
    half = torch.where(finite, rows / scale, 0.0).to(torch.float16)
    return half, torch.where(finite, scale, float("nan"))


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Exact integer product of codes a [M, K] and b [N, K]: a @ b.T as int32 (int64 above K = 131,071).

    Slices of 1024 columns are multiplied in fp32, where every partial sum is an integer of at most 2^24 and so exact.
    """
    wide = torch.int32 if a.shape[1] <= MAX_EXACT_INT32_K else torch.int64
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=wide, device=a.device)
    for k in range(0, a.shape[1], 1024):
        acc += (a[:, k : k + 1024].float() @ b[:, k : k + 1024].float().T).to(wide)
    return acc


def scale_and_bias(
    acc: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """fp32 fma(float(acc) * x_scale, weight_scale, bias). acc [M, N], x_scale [M, 1], weight_scale [N] or [1]."""
    scaled = acc.float() * x_scale
    if bias is None:
        return scaled * weight_scale
    return fma(scaled, weight_scale, bias.float())


def add_residual(y: torch.Tensor, residual: torch.Tensor | None, residual_scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 fma(residual_scale, y, residual); ``residual_scale`` None means 1."""
    if residual is None:
        return y
    if residual_scale is None:
        return y + residual.float()
    return fma(residual_scale.float(), y, residual.float())
