"""The ``int8_tensorwise`` format: INT8 codes, one fp32 scale per row or for all, optionally rotated by ConvRot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kitchen_core import ops
from kitchen_core.arithmetic import rotation_group
from kitchen_core.errors import FormatError
from kitchen_core.formats import Tensors, TensorSpec, check_convrot, check_float_weight, convrot_group
from kitchen_core.int8_rowwise import Int8RowwiseFormat


@dataclass(frozen=True)
class Int8Config:
    """``convrot_groupsize``: the ConvRot group of this weight, 0 where it is not rotated."""

    convrot_groupsize: int = 0


class Int8Format(Int8RowwiseFormat):
    """W8A8: ``qdata`` int8 [N, K]; ``scale`` fp32 [N, 1] (or one element). docs/formats/int8_tensorwise.md"""

    name = "int8_tensorwise"
    package = "kitchen-int8"
    Config = Int8Config
    tensors = (TensorSpec("qdata", "weight"), TensorSpec("scale", "weight_scale"))

    @classmethod
    def config_for(cls, out_features: int, in_features: int, *, convrot_groupsize: int = 256) -> Int8Config:
        return Int8Config(rotation_group(in_features, convrot_groupsize))

    @classmethod
    def quantize(cls, weight: torch.Tensor, config: Int8Config, seed: int = 0, calibration: Any = None) -> Tensors:
        check_float_weight(weight)
        codes, scale = ops.quantize_int8_convrot_weight(weight, config.convrot_groupsize, seed)
        return {"qdata": codes, "scale": scale}

    @classmethod
    def dequantize(cls, tensors: Tensors, config: Int8Config, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return ops.dequantize_int8(tensors["qdata"], tensors["scale"], dtype, config.convrot_groupsize)

    @classmethod
    def linear(
        cls, x, tensors, config, bias=None, out_dtype=None, input_act="none", input_act_weight=None, input_act_eps=0.0,
        residual=None, residual_scale=None,
    ):  # fmt: skip
        return ops.int8_linear(
            x, tensors["qdata"], tensors["scale"], bias, out_dtype, config.convrot_groupsize, input_act,
            input_act_weight, input_act_eps, residual, residual_scale,
        )  # fmt: skip

    @classmethod
    def linear_quantized(
        cls, activation, tensors, config, bias=None, out_dtype=None, residual=None, residual_scale=None
    ):
        return ops.int8_scaled_mm(
            activation.tensors["codes"], activation.tensors["scale"], tensors["qdata"], tensors["scale"], bias,
            out_dtype or activation.dtype, residual, residual_scale,
        )  # fmt: skip

    @classmethod
    def shape(cls, tensors: Tensors, config: Int8Config) -> tuple[int, int]:
        return tuple(tensors["qdata"].shape)

    @classmethod
    def check(cls, tensors: Tensors, config: Int8Config) -> None:
        codes, scale = tensors["qdata"], tensors["scale"]
        if codes.dtype != torch.int8 or codes.dim() != 2:
            raise FormatError(f"int8_tensorwise: weight must be int8 [N, K], got {codes.dtype} {list(codes.shape)}")
        if scale.dtype != torch.float32 or scale.numel() not in (1, codes.shape[0]):
            raise FormatError(
                f"int8_tensorwise: weight_scale must be float32 with 1 or N={codes.shape[0]} elements, "
                f"got {scale.dtype} {list(scale.shape)}"
            )
        check_convrot(cls.name, config.convrot_groupsize, codes.shape[1])

    @classmethod
    def marker(cls, config: Int8Config) -> dict[str, Any]:
        if not config.convrot_groupsize:
            return {"format": cls.name}
        return {"format": cls.name, "convrot": True, "convrot_groupsize": config.convrot_groupsize, "per_row": True}

    @classmethod
    def config_from_marker(cls, marker: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Int8Config:
        group = convrot_group(cls.name, marker, rotated_by_default=False)
        check_convrot(cls.name, group, shapes["qdata"][-1])
        return Int8Config(group)
