"""A quantized activation: x is quantized once and used for several weights (q, k and v; gate and up)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import UnsupportedError


@dataclass(frozen=True)
class QuantizedActivation:
    """x after its activation, rotation and quantization, and what a weight must have in common with it.

    ``kind`` names the scheme ("int8 rowwise", "svdquant", "float"); ``traits`` the properties that a weight must share,
    such as (("convrot_groupsize", 256),); ``shape`` is the logical [..., K]; ``dtype`` the dtype of the original x.
    """

    kind: str
    traits: tuple[tuple[str, object], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        """The device on which x was quantized."""
        return next(iter(self.tensors.values())).device

    def check_fits(
        self,
        kind: str,
        traits: tuple[tuple[str, object], ...],
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises UnsupportedError, naming the property, unless a weight of these properties can take this activation."""
        mine = (("scheme", self.kind), *self.traits, ("in_features", self.shape[-1]))
        theirs = (("scheme", kind), *traits, ("in_features", in_features))
        for (name, have), (_, want) in zip(
            (*mine, ("dtype", self.dtype), ("device", self.device)),
            (*theirs, ("dtype", dtype), ("device", device)),
            strict=False,
        ):
            if have != want:
                raise UnsupportedError(
                    f"a quantized activation cannot be shared with this weight: {name} is {have} in the activation and "
                    f"{want} in the weight; quantize x again for this weight"
                )


def cast_for_autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that autocast would give to a dense linear; x itself outside of autocast."""
    if not torch._C._is_any_autocast_enabled():  # one cheap question in the common case
        return x
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
