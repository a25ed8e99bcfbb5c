"""The INT8 quantizers and dequantizers: schemas, checks and fakes, and the public functions of the same names."""

from __future__ import annotations

import torch

from ..arithmetic import check_rotation_group
from ..errors import UnsupportedError
from ..reference import int8 as reference
from ..registry import Problem
from ._check import (
    ACTIVATION_SCHEMA,
    check_dtype,
    check_float,
    check_input_act,
    check_same_device,
    check_seed,
    check_vector,
    rows,
    words,
)
from ._define import define
from ._forward_mode import call


def check_rotation(problem: Problem) -> None:
    """What of a Problem's sizes these ops and the INT8 linears refuse: a ConvRot group that does not fit K."""
    check_rotation_group(problem.rotation, problem.K)


# ------------------------------------------------------------------------------------------------ quantizers


def _tensorwise_problem(x, scale=None, seed=0):
    check_float("x", x)
    check_seed(seed)
    check_same_device(x, scale=scale)
    if scale is not None:
        check_dtype("scale", scale, torch.float32)
        check_vector("scale", scale, 1, "one")
    width = x.shape[-1] if x.dim() else 1
    options = words(scale=scale, stochastic=seed > 0)
    return Problem("quantize_int8_tensorwise", x.device, x.dtype, torch.int8, rows(x), 0, width, options=options)


def _tensorwise_fake(x, scale=None, seed=0):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((), dtype=torch.float32)


def _check_rows(x: torch.Tensor) -> None:
    check_float("x", x)
    if x.dim() == 0:
        raise UnsupportedError("x must have at least one dim, [..., K], got a 0-dim tensor")


def _rowwise_problem(x, seed=0):
    _check_rows(x)
    check_seed(seed)
    options = words(stochastic=seed > 0)
    return Problem("quantize_int8_rowwise", x.device, x.dtype, torch.int8, rows(x), 0, x.shape[-1], options=options)


def _rowwise_fake(x, seed=0):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _rotate_problem(x, convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, seed=0):
    _check_rows(x)
    check_seed(seed)
    width = x.shape[-1]
    if input_act in ("swiglu", "situ"):
        if width % 2:
            raise UnsupportedError(f"input_act={input_act!r} takes two halves, so x needs an even width, got {width}")
        width = width // 2
    check_input_act(input_act, input_act_weight, width)
    check_rotation_group(convrot_groupsize, width)
    check_same_device(x, input_act_weight=input_act_weight)
    return Problem(
        "quantize_and_rotate_rowwise", x.device, x.dtype, torch.int8, rows(x), 0, width,
        rotation=convrot_groupsize, options=words(input_act=input_act, stochastic=seed > 0),
    )  # fmt: skip


def _rotate_fake(x, convrot_groupsize=0, input_act="none", input_act_weight=None, input_act_eps=0.0, seed=0):
    width = x.shape[-1] // 2 if input_act in ("swiglu", "situ") else x.shape[-1]
    codes = x.new_empty((*x.shape[:-1], width), dtype=torch.int8)
    return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _convrot_weight_problem(weight, convrot_groupsize=256, seed=0):
    check_float("weight", weight)
    check_seed(seed)
    if weight.dim() != 2:
        raise UnsupportedError(f"weight must be [N, K], got shape {list(weight.shape)}; flatten leading dims first")
    check_rotation_group(convrot_groupsize, weight.shape[1])
    return Problem(
        "quantize_int8_convrot_weight", weight.device, weight.dtype, torch.int8, weight.shape[0], 0, weight.shape[1],
        rotation=convrot_groupsize, options=words(stochastic=seed > 0),
    )  # fmt: skip


def _convrot_weight_fake(weight, convrot_groupsize=256, seed=0):
    return _rowwise_fake(weight)


# ---------------------------------------------------------------------------------------------- dequantizers


