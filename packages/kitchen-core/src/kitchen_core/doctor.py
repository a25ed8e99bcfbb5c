"""``kitchen doctor``: what is installed, what each GPU can do, what would run and why."""

from __future__ import annotations

import contextlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from . import plugins as plugin_registry
from .abi import KITCHEN_ABI
from .devices import DeviceFacts, device_facts, simulate, simulating
from .errors import UnsupportedError
from .explanation import explain
from .known_formats import install_hint
from .ops._define import problem_builders
from .registry import Explanation, load_providers
from .typical import TYPICAL_M, typical

_TENSOR_CORES = ("int8", "fp16", "bf16", "fp8", "int4")


@contextlib.contextmanager
def pretend(arch: str | None, name: str | None = None) -> Iterator[str]:
    """The device to explain for: the pretended GPU where ``arch`` is given, else the first real one, else the CPU."""
    if arch is None:
        if name is not None:
            raise UnsupportedError(
                f"--name {name!r} names a pretended GPU; give its architecture too, such as --as sm_75"
            )
        yield "cuda:0" if torch.cuda.is_available() else "cpu"
        return
    with simulate(arch, name):
        yield "cuda:0"


def examine(arch: str | None = None, name: str | None = None) -> dict[str, Any]:
    """The whole report as plain values; ``problems`` lists what a user should mend."""
    load_providers()
    report: dict[str, Any] = {
        "versions": _versions(),
        "driver": _driver(),
        "plugins": _plugins(),
        "devices": [],
        "problems": [],
    }
    with pretend(arch, name) as device:
        devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if arch is None else [device]
        report["devices"] = [_device(d) for d in devices or ["cpu"]]
    report["problems"] += [
        f"plug-in {p['name']} ({p['distribution']}): {p['error']}" for p in report["plugins"] if p["error"]
    ]
    report["problems"] += [
        f"KITCHEN_PLUGINS names {name}, and no plug-in or distribution here is called so; only what it names is used"
        for name in plugin_registry.unknown_names()
    ]
    report["problems"] += [
        problem for device in report["devices"] if (problem := _torch_lacks(device["facts"]["arch"]))
    ]
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        report["problems"].append(
            "nvidia-smi is here but torch sees no GPU: this torch is a CPU build, or its CUDA is newer than the driver"
        )
    return report


