"""Gradients of the linear ops: with respect to x, bias and residual, straight through the quantizer of x.

The ops themselves are inference ops. The public functions come here when a gradient is wanted; the forward value is
the op's own, and the backward is that of a dense linear with the dequantized weight. Weights get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..arithmetic import apply_input_act
from ..errors import InferenceOnlyError


def wants_grad(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    input_act_weight: torch.Tensor | None = None,
) -> bool:
    """Whether any of the tensors asks for a gradient. (Callers ask first whether autograd is recording at all.)"""
    return (
        x.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (residual_scale is not None and residual_scale.requires_grad)
        or (input_act_weight is not None and input_act_weight.requires_grad)
    )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, bias, residual, residual_scale, run, dense_weight):
        ctx.dense_weight = dense_weight
        ctx.dtypes = (h.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype)
        ctx.save_for_backward(residual_scale)
        return run(h, bias, residual, residual_scale)

    @staticmethod
    def backward(ctx, grad):
        (residual_scale,) = ctx.saved_tensors
        h_dtype, bias_dtype, residual_dtype = ctx.dtypes
        grad_residual = grad.to(residual_dtype) if ctx.needs_input_grad[2] else None
        grad = grad.float()
        if residual_scale is not None:
            grad = grad * residual_scale.reshape(-1).float()
        grad_h = (grad @ ctx.dense_weight().float()).to(h_dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype) if ctx.needs_input_grad[1] else None
        return grad_h, grad_bias, grad_residual, None, None, None


def linear_call(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    input_act: str,
    input_act_weight: torch.Tensor | None,
    input_act_eps: float,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    run: Callable,
    dense_weight: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The differentiable form of a linear op.

    ``run(h, bias, residual, residual_scale)`` calls the op without an activation on fp32 h, [..., K];
    ``dense_weight()`` is the dequantized [N, K] weight in the basis of x, made only in the backward.
    Raises InferenceOnlyError where residual_scale asks for a gradient.
    """
    if residual_scale is not None and residual_scale.requires_grad:
        raise InferenceOnlyError(
            "residual_scale has no gradient here; detach it, or apply the residual outside the quantized linear"
        )
    h = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    return _StraightThrough.apply(h, bias, residual, residual_scale, run, dense_weight)
