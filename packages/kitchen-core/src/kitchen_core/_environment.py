"""Switches in environment variables: 1 or 0, and a word that is neither is refused instead of passed over."""

from __future__ import annotations

import os

from .errors import UnsupportedError


def is_on(name: str) -> bool:
    """Whether the variable is 1; unset, empty and 0 are off. Raises UnsupportedError for anything else."""
    word = os.environ.get(name, "").strip()
    if word not in ("", "0", "1"):
        raise UnsupportedError(f"{name}={word!r} is not 0 or 1; correct or unset it")
    return word == "1"
