"""The ``asym_w4a8_int8`` and ``w6a8_int8`` formats: 4-bit and 6-bit codes that decode onto the INT8 grid of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kitchen_core import ops
from kitchen_core.arithmetic import check_rotation_group, rotation_group
from kitchen_core.calibration import check_calibration
from kitchen_core.devices import DeviceFacts
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_core.formats import Tensors, TensorSpec, check_convrot, check_float_weight, convrot_group
from kitchen_core.int8_rowwise import Int8RowwiseFormat

from . import resident, resident_ops
from ._extension import EXTENSION
from .calibrated import calibrate_tensors

SCALE_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32}
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class W4A8Config:
    """``group_size`` weights share a scale; ``convrot_groupsize`` is the ConvRot group, 0 where not rotated.

    ``levels`` says what a code means: "codebook" (a stored table of 16), "uniform" (code - 8) or "asymmetric" (code - 8
    and a stored correction). ``scale_dtype``, "float8_e4m3fn" or "float32", is what quantizing stores; decoding goes
    by the tensor itself.
    """

    group_size: int = 16
    convrot_groupsize: int = 256
    levels: str = "codebook"
    scale_dtype: str = "float8_e4m3fn"


@dataclass(frozen=True)
class W6A8Config:
    """As W4A8Config; the levels of 6 bits are always code - 32."""

    group_size: int = 16
    convrot_groupsize: int = 256
    scale_dtype: str = "float8_e4m3fn"

    @property
    def levels(self) -> str:
        """Always "uniform"."""
        return "uniform"


class _Int8GridFormat(Int8RowwiseFormat):
    """What the two widths share. A weight in the resident layout holds its records (``resident``) as ``qdata``, uint8
    [N/16, K/256, bytes], and no ``s_rel``; whatever has no kernel for them works on what is stored.
    """

    package = "kitchen-w4a8"
    uses_calibration = True
    bits: ClassVar[int]
    resident_tensors = ("qdata", "s_rel")

    # ------------------------------------------------------------------------------------------------ quantizing

    @classmethod
    def config_for(
        cls, out_features: int, in_features: int, *, group_size: int = 16, convrot_groupsize: int = 256, **options: Any
    ) -> Any:
        """A group that does not fit K is refused, since the group is the quality that was asked for.

        The ConvRot group follows ``arithmetic.rotation_group``: the largest power of 4 from 16 to ``convrot_groupsize``
        that divides K, else none. ``options``: ``scale_dtype`` and, at 4 bits, ``levels``.
        """
        ops.check_w4a8_group(group_size, in_features, cls.bits, f"[{out_features}, {in_features}]")
        group = rotation_group(in_features, convrot_groupsize)
        check_rotation_group(group, in_features)
        config = cls.Config(group_size, group, **options)
        if config.levels not in ops.W4A8_LEVELS:
            raise UnsupportedError(f"levels must be one of {', '.join(ops.W4A8_LEVELS)}, got {config.levels!r}")
        if config.scale_dtype not in SCALE_DTYPES:
            raise UnsupportedError(f"scale_dtype must be one of {', '.join(SCALE_DTYPES)}, got {config.scale_dtype!r}")
        return config

    @classmethod
    def quantize(
        cls,
        weight: torch.Tensor,
        config: Any,
        seed: int = 0,
        calibration: Any = None,
        codebook: torch.Tensor | None = None,
        scale_search: bool = True,
    ) -> Tensors:
        """``codebook``: a table to use instead of choosing one; ``scale_search``: 6 bits, try neighbouring scales.

        ``calibration``: a Calibration; codes and s_rel are then chosen for the layer's outputs on such inputs.
        """
        check_float_weight(weight)
        made = ops.quantize_w4a8_weight(
            weight, config.group_size, config.convrot_groupsize, cls.bits, config.levels, codebook, scale_search, seed,
            SCALE_DTYPES[config.scale_dtype],
        )  # fmt: skip
        tensors = {name: tensor for name, tensor in made._asdict().items() if tensor is not None}
        if calibration is None or weight.is_meta:
            return tensors
        check_calibration(calibration, weight.shape[1], seed)
        return calibrate_tensors(tensors, weight, config, cls.bits, calibration)

    @classmethod
    def requantize(cls, tensors: Tensors, config: Any, weight: torch.Tensor, seed: int = 0) -> Tensors:
        """As every format, with the stored table, dtypes and layout.

        The scale search is left out: it pays at rest, not in a merge.
        """
        if cls.is_resident(tensors):
            return cls.lay_resident(cls.requantize(cls.stored(tensors, config), config, weight, seed), config)
        scales = "float32" if tensors["s_rel"].dtype == torch.float32 else "float8_e4m3fn"
        made = cls.quantize(
            weight,
            replace(config, scale_dtype=scales),
            seed=seed,
            codebook=tensors.get("codebook"),
            scale_search=False,
        )
        if tensors["s_rel"].dtype == torch.uint8:
            made["s_rel"] = made["s_rel"].view(torch.uint8)
        for name in ("codebook", "correction"):
            if name in made:
                made[name] = made[name].to(tensors[name].dtype)
        made["s_channel"] = made["s_channel"].reshape(tensors["s_channel"].shape)
        return made

    @classmethod
    def dequantize(cls, tensors: Tensors, config: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensors = cls.stored(tensors, config)
        return ops.dequantize_w4a8_weight(*cls._weight(tensors), dtype, config.group_size, config.convrot_groupsize)

    # ------------------------------------------------------------------------------------------- resident layout

    @classmethod
    def is_resident(cls, tensors: Tensors) -> bool:
        """As every format: records are uint8 [N/16, K/256, bytes]."""
        return resident.is_resident(tensors.get("qdata"), cls.bits)

    @classmethod
    def why_not_resident(cls, tensors: Tensors, config: Any, facts: DeviceFacts | None) -> str | None:
        """As every format."""
        (n, k), scales = cls.shape(tensors, config), tensors["s_rel"].dtype
        if n % resident.ROWS or k % resident.COLUMNS:
            needed = f"N a multiple of {resident.ROWS} and K of {resident.COLUMNS}"
            return f"the layout needs {needed}, the weight is [{n}, {k}]"
        if config.group_size not in resident.GROUPS:
            groups = ", ".join(map(str, resident.GROUPS))
            return f"the layout takes groups of {groups}, the weight has {config.group_size}"
        if scales != torch.float8_e4m3fn:
            return f"the layout takes e4m3 scales, the weight's s_rel is {str(scales).removeprefix('torch.')}"
        if tensors.get("correction") is not None:
            return "no kernel for few rows takes a correction (levels='asymmetric')"
        return EXTENSION.why_not_path(facts, "sm90") if facts is not None else None

    @classmethod
    def lay_resident(cls, tensors: Tensors, config: Any, storage: torch.Tensor | None = None) -> Tensors:
        """As every format."""
        cls.check_names(tensors)
        n, k = cls.shape(tensors, config)
        if storage is None:
            storage = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in cls.resident_tensors])
        shape = resident.Shape(n, k, cls.bits, config.group_size)
        return {"qdata": resident.pack(storage, shape), **cls._not_moved(tensors)}

    @classmethod
    def stored(cls, tensors: Tensors, config: Any) -> Tensors:
        """As every format: records are unpacked into new tensors, which the weight's own memory does not see."""
        if not cls.is_resident(tensors):
            return tensors
        codes, scales = resident_ops.unpack(*cls._records(tensors, config))
        return {"qdata": codes, "s_rel": scales, **cls._not_moved(tensors)}

    @classmethod
    def _not_moved(cls, tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if name not in cls.resident_tensors}

    @classmethod
    def _records(cls, tensors: Tensors, config: Any) -> tuple[torch.Tensor, resident.Shape]:
        """The records of a weight in the resident layout, and what they are of."""
        records = tensors["qdata"]
        return records, resident.shape_of(records, cls.bits, config.group_size)

    # --------------------------------------------------------------------------------------------------- linears

    @classmethod
    def linear(
        cls, x, tensors, config, bias=None, out_dtype=None, input_act="none", input_act_weight=None, input_act_eps=0.0,
        residual=None, residual_scale=None,
    ):  # fmt: skip
        if cls.is_resident(tensors):
            records, shape = cls._records(tensors, config)
            return resident_ops.linear(
                x, records, tensors["s_channel"], tensors.get("codebook"), shape, bias, out_dtype,
                config.convrot_groupsize, input_act, input_act_weight, input_act_eps, residual, residual_scale,
            )  # fmt: skip
        return ops.w4a8_linear(
            x, *cls._weight(tensors), bias, out_dtype, config.group_size, config.convrot_groupsize, input_act,
            input_act_weight, input_act_eps, residual, residual_scale,
        )  # fmt: skip

    @classmethod
    def linear_quantized(
        cls, activation, tensors, config, bias=None, out_dtype=None, residual=None, residual_scale=None
    ):
        if cls.is_resident(tensors):
            records, shape = cls._records(tensors, config)
            return resident_ops.scaled_mm(
                activation.tensors["codes"], activation.tensors["scale"], records, tensors["s_channel"],
                tensors.get("codebook"), shape, bias, out_dtype or activation.dtype, residual, residual_scale,
            )  # fmt: skip
        return ops.w4a8_scaled_mm(
            activation.tensors["codes"], activation.tensors["scale"], *cls._weight(tensors), bias,
            out_dtype or activation.dtype, config.group_size, residual, residual_scale,
        )  # fmt: skip

    @classmethod
    def _weight(cls, tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
        """The stored tensors in the order in which the ops take them."""
        if "s_rel" not in tensors:  # codes were put where records had been
            raise FormatError(
                f"{cls.name}: codes {tensors['qdata'].dtype} {list(tensors['qdata'].shape)} were put where a resident layout "
                "was, and no s_rel with them: give weight and weight_s_rel together, or use load_state_dict"
            )
        return (
            tensors["qdata"], tensors["s_rel"], tensors["s_channel"], tensors.get("codebook"), tensors.get("correction"),
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------- checks

    @classmethod
    def shape(cls, tensors: Tensors, config: Any) -> tuple[int, int]:
        if cls.is_resident(tensors):
            return cls._records(tensors, config)[1][:2]
        n, row_bytes = tensors["qdata"].shape
        return n, row_bytes * 8 // cls.bits

    @classmethod
    def check(cls, tensors: Tensors, config: Any) -> None:
        qdata, s_rel, s_channel, codebook, correction = cls._weight(tensors)
        if qdata.dtype != torch.int8:
            raise FormatError(f"{cls.name}: weight must be int8, got {qdata.dtype}")
        cls._check_shapes({name: tuple(t.shape) for name, t in tensors.items() if t is not None}, config)
        if s_rel.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.float32):
            raise FormatError(
                f"{cls.name}: weight_s_rel must be float8_e4m3fn, uint8 (its bytes) or float32, got {s_rel.dtype}"
            )
        if s_channel.dtype != torch.float32:
            raise FormatError(f"{cls.name}: weight_s_channel must be float32, got {s_channel.dtype}")
        for key, tensor in (("weight_codebook", codebook), ("weight_correction", correction)):
            if tensor is not None and tensor.dtype not in FLOAT_DTYPES:
                raise FormatError(f"{cls.name}: {key} must be float32, float16 or bfloat16, got {tensor.dtype}")
        stored = cls._levels(tensors)
        if config.levels != stored:
            raise FormatError(
                f"{cls.name}: the config says levels={config.levels!r}, the stored tensors are {stored!r} "
                "(weight_codebook goes with 'codebook', weight_correction with 'asymmetric', neither with 'uniform')"
            )

    @classmethod
    def _levels(cls, stored: dict[str, Any]) -> str:
        if stored.get("codebook") is not None:
            return "codebook"
        return "uniform" if stored.get("correction") is None else "asymmetric"

    @classmethod
    def _check_shapes(cls, shapes: dict[str, tuple[int, ...]], config: Any) -> None:
        """Raises FormatError unless the stored shapes fit the width, the groups and each other."""
        qdata, s_rel = shapes["qdata"], shapes["s_rel"]
        stored_per_weight = "K/2" if cls.bits == 4 else "3K/4"
        if len(qdata) != 2 or qdata[1] * 8 % cls.bits:
            raise FormatError(f"{cls.name}: weight must be [N, {stored_per_weight}], got {list(qdata)}")
        n, k = qdata[0], qdata[1] * 8 // cls.bits
        group = config.group_size
        if type(group) is not int:
            raise FormatError(f"{cls.name}: group_size must be an integer, got {group!r}")
        if len(s_rel) != 2 or s_rel[0] != n or s_rel[1] * group != k:
            found = s_rel[1] * group if len(s_rel) == 2 else 0
            other = next((b for b in (4, 6) if b != cls.bits and found and qdata[1] * 8 == found * b), None)
            hint = (
                f"; these are {other}-bit codes of K={found}, which is the other format of this package"
                if other
                else ""
            )
            raise FormatError(
                f"{cls.name}: weight_s_rel must be [N, K/g] = [{n}, {k}/{group}] for weight {list(qdata)}, "
                f"got {list(s_rel)}{hint}"
            )
        try:
            ops.check_w4a8_group(group, k, cls.bits)
        except UnsupportedError as error:
            raise FormatError(f"{cls.name}: {error}") from error
        if "s_channel" in shapes and shapes["s_channel"] not in ((n,), (n, 1)):
            raise FormatError(f"{cls.name}: weight_s_channel must be [N] = [{n}], got {list(shapes['s_channel'])}")
        for name, wanted, meaning in (("codebook", (16,), "[16]"), ("correction", (k // group, n), "[K/g, N]")):
            if name in shapes and shapes[name] != wanted:
                raise FormatError(
                    f"{cls.name}: weight_{name} must be {meaning} = {list(wanted)}, got {list(shapes[name])}"
                )
        check_convrot(cls.name, config.convrot_groupsize, k)

    # ----------------------------------------------------------------------------------------------- checkpoints

    @classmethod
    def marker(cls, config: Any) -> dict[str, Any]:
        marker = {
            "format": cls.name, "group_size": config.group_size, "convrot_groupsize": config.convrot_groupsize,
        }  # fmt: skip
        if config.convrot_groupsize:
            marker["convrot"] = True
        if config.scale_dtype != "float8_e4m3fn":
            marker["scale_dtype"] = config.scale_dtype
        return marker

    @classmethod
    def config_from_marker(cls, marker: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Any:
        """Weights of this family are rotated unless the marker says otherwise; other writers name only the groups."""
        group = convrot_group(cls.name, marker, rotated_by_default=True)
        scale_dtype = marker.get("scale_dtype")
        config = cls._config(
            marker.get("group_size", 16), group, scale_dtype if scale_dtype in SCALE_DTYPES else "float8_e4m3fn",
            cls._levels(shapes),
        )  # fmt: skip
        cls._check_shapes({name: tuple(shape) for name, shape in shapes.items()}, config)
        return config

    @classmethod
    def _config(cls, group_size: int, convrot_groupsize: int, scale_dtype: str, levels: str) -> Any:
        raise NotImplementedError

    @classmethod
    def from_state_dict(cls, state: Tensors, prefix: str = "") -> Tensors:
        """As every format; e4m3 scales that a file holds as uint8 are viewed as what they are."""
        found = super().from_state_dict(state, prefix)
        if "s_rel" in found and found["s_rel"].dtype == torch.uint8:
            found["s_rel"] = found["s_rel"].view(torch.float8_e4m3fn)
        return found


_CORE_TENSORS = (
    TensorSpec("qdata", "weight"),
    TensorSpec("s_rel", "weight_s_rel"),
    TensorSpec("s_channel", "weight_s_channel"),
)


class W4A8Format(_Int8GridFormat):
    """W4A8: ``qdata`` int8 [N, K/2] of nibbles; ``s_rel`` e4m3 [N, K/g]; ``s_channel`` fp32 [N]; ``codebook`` [16] or
    ``correction`` [K/g, N] where there is one. docs/formats/asym_w4a8_int8.md
    """

    name = "asym_w4a8_int8"
    bits = 4
    Config = W4A8Config
    tensors = (
        *_CORE_TENSORS,
        TensorSpec("codebook", "weight_codebook", required=False),
        TensorSpec("correction", "weight_correction", required=False),
    )

    @classmethod
    def _config(cls, group_size: int, convrot_groupsize: int, scale_dtype: str, levels: str) -> W4A8Config:
        return W4A8Config(group_size, convrot_groupsize, levels, scale_dtype)


class W6A8Format(_Int8GridFormat):
    """W6A8: ``qdata`` int8 [N, 3K/4], a nibble plane and a plane of top bits; ``s_rel`` and ``s_channel`` as W4A8.
    docs/formats/asym_w4a8_int8.md
    """

    name = "w6a8_int8"
    bits = 6
    column_planes: ClassVar[dict[str, tuple[int, ...]]] = {"qdata": (2, 1)}  # low nibbles, top bits
    Config = W6A8Config
    tensors = _CORE_TENSORS

    @classmethod
    def _config(cls, group_size: int, convrot_groupsize: int, scale_dtype: str, levels: str) -> W6A8Config:
        return W6A8Config(group_size, convrot_groupsize, scale_dtype)
