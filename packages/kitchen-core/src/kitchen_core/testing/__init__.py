"""What the tests of all packages share: comparison, derived tolerances, shape sets, one-hot decode.

Comparison looks at inf and NaN masks first and names the worst coordinates. Tolerances are computed from the dtype, K and
the format; the derivation stands beside the number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .. import registry
from ..extension import CudaExtension

M_VALUES = (0, 1, 7, 17, 300)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# (N, K): tiny, ragged against every tile, one real layer of a small model. All K are multiples of 64, so that every
# format can hold them.
LAYER_SHAPES = ((1, 64), (7, 128), (96, 320), (130, 384), (384, 1536))

LINEAR_OPS = {
    "int8_tensorwise": "int8_linear",
    "asym_w4a8_int8": "w4a8_linear",
    "w6a8_int8": "w4a8_linear",
    "svdquant_w4a4": "svdquant_linear",
    "awq_w4a16": "awq_linear",
}  # of each format

RELEASE_ARCHS = ("75-real", "80-real", "90a-real", "100-real", "120-real", "120-virtual")  # of release wheels

# Formats whose accumulation is exact in INT32: their error does not grow with K.
EXACT_ACCUMULATION = ("int8_tensorwise", "asym_w4a8_int8", "w6a8_int8")


def inference_mode_has_tangents() -> bool:
    """Whether torch.func.jvp under torch.inference_mode is no zero: with torch 2.10 and 2.11 it is, of a dense linear too."""
    with torch.inference_mode():
        return bool(torch.func.jvp(torch.neg, (torch.ones(1),), (torch.ones(1),))[1])


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``: 2^-24, 2^-11, 2^-8."""
    return torch.finfo(dtype).eps / 2


class Tolerance(NamedTuple):
    """|actual - expected| <= relative * |expected| + accumulation * magnitude, magnitude being |x| @ |W|.T."""

    relative: float
    accumulation: float


def tolerance(dtype: torch.dtype, in_features: int, format: str = "") -> Tolerance:
    """How far two right computations of one linear may differ.

    Each side rounds once to ``dtype``: two roundings, 2u. In fp32 before that, each side's sum of n products is off by
    at most n * 2^-24 * sum|x||w| (Higham, the standard bound of recursive summation, any order); the epilogue adds three
    operations (two scales, bias or residual). n is K where fp32 accumulates, 0 where INT32 does.
    """
    terms = 0 if format in EXACT_ACCUMULATION else in_features
    return Tolerance(2 * unit_roundoff(dtype), 2 * (terms + 3) * 2.0**-24)


def quantization_bound(x_scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The most that INT8 rounding of x may move each output: half a step per column, [M, N] in float64.

    A code is off by at most half a step of its row's scale, so |error[m, n]| <= x_scale[m] / 2 * sum_k |w[n, k]|, with w
    the dequantized weight in the basis in which x was quantized.
    """
    return 0.5 * x_scale.double().reshape(-1, 1) * weight.double().abs().sum(-1).reshape(1, -1)


def swiglu_bound(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The most by which silu(gate) * up, computed in fp32 and rounded once to ``dtype``, may differ from the exact product.

    ``gate`` and ``up`` are the fp32 numbers that are multiplied; the result is float64, of their shape. With v = 2^-24:
    the exponent -gate * log2(e) is off by two roundings, 2|gate| v after exponentiation, of which 1 - sigmoid reaches
    the quotient; the exponential, the sum and the reciprocal add 4v, v and 2v on a GPU (fewer where they are IEEE), two
    products 2v, and one more v covers what is of second order. A sigmoid below 2^-126 may be flushed to 0.
    """
    gate, up = gate.double(), up.double()
    sigmoid = torch.sigmoid(gate)
    relative = unit_roundoff(dtype) + (2 * gate.abs() * (1 - sigmoid) + 10) * 2.0**-24
    return relative * (gate * sigmoid * up).abs() + 2.0**-126 * (gate * up).abs() + torch.finfo(dtype).smallest_normal


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    relative: float | torch.Tensor = 0.0,
    absolute: float | torch.Tensor = 0.0,
    what: str = "result",
) -> None:
    """|actual - expected| <= absolute + relative * |expected| everywhere, with equal shapes and equal inf/NaN masks.

    Compared in float64. The message has the number of bad elements, absolute, relative and cosine figures, and the five
    worst coordinates.
    """
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    for name, mask in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = (mask(a) != mask(e)).nonzero()
        assert len(wrong) == 0, (
            f"{what}: {name} at other places, {len(wrong)} of them, the first at {wrong[0].tolist()}"
        )
    finite = torch.isfinite(e)
    error = torch.where(finite, (a - e).abs(), 0.0)
    to_cpu = [t.double().cpu() if isinstance(t, torch.Tensor) else t for t in (absolute, relative)]
    allowed = to_cpu[0] + to_cpu[1] * torch.where(finite, e.abs(), 0.0)
    bad = error > allowed
    if bad.any():
        raise AssertionError(_describe(what, a, e, error, allowed, bad))


