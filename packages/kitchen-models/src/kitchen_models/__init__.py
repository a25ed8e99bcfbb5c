"""Checkpoints and models for kitchen: inspect, quantize, verify, load, save.

Names are imported when first used, so that the ``kitchen`` command can read its subcommands without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "files",
    "Rules": "rules",
    "calibrate": "calibrations",
    "convert_file": "convert",
    "inspect_file": "inspect",
    "load": "checkpoint",
    "load_calibration": "calibrations",
    "load_into": "checkpoint",
    "quantize_": "quantize",
    "quantize_file": "quantize",
    "save": "checkpoint",
    "save_calibration": "calibrations",
    "verify_files": "verify",
    "write_report": "report",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
