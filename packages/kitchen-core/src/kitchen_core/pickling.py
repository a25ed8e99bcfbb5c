"""Plain pickle cannot write float8 tensors (torch 2.15: the storage has no dtype), so they travel as their bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def hide_float8(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """The tensors, 1-byte floats among them as uint8 views, and the dtypes of those."""
    hidden = {name: t.dtype for name, t in tensors.items() if t.dtype.is_floating_point and t.element_size() == 1}
    return {name: t.view(torch.uint8) if name in hidden else t for name, t in tensors.items()}, hidden


def restore_float8(tensors: Mapping[str, torch.Tensor], hidden: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Undo hide_float8."""
    return {name: t.view(hidden[name]) if name in hidden else t for name, t in tensors.items()}
