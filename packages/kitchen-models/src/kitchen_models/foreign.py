"""Layers that other toolkits stored: nunchaku, AutoAWQ, GPTQ and compressed-tensors, told by their keys and shapes.

Each becomes a marker and tensors of one of our formats. What a file does not say, and what its maker knows from the model
(which layers shift their activation, whose outputs are interleaved), comes from tables of names here, or from ``Hints``.
docs/guides/convert.md
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kitchen_core.errors import FormatError
from kitchen_core.formats import Format, Tensors, get_format
from kitchen_core.layouts import autoawq, compressed_tensors, gptq, nunchaku

from .dialect import NamedTensors, config_of, naming
from .files import Checkpoint, TensorInfo, parse_bounded_json, printable

# nunchaku shifts the input of the linear behind a GELU so that it is not negative, and no tensor says so.
UNSIGNED_NAMES = ("*mlp_fc2", "*mlp_context_fc2", "*.net.2")
# nunchaku interleaves the outputs of these modulations in so many parts, and adds 1 to the biases of those that scale.
ADALN_NAMES = {
    "*norm1.linear": 6, "*norm1_context.linear": 6, "*.img_mod.1": 6, "*.txt_mod.1": 6,
    "*single_transformer_blocks.*.norm.linear": 3,
}  # fmt: skip
DIALECTS = ("comfy", "nunchaku", "autoawq", "gptq", "gptq_v2", "compressed-tensors")
CONFIG_FILES = (("config.json", "quantization_config"), ("quantize_config.json", None), ("quant_config.json", None))
MAX_CONFIG = 16 << 20


@dataclass(frozen=True)
class Hints:
    """What only the maker of a file knows. ``unsigned``: patterns of names; ``adaln``: parts by pattern, 0 for none.

    Both are asked before the tables of this module. ``dialect``: how to read layers that have no marker.
    """

    dialect: str | None = None
    unsigned: tuple[str, ...] | None = None
    adaln: Mapping[str, int] = field(default_factory=dict)

    def is_unsigned(self, name: str) -> bool:
        """Whether nunchaku runs this layer on shifted activations."""
        return _match(name, UNSIGNED_NAMES if self.unsigned is None else self.unsigned) is not None

    def splits(self, name: str) -> int | None:
        """In how many parts the outputs are interleaved; None where no name says."""
        table = {**self.adaln, **{k: v for k, v in ADALN_NAMES.items() if k not in self.adaln}}
        pattern = _match(name, table)
        return None if pattern is None else table[pattern]


def _match(name: str, patterns: Any) -> str | None:
    return next((p for p in patterns if p == name or fnmatch.fnmatchcase(name, p)), None)


@dataclass(frozen=True)
class SourceConfig:
    """The quantization config of a checkpoint, from its header or a JSON file beside it; ``values`` {} where none is."""

    values: Mapping[str, Any] = field(default_factory=dict)
    found_in: str = ""

    @property
    def method(self) -> str:
        """ "awq", "gptq", "compressed-tensors", "svdquant", or "" """
        return str(self.values.get("quant_method", self.values.get("method", ""))).replace("_", "-").lower()

    @property
    def bits(self) -> Any:
        """Bits of a weight, where AutoAWQ or GPTQ say them."""
        return self.values.get("bits", self.values.get("w_bit", 4))

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale, -1 for all; None where nothing says it."""
        found = self.values.get("group_size", self.values.get("q_group_size"))
        return found if type(found) is int else None


def source_config(checkpoint: Checkpoint) -> SourceConfig:
    """The config in the header, else the one in config.json, quantize_config.json or quant_config.json beside the file."""
    text = checkpoint.metadata.get("quantization_config")
    if text is not None:
        try:
            return SourceConfig(_object(text.encode()), "the header's quantization_config")
        except ValueError as error:
            raise FormatError(f"the header's quantization_config is not a JSON object: {error}") from error
    for name, key in CONFIG_FILES:
        path = checkpoint.path.parent / name
        if path.is_file() and path.stat().st_size <= MAX_CONFIG:
            found = _config_in(path, key)
            if found:
                return SourceConfig(found, str(path))
    return SourceConfig()


