"""kitchen as a backend of comfy_kitchen's registry, so that ComfyUI and SGLang run their quantized layers through it.

One call, ``register()``, before a model runs; nothing else changes for the user, whose files and layout classes stay the
registry's own. ComfyUI: a custom node folder whose ``__init__.py`` calls it. SGLang: the entry point
``sglang.multimodal_gen.plugins`` of this package does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

import kitchen_core
from kitchen_core.errors import KitchenError, UnsupportedError
from kitchen_core.layouts.tile_packed import unpack_proj_up, unpack_scale, unpack_weight
from kitchen_core.plugins import plugins

BACKEND = "kitchen"
# What another library's registry calls from here, and what decides whether a GPU is served: the op whose kernel does the work.
DECIDING_OPS = {
    "int8_linear": "int8_scaled_mm",
    "quantize_int8_rowwise": "quantize_int8_rowwise",
    "quantize_int8_tensorwise": "quantize_int8_tensorwise",
    "quantize_int8_convrot_weight": "quantize_int8_convrot_weight",
    "dequantize_int8_simple_dtype": "dequantize_int8",
    "dequantize_int8_convrot_weight_dtype": "dequantize_int8",
    "dequantize_int8_embedding": "dequantize_int8_embedding",
    "w4a8_int8_linear": "w4a8_scaled_mm",
    "dequantize_w4a8_int8_weight": "dequantize_w4a8_weight",
    "quantize_svdquant_w4a4": "quantize_svdquant_w4a4",
    "scaled_mm_svdquant_w4a4": "scaled_mm_svdquant_w4a4",
    "gemv_awq_w4a16": "awq_linear",
}
FORMATS = {"int8": "int8_tensorwise", "w4a8": "asym_w4a8_int8", "svdquant": "svdquant_w4a4", "awq": "awq_w4a16"}
_CODED_DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}  # the registry's numbers for output dtypes
_DIRECT_CUDA = "COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA"


def register(*, first: bool = True, svdquant: bool = True) -> list[str]:
    """Makes kitchen a backend of ``comfy_kitchen.registry`` and returns the functions it offers there, sorted.

    Only functions of installed format packages are offered, and a call with GPU tensors is taken only if a kernel of ours runs
    it there, so that a slower path never displaces the registry's own. Calling again replaces the earlier registration.

    Args:
        first: ask kitchen before every other backend; else it is asked last.
        svdquant: SVDQuant layers ask the registry too (they go around it by default): sets the environment variable
            COMFY_KITCHEN_SVDQUANT_DIRECT_CUDA=0 unless it is set.

    Raises:
        UnsupportedError: comfy_kitchen is not installed, or no format package is.
    """
    try:
        from comfy_kitchen.registry import registry
    except ImportError as error:
        raise UnsupportedError(
            f"comfy_kitchen cannot be imported ({error}); install comfy-kitchen, or run this where ComfyUI runs"
        ) from error
    offered = _offered()
    if not offered:
        raise UnsupportedError(
            "no format package of kitchen is installed; install kitchen-int8, -w4a8, -awq or -svdquant"
        )
    registry.register(BACKEND, SimpleNamespace(**offered), {name: _constraints(name) for name in offered})
    others = [name for name in registry._priority if name != BACKEND]  # the registry has no getter for it
    registry.set_priority([BACKEND, *others] if first else [*others, BACKEND])
    if svdquant and "scaled_mm_svdquant_w4a4" in offered:
        os.environ.setdefault(_DIRECT_CUDA, "0")
    return sorted(offered)


def _offered() -> dict[str, Callable]:
    installed = {short for short, name in FORMATS.items() if name in plugins("kitchen.formats")}
    return {name: function for short in sorted(installed) for name, function in _FUNCTIONS[short].items()}


def _constraints(name: str) -> Any:
    from comfy_kitchen.constraints import FunctionConstraints

    return FunctionConstraints(default_devices=frozenset({"cuda", "cpu"}), call_rules=(_rule(name),))


def _rule(name: str) -> Callable[[Mapping[str, object]], Any]:
    """A call rule of the registry: None of ours where the storage is foreign or a GPU would take a slow path."""
    from comfy_kitchen.constraints import ValidationResult

    def rule(arguments: Mapping[str, object]) -> ValidationResult:
        reason = why_not(name, arguments)
        return ValidationResult.ok() if reason is None else ValidationResult.fail("kitchen", reason)

    return rule


def why_not(name: str, arguments: Mapping[str, object]) -> str | None:
    """Why kitchen does not take a call of the registry's function ``name``, in words, or None where it does."""
    if torch.compiler.is_compiling():  # tracing: shapes may be symbols, and the op itself checks them
        tensor = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
        return None if tensor is None else _why_not_device(DECIDING_OPS[name], tensor.device)
    key = (name, *((k, _signature(value)) for k, value in arguments.items()))
    if key not in _answers:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = _ask(name, arguments)
    return _answers[key]