def _dequantize_problem(codes, scale, out_dtype=None, convrot_groupsize=0):
    check_dtype("codes", codes, torch.int8)
    check_dtype("scale", scale, torch.float32)
    check_same_device(codes, scale=scale)
    if codes.dim() == 0:
        raise UnsupportedError("codes must have at least one dim, [..., K], got a 0-dim tensor")
    check_vector("scale", scale, rows(codes), "rows", scalar=True)
    check_rotation_group(convrot_groupsize, codes.shape[-1])
    out = out_dtype or torch.float32
    return Problem(
        "dequantize_int8", codes.device, codes.dtype, out, rows(codes), 0, codes.shape[-1], rotation=convrot_groupsize
    )


def _dequantize_fake(codes, scale, out_dtype=None, convrot_groupsize=0):
    return codes.new_empty(codes.shape, dtype=out_dtype or torch.float32)


def _embedding_problem(codes, scale, indices, out_dtype=None, convrot_groupsize=0):
    problem = _dequantize_problem(codes, scale, out_dtype, convrot_groupsize)
    if codes.dim() != 2:
        raise UnsupportedError(f"codes must be [V, K], got shape {list(codes.shape)}")
    if indices.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"indices must be int64 or int32, got {indices.dtype}")
    check_same_device(codes, indices=indices)
    return problem._replace(op="dequantize_int8_embedding", M=indices.numel(), N=codes.shape[0])


def _embedding_fake(codes, scale, indices, out_dtype=None, convrot_groupsize=0):
    return codes.new_empty((*indices.shape, codes.shape[1]), dtype=out_dtype or torch.float32)


# ---------------------------------------------------------------------------------------------- declarations

define(
    "quantize_int8_tensorwise(Tensor x, Tensor? scale=None, int seed=0) -> (Tensor, Tensor)",
    problem=_tensorwise_problem, fake=_tensorwise_fake, reference=reference.quantize_int8_tensorwise,
)  # fmt: skip
define(
    "quantize_int8_rowwise(Tensor x, int seed=0) -> (Tensor, Tensor)",
    problem=_rowwise_problem, fake=_rowwise_fake, reference=reference.quantize_int8_rowwise,
)  # fmt: skip
define(
    f"quantize_and_rotate_rowwise(Tensor x, int convrot_groupsize=0, {ACTIVATION_SCHEMA}, int seed=0) -> (Tensor, Tensor)",
    problem=_rotate_problem, fake=_rotate_fake, reference=reference.quantize_and_rotate_rowwise,
    sizes=check_rotation,
)  # fmt: skip
define(
    "quantize_int8_convrot_weight(Tensor weight, int convrot_groupsize=256, int seed=0) -> (Tensor, Tensor)",
    problem=_convrot_weight_problem, fake=_convrot_weight_fake, reference=reference.quantize_int8_convrot_weight,
    sizes=check_rotation,
)  # fmt: skip
define(
    "dequantize_int8(Tensor codes, Tensor scale, ScalarType? out_dtype=None, int convrot_groupsize=0) -> Tensor",
    problem=_dequantize_problem, fake=_dequantize_fake, reference=reference.dequantize_int8,
    sizes=check_rotation,
)  # fmt: skip
define(
    "dequantize_int8_embedding(Tensor codes, Tensor scale, Tensor indices, ScalarType? out_dtype=None, "
    "int convrot_groupsize=0) -> Tensor",
    problem=_embedding_problem, fake=_embedding_fake, reference=reference.dequantize_int8_embedding,
    sizes=check_rotation,
)  # fmt: skip
# ------------------------------------------------------------------------------------------- public functions