def _torch_lacks(arch: str) -> str | None:
    """What to say where this torch holds no code for a GPU: then nothing runs there, whatever kitchen has."""
    built = [(kind, int(sm)) for kind, sm in re.findall(r"(sm|compute)_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    if not built or not arch.startswith("sm_"):
        return None
    sm = int(arch.removeprefix("sm_"))
    if any(at <= sm and (kind == "compute" or at // 10 == sm // 10) for kind, at in built):
        return None
    have = ", ".join(torch.cuda.get_arch_list())
    mend = '; the last torch on PyPI that has it: pip install "torch==2.10.*"' if sm == 70 else "; use one that has it"
    return f"torch {torch.__version__} has no code for {arch}, only for {have}: nothing runs on that GPU with it{mend}"


def _versions() -> dict[str, str]:
    return {
        "kitchen-core": version("kitchen-core"),
        "kitchen ABI": str(KITCHEN_ABI),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }


def _driver() -> str:
    """The NVIDIA driver as nvidia-smi tells it, or why there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi: no NVIDIA driver here"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else f"nvidia-smi failed: {done.stderr.strip()}"


def _plugins() -> list[dict[str, Any]]:
    rows = []
    for group in plugin_registry.GROUPS:
        for plugin in plugin_registry.plugins(group).values():
            loaded = plugin.load()
            lines = loaded.doctor() if group == "kitchen.kernels" and loaded is not None else []
            rows.append(
                {
                    "group": group,
                    "name": plugin.name,
                    "distribution": plugin.distribution,
                    "error": plugin.why_not(),
                    "notes": lines,
                }
            )
    return rows


def _device(device: str) -> dict[str, Any]:
    facts = device_facts(device)
    ops = {}
    for op in sorted(problem_builders()):
        found = {m: explain(op, device=device, **typical(op, m)) for m in TYPICAL_M}
        ops[op] = {f"M={m}": explanation_as_dict(e) for m, e in found.items()}
    return {"device": device, "facts": _facts(facts), "ops": ops}


def _facts(facts: DeviceFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "arch": facts.arch,
        "simulated": facts.simulated or simulating(),
        "multiprocessors": facts.sm_count,
        "shared memory per block (KiB)": facts.shared_memory_optin >> 10,
        "L2 (MiB)": facts.l2_bytes >> 20,
        "driver supports CUDA": f"{facts.driver_cuda // 1000}.{facts.driver_cuda % 1000 // 10}"
        if facts.driver_cuda
        else "",
        "tensor cores": [kind for kind in _TENSOR_CORES if getattr(facts, f"{kind}_tensor_cores")],
    }


def explanation_as_dict(explanation: Explanation) -> dict[str, Any]:
    """An Explanation as plain values."""
    return {
        "problem": str(explanation.problem),
        "chosen": explanation.chosen.id if explanation.chosen else None,
        "slow": bool(explanation.chosen and explanation.chosen.slow and explanation.facts.kind != "cpu"),
        "slow_path": explanation.slow_path,
        "calls": list(explanation.chosen.calls) if explanation.chosen else [],
        "candidates": [{"kernel": c.kernel.id, "reason": c.reason} for c in explanation.candidates],
        "missing": [{"package": package, "reason": reason} for package, reason in explanation.missing],
        "notes": list(explanation.notes),
        "refused": explanation.refused,
    }


def render(report: dict[str, Any], verbose: bool = True) -> str:
    """The report as text: a summary, then details. Not ``verbose``: packages in a line each, the CPU's ops in one."""
    problems, plugins = report["problems"], report["plugins"]
    formats = [plugin["name"] for plugin in plugins if plugin["group"] == "kitchen.formats" and not plugin["error"]]
    end = (
        [f"Problems: {len(problems)}", *(f"  {problem}" for problem in problems)] if problems else ["No problems found"]
    )
    none = f"none; they come as packages, such as kitchen-int8: {install_hint('kitchen-int8')}"
    lines = [
        "Summary",
        f"  formats: {', '.join(formats) or none}",
        *(f"  {device['device']}: {_in_short(device)}" for device in report["devices"]),
        f"  problems: {len(problems) or 'none'}{', see the end' if problems else ''}",
        "Versions",
        *(f"  {name:14} {value}" for name, value in report["versions"].items()),
        f"  {'driver':14} {report['driver']}",
        "Plug-ins" if plugins else "Plug-ins: none installed",
    ]
    if verbose:
        for plugin in plugins:
            state = f"BROKEN: {plugin['error']}" if plugin["error"] else "ok"
            lines.append(f"  {plugin['group']:16} {plugin['name']:18} {plugin['distribution']:30} {state}")
            lines += [f"      {note}" for note in plugin["notes"]]
    else:
        lines += _packages(plugins)
    for device in report["devices"]:
        if verbose or device["facts"]["arch"] != "cpu":
            lines += _render_device(device)
    return "\n".join(lines + end)


def _in_short(device: dict[str, Any]) -> str:
    """A device in a line: its name, and where its ops run, if they are few words."""
    facts, cases = device["facts"], [case for ops in device["ops"].values() for case in ops.values()]
    if facts["arch"] == "cpu":
        chosen = ", ".join(sorted({str(case["chosen"]) for case in cases}))
        return f"no GPU; every op runs as {chosen}, plain PyTorch. --verbose says why, --as sm_90 what a GPU would run"
    slow = [op for op, asked in device["ops"].items() if any(case["slow_path"] for case in asked.values())]
    words = f"{len(slow)} of {len(device['ops'])} ops take a slow path" if slow else "every op has a fast path"
    return f"{facts['name']}, {facts['arch']}{' (simulated)' if facts['simulated'] else ''}; {words}"


def _packages(plugins: list[dict[str, Any]]) -> list[str]:
    """A line for each distribution, with the names of what it adds and, below, what is said of it."""
    lines = []
    for distribution in sorted({plugin["distribution"] for plugin in plugins}):
        mine = [plugin for plugin in plugins if plugin["distribution"] == distribution]
        adds: dict[str, str] = {}
        for plugin in mine:
            kind = plugin["group"].rpartition(".")[2]
            adds[kind] = f"{adds[kind]}, {plugin['name']}" if kind in adds else f"{kind}: {plugin['name']}"
        lines.append(f"  {distribution:30} {'; '.join(adds.values())}")
        lines += [f"      {plugin['name']} is BROKEN: {plugin['error']}" for plugin in mine if plugin["error"]]
        lines += [f"      {note}" for plugin in mine for note in plugin["notes"]]
    return lines


def _render_device(device: dict[str, Any]) -> list[str]:
    facts = device["facts"]
    mark = " (simulated)" if facts["simulated"] else ""
    lines = [f"Device {device['device']}: {facts['name']}, {facts['arch']}{mark}"]
    if facts["arch"].startswith("sm_"):
        cores = ", ".join(facts["tensor cores"]) or "none"
        lines.append(f"  tensor cores: {cores}; driver supports CUDA {facts['driver supports CUDA'] or 'unknown'}")
    lines.append(f"  for {_typical_words()}; other sizes: kitchen explain OP -M ... -N ... -K ...")
    said: set[str] = set()
    for op, cases in device["ops"].items():
        chosen = {m: f"{case['chosen']}{_remark(case)}" for m, case in cases.items()}
        what = chosen["M=1"] if len(set(chosen.values())) == 1 else ", ".join(f"{m}: {k}" for m, k in chosen.items())
        lines.append(f"  {op:30} {what}")
        reasons = _reasons(cases)
        for reason, kernels in reasons.items():
            head, colon, _ = reason.partition(":")
            short = f"{head} (see above)" if colon and reason in said else reason
            lines.append(f"      {', '.join(kernels)}: {short}")
        said.update(reasons)
    return lines


def _typical_words() -> str:
    sizes = typical("int8_linear", M=1)
    return f"a layer of N={sizes['N']}, K={sizes['K']}, bfloat16, at {' and '.join(f'M={m}' for m in TYPICAL_M)}"


def _reasons(cases: dict[str, Any]) -> dict[str, list[str]]:
    """Reason -> the kernels that have it, each with its M where not every M has that answer."""
    answers: dict[str, dict[str, list[str]]] = {}  # kernel -> reason -> Ms
    for m, case in cases.items():
        told = [(c["kernel"], c["reason"]) for c in case["candidates"]]
        told += [(absent["package"], absent["reason"]) for absent in case.get("missing", ())]
        for kernel, reason in told:
            if reason and not reason.startswith("composes"):
                answers.setdefault(kernel, {}).setdefault(reason, []).append(m)
    reasons: dict[str, list[str]] = {}
    for kernel, found in answers.items():
        for reason, ms in found.items():
            reasons.setdefault(reason, []).append(kernel if len(ms) == len(cases) else f"{kernel} at {', '.join(ms)}")
    return reasons


def _remark(case: dict[str, Any]) -> str:
    """What a chosen kernel's name leaves out: what of it is slow, or which ops a composition calls."""
    if case["slow_path"]:
        return f" ({case['slow_path']})"
    return f" (calls {', '.join(case['calls'])})" if case["calls"] else ""
