"""Which layers of a checkpoint are stored by other toolkits, and in which form: by keys, shapes and the config beside them.

A form is taken only where keys, dtypes and shapes fit it. Where they fit two, or where nothing says what a stored zero means,
the layer has a problem, and ``--from`` decides.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from kitchen_core.errors import FormatError, KitchenError
from kitchen_core.layouts import nunchaku

from .dialect import MARKER, StoredLayer, find_layers
from .files import Checkpoint, TensorInfo, printable
from .foreign import (
    AUTOAWQ_GEMM,
    AUTOAWQ_GEMV,
    AUTOAWQ_GEMV_FAST,
    CT_INT,
    CT_PACKED,
    DIALECTS,
    GPTQ,
    NUNCHAKU_AWQ,
    NUNCHAKU_SVDQUANT,
    ForeignLayer,
    Hints,
    Kind,
    SourceConfig,
    source_config,
)

AnyLayer = StoredLayer | ForeignLayer
_TELLING = ("qweight", "weight_packed")
_COMPANIONS = ("wscales", "wzeros", "qzeros", "weight_shape")  # of a qweight or a weight_packed, never alone
_CT_FORMATS = ("pack-quantized", "int-quantized", "mixed-precision", "")
_AWQ_VERSIONS = {"gemm": AUTOAWQ_GEMM, "gemv": AUTOAWQ_GEMV, "gemv_fast": AUTOAWQ_GEMV_FAST}


def find_all_layers(checkpoint: Checkpoint, hints: Hints | None = None) -> dict[str, AnyLayer]:
    """All quantized layers by name, whatever toolkit stored them; headers and small tensors alone are read.

    Raises FormatError where a table or config as a whole is unusable; what is wrong with one layer is in its ``problems``.
    """
    hints = hints or Hints()
    if hints.dialect is not None and hints.dialect not in DIALECTS:
        raise FormatError(f"--from must be one of {', '.join(DIALECTS)}, got {hints.dialect!r}")
    found: dict[str, AnyLayer] = dict(find_layers(checkpoint))
    if hints.dialect == "comfy":
        return found
    candidates = {
        name: rest
        for name, rest in _children(checkpoint).items()
        if name not in found and MARKER not in rest and _may_be_foreign(rest)
    }
    config = source_config(checkpoint) if candidates else SourceConfig()
    for name, rest in candidates.items():
        layer = _recognise(checkpoint, name, rest, config, hints)
        if layer is not None:
            found[name] = layer
    return found


def codes_of_others(checkpoint: Checkpoint, stored: Mapping[str, AnyLayer]) -> dict[str, TensorInfo]:
    """The codes of layers that are not ``stored`` and whose keys alone tell that another toolkit quantized them."""
    return {
        name: rest[key]
        for name, rest in _children(checkpoint).items()
        for key in _TELLING
        if key in rest and name not in stored
    }


def _children(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    children: dict[str, dict[str, TensorInfo]] = {}
    for key, info in checkpoint.tensors.items():
        layer, _, rest = key.rpartition(".")
        children.setdefault(layer, {})[rest] = info
    return children


def _may_be_foreign(rest: Mapping[str, TensorInfo]) -> bool:
    return any(name in rest for name in (*_TELLING, *_COMPANIONS)) or _is_int8(rest)


def _is_int8(rest: Mapping[str, TensorInfo]) -> bool:
    return "weight" in rest and rest["weight"].dtype == "I8" and "weight_scale" in rest


def _recognise(
    checkpoint: Checkpoint, name: str, rest: dict[str, TensorInfo], config: SourceConfig, hints: Hints
) -> ForeignLayer | None:
    method = hints.dialect or config.method
    try:
        if "qzeros" in rest:
            _check_told(config, hints)
        kind = _kind_of(rest, method, config)
    except FormatError as error:
        return ForeignLayer(name, _placeholder(rest), rest, problems=[str(error)])
    if kind is None:
        return None
    layer = ForeignLayer(name, kind, rest)
    try:
        _complete(checkpoint, layer, config, hints)
    except (KitchenError, ArithmeticError) as error:
        layer.problems.append(str(error))
    return layer


def _check_told(config: SourceConfig, hints: Hints) -> None:
    """Raises FormatError where ``--from`` and the config name two of AutoAWQ, GPTQ and its second convention."""
    said = {"awq": "autoawq", "autoawq": "autoawq", "gptq": "gptq", "gptq-v2": "gptq_v2"}.get(config.method)
    if said == "gptq":  # it may leave the convention of zeros open
        said = config.values.get("checkpoint_format", hints.dialect if hints.dialect == "gptq_v2" else said)
    if None not in (said, hints.dialect) and said != hints.dialect:
        raise FormatError(
            f"{config.found_in} says it is {printable(str(said))}, and --from says {hints.dialect}; leave --from away, or "
            "correct the config where it is of another file"
        )


def _placeholder(rest: Mapping[str, TensorInfo]) -> Kind:
    return NUNCHAKU_SVDQUANT if "wscales" in rest else AUTOAWQ_GEMM if "qzeros" in rest else CT_PACKED


def _kind_of(rest: Mapping[str, TensorInfo], method: str, config: SourceConfig) -> Kind | None:
    """The form of a layer; None for a weight that no dialect but comfy's could explain. Raises FormatError in words."""
    if "qweight" in rest:
        if "wscales" in rest:
            return NUNCHAKU_AWQ if "wzeros" in rest else NUNCHAKU_SVDQUANT
        if {"qzeros", "scales"} <= set(rest):
            return _awq_or_gptq(rest, method, config)
        raise FormatError(
            f"its qweight comes with {', '.join(sorted(set(rest) - {'qweight'})) or 'nothing'}, which no known toolkit writes; "
            "known are nunchaku (wscales), AutoAWQ and GPTQ (qzeros, scales)"
            + (f"; the config says {method!r}" if method else "")
        )
    if "weight_packed" in rest:
        _check_ct(config, method)
        return CT_PACKED
    if "weight" not in rest:
        raise FormatError(f"it has {', '.join(sorted(rest))} and no qweight or weight_packed; the file is incomplete")
    if method == "compressed-tensors":
        _check_ct(config, method)
        return CT_INT
    return None


