"""What formats share whose x is quantized to INT8 by rows, in the basis of a ConvRot group: the quantized x itself."""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .activation import QuantizedActivation
from .formats import Format, Tensors


class Int8RowwiseFormat(Format):
    """Base of such formats: one quantized x serves weights of all of them whose ``config.convrot_groupsize`` is the same."""

    activation_kind = "int8 rowwise"

    @classmethod
    def quantize_activation(
        cls, x: torch.Tensor, tensors: Tensors, config: Any, **input_act: Any
    ) -> QuantizedActivation:
        """As every format."""
        codes, scale = ops.quantize_and_rotate_rowwise(x, config.convrot_groupsize, **input_act)
        traits = cls.activation_traits(tensors, config)
        inner = {"codes": codes, "scale": scale}
        return QuantizedActivation(cls.activation_kind, traits, tuple(codes.shape), x.dtype, inner)

    @classmethod
    def activation_traits(cls, tensors: Tensors, config: Any) -> tuple[tuple[str, object], ...]:
        """As every format."""
        return (("convrot_groupsize", config.convrot_groupsize),)
