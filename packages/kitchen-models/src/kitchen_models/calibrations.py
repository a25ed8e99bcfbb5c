"""Calibrating a model: running it on inputs like those it will see, and keeping what each linear layer was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitchen_core.calibration import SAMPLE_ROWS, Calibration
from kitchen_core.errors import FormatError, UnsupportedError

from .files import TORCH_DTYPES, Checkpoint, printable
from .rules import Rules
from .writer import Planned, writing

Calibrations = Mapping[str, Calibration]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Any = "*",
    sample_rows: int = SAMPLE_ROWS,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Calibration]:
    """Run the float model over ``batches`` and return a Calibration for each nn.Linear that was reached, by its name.

    A batch is a mapping (``model(**batch)``), a tuple or list (``model(*batch)``) or anything else (``model(batch)``), on
    the model's device. Every row of a layer's input counts, so give batches without padding. ``layers``: a pattern, as in
    rules, or several; a layer keeps K * (K + sample_rows) fp32 numbers, so a large model is done in parts. The model's
    mode and weights are left as they are.
    Raises UnsupportedError, naming the layer, for inputs with inf or NaN, and where no layer was reached.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    wanted = Rules.of([(pattern, None) for pattern in patterns])
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and wanted.match(name) is not None
    }
    made: dict[str, Calibration] = {}

    def watch(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if name not in made:
                made[name] = Calibration(module.in_features, sample_rows, x.device)
            try:
                made[name].update(x)
            except UnsupportedError as error:
                raise UnsupportedError(f"layer {printable(name)!r}: {error}") from error

        return seen

    total = len(batches) if hasattr(batches, "__len__") else 0
    hooks = [module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module in linears.items()]
    try:
        for done, batch in enumerate(batches):
            if progress:
                progress("calibrating", done, total)
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not made:
        raise UnsupportedError(
            f"no linear layer was reached: {len(linears)} match {', '.join(patterns)}, and the batches led to none of them"
        )
    return {name: made[name] for name in linears if name in made}


def save_calibration(calibrations: Calibrations, path: str | os.PathLike[str]) -> None:
    """Write what ``calibrate`` returned as one safetensors file, atomically."""
    tensors = {f"{name}/{key}": t for name, c in calibrations.items() for key, t in c.tensors().items()}
    planned = [Planned.of(name, tensor) for name, tensor in tensors.items()]
    with writing(Path(path), planned, {"kitchen_calibration": "1"}) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)


def load_calibration(path: str | os.PathLike[str]) -> CalibrationFile:
    """Open such a file. Each layer is read when it is asked for. Raises FormatError for any other file."""
    return CalibrationFile(path)


class CalibrationFile(Mapping[str, Calibration]):
    """The calibrations of a file by layer; nothing is kept in memory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._checkpoint = Checkpoint.open(path)
        if "kitchen_calibration" not in self._checkpoint.metadata:
            raise FormatError(f"{str(path)!r} is no calibration: kitchen_models.save_calibration writes one")
        self._keys: dict[str, dict[str, str]] = {}
        for key, info in self._checkpoint.tensors.items():
            name, _, part = key.rpartition("/")
            if info.dtype not in TORCH_DTYPES:
                raise FormatError(f"{str(path)!r}: tensor {printable(key)!r} has the dtype {info.dtype}")
            self._keys.setdefault(name, {})[part] = key

    def __getitem__(self, name: str) -> Calibration:
        keys = self._keys[name]
        try:
            return Calibration.from_tensors({part: self._checkpoint.read(key) for part, key in keys.items()})
        except UnsupportedError as error:
            raise FormatError(f"{str(self.path)!r}, layer {printable(name)!r}: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __iter__(self):
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def calibrated_layers(calibrations: Calibrations | None, decisions: Iterable[Any]) -> frozenset[str]:
    """The layers that will be quantized with their calibration: those that have one and whose format uses it.

    Raises UnsupportedError where calibrations are given and none is of a layer that gets such a format.
    """
    if calibrations is None:
        return frozenset()
    users = [d.layer for d in decisions if d.format is not None and d.format.uses_calibration]
    found = frozenset(layer for layer in users if layer in calibrations)
    if users and not found:
        raise UnsupportedError(
            f"none of the {len(users)} layers that could use a calibration is among the {len(calibrations)} calibrated "
            f"ones: wanted {printable(users[0])!r}, calibrated {[printable(n) for n in list(calibrations)[:2]]}; "
            "do the names differ by a prefix?"
        )
    return found
