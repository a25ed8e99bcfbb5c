"""Cases of the AWQ ops."""

from __future__ import annotations

import torch

from .maker import OUT_FEATURES, Case, Maker
from .truth import activated, finished, nibbles, product

WIDTHS = (2, 34, 60, 64, 96, 128, 192, 256, 320, 512, 768)
GROUPS = (2, 6, 8, 16, 24, 32, 64, 96, 128, 256)


def weight_of(m: Maker, n: int, plain: bool = False) -> tuple[list[torch.Tensor], int, torch.Tensor]:
    """qweight, wscales and wzeros with any strides; the group; fma(q - 8, scale, zero) in float64 [N, K]."""
    k = m.pick("K", [w for w in WIDTHS if (m.must_have != "group_size" or w != 64) and (not plain or w % 32 == 0)])
    groups = [g for g in (*GROUPS, k) if k % g == 0 and (m.must_have != "group_size" or g != 64)]
    groups = [g for g in groups if not plain or g % 32 == 0]
    group = m.pick("group", groups)
    packed = m.strided("weight layout", m.integers(-128, 128, n, k // 2))
    dtypes = m.float_dtype(), m.float_dtype() if m.draw((False, False, True)) else None
    scales = (m.rand(k // group, n) * 0.01 + 0.002).to(dtypes[0])
    zeros = (m.randn(k // group, n) * 0.03).to(dtypes[1] or dtypes[0])
    scales, zeros = m.strided("wscales layout", scales), m.strided("wzeros layout", zeros)
    wide = [t.double().T.repeat_interleave(group, dim=1) for t in (scales, zeros)]
    return [packed, scales, zeros], group, (nibbles(packed, signed=False) - 8).double() * wide[0] + wide[1]


def dequantizer(op: str, m: Maker) -> Case:
    tensors, group, exact = weight_of(m, m.pick("N", OUT_FEATURES))
    out = m.out_dtype(None, torch.float32)
    once = exact.float().to(out or torch.float32).double()
    return Case(op, [*tensors, group, out], [once], [torch.zeros_like(once)], [True], (out or torch.float32,))


def linear(op: str, m: Maker) -> Case:
    plain = m.pick(
        "plain", (True, False)
    )  # what the fused kernels take: scales of x's type, whole tiles, no activation
    n, lead = m.pick("N", [n for n in OUT_FEATURES if not plain or n % 8 == 0]), m.lead()
    tensors, group, exact = weight_of(m, n, plain)
    k = exact.shape[1]
    act, act_weight, eps, width = (
        ("none", None, 0.0, k) if plain and "input_act" not in str(m.must_have) else m.activation(k)
    )
    x = m.x(lead, width)
    if plain and tensors[1].dtype == tensors[2].dtype:
        x = x.to(tensors[1].dtype)
    bias, out = m.vector("bias", n), m.out_dtype(None, x.dtype)
    residual, residual_scale = m.residual((*lead, n))
    decoded = m.float_dtype() if m.wants("weight_dtype") else None
    dense = exact.float().to(decoded or x.dtype).double()
    h, error = activated(x, act, act_weight, eps)
    y, bound = product(h, error, dense, k)
    y, bound = finished(y, bound, bias, residual, residual_scale, out or x.dtype)
    arguments = [
        x, *tensors, bias, group, out, act, act_weight, eps, residual, residual_scale, decoded,
        *m.part(n),
    ]  # fmt: skip
    return Case(op, arguments, [y], [bound], [False], (out or x.dtype,))


BUILDERS = {"dequantize_awq": dequantizer, "awq_linear": linear}