_answers: dict[tuple, str | None] = {}
_MOST_ANSWERS = 4096


def _signature(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else value


def _ask(name: str, arguments: Mapping[str, object]) -> str | None:
    scale = arguments.get("scale")
    if name == "quantize_int8_tensorwise" and isinstance(scale, str) and scale != "recalculate":
        return f"scale must be a number, a tensor, None or 'recalculate', got {scale!r}"
    weight = next((arguments[k] for k in ("weight", "qdata", "qweight") if arguments.get(k) is not None), None)
    if isinstance(weight, torch.Tensor) and weight.dim() != 2:
        return f"the weight is {weight.dim()}-dimensional: a packed storage that only its own backend reads"
    function = next(functions[name] for functions in _FUNCTIONS.values() if name in functions)
    try:
        return function.func(_Questions(), **arguments)
    except (KitchenError, TypeError) as error:
        return str(error)


class _Questions:
    """Stands for kitchen_core: each op answers why it would not run a call well, or None."""

    def __getattr__(self, op: str) -> Callable[..., str | None]:
        return partial(_reason, op)


def _reason(op: str, *arguments: Any) -> str | None:
    """Why a call of an op is refused, or would take a slow path on a GPU. Arguments that the op refuses raise."""
    explanation = kitchen_core.explain(op, *arguments)
    if explanation.facts.kind != "cuda":
        return None
    if explanation.chosen is not None and explanation.chosen.calls:  # a composition ends with its GEMM
        return _why_not_device(explanation.chosen.calls[-1], explanation.problem.device)
    return _slow(explanation, op, explanation.problem.device)


@cache
def _why_not_device(op: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    explanation = kitchen_core.explain(op, M=64, N=3072, K=3072, group=64, bits=4, dtype=torch.bfloat16, device=device)
    return _slow(explanation, op, device)


def _slow(explanation: Any, op: str, device: torch.device) -> str | None:
    if explanation.chosen is None or explanation.chosen.provider == "core":
        return f"no CUDA kernel of kitchen for {op} on {device}: see kitchen_core.explain({op!r}, ...)"
    return None


# ------------------------------------------------------------------------------------------------ functions of the registry
# Named, and their arguments named, as the registry's callers name them; they may pass arguments by position too. ``ops`` is
# kitchen_core, or what asks in its place whether a call could run.


def _int8_linear(
    ops, x, weight, weight_scale, bias=None, out_dtype=None, convrot=False, convrot_groupsize=256,
    input_act=None, input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    return ops.int8_linear(
        x, weight, _fp32(weight_scale), bias, out_dtype, convrot_groupsize if convrot else 0, input_act or "none",
        input_act_weight, input_act_eps, residual, residual_scale,
    )  # fmt: skip


def _quantize_int8_rowwise(ops, x, stochastic_rounding=0):
    return ops.quantize_int8_rowwise(x, _seed(stochastic_rounding))


def _quantize_int8_tensorwise(ops, x, scale=None, stochastic_rounding=0):
    if isinstance(scale, str):  # "recalculate"
        scale = None
    elif isinstance(scale, (int, float)):
        scale = torch.tensor(scale, dtype=torch.float32, device=x.device)
    elif scale is not None:
        scale = scale.to(x.device, torch.float32)
    return ops.quantize_int8_tensorwise(x, scale, _seed(stochastic_rounding))


def _quantize_int8_convrot_weight(ops, weight, group_size=256, stochastic_rounding=0):
    return ops.quantize_int8_convrot_weight(weight, group_size, _seed(stochastic_rounding))


def _dequantize_int8_simple_dtype(ops, q, scale, output_dtype_code):
    return ops.dequantize_int8(q, _fp32(scale), _dtype(output_dtype_code))


def _dequantize_int8_convrot_weight_dtype(ops, q, scale, group_size, output_dtype_code):
    return ops.dequantize_int8(q, _fp32(scale), _dtype(output_dtype_code), group_size)


def _dequantize_int8_embedding(ops, q, scale, indices, group_size, output_dtype_code):
    return ops.dequantize_int8_embedding(q, _fp32(scale), indices, _dtype(output_dtype_code), max(group_size, 0))


def _w4a8_int8_linear(
    ops, x, qdata, s_rel, s_channel, codebook=None, correction=None, bias=None, group_size=16, convrot_groupsize=256,
    out_dtype=torch.bfloat16, input_act=None, input_act_weight=None, input_act_eps=0.0, residual=None, residual_scale=None,
):  # fmt: skip
    return ops.w4a8_linear(
        x, qdata, s_rel, s_channel, codebook, correction, bias, out_dtype, group_size, convrot_groupsize,
        input_act or "none", input_act_weight, input_act_eps, residual, residual_scale,
    )  # fmt: skip


def _dequantize_w4a8_int8_weight(
    ops, qdata, s_rel, s_channel, codebook=None, correction=None, group_size=16, convrot_groupsize=256,
    output_dtype=torch.bfloat16,
):  # fmt: skip
    return ops.dequantize_w4a8_weight(
        qdata, s_rel, s_channel, codebook, correction, output_dtype, group_size, convrot_groupsize
    )


def _quantize_svdquant_w4a4(ops, x, smooth, lora_down, pad_size=0, act_unsigned=False, lora_x=None):
    # pad_size: rows of padding that other backends add and their callers cut off; ours need none
    return ops.quantize_svdquant_w4a4(x, smooth, lora_down, act_unsigned, lora_x)


def _scaled_mm_svdquant_w4a4(ops, act, wgt, ascales, wscales, lora_act_in, lora_up, bias=None, act_unsigned=False):
    if wgt.dim() == 4:  # a storage of this registry's CUDA backend, whose quantizer writes other scales than ours
        wgt, wscales, lora_up = unpack_weight(wgt), unpack_scale(wscales), unpack_proj_up(lora_up)
    return ops.scaled_mm_svdquant_w4a4(
        act, wgt, ascales.float(), wscales, lora_act_in.float(), lora_up, bias, act_unsigned, wscales.dtype
    )


def _gemv_awq_w4a16(ops, x, qweight, wscales, wzeros, bias=None, group_size=64):
    return ops.awq_linear(x, qweight, wscales, wzeros, bias, group_size, wscales.dtype)


def _seed(stochastic_rounding: int | None) -> int:
    return max(stochastic_rounding or 0, 0)


def _fp32(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.dtype == torch.float32 else scale.float()


def _dtype(code: int) -> torch.dtype:
    if code not in _CODED_DTYPES:
        raise UnsupportedError(f"output_dtype_code must be one of {sorted(_CODED_DTYPES)}, got {code}")
    return _CODED_DTYPES[code]


_FUNCTIONS: dict[str, dict[str, Callable]] = {
    "int8": {
        "int8_linear": partial(_int8_linear, kitchen_core),
        "quantize_int8_rowwise": partial(_quantize_int8_rowwise, kitchen_core),
        "quantize_int8_tensorwise": partial(_quantize_int8_tensorwise, kitchen_core),
        "quantize_int8_convrot_weight": partial(_quantize_int8_convrot_weight, kitchen_core),
        "dequantize_int8_simple_dtype": partial(_dequantize_int8_simple_dtype, kitchen_core),
        "dequantize_int8_convrot_weight_dtype": partial(_dequantize_int8_convrot_weight_dtype, kitchen_core),
        "dequantize_int8_embedding": partial(_dequantize_int8_embedding, kitchen_core),
    },
    "w4a8": {
        "w4a8_int8_linear": partial(_w4a8_int8_linear, kitchen_core),
        "dequantize_w4a8_int8_weight": partial(_dequantize_w4a8_int8_weight, kitchen_core),
    },
    "svdquant": {
        "quantize_svdquant_w4a4": partial(_quantize_svdquant_w4a4, kitchen_core),
        "scaled_mm_svdquant_w4a4": partial(_scaled_mm_svdquant_w4a4, kitchen_core),
    },
    "awq": {"gemv_awq_w4a16": partial(_gemv_awq_w4a16, kitchen_core)},
}