def quantize_int8_tensorwise(
    x: torch.Tensor, scale: torch.Tensor | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor to INT8 with one scale.

    Shapes: x [...]; scale [] or None.
    Dtypes and units: x float32, float16 or bfloat16; scale float32, multiply to dequantize.
    Layout: any strides; codes are contiguous.
    Returns: int8 codes of x's shape, and the float32 scale, max(absmax / 127, 1e-30) where none was given. ``seed`` > 0
        rounds stochastically (the same bits on every device), else ties go to even.
    Raises: UnsupportedError for another dtype or a scale of more than one element.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(torch.ops.kitchen.quantize_int8_tensorwise.default, x, scale, seed)


def quantize_int8_rowwise(x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row (last dim) to INT8 with its own scale.

    Shapes: x [..., K].
    Dtypes and units: x float32, float16 or bfloat16; scales float32, per row, multiply to dequantize.
    Layout: any strides; outputs are contiguous.
    Returns: int8 codes [..., K] and float32 scales [..., 1]. A row with an inf or a NaN gets scale NaN and codes 0.
    Raises: UnsupportedError for another dtype or a 0-dim tensor.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(torch.ops.kitchen.quantize_int8_rowwise.default, x, seed)


def quantize_and_rotate_rowwise(
    x: torch.Tensor,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply an activation, rotate (ConvRot) and quantize each row to INT8, all in fp32 with one rounding to codes.

    Shapes: x [..., K], or [..., 2K] for swiglu and situ; input_act_weight [K] for rms_norm.
    Dtypes and units: x float32, float16 or bfloat16; scales float32, per row, multiply to dequantize.
    Layout: any strides; outputs are contiguous.
    Returns: int8 codes [..., K] and float32 scales [..., 1].
    Raises: UnsupportedError for an unknown activation, or a group that is no power of 4 or does not divide K.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md; activations: ``arithmetic.apply_input_act``.
    """
    return call(
        torch.ops.kitchen.quantize_and_rotate_rowwise.default,
        x,
        convrot_groupsize,
        input_act,
        input_act_weight,
        input_act_eps,
        seed,
    )


def quantize_int8_convrot_weight(
    weight: torch.Tensor, convrot_groupsize: int = 256, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate a weight along its in-features and quantize each row to INT8.

    Shapes: weight [N, K].
    Dtypes and units: weight float32, float16 or bfloat16; scales float32, per row, multiply to dequantize.
    Layout: any strides; outputs are contiguous.
    Returns: int8 codes [N, K] in the rotated basis and float32 scales [N, 1].
    Raises: UnsupportedError for a weight that is not 2-D or a group that does not divide K.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(torch.ops.kitchen.quantize_int8_convrot_weight.default, weight, convrot_groupsize, seed)


def dequantize_int8(
    codes: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype | None = None, convrot_groupsize: int = 0
) -> torch.Tensor:
    """codes * scale in fp32, un-rotated, rounded once.

    Shapes: codes [..., K]; scale one element or one per row.
    Dtypes and units: codes int8; scale float32.
    Layout: any strides.
    Returns: ``out_dtype`` (float32 where None), of the shape of codes.
    Raises: UnsupportedError for a scale of another length or dtype.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(torch.ops.kitchen.dequantize_int8.default, codes, scale, out_dtype, convrot_groupsize)


def dequantize_int8_embedding(
    codes: torch.Tensor,
    scale: torch.Tensor,
    indices: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    convrot_groupsize: int = 0,
) -> torch.Tensor:
    """Rows of a quantized embedding: gathered first, then dequantized.

    Shapes: codes [V, K]; scale one element or [V, 1]; indices [...].
    Dtypes and units: codes int8; scale float32; indices int64 or int32.
    Layout: any strides.
    Returns: ``out_dtype`` [..., K] (float32 where None). Negative indices count from the end.
    Raises: UnsupportedError for another dtype; an index out of range raises IndexError on the CPU, and gives a row of NaN in
        the CUDA kernel.
    Devices: any; CUDA kernel in kitchen-int8 from sm_75.
    Source: docs/formats/int8_tensorwise.md.
    """
    return call(
        torch.ops.kitchen.dequantize_int8_embedding.default, codes, scale, indices, out_dtype, convrot_groupsize
    )