def _config_in(path: Path, key: str | None) -> Mapping[str, Any]:
    try:
        table = _object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{str(path)!r}, which should say how the weights are stored, cannot be read: {error}"
        ) from error
    found = table if key is None else table.get(key, table.get("compression_config"))
    return found if isinstance(found, dict) else {}


def _object(raw: bytes) -> dict[str, Any]:
    table = parse_bounded_json(raw)
    if not isinstance(table, dict):
        raise ValueError(f"it is a {type(table).__name__}")
    return table


# ---------------------------------------------------------------------------------------------------------- layers


@dataclass
class ForeignLayer(NamedTensors):
    """A layer of another dialect: as StoredLayer, with what turns its tensors into ours."""

    name: str
    kind: Kind
    tensors: dict[str, TensorInfo]
    marker: dict[str, Any] = field(default_factory=dict)
    group_size: int = 0
    splits: int = 0
    small: dict[str, list[int]] = field(default_factory=dict)  # values of small tensors that shapes depend on
    v2: bool = False
    problems: list[str] = field(default_factory=list)
    rounded: bool = False  # whether unpacking rounded a zero to its dtype

    @property
    def format_name(self) -> str:
        """The format of ours that it maps to."""
        return self.kind.format

    @property
    def marked_in(self) -> tuple[str, ...]:
        """Nowhere: its keys tell it."""
        return ()

    def resolve(self) -> tuple[type[Format], Any, Tensors]:
        """(format, config, meta tensors of our format), from the header alone. Raises as ``StoredLayer.resolve``."""
        if self.problems:
            raise FormatError(f"layer {printable(self.name)!r}: {self.problems[0]}")
        with naming(self.name):
            format = get_format(self.kind.format)
            tensors = self.kind.meta(self)
            format.check_names(tensors)
            config = config_of(format, self.marker, tensors)
            format.check(tensors, config)
            return format, config, tensors

    def bias_dtype(self) -> str | None:
        """The dtype in which the bias will be, None where there is none. float32 where a 1 has to be taken off exactly."""
        info = self.tensors.get("bias")
        return None if info is None else "F32" if self.splits else info.dtype

    def unpack(self, checkpoint: Checkpoint) -> tuple[Tensors, torch.Tensor | None]:
        """(the tensors of our format, the bias)"""
        with naming(self.name):
            stored = {rest: checkpoint.read(self.prefix + rest) for rest in sorted(self.kind.read & set(self.tensors))}
            bias = stored.pop("bias", None)
            tensors = self.kind.unpack(self, stored)
            if "zeros" in tensors and self.kind.dialect != "nunchaku":
                integers = autoawq.integer_zeros(tensors["scale"], tensors["zeros"], self.name)
                exact = (8 - integers.float()) * tensors["scale"].float()
                self.rounded = not torch.equal(exact, tensors["zeros"].float())
            return tensors, None if bias is None else self.kind.unpack_bias(self, bias)

    @property
    def dropped(self) -> list[str]:
        """Tensors that running the layer does not need and our format has no place for."""
        return sorted(set(self.tensors) - self.kind.read)


@dataclass(frozen=True)
class Kind:
    """One stored form. ``read``: the tensors that are used; ``others``: known ones that are left out."""

    dialect: str
    form: str
    format: str
    read: frozenset[str]
    others: frozenset[str]
    meta: Callable[[ForeignLayer], Tensors]
    unpack: Callable[[ForeignLayer, Tensors], Tensors]
    unpack_bias: Callable[[ForeignLayer, torch.Tensor], torch.Tensor] = lambda layer, bias: bias


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _need(layer: ForeignLayer, *names: str) -> list[TensorInfo]:
    missing = [name for name in names if name not in layer.tensors]
    if missing:
        raise FormatError(f"a {layer.kind.form} layer needs {', '.join(names)}; missing: {', '.join(missing)}")
    return [layer.tensors[name] for name in names]


