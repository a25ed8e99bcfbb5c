"""Dialects that a checkpoint can be written in: which tensors a layer becomes, from its shapes alone, and how they are made.

A target refuses, in words, what it cannot hold exactly; ``convert`` names the layer. docs/guides/convert.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kitchen_core.errors import FormatError
from kitchen_core.formats import Format, Tensors
from kitchen_core.layouts import autoawq, compressed_tensors, gptq, nunchaku
from kitchen_core.layouts.autoawq import Canonical

from .dialect import MARKER, marker_bytes
from .files import FILE_DTYPES
from .foreign import Hints

Entry = tuple[str, tuple[int, ...]]  # dtype as files spell it, and shape
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Job:
    """A layer to be written: its name, format, config and marker, its tensors without values, the dtype of its bias.

    ``symmetric``: whether its zeros are known to be 0 everywhere.
    """

    name: str
    format: type[Format]
    config: Any
    marker: Mapping[str, Any]
    meta: Tensors
    bias: str | None
    hints: Hints
    symmetric: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """(N, K)"""
        return self.format.shape(self.meta, self.config)


Plan = Callable[[Job], dict[str, Entry]]
Pack = Callable[[Job, Tensors, "torch.Tensor | None"], Tensors]


@dataclass(frozen=True)
class Target:
    """A dialect to write. ``forms``: by the name of a format, (plan, pack); ``config``: what belongs in config.json."""

    name: str
    forms: Mapping[str, tuple[Plan, Pack]]
    config: Callable[[list[Job], list[str]], dict[str, Any]] | None = None
    marked: bool = False

    def form(self, job: Job) -> tuple[Plan, Pack]:
        """How it writes a layer. Raises FormatError where it has no form for the layer's format."""
        if job.format.name not in self.forms:
            raise FormatError(
                f"{self.name} has no form for {job.format.name}; it holds {', '.join(self.forms)}. Write this layer to comfy"
            )
        return self.forms[job.format.name]


# ----------------------------------------------------------------------------------------------------------- comfy


