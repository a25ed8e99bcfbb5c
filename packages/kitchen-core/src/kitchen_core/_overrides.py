"""Whether anything overrides the usual choice of kernels: forcing, simulated devices, tracing.

The fast path of a call asks only this one number; whoever overrides counts itself in and out. Which thread an override
belongs to is the override's own business (context variables); the others then merely take the longer way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_lock = threading.Lock()
depth = 0


@contextlib.contextmanager
def override(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for the block, counted in ``depth``."""
    global depth
    token = variable.set(value)
    with _lock:
        depth += 1
    try:
        yield
    finally:
        with _lock:
            depth -= 1
        variable.reset(token)
