#!/usr/bin/env python3
"""What users may rely on: public names with their signatures, op schemas, kernels, formats, commands. A change must be meant.

    python tools/public_names.py            compares with tools/public_names.txt; exit status 1 shows the difference
    python tools/public_names.py --write    records what is there now

A line that goes away, or changes, breaks somebody: it belongs into the release notes with what to do.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
from pathlib import Path

import torch

RECORD = Path(__file__).resolve().with_name("public_names.txt")
PACKAGES = (
    "kitchen_core", "kitchen_int8", "kitchen_w4a8", "kitchen_svdquant", "kitchen_awq", "kitchen_fallback_volta",
    "kitchen_models",
)  # fmt: skip


def names_of(package: str) -> list[str]:
    """``package.name(signature)`` of everything in __all__, methods of classes included."""
    module = importlib.import_module(package)
    lines = []
    for name in sorted(getattr(module, "__all__", ())):
        value = getattr(module, name)
        lines.append(described(f"{package}.{name}", value))
        if inspect.isclass(value):
            members = [(n, m) for n, m in vars(value).items() if not n.startswith("_")]
            lines += [described(f"{package}.{name}.{n}", getattr(m, "__func__", m)) for n, m in sorted(members)]
    return lines


def described(name: str, value: object) -> str:
    if isinstance(value, property):
        return f"{name} (property)"
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return name
    shown = ", ".join(f"{p.name}{'' if p.default is p.empty else '=' + spelled(p.default)}" for p in parameters)
    return f"{name}({shown})"


def spelled(value: object) -> str:
    """A default as it does not depend on where or when it runs."""
    plain = value is None or isinstance(value, (bool, int, float, str, tuple, torch.dtype))
    return repr(value) if plain else type(value).__name__


def everything() -> list[str]:
    from kitchen_core import installed_formats
    from kitchen_core.ops._define import problem_builders
    from kitchen_core.plugins import plugins
    from kitchen_core.registry import kernels_of

    lines = [line for package in PACKAGES for line in names_of(package)]
    for op in sorted(problem_builders()):
        lines.append(f"op {getattr(torch.ops.kitchen, op).default._schema}")
        lines += [f"kernel {op}: {kernel.id}" for kernel in sorted(kernels_of(op), key=lambda k: k.id)]
    lines += [f"format {name}" for name in sorted(installed_formats())]
    lines += [f"command {name}" for name in sorted(plugins("kitchen.commands"))]
    return lines


def difference() -> str:
    """What changed since the record, as a unified diff; empty where nothing did."""
    recorded = RECORD.read_text().splitlines() if RECORD.exists() else []
    return "\n".join(difflib.unified_diff(recorded, everything(), "recorded", "now", lineterm="", n=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record what is there now")
    args = parser.parse_args()
    if args.write:
        RECORD.write_text("\n".join(everything()) + "\n")
        return
    changed = difference()
    if changed:
        sys.exit(f"{changed}\n\nif this is meant: python tools/public_names.py --write")
    print(f"{len(everything())} public names as recorded")


if __name__ == "__main__":
    main()
