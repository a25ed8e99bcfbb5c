"""The SVDQuant ops: schemas, checks and fakes, and the public functions of the same names."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from ..reference import svdquant as reference
from ..registry import Problem
from ._autograd import check_constant, linear_call, wants_grad
from ._check import (
    check_dtype,
    check_float,
    check_four_bits,
    check_input_act,
    check_part,
    check_residual,
    check_same_device,
    check_shape,
    check_vector,
    check_x,
    names,
    rows,
    words,
)
from ._define import compose, define
from ._forward_mode import call

__all__ = [
    "dequantize_svdquant_w4a4",
    "quantize_svdquant_w4a4",
    "scaled_mm_svdquant_w4a4",
    "svdquant_linear",
]

GROUP = reference.GROUP


# ---------------------------------------------------------------------------------------------------- checks


def _check_in_features(k: int) -> None:
    if k == 0 or k % GROUP:
        raise UnsupportedError(
            f"svdquant quantizes groups of {GROUP} columns, got in_features K={k}; K must be a multiple of {GROUP}"
        )


def _check_sizes(problem: Problem) -> None:
    _check_in_features(problem.K)
    if problem.group not in (0, GROUP):
        raise UnsupportedError(f"svdquant quantizes groups of {GROUP} columns, got group {problem.group}; leave it out")
    check_four_bits(problem)


def _check_projection(name: str, tensor: torch.Tensor, length: int, symbol: str) -> None:
    check_float(name, tensor)
    if tensor.dim() != 2 or tensor.shape[0] != length:
        raise UnsupportedError(f"{name} must be [{symbol}={length}, R], got shape {list(tensor.shape)}")


def _branch_type(proj_up: torch.Tensor) -> str | None:
    """The word of a Problem; None where there is no branch."""
    return names((proj_up.dtype,)) if proj_up.shape[1] else None


def _check_weight(weight: torch.Tensor, wscales: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    check_dtype("weight", weight, torch.int8)
    if weight.dim() != 2:
        tiled = "; a tile-packed weight is unpacked with kitchen_core.layouts.tile_packed" if weight.dim() == 4 else ""
        raise UnsupportedError(f"weight must be int8 [N, K/2], got shape {list(weight.shape)}{tiled}")
    n, k = weight.shape[0], 2 * weight.shape[1]
    _check_in_features(k)
    check_float("wscales", wscales)
    check_shape("wscales", wscales, (k // GROUP, n), "[K/64, N]")
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (n,), "[N]")
    return n, k


def _check_down(smooth: torch.Tensor, proj_down: torch.Tensor, k: int) -> None:
    check_float("smooth", smooth)
    check_vector("smooth", smooth, k, "K")
    _check_projection("proj_down", proj_down, k, "K")


def _quantize_problem(x, smooth, proj_down, act_unsigned=False, lora_x=None):
    check_float("x", x)
    if x.dim() == 0:
        raise UnsupportedError("x must have at least one dim, [..., K], got a 0-dim tensor")
    k = x.shape[-1]
    _check_in_features(k)
    _check_down(smooth, proj_down, k)
    if lora_x is not None:
        check_float("lora_x", lora_x)
        check_shape("lora_x", lora_x, tuple(x.shape), "that of x")
    check_same_device(x, smooth=smooth, proj_down=proj_down, lora_x=lora_x)
    options = words(act_unsigned=act_unsigned, lora_x=lora_x)
    return Problem(
        "quantize_svdquant_w4a4", x.device, x.dtype, torch.int8, rows(x), 0, k, group=GROUP, rank=proj_down.shape[1],
        bits=4, options=options,
    )  # fmt: skip


def _quantize_fake(x, smooth, proj_down, act_unsigned=False, lora_x=None):
    m, k = rows(x), x.shape[-1]
    return (
        x.new_empty((m, k // 2), dtype=torch.int8),
        x.new_empty((k // GROUP, m), dtype=torch.float32),
        x.new_empty((m, proj_down.shape[1]), dtype=torch.float32),
    )


def _scaled_mm_problem(
    codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, out_dtype=torch.bfloat16,
    residual=None, residual_scale=None, part_first=None, part_of=None,
):  # fmt: skip
    n, k = _check_weight(weight, wscales, bias)
    check_dtype("codes", codes, torch.int8)
    if codes.dim() != 2 or codes.shape[1] != k // 2:
        raise UnsupportedError(f"codes must be [M, K/2={k // 2}] to fit the weight, got shape {list(codes.shape)}")
    m = codes.shape[0]
    check_dtype("ascales", ascales, torch.float32)
    check_shape("ascales", ascales, (k // GROUP, m), "[K/64, M]")
    _check_projection("proj_up", proj_up, n, "N")
    check_dtype("lora_act", lora_act, torch.float32)
    check_shape("lora_act", lora_act, (m, proj_up.shape[1]), "[M, R]")
    check_residual(codes, n, residual, residual_scale)
    check_same_device(
        codes, weight=weight, ascales=ascales, wscales=wscales, lora_act=lora_act, proj_up=proj_up, bias=bias,
        residual=residual, residual_scale=residual_scale,
    )  # fmt: skip
    options = words(
        bias=bias, residual=residual, act_unsigned=act_unsigned, scales=names((wscales.dtype,)),
        proj_up=_branch_type(proj_up),
    )  # fmt: skip
    return Problem(
        "scaled_mm_svdquant_w4a4", codes.device, torch.int8, out_dtype, m, n, k, group=GROUP, rank=proj_up.shape[1],
        bits=4, options=options, part=check_part(n, part_first, part_of),
    )  # fmt: skip


def _scaled_mm_fake(
    codes, weight, ascales, wscales, lora_act, proj_up, bias=None, act_unsigned=False, out_dtype=torch.bfloat16,
    residual=None, residual_scale=None, part_first=None, part_of=None,
):  # fmt: skip
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=out_dtype)


def _linear_problem(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None,
):  # fmt: skip
    n, k = _check_weight(weight, wscales, bias)
    _check_down(smooth, proj_down, k)
    _check_projection("proj_up", proj_up, n, "N")
    if proj_up.shape[1] != proj_down.shape[1]:
        raise UnsupportedError(
            f"proj_up [N, R] and proj_down [K, R] must have one rank, got {list(proj_up.shape)} and "
            f"{list(proj_down.shape)}"
        )
    check_input_act(input_act, input_act_weight, k)
    check_x(x, k, input_act)
    check_residual(x, n, residual, residual_scale)
    check_same_device(
        x, weight=weight, wscales=wscales, smooth=smooth, proj_down=proj_down, proj_up=proj_up, bias=bias,
        input_act_weight=input_act_weight, residual=residual, residual_scale=residual_scale,
    )  # fmt: skip
    options = words(
        bias=bias, input_act=input_act, residual=residual, act_unsigned=act_unsigned, scales=names((wscales.dtype,)),
        proj_up=_branch_type(proj_up),
    )  # fmt: skip
    return Problem(
        "svdquant_linear", x.device, x.dtype, out_dtype or x.dtype, rows(x), n, k, group=GROUP,
        rank=proj_up.shape[1], bits=4, options=options, part=check_part(n, part_first, part_of),
    )  # fmt: skip


def _linear_fake(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None, *args, **kwargs
):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


# ---------------------------------------------------------------------------------------------- declarations

define(
    "quantize_svdquant_w4a4(Tensor x, Tensor smooth, Tensor proj_down, bool act_unsigned=False, Tensor? lora_x=None) "
    "-> (Tensor, Tensor, Tensor)",
    problem=_quantize_problem, fake=_quantize_fake, reference=reference.quantize_svdquant_w4a4,
    sizes=_check_sizes,
)  # fmt: skip
define(
    "scaled_mm_svdquant_w4a4(Tensor codes, Tensor weight, Tensor ascales, Tensor wscales, Tensor lora_act, "
    "Tensor proj_up, Tensor? bias=None, bool act_unsigned=False, ScalarType out_dtype=bfloat16, "
    "Tensor? residual=None, Tensor? residual_scale=None, int? part_first=None, int? part_of=None) -> Tensor",
    problem=_scaled_mm_problem, fake=_scaled_mm_fake, reference=reference.scaled_mm_svdquant_w4a4,
    sizes=_check_sizes,
)  # fmt: skip
define(
    "svdquant_linear(Tensor x, Tensor weight, Tensor wscales, Tensor smooth, Tensor proj_down, Tensor proj_up, "
    "Tensor? bias=None, bool act_unsigned=False, ScalarType? out_dtype=None, str input_act='none', "
    "Tensor? input_act_weight=None, float input_act_eps=0.0, Tensor? residual=None, Tensor? residual_scale=None, "
    "int? part_first=None, int? part_of=None) -> Tensor",
    problem=_linear_problem, fake=_linear_fake, reference=reference.svdquant_linear, sizes=_check_sizes,
)  # fmt: skip


def _composed_linear(
    x, weight, wscales, smooth, proj_down, proj_up, bias=None, act_unsigned=False, out_dtype=None,
    input_act="none", input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
    part_first=None, part_of=None,
):  # fmt: skip
    return reference.layer(
        torch.ops.kitchen.quantize_svdquant_w4a4.default, torch.ops.kitchen.scaled_mm_svdquant_w4a4.default,
        x, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype,
        input_act, input_act_weight, input_act_eps, residual, residual_scale, part_first, part_of,
    )  # fmt: skip


compose("svdquant_linear", _composed_linear, ("quantize_svdquant_w4a4", "scaled_mm_svdquant_w4a4"))


# ------------------------------------------------------------------------------------------- public functions


def quantize_svdquant_w4a4(
    x: torch.Tensor,
    smooth: torch.Tensor,
    proj_down: torch.Tensor,
    act_unsigned: bool = False,
    lora_x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation half of svdquant_linear: x / smooth in 4 bits per group of 64 columns, and x @ proj_down.

    Shapes: x [..., K], M rows in all; smooth [K]; proj_down [K, R], R >= 0; lora_x as x.
    Dtypes and units: all inputs float32, float16 or bfloat16; ascales float32, multiply to dequantize.
    Layout: any strides; outputs are contiguous and not padded. Codes are packed two to a byte, even column low.
        No shift is applied here: the layer gives x + 0.171875 for an unsigned layer, and the raw x as ``lora_x``.
    Returns: codes int8 [M, K/2], ascales float32 [K/64, M] and lora_act float32 [M, R] = (lora_x or x) @ proj_down.
        Signed codes are -7..7, unsigned 0..15 (negatives clip to 0). A group that is not finite after the division gets
        scale NaN and codes 0, so that its row becomes NaN and no other row is touched.
    Raises: UnsupportedError for a K that 64 does not divide, or shapes and dtypes that do not fit.
    Devices: any; CUDA kernel in kitchen-svdquant from sm_75.
    Source: docs/formats/svdquant_w4a4.md.
    """
    return call(torch.ops.kitchen.quantize_svdquant_w4a4.default, x, smooth, proj_down, act_unsigned, lora_x)