def _check_ct(config: SourceConfig, method: str) -> None:
    form = str(config.values.get("format", "")) if config.method == "compressed-tensors" else ""
    if form not in _CT_FORMATS:
        raise FormatError(
            f"its compressed-tensors format is {form!r}; known are {', '.join(f for f in _CT_FORMATS if f)}. Others need "
            "compressed-tensors itself"
        )


def _awq_or_gptq(rest: Mapping[str, TensorInfo], method: str, config: SourceConfig) -> Kind:
    fitting = forms = _fitting(rest)
    if method in ("gptq", "gptq_v2", "gptq-v2"):
        fitting = [kind for kind in fitting if kind is GPTQ]
    elif method in ("awq", "autoawq"):
        version = str(config.values.get("version", "")).lower() if config.method == "awq" or config.values else ""
        if version and version not in _AWQ_VERSIONS:
            raise FormatError(f"its AutoAWQ version is {version!r}; known are {', '.join(_AWQ_VERSIONS)}")
        fitting = [k for k in fitting if k is not GPTQ and (not version or k is _AWQ_VERSIONS[version])]
    elif method:
        raise FormatError(f"its config says quant_method {method!r}; a qweight with qzeros is known from awq and gptq")
    if config.values and config.bits != 4:
        raise FormatError(f"its config says {config.bits!r} bits; awq_w4a16 holds 4")
    if len(fitting) == 1:
        return fitting[0]
    shapes = {name: (rest[name].dtype, list(rest[name].shape)) for name in ("qweight", "qzeros", "scales")}
    if forms and not fitting:
        raise FormatError(
            f"its tensors {shapes} are those of {' and '.join(kind.form for kind in forms)}, and {method} was said; correct "
            "--from or the config, whichever says so"
        )
    if not fitting:
        raise FormatError(
            f"its tensors {shapes} fit no known form{f' of {method}' if method else ''} in 4 bits: AutoAWQ GEMM, GEMV, "
            "GEMVFast, GPTQ; other widths and repacked files (marlin, exllama) need their own tool"
        )
    raise FormatError(
        f"its tensors {shapes} fit {' and '.join(kind.form for kind in fitting)}; say which with --from {fitting[0].dialect}"
    )