def _describe(what, a, e, error, allowed, bad) -> str:
    allowed = torch.as_tensor(allowed, dtype=torch.float64).expand_as(error)
    excess = (error - allowed).flatten()
    worst = excess.topk(min(5, int(bad.sum()))).indices
    places = [torch.unravel_index(i, e.shape) for i in worst]
    lines = [
        f"  at {[int(c) for c in at]}: {a[at].item():.9g}, expected {e[at].item():.9g}, "
        f"off by {error[at].item():.3g}, allowed {allowed[at].item():.3g}"
        for at in places
    ]
    norm = e.norm().item()
    relative = (a - e).norm().item() / norm if norm else float("inf")
    cosine = torch.nn.functional.cosine_similarity(a.flatten(), e.flatten(), dim=0).item()
    return (
        f"{what}: {int(bad.sum())} of {bad.numel()} elements out of bounds; relative L2 {relative:.3g}, "
        f"cosine {cosine:.9f}; worst:\n" + "\n".join(lines)
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Bit for bit (NaNs at the same places count as equal), same dtype and shape."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert_close(actual, expected, what=what)


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same keys in the same order, and under each the same dtype and bytes."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype
        and torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def pretend_built(monkeypatch: Any, extension: CudaExtension, *archs: str) -> None:
    """Until the test ends a package's extension says that it was built for these architectures; for none, not at all."""
    info = {"has_cuda": bool(archs), "archs": list(archs), "nvcc": "13.0.88", "reason": "" if archs else "no nvcc"}
    monkeypatch.setitem(extension.__dict__, "build_info", info)


def linear_inputs(model: torch.nn.Module, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows that each nn.Linear of a model sees in these batches, by the layer's name."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def leading_shapes(rows: int) -> list[tuple[int, ...]]:
    """Shapes of x without its last dim that hold ``rows`` rows: 1-D (for one row), 2-D, 3-D, 4-D."""
    shapes = [(rows,), (1, rows), (1, rows, 1)]
    return [(), *shapes] if rows == 1 else shapes


def strided_copies(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x [M, K] again with other strides: every value is equal, only the layout differs."""
    wide = x.new_zeros(x.shape[0], 2 * x.shape[1])
    wide[:, ::2] = x
    tall = x.new_zeros(2 * x.shape[0], x.shape[1])
    tall[::2] = x
    offset = x.new_zeros(x.numel() + 1)
    offset[1:] = x.flatten()
    return {
        "contiguous": x.contiguous(),
        "transposed": x.t().contiguous().t(),
        "every second column": wide[:, ::2],
        "every second row": tall[::2],
        "unaligned": offset[1:].view(x.shape),
    }


def one_hot_decode(
    linear: Callable[[torch.Tensor], torch.Tensor], in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K] that ``linear`` multiplies with, read out by one-hot activations."""
    return linear(torch.eye(in_features, dtype=dtype)).t()


@contextlib.contextmanager
def expect_kernel(op: str, kernel_id: str) -> Iterator[None]:
    """Within the block ``op`` must run at least once, and only on this kernel: eager against eager cannot pass."""
    with registry.trace() as calls:
        yield
    ran = [kernel for called, kernel in calls if called == op]
    assert ran, f"{op} was not called; called: {calls}"
    assert set(ran) == {kernel_id}, f"{op} ran on {sorted(set(ran))}, expected {kernel_id}"
