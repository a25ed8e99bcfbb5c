"""The ``awq_w4a16`` format: 4-bit weights with a float scale and a float zero per group, float activations."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kitchen_core import ops
from kitchen_core.activation import QuantizedActivation
from kitchen_core.arithmetic import apply_input_act
from kitchen_core.calibration import check_calibration
from kitchen_core.devices import DeviceFacts
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import Format, Tensors, TensorSpec, check_float_weight
from kitchen_core.ops._check import part_numbers

from . import resident, resident_ops
from ._extension import EXTENSION
from .calibrated import quantize_awq_calibrated
from .quantizer import quantize_awq

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AWQConfig:
    """``group_size``: columns that share a scale and a zero; in_features itself means one of each a row."""

    group_size: int = 64


class AWQFormat(Format):
    """W4A16: ``qdata`` int8 [N, K/2], codes 0..15; ``scale`` and ``zeros`` [K/g, N]. docs/formats/awq_w4a16.md

    W = (q - 8) * scale + zero, decoded to x's dtype. Codes in the resident layout (``resident``) are uint8 [N, K/256, 128];
    whatever has no kernel for them works on what is stored.
    """

    name = "awq_w4a16"
    package = "kitchen-awq"
    Config = AWQConfig
    tensors = (
        TensorSpec("qdata", "weight"),
        TensorSpec("scale", "weight_scale"),
        TensorSpec("zeros", "weight_zeros", aliases=("weight_zero",)),
    )
    activation_kind = "float"
    uses_calibration = True
    takes_part = True
    resident_tensors = ("qdata",)

    @classmethod
    def config_for(cls, out_features: int, in_features: int, *, group_size: int = 64) -> AWQConfig:
        """``group_size`` -1 means one group a row. A group that does not divide K is refused, never replaced: other
        tools would read the layer with the group that was asked for.
        """
        shape = f"a layer [{out_features}, {in_features}]"
        if in_features < 2 or in_features % 2:
            raise UnsupportedError(
                f"awq_w4a16 cannot hold {shape}: K={in_features} must be even, two codes fill a byte"
            )
        group = in_features if group_size == -1 else group_size
        if group < 1 or in_features % group:
            fitting = "".join(f"{g}, " for g in (128, 64, 32, 16, 8) if in_features % g == 0).removesuffix(", ")
            raise UnsupportedError(
                f"awq_w4a16 cannot hold {shape} in groups of {group_size}: the group must divide K={in_features}; "
                f"use group_size {f'{fitting} or ' if fitting else ''}-1, which is one group a row, for this layer"
            )
        return AWQConfig(group)

    @classmethod
    def quantize(cls, weight: torch.Tensor, config: AWQConfig, seed: int = 0, calibration: Any = None) -> Tensors:
        """``calibration``: a Calibration; scales, zeros and codes are then chosen for the layer's outputs on such inputs."""
        check_float_weight(weight)
        if calibration is None or weight.is_meta:
            codes, scale, zeros = quantize_awq(weight, config.group_size, seed)
        else:
            check_calibration(calibration, weight.shape[1], seed)
            codes, scale, zeros = quantize_awq_calibrated(weight, config.group_size, calibration)
        return {"qdata": codes, "scale": scale, "zeros": zeros}

    @classmethod
    def requantize(cls, tensors: Tensors, config: AWQConfig, weight: torch.Tensor, seed: int = 0) -> Tensors:
        """As every format, in the layout of the codes."""
        made = cls.quantize(weight, config, seed=seed)
        return cls.lay_resident(made, config) if cls.is_resident(tensors) else made

    @classmethod
    def is_resident(cls, tensors: Tensors) -> bool:
        """As every format: codes in the resident layout are uint8 [N, K/256, 128]."""
        return resident.is_resident(tensors.get("qdata"))

    @classmethod
    def why_not_resident(cls, tensors: Tensors, config: AWQConfig, facts: DeviceFacts | None) -> str | None:
        """As every format."""
        (n, k), scale, zero = cls.shape(tensors, config), tensors["scale"].dtype, tensors["zeros"].dtype
        if n % 8 or k % resident.COLUMNS:
            return f"the layout needs N a multiple of 8 and K of {resident.COLUMNS}, the weight is [{n}, {k}]"
        reason = resident.group_reason(config.group_size)
        if reason is not None:
            return reason
        if scale == torch.float32 or scale != zero:
            return (
                f"its kernel takes scales and zeros of x's type, bfloat16 or float16, the weight has {scale} and {zero}"
            )
        return EXTENSION.why_not_path(facts, "sm90") if facts is not None else None

    @classmethod
    def lay_resident(cls, tensors: Tensors, config: AWQConfig, storage: torch.Tensor | None = None) -> Tensors:
        """As every format; scales and zeros stay as they are."""
        cls.check_names(tensors)
        return {**tensors, "qdata": resident.pack(tensors["qdata"], storage)}

    @classmethod
    def stored(cls, tensors: Tensors, config: AWQConfig) -> Tensors:
        """As every format: resident codes are put back into new memory, which the weight does not see."""
        return {**tensors, "qdata": resident_ops.unpack(tensors["qdata"])} if cls.is_resident(tensors) else tensors

    @classmethod
    def dequantize(cls, tensors: Tensors, config: AWQConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensors = cls.stored(tensors, config)
        return ops.dequantize_awq(tensors["qdata"], tensors["scale"], tensors["zeros"], config.group_size, dtype)

    @classmethod
    def linear(
        cls, x, tensors, config, bias=None, out_dtype=None, input_act="none", input_act_weight=None, input_act_eps=0.0,
        residual=None, residual_scale=None, part=None,
    ):  # fmt: skip
        return cls._op(tensors)(
            x, tensors["qdata"], tensors["scale"], tensors["zeros"], bias, config.group_size, out_dtype, input_act,
            input_act_weight, input_act_eps, residual, residual_scale, None, *cls._part(tensors, part),
        )  # fmt: skip

    @classmethod
    def _op(cls, tensors: Tensors):
        """The linear op for the layout of the codes."""
        return resident_ops.linear if cls.is_resident(tensors) else ops.awq_linear

    @classmethod
    def _part(cls, tensors: Tensors, part: Any) -> tuple[int | None, ...]:
        """The last arguments of that op, which takes none where codes are in the resident layout."""
        if part is None:
            return ()
        if cls.is_resident(tensors):
            raise UnsupportedError(
                f"{cls.name}: a weight in the resident layout is a whole one, got part={part!r}; give what is stored: "
                "format.stored(tensors, config)"
            )
        return part_numbers(part)

    @classmethod
    def quantize_activation(
        cls, x: torch.Tensor, tensors: Tensors, config: AWQConfig, input_act="none", input_act_weight=None,
        input_act_eps=0.0,
    ) -> QuantizedActivation:  # fmt: skip
        """Nothing is quantized: x is carried, after its activation in fp32 where there is one."""
        h = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
        return QuantizedActivation(cls.activation_kind, (), tuple(h.shape), x.dtype, {"x": h})

    @classmethod
    def linear_quantized(
        cls, activation, tensors, config, bias=None, out_dtype=None, residual=None, residual_scale=None, part=None
    ):
        # weight_dtype: x may have become fp32 in its activation, the weight decodes to the original dtype all the same
        return cls._op(tensors)(
            activation.tensors["x"], tensors["qdata"], tensors["scale"], tensors["zeros"], bias, config.group_size,
            out_dtype or activation.dtype, "none", None, 0.0, residual, residual_scale, activation.dtype,
            *cls._part(tensors, part),
        )  # fmt: skip

    @classmethod
    def shape(cls, tensors: Tensors, config: AWQConfig) -> tuple[int, int]:
        n, *bytes_of_a_row = tensors["qdata"].shape
        return n, 2 * prod(bytes_of_a_row)

    @classmethod
    def check(cls, tensors: Tensors, config: AWQConfig) -> None:
        codes = tensors["qdata"]
        if codes.dtype != torch.int8 or codes.dim() != 2:
            raise FormatError(f"{cls.name}: weight must be int8 [N, K/2], got {codes.dtype} {list(codes.shape)}")
        n, k = cls.shape(tensors, config)
        if config.group_size < 1 or k % config.group_size:
            raise FormatError(f"{cls.name}: group_size {config.group_size} does not divide K={k} of the weight")
        for key, tensor in (("weight_scale", tensors["scale"]), ("weight_zeros", tensors["zeros"])):
            if tensor.dtype not in FLOATS or tuple(tensor.shape) != (k // config.group_size, n):
                raise FormatError(
                    f"{cls.name}: {key} must be float32, float16 or bfloat16 [K/g, N] = "
                    f"{[k // config.group_size, n]}, got {tensor.dtype} {list(tensor.shape)}"
                )

    @classmethod
    def marker(cls, config: AWQConfig) -> dict[str, Any]:
        return {"format": cls.name, "group_size": config.group_size}

    @classmethod
    def config_from_marker(cls, marker: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> AWQConfig:
        """The group is that of the shapes; a marker that says another (-1 meaning K) is refused, one that is silent is not."""
        k, groups = 2 * shapes["qdata"][-1], shapes["scale"][0]
        if groups == 0 or k % groups:
            raise FormatError(f"{cls.name}: weight_scale has {groups} groups, which do not divide K={k} of the weight")
        said = marker.get("group_size", k // groups)
        if type(said) is not int or (k if said == -1 else said) != k // groups:
            raise FormatError(
                f"{cls.name}: the marker says group_size {said!r}, the shapes say {k // groups} "
                f"(K={k} in {groups} groups); the file's marker does not fit its weight"
            )
        return AWQConfig(k // groups)
