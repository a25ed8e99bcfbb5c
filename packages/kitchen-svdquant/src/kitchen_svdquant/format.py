"""The ``svdquant_w4a4`` format: 4-bit weights and activations per group of 64, and a low-rank branch in high precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kitchen_core import ops
from kitchen_core.activation import QuantizedActivation
from kitchen_core.arithmetic import apply_input_act
from kitchen_core.calibration import Calibration, check_calibration
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import Format, Tensors, TensorSpec, check_float_weight
from kitchen_core.layouts import tile_packed
from kitchen_core.ops._check import part_numbers
from kitchen_core.ops._forward_mode import aside
from kitchen_core.reference.svdquant import GROUP, UNSIGNED_SHIFT, low_rank_input, shift_contribution

from ._quantize import low_rank_product
from .calibrated import quantize_svdquant_calibrated
from .quantizer import quantize_svdquant

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NATURAL_DIMS = {"qdata": 2, "scale": 2, "proj_up": 2}
UNPACK_TILES = {
    "qdata": tile_packed.unpack_weight,
    "scale": tile_packed.unpack_scale,
    "proj_up": tile_packed.unpack_proj_up,
}


@dataclass(frozen=True)
class SVDQuantConfig:
    """``rank`` of the low-rank branch (0: none); ``act_unsigned``: the quantizer takes x + 0.171875 on the grid 0..15."""

    rank: int = 32
    act_unsigned: bool = False


class SmoothFactor:
    """A smooth factor as a trait of an activation: two are equal when their values are.

    Layers that share one tensor compare for free; on a GPU two tensors are compared there, and the host waits for it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SmoothFactor):
            return NotImplemented
        mine, theirs = self.tensor, other.tensor
        if mine is theirs or mine.shape != theirs.shape or mine.device != theirs.device:
            return True  # another length or device is told under its own name: in_features, device
        return bool(torch.equal(mine.float(), theirs.float()))

    __hash__ = None  # values are compared, and they are not read for a hash

    def __repr__(self) -> str:
        head = ", ".join(f"{v:.4g}" for v in self.tensor.flatten()[:3].tolist())
        return f"[{head}, ...] of {self.tensor.numel()} elements"


