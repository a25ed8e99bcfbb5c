"""Which sizes a W4A8 or W6A8 weight can have."""

from __future__ import annotations

from ..arithmetic import check_rotation_group
from ..errors import UnsupportedError
from ..registry import Problem


def w4a8_group_sizes(in_features: int, bits: int = 4, limit: int = 256) -> list[int]:
    """The group sizes, up to ``limit``, that a weight of K = ``in_features`` can have."""
    return [g for g in range(4, limit + 1) if _group_fits(g, in_features, bits)]


def _group_fits(group: int, in_features: int, bits: int) -> bool:
    return group >= 4 and in_features % group == 0 and (group % 16 == 0 or (bits == 4 and 16 % group == 0))


def check_w4a8_group(group_size: int, in_features: int, bits: int, shape: str = "") -> None:
    """Raises UnsupportedError unless K and the group fit each other and the width.

    K is a multiple of 16 (6 bits: 32); the group, 4 at least, divides K, and divides 16 or is a multiple (6 bits: is one).
    """
    unit = 16 if bits == 4 else 32
    layer = f" (weight {shape})" if shape else ""
    if in_features == 0 or in_features % unit:
        raise UnsupportedError(
            f"in_features K must be a positive multiple of {unit} at {bits} bits, got K={in_features}{layer}; "
            "leave this layer unquantized or use int8_tensorwise"
        )
    if not _group_fits(group_size, in_features, bits):
        allowed = ", ".join(map(str, w4a8_group_sizes(in_features, bits)))
        raise UnsupportedError(
            f"group_size {group_size} does not fit K={in_features} at {bits} bits{layer}; allowed here (up to 256): "
            f"{allowed}"
        )


def check_bits(bits: int) -> None:
    """Raises UnsupportedError unless a weight can have so many bits."""
    if bits not in (4, 6):
        raise UnsupportedError(f"bits must be 4 or 6, got {bits}")


def check_sizes(problem: Problem) -> None:
    """What the ops refuse of a Problem's sizes."""
    check_bits(problem.bits)
    check_w4a8_group(problem.group, problem.K, problem.bits)
    check_rotation_group(problem.rotation, problem.K)