def scaled_mm_svdquant_w4a4(
    codes: torch.Tensor,
    weight: torch.Tensor,
    ascales: torch.Tensor,
    wscales: torch.Tensor,
    lora_act: torch.Tensor,
    proj_up: torch.Tensor,
    bias: torch.Tensor | None = None,
    act_unsigned: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    part_first: int | None = None,
    part_of: int | None = None,
) -> torch.Tensor:
    """The second half of svdquant_linear, for activations that are quantized already.

    Shapes: codes [M, K/2]; weight [N, K/2]; ascales [K/64, M]; wscales [K/64, N]; lora_act [M, R]; proj_up [N, R];
        bias [N]; residual [M, N]; residual_scale 1 or N elements.
    Dtypes and units: codes and weight int8, two 4-bit codes a byte (weights signed, -8 allowed); ascales and lora_act
        float32; wscales, proj_up, bias and residual float; scales multiply to dequantize.
    Layout: any strides. ``act_unsigned`` tells how the nibbles of codes are read, and must be the quantizer's.
        ``part_first`` and ``part_of``: as ``svdquant_linear``.
    Returns: ``out_dtype`` [M, N], rounded once: residual + residual_scale * (sum over groups, ascending, of
        (dot * ascale) * wscale + lora_act @ proj_up.T + bias).
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any; CUDA kernels in kitchen-svdquant from sm_75.
    Source: docs/formats/svdquant_w4a4.md.
    """
    return call(
        torch.ops.kitchen.scaled_mm_svdquant_w4a4.default,
        codes, weight, ascales, wscales, lora_act, proj_up, bias, act_unsigned, out_dtype, residual, residual_scale,
        part_first, part_of,
    )  # fmt: skip