def _matrix(info: TensorInfo, *dtypes: str) -> tuple[int, int]:
    if len(info.shape) != 2 or 0 in info.shape or info.dtype not in dtypes:
        name = info.name.rpartition(".")[2]
        raise FormatError(f"{name} must be a matrix of {' or '.join(dtypes)}, got {info.dtype} {list(info.shape)}")
    return info.shape[0], info.shape[1]


_FLOATS = ("F16", "BF16", "F32")

# ------------------------------------------------------------------------------------------------ nunchaku SVDQuant

_V1 = {"smooth": "smooth_factor", "lora_down": "proj_down", "lora_up": "proj_up"}
_FP4 = ("wtscale", "wcscales")


def _svdquant_meta(layer: ForeignLayer) -> Tensors:
    names = {_V1.get(rest, rest): rest for rest in layer.tensors}
    qweight, wscales, smooth = _need(layer, "qweight", "wscales", names.get("smooth_factor", "smooth_factor"))
    n, half_k = _matrix(qweight, "I8", "U8")
    k = 2 * half_k
    if any(name in layer.tensors for name in _FP4) or wscales.dtype.startswith("F8") or wscales.shape[0] == k // 16:
        raise FormatError(
            f"these are FP4 codes (nvfp4: scales {wscales.dtype} {list(wscales.shape)}, groups of 16), and svdquant_w4a4 holds "
            f"INT4 in groups of 64: wscales [K/64, N] = {[k // 64, n]}; get the INT4 file of this model"
        )
    if n % 128 or k % 128 or _matrix(wscales, *_FLOATS) != (k // 64, n):
        raise FormatError(
            f"qweight {list(qweight.shape)} and wscales {list(wscales.shape)} must be [N, K/2] and [K/64, N] with N and K "
            "multiples of 128"
        )
    dtype, rank = wscales.torch_dtype(), 0
    down, up = (layer.tensors.get(names.get(part, "")) for part in ("proj_down", "proj_up"))
    if (down is None) != (up is None):
        raise FormatError("it has one half of its low-rank branch; the file is incomplete")
    down_dtype = up_dtype = dtype
    if down is not None:
        rank = _matrix(down, *_FLOATS)[1]
        if _matrix(down, *_FLOATS)[0] != k or _matrix(up, *_FLOATS) != (n, rank) or rank % 16:
            raise FormatError(
                f"the low-rank branch must be [K, R] = [{k}, R] and [N, R] = [{n}, R] with R a multiple of 16, got "
                f"{list(down.shape)} and {list(up.shape)}"
            )
        down_dtype, up_dtype = down.torch_dtype(), up.torch_dtype()
    if smooth.shape != (k,):
        raise FormatError(f"its smooth factor must be [K] = [{k}], got {list(smooth.shape)}")
    return {
        "qdata": _meta(torch.int8, n, half_k), "scale": _meta(dtype, k // 64, n), "proj_down": _meta(down_dtype, k, rank),
        "proj_up": _meta(up_dtype, n, rank), "smooth_factor": _meta(smooth.torch_dtype(), k),
    }  # fmt: skip


def _svdquant_unpack(layer: ForeignLayer, stored: Tensors) -> Tensors:
    stored = {_V1.get(rest, rest): tensor for rest, tensor in stored.items()}
    n, half_k = stored["qweight"].shape
    scale = stored["wscales"]
    return {
        "qdata": nunchaku.unpack_qweight(stored["qweight"].view(torch.int8)),
        "scale": nunchaku.unpack_wscales(scale),
        "proj_down": nunchaku.unpack_lora_down(stored["proj_down"])
        if "proj_down" in stored
        else scale.new_zeros(2 * half_k, 0),
        "proj_up": nunchaku.unpack_lora_up(stored["proj_up"]) if "proj_up" in stored else scale.new_zeros(n, 0),
        "smooth_factor": nunchaku.unpack_vector(stored["smooth_factor"]),
    }


# ---------------------------------------------------------------------------------------------------- nunchaku AWQ


def _nunchaku_awq_meta(layer: ForeignLayer) -> Tensors:
    qweight, wscales, wzeros = _need(layer, "qweight", "wscales", "wzeros")
    rows, words = _matrix(qweight, "I32", "I16")
    n, k, g = 4 * rows, words * (2 if qweight.dtype == "I32" else 1), layer.group_size
    allowed = {k // g, nunchaku.awq_padded_groups(k, g)}
    for info in (wscales, wzeros):
        groups, outputs = _matrix(info, *_FLOATS)
        if outputs != n or groups not in allowed:
            raise FormatError(
                f"{info.name.rpartition('.')[2]} must be [K/g, N] = {[k // g, n]} (or padded to {max(allowed)} rows) for "
                f"groups of {g}, got {list(info.shape)}"
            )
    if layer.splits and n % layer.splits:
        raise FormatError(
            f"its {n} outputs cannot be {layer.splits} interleaved parts; give --adaln {layer.name}=0 if not"
        )
    return {
        "qdata": _meta(torch.int8, n, k // 2), "scale": _meta(wscales.torch_dtype(), k // g, n),
        "zeros": _meta(wzeros.torch_dtype(), k // g, n),
    }  # fmt: skip


def _nunchaku_awq_unpack(layer: ForeignLayer, stored: Tensors) -> Tensors:
    codes = nunchaku.unpack_awq_qweight(stored["qweight"])
    groups = 2 * codes.shape[1] // layer.group_size
    scale, scaled = stored["wscales"][:groups].contiguous(), stored["wzeros"][:groups]
    zeros = nunchaku.unpack_awq_zeros(scaled, scale)
    layer.rounded = not torch.equal(scaled.double() + 8 * scale.double(), zeros.double())
    if layer.splits:
        codes = nunchaku.deinterleave_rows(codes, layer.splits).contiguous()
        scale, zeros = (nunchaku.deinterleave_rows(t, layer.splits, 1).contiguous() for t in (scale, zeros))
    return {"qdata": codes, "scale": scale, "zeros": zeros}


def _nunchaku_awq_bias(layer: ForeignLayer, bias: torch.Tensor) -> torch.Tensor:
    if not layer.splits:
        return bias
    return nunchaku.remove_folded_one(nunchaku.deinterleave_rows(bias.float(), layer.splits).contiguous(), layer.splits)


# ------------------------------------------------------------------------------------------- AutoAWQ, GPTQ, compressed


def _awq_meta(n: int, k: int, groups: int, scales: TensorInfo) -> Tensors:
    if groups == 0 or k % groups or k % 2:
        raise FormatError(f"its {groups} groups do not divide K={k}")
    dtype = scales.torch_dtype()
    return {
        "qdata": _meta(torch.int8, n, k // 2), "scale": _meta(dtype, groups, n), "zeros": _meta(dtype, groups, n),
    }  # fmt: skip


def _gemm_meta(layer: ForeignLayer) -> Tensors:
    qweight, _, scales = _need(layer, "qweight", "qzeros", "scales")
    k, words = _matrix(qweight, "I32")
    _equal(layer, {"qzeros": (scales.shape[0], words), "scales": (scales.shape[0], 8 * words)})
    return _awq_meta(8 * words, k, scales.shape[0], scales)


def _gptq_meta(layer: ForeignLayer) -> Tensors:
    qweight, qzeros, scales = _need(layer, "qweight", "qzeros", "scales")
    words, n = _matrix(qweight, "I32")
    _matrix(qzeros, "I32")
    if len(scales.shape) == 2 and qzeros.shape[1] * 4 == n:
        raise FormatError(
            "its words hold four codes of 8 bits, and awq_w4a16 holds 4 bits; dequantize it with its own tool"
        )
    _equal(layer, {"qzeros": (scales.shape[0], n // 8), "scales": (scales.shape[0], n)})
    return _awq_meta(n, 8 * words, scales.shape[0], scales)


def _gemv_meta(layer: ForeignLayer) -> Tensors:
    qweight, qzeros, scales = _need(layer, "qweight", "qzeros", "scales")
    n, words = _matrix(qweight, "I32")
    groups = 8 * words // layer.group_size
    if _matrix(scales, *_FLOATS)[0] != n or scales.shape[1] < groups or qzeros.shape != (n, scales.shape[1] // 8):
        raise FormatError(
            f"GEMV scales and qzeros must be [N, P] and [N, P/8] with N={n} and P of at least {groups} groups, got "
            f"{list(scales.shape)} and {list(qzeros.shape)}"
        )
    return _awq_meta(n, 8 * words, groups, scales)


def _gemv_fast_meta(layer: ForeignLayer) -> Tensors:
    qweight, qzeros, scales = _need(layer, "qweight", "qzeros", "scales")
    rows, k = _matrix(qweight, "I16")
    groups = k // layer.group_size
    for info in (qzeros, scales):
        if _matrix(info, *_FLOATS)[1] != 4 * rows or info.shape[0] < groups:
            raise FormatError(
                f"GEMVFast {info.name.rpartition('.')[2]} must be [K/g padded, N] with N={4 * rows} and at least {groups} "
                f"rows, got {list(info.shape)}"
            )
    return _awq_meta(4 * rows, k, groups, scales)


def _equal(layer: ForeignLayer, shapes: dict[str, tuple[int, int]]) -> None:
    for name, shape in shapes.items():
        if layer.tensors[name].shape != shape:
            raise FormatError(
                f"{name} of a {layer.kind.form} layer must be {list(shape)} beside qweight "
                f"{list(layer.tensors['qweight'].shape)}, got {list(layer.tensors[name].shape)}"
            )


def _packed_meta(layer: ForeignLayer) -> Tensors:
    packed, scale = _need(layer, "weight_packed", "weight_scale")
    rows, words = _matrix(packed, "I32")
    n, k = layer.small["weight_shape"]
    if (rows, words) == (n, -(-k // 4)):
        raise FormatError("its words hold four codes of 8 bits (W8A16), and awq_w4a16 holds 4 bits")
    if (rows, words) != (n, -(-k // 8)):
        raise FormatError(
            f"weight_packed must be [N, K/8] = {[n, -(-k // 8)]} for weight_shape {[n, k]}, got {[rows, words]}"
        )
    if _matrix(scale, *_FLOATS)[0] != n:
        raise FormatError(f"weight_scale must be [N, K/g] with N={n}, got {list(scale.shape)}")
    return _awq_meta(n, k, scale.shape[1], scale)


def _packed_unpack(layer: ForeignLayer, stored: Tensors) -> Tensors:
    order = stored.get("weight_g_idx")
    n, k = layer.small["weight_shape"]
    groups = stored["weight_scale"].shape[1]
    if order is not None and not torch.equal(order.long(), torch.arange(k, device="cpu") // (k // groups)):
        raise FormatError(
            "weight_g_idx is not column // group_size: groups of scattered columns have no awq_w4a16 form; quantize it again "
            "without activation order"
        )
    canonical = compressed_tensors.unpack(
        stored["weight_packed"], stored["weight_scale"], (n, k), stored.get("weight_zero_point")
    )
    return canonical._asdict()


def _int_meta(layer: ForeignLayer) -> Tensors:
    weight, scale = _need(layer, "weight", "weight_scale")
    n, k = _matrix(weight, "I8")
    if scale.dtype not in _FLOATS or scale.shape not in ((n, 1), (n,), (1,), ()):
        raise FormatError(
            f"weight_scale must be float, one for each of the {n} rows or one in all, got {scale.dtype} {list(scale.shape)}; "
            "int8_tensorwise has no groups"
        )
    if "input_scale" in layer.tensors:
        raise FormatError(
            "it has a static input_scale, and int8_tensorwise quantizes each row of activations by itself; use a checkpoint "
            "with dynamic (token) activations"
        )
    shape = (n, 1) if n in scale.shape else ()
    return {"qdata": _meta(torch.int8, n, k), "scale": _meta(torch.float32, *shape)}


def _int_unpack(layer: ForeignLayer, stored: Tensors) -> Tensors:
    points = stored.get("weight_zero_point")
    if points is not None and bool((points != 0).any()):
        raise FormatError("its weight_zero_point is not 0 everywhere, and int8_tensorwise is symmetric")
    n = stored["weight"].shape[0]
    scale = stored["weight_scale"].float()
    return {"qdata": stored["weight"], "scale": scale.reshape(n, 1) if n in scale.shape else scale.reshape(())}


NUNCHAKU_SVDQUANT = Kind(
    "nunchaku", "nunchaku SVDQuant", "svdquant_w4a4",
    frozenset({"qweight", "wscales", "smooth_factor", "smooth", "proj_down", "lora_down", "proj_up", "lora_up", "bias"}),
    frozenset({"smooth_factor_orig", "smooth_orig", *_FP4}),
    _svdquant_meta, _svdquant_unpack, lambda layer, bias: nunchaku.unpack_vector(bias),
)  # fmt: skip
NUNCHAKU_AWQ = Kind(
    "nunchaku", "nunchaku AWQ", "awq_w4a16", frozenset({"qweight", "wscales", "wzeros", "bias"}), frozenset(),
    _nunchaku_awq_meta, _nunchaku_awq_unpack, _nunchaku_awq_bias,
)  # fmt: skip
_AWQ_KEYS = frozenset({"qweight", "qzeros", "scales", "bias"})
AUTOAWQ_GEMM = Kind(
    "autoawq", "AutoAWQ GEMM", "awq_w4a16", _AWQ_KEYS, frozenset(), _gemm_meta,
    lambda layer, t: autoawq.unpack_gemm(t["qweight"], t["qzeros"], t["scales"])._asdict(),
)  # fmt: skip
AUTOAWQ_GEMV = Kind(
    "autoawq", "AutoAWQ GEMV", "awq_w4a16", _AWQ_KEYS, frozenset(), _gemv_meta,
    lambda layer, t: autoawq.unpack_gemv(t["qweight"], t["qzeros"], t["scales"], layer.group_size)._asdict(),
)  # fmt: skip
AUTOAWQ_GEMV_FAST = Kind(
    "autoawq", "AutoAWQ GEMVFast", "awq_w4a16", _AWQ_KEYS, frozenset(), _gemv_fast_meta,
    lambda layer, t: autoawq.unpack_gemv_fast(t["qweight"], t["qzeros"], t["scales"], layer.group_size)._asdict(),
)  # fmt: skip
GPTQ = Kind(
    "gptq", "GPTQ", "awq_w4a16", _AWQ_KEYS | {"g_idx"}, frozenset(), _gptq_meta,
    lambda layer, t: gptq.unpack(t["qweight"], t["qzeros"], t["scales"], t.get("g_idx"), v2=layer.v2)._asdict(),
)  # fmt: skip
CT_PACKED = Kind(
    "compressed-tensors", "compressed-tensors pack-quantized", "awq_w4a16",
    frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "bias"}), frozenset({"weight_shape"}),
    _packed_meta, _packed_unpack,
)  # fmt: skip
CT_INT = Kind(
    "compressed-tensors", "compressed-tensors int-quantized", "int8_tensorwise",
    frozenset({"weight", "weight_scale", "weight_zero_point", "bias"}), frozenset(), _int_meta, _int_unpack,
)  # fmt: skip
