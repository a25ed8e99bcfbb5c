"""What a spawned process runs in tests: it has to be importable there."""

from __future__ import annotations

from typing import Any


def run_module(pipe: Any) -> None:
    """Receive (module, x), send the numbers of module(x): a tensor would need its sender to live on."""
    module, x = pipe.recv()
    pipe.send(module(x).tolist())