def _comfy(rename: Mapping[str, str]) -> tuple[Plan, Pack]:
    def key_of(key: str) -> str:
        return rename.get(key, key)

    def plan(job: Job) -> dict[str, Entry]:
        if job.meta.get("correction") is not None:
            raise FormatError(
                "its levels are asymmetric (weight_correction), which ComfyUI reads past: the picture would be wrong; quantize "
                "the original again with levels=codebook"
            )
        state = job.format.state_dict(job.meta)
        entries = {key_of(key): _entry(tensor) for key, tensor in state.items()}
        return {**entries, MARKER: ("U8", tuple(marker_bytes(job.marker).shape)), **_bias_entry(job)}

    def pack(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
        state = {key_of(key): tensor for key, tensor in job.format.state_dict(tensors).items()}
        return {**state, MARKER: marker_bytes(job.marker), **_with_bias(bias)}

    return plan, pack


def _entry(tensor: torch.Tensor) -> Entry:
    return FILE_DTYPES[tensor.dtype], tuple(tensor.shape)


def _bias_entry(job: Job) -> dict[str, Entry]:
    return {} if job.bias is None else {"bias": (job.bias, (job.sizes[0],))}


def _with_bias(bias: torch.Tensor | None) -> Tensors:
    return {} if bias is None else {"bias": bias}


# -------------------------------------------------------------------------------------------------------- nunchaku


def _nunchaku(names: Mapping[str, str], padded: bool) -> dict[str, tuple[Plan, Pack]]:
    """``names`` of v2 to those of the version; ``padded``: whether the scales of AWQ layers get pad rows."""

    def svdquant_plan(job: Job) -> dict[str, Entry]:
        (n, k), dtype = job.sizes, _one_half(job)
        if n % 128 or k % 128:
            raise FormatError(f"nunchaku's tiles are 128 wide, and [N, K] = {[n, k]} would have to be padded")
        if job.config.act_unsigned != job.hints.is_unsigned(job.name):
            raise FormatError(
                f"its act_unsigned is {job.config.act_unsigned}, and nunchaku, which goes by names, would run it as "
                f"{not job.config.act_unsigned}; give --unsigned PATTERN where its loader differs"
            )
        rank = _rank(job)
        entries = {
            "qweight": ("I8", (n, k // 2)), "wscales": (dtype, (k // 64, n)), "smooth_factor": (dtype, (k,)),
            "smooth_factor_orig": (dtype, (k,)), "proj_down": (dtype, (k, rank)), "proj_up": (dtype, (n, rank)),
        }  # fmt: skip
        return {**{names.get(key, key): entry for key, entry in entries.items()}, **_bias_entry(job)}

    def svdquant_pack(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
        rank, smooth = _rank(job), nunchaku.pack_vector(tensors["smooth_factor"])
        made = {
            "qweight": nunchaku.pack_qweight(tensors["qdata"]), "wscales": nunchaku.pack_wscales(tensors["scale"]),
            "smooth_factor": smooth, "smooth_factor_orig": smooth,
            "proj_down": nunchaku.pack_lora_down(_to_rank(tensors["proj_down"], rank)),
            "proj_up": nunchaku.pack_lora_up(_to_rank(tensors["proj_up"], rank)),
        }  # fmt: skip
        packed = None if bias is None else nunchaku.pack_vector(bias)
        return {**{names.get(key, key): tensor for key, tensor in made.items()}, **_with_bias(packed)}

    def awq_plan(job: Job) -> dict[str, Entry]:
        (n, k), group = job.sizes, job.config.group_size
        if group != 64 or n % 4 or k % 64:
            raise FormatError(
                f"nunchaku's gemv_awq has groups of 64, N a multiple of 4, K of 64; got {group} for {[n, k]}"
            )
        dtype = _one_half(job)
        splits = _splits(job)
        rows = nunchaku.awq_padded_groups(k, 64) if padded else k // 64
        entries = {"qweight": ("I32", (n // 4, k // 2)), "wscales": (dtype, (rows, n)), "wzeros": (dtype, (rows, n))}
        return {**entries, **({} if job.bias is None else {"bias": (dtype if splits else job.bias, (n,))})}

    def awq_pack(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
        codes, scale, zeros = tensors["qdata"], tensors["scale"], tensors["zeros"]
        splits = _splits(job)
        if splits:
            codes = nunchaku.interleave_rows(codes, splits).contiguous()
            scale, zeros = (nunchaku.interleave_rows(t, splits, 1).contiguous() for t in (scale, zeros))
            if bias is not None:
                bias = nunchaku.interleave_rows(nunchaku.add_folded_one(bias.float(), splits), splits)
                bias = bias.contiguous().to(scale.dtype)
        scaled = nunchaku.pack_awq_zeros(zeros, scale)
        if padded:
            rows = nunchaku.awq_padded_groups(2 * codes.shape[1], 64)
            scale, scaled = (nunchaku.pad(t, rows, 1).contiguous() for t in (scale, scaled))
        return {"qweight": nunchaku.pack_awq_qweight(codes), "wscales": scale, "wzeros": scaled, **_with_bias(bias)}

    return {"svdquant_w4a4": (svdquant_plan, svdquant_pack), "awq_w4a16": (awq_plan, awq_pack)}


def _splits(job: Job) -> int:
    (n, k), splits = job.sizes, job.hints.splits(job.name)
    if splits is None and n in (3 * k, 6 * k):
        raise FormatError(
            f"its {n} outputs look like a modulation, whose outputs nunchaku interleaves, and no known name says so; give "
            f"--adaln '{job.name}={n // k}' or '{job.name}=0'"
        )
    return splits or 0


def _rank(job: Job) -> int:
    """The rank as nunchaku stores it: a multiple of 16, at least one; the rest is zeros, which add nothing."""
    return max(16, -(-job.config.rank // 16) * 16)


def _to_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, rank - tensor.shape[1]))


def _one_half(job: Job) -> str:
    """The one 16-bit dtype of all float tensors, which is what nunchaku's kernels take."""
    found = {name: t.dtype for name, t in job.meta.items() if t.dtype.is_floating_point}
    dtypes = {FILE_DTYPES.get(dtype, str(dtype)) for dtype in found.values()}
    if job.bias is not None and not (job.format.name == "awq_w4a16" and _splits(job)):
        dtypes.add(job.bias)
    if len(dtypes) != 1 or not dtypes <= {"F16", "BF16"}:
        raise FormatError(
            f"nunchaku holds all its floats in one of F16 and BF16, this layer has {', '.join(sorted(dtypes))}"
        )
    return dtypes.pop()


def _nunchaku_config(jobs: list[Job], left: list[str]) -> dict[str, Any]:
    ranks = sorted({_rank(job) for job in jobs if job.format.name == "svdquant_w4a4"})
    config = {
        "method": "svdquant",
        "weight": {"dtype": "int4", "scale_dtype": None, "group_size": 64},
        "activation": {"dtype": "int4", "scale_dtype": None, "group_size": 64},
    }
    return {**config, **({"rank": ranks[-1]} if ranks else {})}


# ----------------------------------------------------------------------------------------- AutoAWQ, GPTQ, compressed


def _gemm_plan(job: Job) -> dict[str, Entry]:
    n, k, groups, dtype = _awq_sizes(job)
    if n % 8:
        raise FormatError(f"GEMM words hold 8 outputs, N={n} is no multiple of 8")
    entries = {"qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (groups, n // 8)), "scales": (dtype, (groups, n))}
    return {**entries, **_bias_entry(job)}


def _gemv_plan(job: Job) -> dict[str, Entry]:
    n, k, groups, dtype = _awq_sizes(job)
    if k % 8:
        raise FormatError(f"GEMV words hold 8 columns, K={k} is no multiple of 8")
    padded = nunchaku.awq_padded_groups(k, k // groups)
    entries = {"qweight": ("I32", (n, k // 8)), "qzeros": ("I32", (n, padded // 8)), "scales": (dtype, (n, padded))}
    return {**entries, **_bias_entry(job)}


def _gemv_fast_plan(job: Job) -> dict[str, Entry]:
    n, k, groups, dtype = _awq_sizes(job)
    if n % 4 or k % 64:
        raise FormatError(f"GEMVFast takes N a multiple of 4 and K of 64, got {[n, k]}")
    padded = nunchaku.awq_padded_groups(k, k // groups)
    entries = {"qweight": ("I16", (n // 4, k)), "qzeros": (dtype, (padded, n)), "scales": (dtype, (padded, n))}
    return {**entries, **_bias_entry(job)}


def _gptq_plan(job: Job) -> dict[str, Entry]:
    n, k, groups, dtype = _awq_sizes(job)
    if n % 8 or k % 8:
        raise FormatError(f"GPTQ words hold 8 codes, N={n} and K={k} must be multiples of 8")
    entries = {
        "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (groups, n // 8)), "scales": (dtype, (groups, n)),
        "g_idx": ("I32", (k,)),
    }  # fmt: skip
    return {**entries, **_bias_entry(job)}


def _packed_plan(job: Job) -> dict[str, Entry]:
    n, k, groups, dtype = _awq_sizes(job)
    entries = {
        "weight_packed": ("I32", (n, -(-k // 8))), "weight_scale": (dtype, (n, groups)), "weight_shape": ("I64", (2,)),
    }  # fmt: skip
    if not job.symmetric:
        entries["weight_zero_point"] = ("I32", (-(-n // 8), groups))
    return {**entries, **_bias_entry(job)}


def _awq_sizes(job: Job) -> tuple[int, int, int, str]:
    (n, k), scale, zeros = job.sizes, job.meta["scale"], job.meta["zeros"]
    if scale.dtype != zeros.dtype:
        raise FormatError(
            f"its scales are {scale.dtype} and its zeros {zeros.dtype}; this dialect has one dtype for both"
        )
    return n, k, scale.shape[0], FILE_DTYPES[scale.dtype]


def _canonical_pack(pack: Callable[..., Any]) -> Pack:
    def packed(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
        made = pack(Canonical(tensors["qdata"], tensors["scale"], tensors["zeros"]), job.name)
        return {**{name: t for name, t in made._asdict().items() if t is not None}, **_with_bias(bias)}

    return packed


def _packed_pack(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
    made = compressed_tensors.pack(Canonical(tensors["qdata"], tensors["scale"], tensors["zeros"]), job.name)._asdict()
    points = made.pop("weight_zero_point")
    if job.symmetric and points is not None:
        raise FormatError("its zeros were said to be 0 everywhere, and they are not; the file's config does not fit it")
    if not job.symmetric:
        shape = tensors["scale"].shape
        eights = compressed_tensors._words(torch.full(tuple(shape), 8, dtype=torch.int8, device="cpu"))
        made["weight_zero_point"] = eights.t().contiguous() if points is None else points
    return {**made, **_with_bias(bias)}


def _int_plan(job: Job) -> dict[str, Entry]:
    if job.config.convrot_groupsize:
        raise FormatError(
            f"its weight is rotated (ConvRot, groups of {job.config.convrot_groupsize}), which int-quantized cannot say: "
            "another reader would multiply by it as it is; quantize the original again with --convrot-groupsize 0"
        )
    n, k = job.sizes
    scale = (n, 1) if job.meta["scale"].numel() == n else (1,)
    return {"weight": ("I8", (n, k)), "weight_scale": ("F32", scale), **_bias_entry(job)}


def _int_pack(job: Job, tensors: Tensors, bias: torch.Tensor | None) -> Tensors:
    n, scale = job.sizes[0], tensors["scale"]
    shape = (n, 1) if scale.numel() == n else (1,)
    return {"weight": tensors["qdata"], "weight_scale": scale.reshape(shape), **_with_bias(bias)}


def _group_of(jobs: list[Job], where: str) -> int:
    groups = {job.config.group_size: job.name for job in jobs}
    if len(groups) > 1:
        (g, a), (h, b), *_ = groups.items()
        raise FormatError(
            f"layer {a!r} has groups of {g} and layer {b!r} of {h}; {where} has one group size for a checkpoint"
        )
    return next(iter(groups), 128)


def _awq_config(version: str) -> Callable[[list[Job], list[str]], dict[str, Any]]:
    def config(jobs: list[Job], left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": _group_of(jobs, "AutoAWQ"), "zero_point": True,
            "version": version, "modules_to_not_convert": sorted(left) or None,
        }  # fmt: skip

    return config


def _gptq_config(form: str) -> Callable[[list[Job], list[str]], dict[str, Any]]:
    def config(jobs: list[Job], left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": 4, "group_size": _group_of(jobs, "GPTQ"), "desc_act": False,
            "sym": all(job.symmetric for job in jobs), "checkpoint_format": form, "lm_head": False,
        }  # fmt: skip

    return config


def _ct_config(jobs: list[Job], left: list[str]) -> dict[str, Any]:
    schemes: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for job in jobs:
        scheme = _scheme(job)
        schemes.setdefault(json.dumps(scheme, sort_keys=True), (scheme, []))[1].append(job.name)
    groups = {}
    for number, (scheme, names) in enumerate(schemes.values()):
        groups[f"group_{number}"] = {**scheme, "targets": ["Linear"] if len(schemes) == 1 else sorted(names)}
    forms = {scheme["format"] for scheme, _ in schemes.values()}
    return {
        "quant_method": "compressed-tensors", "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed", "global_compression_ratio": None, "kv_cache_scheme": None,
        "config_groups": groups, "ignore": sorted(left),
    }  # fmt: skip


def _scheme(job: Job) -> dict[str, Any]:
    shared = {"dynamic": False, "observer": "minmax", "type": "int", "actorder": None, "block_structure": None}
    if job.format.name == "int8_tensorwise":
        one = job.meta["scale"].numel() == 1 != job.sizes[0]
        strategy = "tensor" if one else "channel"
        weights = {**shared, "num_bits": 8, "symmetric": True, "strategy": strategy, "group_size": None}
        activations = {
            **shared,
            "num_bits": 8,
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
        return {
            "weights": weights, "input_activations": {**activations, "observer": None}, "output_activations": None,
            "format": "int-quantized",
        }  # fmt: skip
    whole = job.config.group_size == job.sizes[1]
    weights = {
        **shared, "num_bits": 4, "symmetric": job.symmetric, "strategy": "channel" if whole else "group",
        "group_size": None if whole else job.config.group_size,
    }  # fmt: skip
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}


_ALL = ("int8_tensorwise", "asym_w4a8_int8", "w6a8_int8", "svdquant_w4a4", "awq_w4a16")
_V1_NAMES = {
    "smooth_factor": "smooth", "smooth_factor_orig": "smooth_orig", "proj_down": "lora_down", "proj_up": "lora_up",
}  # fmt: skip

TARGETS = {
    target.name: target
    for target in (
        Target("comfy", dict.fromkeys(_ALL, _comfy({})), marked=True),
        Target("comfy-quants", dict.fromkeys(_ALL, _comfy({"weight_zeros": "weight_zero"})), marked=True),
        Target("nunchaku", _nunchaku({}, padded=False), _nunchaku_config),
        Target("nunchaku-v1", _nunchaku(_V1_NAMES, padded=True), _nunchaku_config),
        Target("autoawq", {"awq_w4a16": (_gemm_plan, _canonical_pack(autoawq.pack_gemm))}, _awq_config("gemm")),
        Target("autoawq-gemv", {"awq_w4a16": (_gemv_plan, _canonical_pack(autoawq.pack_gemv))}, _awq_config("gemv")),
        Target(
            "autoawq-gemv-fast", {"awq_w4a16": (_gemv_fast_plan, _canonical_pack(autoawq.pack_gemv_fast))},
            _awq_config("gemv_fast"),
        ),
        Target("gptq", {"awq_w4a16": (_gptq_plan, _canonical_pack(gptq.pack))}, _gptq_config("gptq")),
        Target(
            "gptq_v2", {"awq_w4a16": (_gptq_plan, _canonical_pack(lambda c, layer: gptq.pack(c, layer, v2=True)))},
            _gptq_config("gptq_v2"),
        ),
        Target(
            "compressed-tensors",
            {"awq_w4a16": (_packed_plan, _packed_pack), "int8_tensorwise": (_int_plan, _int_pack)},
            _ct_config,
        ),
    )
}  # fmt: skip
