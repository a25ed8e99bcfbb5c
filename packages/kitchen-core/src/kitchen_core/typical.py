"""One call per op that stands for its use in a model: what `kitchen doctor` asks for, and what `kitchen explain` assumes."""

from __future__ import annotations

from typing import Any

import torch

from .arithmetic import rotation_group

TYPICAL_M = (1, 4096)

_LAYER = {"N": 3072, "K": 3072}
_CODES = {"dtype": torch.int8, "out_dtype": torch.bfloat16}  # an op on codes: its float dtype is the output's
_QUANTIZER = {"N": 0, "K": 3072, "out_dtype": torch.int8}
_W4A8 = {"group": 16, "bits": 4, "options": ("codebook",)}
_SVDQUANT = {"group": 64, "bits": 4, "rank": 32, "options": ("scales=bfloat16",)}
_AWQ = {"group": 64, "bits": 4, "options": ("scales=bfloat16",)}

# By the fields of a Problem; where an op is not named, a plain layer. M is the caller's, save where it has no meaning.
_TYPICAL: dict[str, dict[str, Any]] = {
    "int8_linear": {**_LAYER, "rotation": 256},
    "int8_linear_fp16": {**_LAYER, "rotation": 256},
    "int8_swiglu_mlp": {**_LAYER, "group": 256, "rotation": 256},
    "int8_gate_up_mlp": {**_LAYER, "group": 256, "rotation": 256},
    "int8_scaled_mm": {**_LAYER, **_CODES},
    "quantize_and_rotate_rowwise": {**_QUANTIZER, "rotation": 256},
    "quantize_int8_rowwise": _QUANTIZER,
    "quantize_int8_tensorwise": _QUANTIZER,
    "quantize_int8_convrot_weight": {**_QUANTIZER, "rotation": 256},
    "dequantize_int8": {**_LAYER, **_CODES, "N": 0, "rotation": 256},
    "dequantize_int8_embedding": {**_LAYER, **_CODES, "rotation": 256},
    "w4a8_linear": {**_LAYER, **_W4A8, "rotation": 256},
    "w4a8_scaled_mm": {**_LAYER, **_CODES, **_W4A8},
    "quantize_w4a8_weight": {**_QUANTIZER, **_W4A8, "rotation": 256, "options": ("levels=codebook",)},
    "decode_w4a8_weight": {**_QUANTIZER, **_W4A8, "dtype": torch.int8},
    "dequantize_w4a8_weight": {**_LAYER, **_CODES, **_W4A8, "N": 0, "rotation": 256},
    "svdquant_linear": {**_LAYER, **_SVDQUANT},
    "scaled_mm_svdquant_w4a4": {**_LAYER, **_CODES, **_SVDQUANT},
    "quantize_svdquant_w4a4": {**_QUANTIZER, **_SVDQUANT, "options": ()},
    "awq_linear": {**_LAYER, **_AWQ},
    "dequantize_awq": {**_LAYER, **_CODES, **_AWQ, "M": 0},
}


def usual_rotation(op: str, in_features: int) -> int:
    """The ConvRot group that a layer of so many columns gets where nothing else is asked; 0 for an op that has none."""
    wanted = _TYPICAL.get(op, {}).get("rotation", 0)
    return rotation_group(in_features, wanted) if wanted and isinstance(in_features, int) and in_features > 0 else 0


def typical(op: str, M: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Fields of the Problem of a typical call of ``op`` with M rows; ``dtype`` is that of its float operands or output."""
    fields = {"M": M, "dtype": torch.bfloat16, **_TYPICAL.get(op, _LAYER)}
    fields.setdefault("out_dtype", fields["dtype"])
    if dtype is not None:
        floats = [name for name in ("dtype", "out_dtype") if fields[name].is_floating_point]
        fields.update(dict.fromkeys(floats, dtype))
    return fields
