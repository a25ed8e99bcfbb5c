"""INT8 W8A8 for kitchen: the ``int8_tensorwise`` format and its CUDA kernels, loaded by kitchen_core through entry points.

``pack_gate_up`` packs the gate and up projection of a SwiGLU MLP; it is loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .gate_up import pack_gate_up as pack_gate_up

__all__ = ["pack_gate_up"]


def __getattr__(name: str) -> object:
    if name != "pack_gate_up":
        raise AttributeError(f"module 'kitchen_int8' has no attribute {name!r}")
    from .gate_up import pack_gate_up

    globals()[name] = pack_gate_up
    return pack_gate_up
