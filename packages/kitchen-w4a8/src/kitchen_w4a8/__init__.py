"""W4A8 and W6A8 linear layers for kitchen: the ``asym_w4a8_int8`` and ``w6a8_int8`` formats.

``optimize_for_decode``, kitchen_core's, lays out a weight anew for few rows of x; it is loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitchen_core import optimize_for_decode as optimize_for_decode

__version__ = "0.1.0"
__all__ = ["optimize_for_decode"]


def __getattr__(name: str) -> object:
    if name != "optimize_for_decode":
        raise AttributeError(f"module 'kitchen_w4a8' has no attribute {name!r}")
    from kitchen_core import optimize_for_decode

    globals()[name] = optimize_for_decode
    return optimize_for_decode