def svdquant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    wscales: torch.Tensor,
    smooth: torch.Tensor,
    proj_down: torch.Tensor,
    proj_up: torch.Tensor,
    bias: torch.Tensor | None = None,
    act_unsigned: bool = False,
    out_dtype: torch.dtype | None = None,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    part_first: int | None = None,
    part_of: int | None = None,
) -> torch.Tensor:
    """SVDQuant W4A4 linear: Q(x / smooth) @ (Wq * ws).T + (x @ proj_down) @ proj_up.T + bias.

    Shapes: x [..., K], or [..., 2K] for swiglu and situ; weight [N, K/2]; wscales [K/64, N]; smooth [K];
        proj_down [K, R]; proj_up [N, R], R >= 0; bias [N]; residual [..., N]; residual_scale 1 or N elements.
    Dtypes and units: x float32, float16 or bfloat16; weight int8, two signed 4-bit codes a byte; all else float, scales
        multiply to dequantize.
    Layout: any strides. The low-rank branch takes the raw x. With ``act_unsigned`` the quantizer takes x + 0.171875
        (added in fp32); the bias of such a layer already holds the correction for the shift. ``part_first`` and
        ``part_of``, for weights that are divided by outputs: the N rows are those from ``part_first`` on of a weight of
        ``part_of`` rows, and kernels add in the order in which they would for the whole, where both numbers and N are
        multiples of 8: bit for bit its outputs.
    Returns: ``out_dtype`` (x's where None) [..., N], rounded once. A row of x with inf or NaN gives a row of NaN.
    Raises: UnsupportedError for shapes, dtypes, devices or activations that do not fit.
    Devices: any; CUDA kernels in kitchen-svdquant from sm_75. Differentiable in x, bias and residual (straight through).
    Source: docs/formats/svdquant_w4a4.md.
    """
    op = torch.ops.kitchen.svdquant_linear.default
    if wants_grad(x, bias, residual, residual_scale, input_act_weight):

        def run(h, bias, residual, residual_scale):
            return op(
                h, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype or x.dtype, "none", None,
                0.0, residual, residual_scale, part_first, part_of,
            )  # fmt: skip

        def dense_weight():
            return dequantize_svdquant_w4a4(weight, wscales, smooth, proj_down, proj_up)

        return linear_call(
            x, bias, input_act, input_act_weight, input_act_eps, residual, residual_scale, run, dense_weight,
            (weight, wscales, smooth, proj_down, proj_up),
        )  # fmt: skip
    check_constant(weight, wscales, smooth, proj_down, proj_up)
    return op(
        x, weight, wscales, smooth, proj_down, proj_up, bias, act_unsigned, out_dtype, input_act, input_act_weight,
        input_act_eps, residual, residual_scale, part_first, part_of,
    )  # fmt: skip


def dequantize_svdquant_w4a4(
    weight: torch.Tensor,
    wscales: torch.Tensor,
    smooth: torch.Tensor,
    proj_down: torch.Tensor,
    proj_up: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The dense weight in the basis of x: (Wq * ws) / smooth + proj_up @ proj_down.T, in fp32. Plain PyTorch, no op.

    Shapes: weight [N, K/2]; wscales [K/64, N]; smooth [K]; proj_down [K, R]; proj_up [N, R].
    Dtypes and units: weight int8, two signed 4-bit codes a byte; all else float.
    Layout: any strides.
    Returns: ``out_dtype`` (float32 where None) [N, K], rounded once. It does not hold the shift of an unsigned layer: a
        dense linear with it needs the bias of ``SVDQuantFormat.dense_fallback_bias``.
    Raises: UnsupportedError for shapes or dtypes that do not fit.
    Devices: any.
    Source: docs/formats/svdquant_w4a4.md.
    """
    n, k = _check_weight(weight, wscales, None)
    _check_down(smooth, proj_down, k)
    _check_projection("proj_up", proj_up, n, "N")
    return reference.dequantize_svdquant_w4a4(weight, wscales, smooth, proj_down, proj_up, out_dtype)