def _fitting(rest: Mapping[str, TensorInfo]) -> list[Kind]:
    q, z, s = (rest[name] for name in ("qweight", "qzeros", "scales"))
    if not len(q.shape) == len(z.shape) == len(s.shape) == 2:
        return []
    if q.dtype == "I16":
        return [AUTOAWQ_GEMV_FAST] if s.shape == z.shape and s.shape[1] == 4 * q.shape[0] else []
    if q.dtype != "I32" or z.dtype != "I32":
        return []
    fitting = []
    if "g_idx" not in rest:
        if z.shape == (s.shape[0], q.shape[1]) and s.shape[1] == 8 * q.shape[1]:
            fitting.append(AUTOAWQ_GEMM)
        if s.shape[0] == q.shape[0] and z.shape == (q.shape[0], s.shape[1] // 8) and s.shape[1] % 8 == 0:
            fitting.append(AUTOAWQ_GEMV)
    if s.shape[1] == q.shape[1] and z.shape in ((s.shape[0], q.shape[1] // 8), (s.shape[0], q.shape[1] // 4)):
        fitting.append(GPTQ)
    return fitting


# ------------------------------------------------------------------------------------------------- what shapes leave open


def _complete(checkpoint: Checkpoint, layer: ForeignLayer, config: SourceConfig, hints: Hints) -> None:
    """Fills in marker, group and parts. Raises FormatError where nothing says them."""
    unknown = sorted(set(layer.tensors) - layer.kind.read - layer.kind.others)
    if unknown:
        raise FormatError(
            f"a {layer.kind.form} layer has no {', '.join(map(printable, unknown))}: known are "
            f"{', '.join(sorted(layer.kind.read | layer.kind.others))}; a newer file may need newer packages: "
            "pip install --upgrade kitchen-core kitchen-models"
        )
    layer.marker = {"format": layer.kind.format}
    if layer.kind is NUNCHAKU_SVDQUANT:
        _check_int4(config)
        layer.marker["act_unsigned"] = hints.is_unsigned(layer.name)
    elif layer.kind is NUNCHAKU_AWQ:
        layer.group_size = 64
        layer.splits = _splits(layer, hints)
    elif layer.kind in (AUTOAWQ_GEMV, AUTOAWQ_GEMV_FAST):
        layer.group_size = _gemv_group(layer, config)
    elif layer.kind is GPTQ:
        layer.v2 = _is_v2(config, hints)
        _check_group(layer, config, 8 * layer.tensors["qweight"].shape[0])
    elif layer.kind is AUTOAWQ_GEMM:
        _check_group(layer, config, layer.tensors["qweight"].shape[0])
    elif layer.kind is CT_PACKED:
        layer.small["weight_shape"] = _two_numbers(checkpoint, layer)


def _check_group(layer: ForeignLayer, config: SourceConfig, in_features: int) -> None:
    """Raises FormatError where config and shapes disagree about the group: one of them is of another file."""
    groups = layer.tensors["scales"].shape[0]
    said = in_features if config.group_size == -1 else config.group_size
    if said is not None and groups * said != in_features:
        raise FormatError(
            f"{config.found_in} says group_size {config.group_size}, the shapes say {groups} groups of K={in_features}; the "
            "config does not belong to this file"
        )


def _check_int4(config: SourceConfig) -> None:
    weight = config.values.get("weight")
    dtype = weight.get("dtype") if isinstance(weight, dict) else None
    if dtype not in (None, "int4"):
        raise FormatError(
            f"{config.found_in} says weights of {printable(str(dtype))!r}, and svdquant_w4a4 holds 'int4'; get the INT4 file "
            "of this model"
        )


def _splits(layer: ForeignLayer, hints: Hints) -> int:
    words = layer.tensors["qweight"]
    splits = hints.splits(layer.name)
    if len(words.shape) != 2 or words.dtype not in ("I32", "I16"):
        return 0
    n, k = 4 * words.shape[0], words.shape[1] * (2 if words.dtype == "I32" else 1)
    if splits is None and n in (3 * k, 6 * k):
        raise FormatError(
            f"its {n} outputs are {n // k} times its {k} inputs, as of a modulation whose outputs nunchaku interleaves, and no "
            f"known name says so; give --adaln '{layer.name}={n // k}' if they are, --adaln '{layer.name}=0' if not"
        )
    return splits or 0


def _gemv_group(layer: ForeignLayer, config: SourceConfig) -> int:
    q, s = layer.tensors["qweight"], layer.tensors["scales"]
    fast = layer.kind is AUTOAWQ_GEMV_FAST
    k, padded = (q.shape[1], s.shape[0]) if fast else (8 * q.shape[1], s.shape[1])
    if config.group_size is not None:
        group = k if config.group_size == -1 else config.group_size
        if group < 1 or k % group:
            raise FormatError(f"{config.found_in} says group_size {config.group_size}, which does not divide K={k}")
        return group
    fitting = [g for g in (128, 64, 32) if k % g == 0 and nunchaku.awq_padded_groups(k, g) == padded]
    if len(fitting) != 1:
        raise FormatError(
            f"nothing says its group_size, and {padded} padded groups of K={k} fit {fitting or 'none of 128, 64, 32'}; put its "
            "quant_config.json or config.json beside the file"
        )
    return fitting[0]


def _is_v2(config: SourceConfig, hints: Hints) -> bool:
    if hints.dialect in ("gptq", "gptq_v2"):
        return hints.dialect == "gptq_v2"
    if config.method not in ("gptq", "") or not config.values:
        raise FormatError(
            "GPTQ files store their zeros or one less, and nothing says which: put its config.json or quantize_config.json "
            "beside the file, or give --from gptq (one less, the older and usual form) or --from gptq_v2"
        )
    said = config.values.get("checkpoint_format", "gptq")
    if said not in ("gptq", "gptq_v2"):
        raise FormatError(f"{config.found_in} says checkpoint_format {said!r}; known are gptq and gptq_v2")
    return said == "gptq_v2"


def _two_numbers(checkpoint: Checkpoint, layer: ForeignLayer) -> list[int]:
    info = layer.tensors.get("weight_shape")
    if info is None or info.shape != (2,) or info.dtype not in ("I64", "I32"):
        raise FormatError("it needs weight_shape, two integers: without it the columns of the last word are unknown")
    raw = checkpoint.read_bytes(info.name, 16)
    n, k = struct.unpack("<2q" if info.dtype == "I64" else "<2i", raw)
    if n < 1 or k < 1:
        raise FormatError(f"its weight_shape is {[n, k]}")
    return [n, k]


def describe(layer: AnyLayer) -> str:
    """How a layer is stored, for people: "comfy", "nunchaku SVDQuant"."""
    return layer.kind.form if isinstance(layer, ForeignLayer) else "comfy"


def dialect_of(layer: AnyLayer) -> str:
    """What ``--from`` calls the toolkit that stored a layer; both conventions of GPTQ are "gptq"."""
    return layer.kind.dialect if isinstance(layer, ForeignLayer) else "comfy"
