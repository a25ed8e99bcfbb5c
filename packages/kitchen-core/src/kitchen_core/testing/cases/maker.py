"""What every case is made of: shapes, dtypes, values and strides, drawn; and the case itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...arithmetic import INPUT_ACTS
from .. import FLOAT_DTYPES, assert_close, leading_shapes

Draw = Callable[[Sequence[Any]], Any]

ROWS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129)
OUT_FEATURES = (1, 7, 8, 16, 24, 33, 64, 96, 128, 130, 200, 264)
VALUES = ("normal", "normal", "outlier columns", "zero rows", "tiny", "large", "a row with inf", "a row with nan")
LAYOUTS = ("contiguous", "contiguous", "transposed", "every second column", "every second row", "unaligned", "expanded")


@dataclass
class Case:
    """One call: positional ``arguments`` of ``op`` on the CPU; ``truth`` and ``bound`` in float64 for each output.

    ``bits`` tells for each output whether all kernels promise the reference's bits, ``dtypes`` what it must be;
    ``judge(outputs)`` turns outputs into the numbers that they stand for (codes times scales). ``about`` is what a failure
    prints.
    """

    op: str
    arguments: list
    truth: list[torch.Tensor]
    bound: list[torch.Tensor]
    bits: list[bool]
    dtypes: tuple[torch.dtype, ...]
    judge: Callable[[tuple[torch.Tensor, ...]], list[torch.Tensor]] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def check(self, outputs: torch.Tensor | tuple[torch.Tensor, ...], what: str) -> None:
        """Every output is within its bound of the truth, and NaN and shapes agree; what would overflow is left out."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert tuple(o.dtype for o in outputs) == self.dtypes, f"{what}: {[o.dtype for o in outputs]}, {self.dtypes}"
        limits = [torch.finfo(o.dtype).max if o.is_floating_point() else float("inf") for o in outputs]
        outputs = tuple(o.cpu() for o in outputs)
        numbers = self.judge(outputs) if self.judge is not None else list(outputs)
        assert len(numbers) == len(self.truth), what
        for i, (got, truth, bound, limit) in enumerate(zip(numbers, self.truth, self.bound, limits, strict=False)):
            label = f"{what}, output {i}, {self.about}"
            assert got.shape == truth.shape, f"{label}: {list(got.shape)}, expected {list(truth.shape)}"
            overflows = truth.abs() + bound >= limit
            judged, expected = (torch.where(overflows, 0.0, t.double()) for t in (got, truth))
            assert_close(judged, expected, absolute=bound.nan_to_num(0.0, posinf=0.0), what=label)


class Maker:
    """Draws the parts of a case; numbers come from one seeded generator."""

    def __init__(self, draw: Draw, must_have: str | None = None) -> None:
        self.draw = draw
        self.must_have = must_have
        self.generator = torch.Generator().manual_seed(draw(range(10_000)))
        self.about: dict[str, Any] = {}

    def pick(self, name: str, options: Sequence[Any]) -> Any:
        """One of the options, which a failure will name."""
        self.about[name] = self.draw(options)
        return self.about[name]

    def wants(self, name: str) -> bool:
        """Whether an optional argument is given."""
        return name == self.must_have or self.draw((False, True))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def float_dtype(self) -> torch.dtype:
        return self.draw(FLOAT_DTYPES)

    def lead(self) -> tuple[int, ...]:
        """A shape without its last dim, of 0 to 4 dims."""
        rows = self.draw(ROWS)
        return self.pick("lead", [*leading_shapes(rows), (2, rows), (rows, 1, 3)])

    def x(self, lead: tuple[int, ...], width: int) -> torch.Tensor:
        """Activations [*lead, width] of a drawn dtype, kind of values and strides."""
        dtype, kind = self.pick("dtype", FLOAT_DTYPES), self.pick("values", VALUES)
        values = self.randn(*lead, width)
        rows = values.reshape(-1, width)
        if kind == "outlier columns":
            rows[:, :: max(1, width // 3)] *= 300.0
        elif kind == "zero rows":
            rows[::2] = 0.0
        elif kind in ("tiny", "large"):  # towards the ends of what fp16 holds
            values = values * (1e-6 if kind == "tiny" else 1e3)
        elif kind.startswith("a row with") and len(rows):
            rows[len(rows) // 2, width // 2] = float(kind.split()[-1])
        return self.strided("x layout", values.to(dtype))

    def strided(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with drawn strides: of the same values, or, where expanded, its first row for all."""
        layout = self.pick(name, LAYOUTS)
        if tensor.dim() == 0 or tensor.numel() == 0 or layout == "contiguous":
            return tensor
        if layout == "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "every second column":
            return torch.stack((tensor, torch.zeros_like(tensor)), dim=-1).flatten(-2)[..., ::2]
        if layout == "every second row":
            return torch.stack((tensor, torch.zeros_like(tensor)), dim=1)[:, 0]
        if layout == "unaligned":
            return torch.cat((tensor.new_zeros(1), tensor.flatten()))[1:].view(tensor.shape)
        return tensor[:1].clone().expand(tensor.shape)

    def vector(self, name: str, length: int, size: float = 1.0) -> torch.Tensor | None:
        """An optional float vector."""
        return self.randn(length).mul(size).to(self.float_dtype()) if self.wants(name) else None

    def out_dtype(self, default: torch.dtype | None, unlike: torch.dtype | None = None) -> torch.dtype | None:
        """The optional out_dtype; another one than ``unlike`` where it has to be given."""
        if self.must_have == "out_dtype":
            return self.draw([d for d in FLOAT_DTYPES if d not in (default, unlike)])
        return self.float_dtype() if self.wants("out_dtype") else default

    def residual(self, shape: tuple[int, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The optional residual [..., N], and its optional scale of 1 or N elements."""
        if not self.wants("residual") and self.must_have != "residual_scale":
            return None, None
        residual = self.strided("residual layout", self.randn(*shape).to(self.float_dtype()))
        if not self.wants("residual_scale"):
            return residual, None
        return residual, self.randn(self.draw((1, shape[-1]))).to(self.float_dtype())

    def part(self, n: int) -> tuple[int | None, int | None]:
        """The optional part_first and part_of of a weight of n rows: both, or neither."""
        if not self.wants("part_first") and self.must_have != "part_of":
            return None, None
        first = self.pick("part_first", (0, 1, 8, 96))
        return first, self.pick("part_of", (first + n, first + n + 1, first + n + 8, 1 << 20))

    def activation(self, width: int) -> tuple[str, torch.Tensor | None, float, int]:
        """input_act, its weight and eps, and the width of x."""
        acts = INPUT_ACTS[1:] if self.wants("input_act") else INPUT_ACTS[:1]
        if self.must_have in ("input_act_weight", "input_act_eps"):
            acts = ("rms_norm",)
        act = self.pick("input_act", acts)
        weight = self.rand(width).to(self.float_dtype()) if act == "rms_norm" else None
        eps = self.draw((1e-6, 1e-5)) if act == "rms_norm" else 0.0
        return act, weight, eps, 2 * width if act in ("swiglu", "situ") else width
