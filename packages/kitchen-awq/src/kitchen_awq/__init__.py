"""AWQ W4A16 for kitchen: the ``awq_w4a16`` format, loaded by kitchen_core through its entry point.

``optimize_for_decode``, kitchen_core's, lays out a weight anew for few rows of x; it is loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitchen_core import optimize_for_decode as optimize_for_decode

__all__ = ["optimize_for_decode"]


def __getattr__(name: str) -> object:
    if name != "optimize_for_decode":
        raise AttributeError(f"module 'kitchen_awq' has no attribute {name!r}")
    from kitchen_core import optimize_for_decode

    globals()[name] = optimize_for_decode
    return optimize_for_decode