class SVDQuantFormat(Format):
    """W4A4 with a low-rank branch. docs/formats/svdquant_w4a4.md

    ``qdata`` int8 [N, K/2], signed nibbles; ``scale`` [K/64, N]; ``proj_down`` [K, R]; ``proj_up`` [N, R];
    ``smooth_factor`` [K]: y = Q(x / smooth) @ (Wq * scale).T + (x @ proj_down) @ proj_up.T + bias.
    """

    name = "svdquant_w4a4"
    package = "kitchen-svdquant"
    Config = SVDQuantConfig
    tensors = (
        TensorSpec("qdata", "weight"),
        TensorSpec("scale", "weight_scale"),
        TensorSpec("proj_down", "proj_down", aliases=("weight_proj_down",)),
        TensorSpec("proj_up", "proj_up", aliases=("weight_proj_up",)),
        TensorSpec("smooth_factor", "smooth_factor", aliases=("weight_smooth_factor",)),
    )
    activation_kind = "svdquant"
    uses_calibration = True
    takes_part = True

    @classmethod
    def config_for(
        cls, out_features: int, in_features: int, *, rank: int = 32, act_unsigned: bool = False
    ) -> SVDQuantConfig:
        """The rank is cut to that of a small layer, min(N, K). A K that 64 does not divide is refused: the group is fixed.

        ``act_unsigned`` is refused here, since the layer's bias must then hold the correction for the shift: make
        SVDQuantConfig(act_unsigned=True) by hand and give the layer ``SVDQuantFormat.compensated_bias``.
        """
        shape = f"a layer [{out_features}, {in_features}]"
        if in_features == 0 or in_features % GROUP:
            raise UnsupportedError(
                f"svdquant_w4a4 cannot hold {shape}: it quantizes groups of {GROUP} columns, and K={in_features} is no "
                f"multiple of {GROUP}; use awq_w4a16 or int8_tensorwise for this layer"
            )
        if rank < 0:
            raise UnsupportedError(f"svdquant_w4a4: rank must be 0 (no low-rank branch) or more, got {rank}")
        if act_unsigned:
            raise UnsupportedError(
                f"svdquant_w4a4: {shape} cannot be made unsigned by option alone, its bias must hold the correction for "
                "the shift; quantize with SVDQuantConfig(rank, act_unsigned=True) and use SVDQuantFormat.compensated_bias"
            )
        return SVDQuantConfig(min(rank, out_features, in_features))

    @classmethod
    def quantize(
        cls,
        weight: torch.Tensor,
        config: SVDQuantConfig,
        seed: int = 0,
        calibration: Calibration | torch.Tensor | None = None,
        smooth: torch.Tensor | None = None,
    ) -> Tensors:
        """``calibration``: a Calibration, which fits branch and codes to the layer's outputs, or, for the choice of the
        smooth factor alone, activations [..., K] or their absmax per channel [K]. ``smooth`` [K]: a factor to keep, so
        that several layers can share one activation.
        """
        check_float_weight(weight)
        cls.config_for(*weight.shape, rank=config.rank)
        rank = min(config.rank, *weight.shape)
        if rank != config.rank:
            raise UnsupportedError(f"rank {config.rank} is more than a weight of shape {list(weight.shape)} has")
        if smooth is not None and tuple(smooth.shape) != (weight.shape[1],):
            raise UnsupportedError(f"smooth must have shape [K] = [{weight.shape[1]}], got {list(smooth.shape)}")
        if weight.is_meta:
            return _empty(weight, rank)
        if isinstance(calibration, Calibration):
            check_calibration(calibration, weight.shape[1], seed)
            return quantize_svdquant_calibrated(weight, rank, config.act_unsigned, calibration, smooth)._asdict()
        return quantize_svdquant(weight, rank, config.act_unsigned, seed, calibration, smooth)._asdict()

    @classmethod
    def requantize(cls, tensors: Tensors, config: SVDQuantConfig, weight: torch.Tensor, seed: int = 0) -> Tensors:
        """Another weight in the same config. Refused for unsigned layers: their bias is compensated for the old codes."""
        if config.act_unsigned:
            raise UnsupportedError(
                "an unsigned svdquant_w4a4 layer cannot be requantized in place: its bias compensates the activation shift "
                "for the stored codes. Quantize the new weight and set the bias to SVDQuantFormat.compensated_bias(...)"
            )
        return cls.quantize(weight, config, seed=seed)

    @classmethod
    def dequantize(cls, tensors: Tensors, config: SVDQuantConfig, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Without the shift of an unsigned layer: a dense linear needs ``dense_fallback_bias`` too."""
        return ops.dequantize_svdquant_w4a4(
            tensors["qdata"],
            tensors["scale"],
            tensors["smooth_factor"],
            tensors["proj_down"],
            tensors["proj_up"],
            dtype,
        )

    @classmethod
    def dense_fallback_bias(
        cls, tensors: Tensors, config: SVDQuantConfig, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The bias for a dense linear with ``dequantize``'s weight, in fp32 where it differs from the layer's own.

        An unsigned layer multiplies x + 0.171875, and its bias holds minus that contribution; the dense weight multiplies
        x itself, so 0.171875 * sum_k Wres[n, k] is added back. A signed layer's bias is returned as it is.
        """
        if not config.act_unsigned:
            return bias
        shift = shift_contribution(tensors["qdata"], tensors["scale"], tensors["smooth_factor"])
        return shift if bias is None else bias.float() + shift

    @classmethod
    def compensated_bias(
        cls, tensors: Tensors, config: SVDQuantConfig, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The bias that an unsigned layer must store, from the bias of the float layer: the inverse of the above."""
        if not config.act_unsigned:
            return bias
        shift = shift_contribution(tensors["qdata"], tensors["scale"], tensors["smooth_factor"])
        return -shift if bias is None else bias.float() - shift

    @classmethod
    def linear(
        cls, x, tensors, config, bias=None, out_dtype=None, input_act="none", input_act_weight=None, input_act_eps=0.0,
        residual=None, residual_scale=None, part=None,
    ):  # fmt: skip
        return ops.svdquant_linear(
            x, tensors["qdata"], tensors["scale"], tensors["smooth_factor"], tensors["proj_down"], tensors["proj_up"],
            bias, config.act_unsigned, out_dtype, input_act, input_act_weight, input_act_eps, residual, residual_scale,
            *part_numbers(part),
        )  # fmt: skip

    @classmethod
    def quantize_activation(
        cls, x: torch.Tensor, tensors: Tensors, config: SVDQuantConfig, input_act="none", input_act_weight=None,
        input_act_eps=0.0,
    ) -> QuantizedActivation:  # fmt: skip
        """Codes for every weight of equal smooth factor, and the raw x for each weight's own proj_down."""
        raw = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
        shifted = raw.float() + UNSIGNED_SHIFT if config.act_unsigned else raw
        no_branch = tensors["proj_down"][:, :0]  # rank 0: the branch is each weight's own
        codes, ascales, _ = ops.quantize_svdquant_w4a4(
            shifted, tensors["smooth_factor"], no_branch, config.act_unsigned
        )
        inner = {"codes": codes, "ascales": ascales, "x": raw}
        traits = cls.activation_traits(tensors, config)
        return QuantizedActivation(cls.activation_kind, traits, tuple(raw.shape), x.dtype, inner)

    @classmethod
    def linear_quantized(
        cls, activation, tensors, config, bias=None, out_dtype=None, residual=None, residual_scale=None, part=None
    ):
        n = tensors["qdata"].shape[0]
        x = activation.tensors["x"]
        lora_act = aside(_low_rank, x, tensors["proj_down"])
        y = ops.scaled_mm_svdquant_w4a4(
            activation.tensors["codes"], tensors["qdata"], activation.tensors["ascales"], tensors["scale"], lora_act,
            tensors["proj_up"], bias, config.act_unsigned, out_dtype or activation.dtype,
            None if residual is None else residual.reshape(-1, n), residual_scale, *part_numbers(part),
        )  # fmt: skip
        return y.reshape(*activation.shape[:-1], n)

    @classmethod
    def activation_traits(cls, tensors: Tensors, config: SVDQuantConfig) -> tuple[tuple[str, object], ...]:
        return (("act_unsigned", config.act_unsigned), ("smooth_factor", SmoothFactor(tensors["smooth_factor"])))

    @classmethod
    def shape(cls, tensors: Tensors, config: SVDQuantConfig) -> tuple[int, int]:
        return tensors["qdata"].shape[0], 2 * tensors["qdata"].shape[1]

    @classmethod
    def check(cls, tensors: Tensors, config: SVDQuantConfig) -> None:
        codes = tensors["qdata"]
        if codes.dtype != torch.int8 or codes.dim() != 2:
            tiled = "; from_state_dict unpacks tiles" if codes.dim() == 4 else ""
            raise FormatError(f"{cls.name}: weight must be int8 [N, K/2], got {codes.dtype} {list(codes.shape)}{tiled}")
        n, k = cls.shape(tensors, config)
        if k == 0 or k % GROUP:
            raise FormatError(f"{cls.name}: K={k} of the weight must be a multiple of {GROUP}")
        wanted = {
            "scale": ((k // GROUP, n), "[K/64, N]"),
            "proj_down": ((k, config.rank), "[K, R]"),
            "proj_up": ((n, config.rank), "[N, R]"),
            "smooth_factor": ((k,), "[K]"),
        }
        keys = {spec.name: spec.key for spec in cls.tensors}
        for name, (shape, meaning) in wanted.items():
            tensor = tensors[name]
            if tensor.dtype not in FLOATS or tuple(tensor.shape) != shape:
                raise FormatError(
                    f"{cls.name}: {keys[name]} must be float32, float16 or bfloat16 {meaning} = {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )

    @classmethod
    def marker(cls, config: SVDQuantConfig) -> dict[str, Any]:
        return {
            "format": cls.name,
            "act_unsigned": config.act_unsigned,
            "lowrank_branch_input_basis": "raw",
            "proj_down_smooth_folded": True,
        }

    @classmethod
    def config_from_marker(cls, marker: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> SVDQuantConfig:
        """The rank is that of proj_down. A marker that is silent about the low-rank branch means the raw x."""
        unsigned = marker.get("act_unsigned", False)
        if type(unsigned) is not bool:
            raise FormatError(f"{cls.name}: act_unsigned must be true or false, got {unsigned!r}")
        basis = marker.get("lowrank_branch_input_basis", "raw")
        if basis != "raw" or marker.get("proj_down_smooth_folded", True) is not True:
            raise FormatError(
                f"{cls.name}: the low-rank branch must take the raw x, with smooth folded into proj_down; the marker says "
                f"basis {basis!r}, folded {marker.get('proj_down_smooth_folded', True)!r}"
            )
        return SVDQuantConfig(shapes["proj_down"][-1], unsigned)

    @classmethod
    def from_state_dict(cls, state: Tensors, prefix: str = "") -> Tensors:
        """Tile-packed tensors are told by their rank, each by itself (files mix both forms), and unpacked."""
        found = super().from_state_dict(state, prefix)
        for name, unpack in UNPACK_TILES.items():
            if name in found and found[name].dim() == NATURAL_DIMS[name] + (2 if name == "qdata" else 1):
                found[name] = unpack(found[name])
        return found


def _low_rank(x: torch.Tensor, proj_down: torch.Tensor) -> torch.Tensor:
    """x @ proj_down, [M, R] in float32."""
    if x.is_cuda:
        return low_rank_product(x.reshape(-1, x.shape[-1]), proj_down)
    return low_rank_input(x, proj_down)


def _empty(weight: torch.Tensor, rank: int) -> Tensors:
    """What quantizing makes, without values: for planning on the meta device."""
    n, k = weight.shape
    return {
        "qdata": weight.new_empty(n, k // 2, dtype=torch.int8),
        "scale": weight.new_empty(k // GROUP, n),
        "proj_down": weight.new_empty(k, rank),
        "proj_up": weight.new_empty(n, rank),
        "smooth_factor": weight.new_empty(k),
    }
