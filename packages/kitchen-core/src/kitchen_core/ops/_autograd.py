"""Gradients of the linear ops: with respect to x, bias and residual, straight through the quantizer of x.

The ops themselves are inference ops. The public functions come here when a gradient is wanted; the forward value is
the op's own, and the backward is that of a dense linear with the dequantized weight. Weights get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from ..arithmetic import apply_input_act
from ..errors import InferenceOnlyError


def wants_grad(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    input_act_weight: torch.Tensor | None = None,
) -> bool:
    """Whether any of the tensors asks for a gradient. (Callers ask first whether autograd is recording at all.)

    In forward mode any of them may: under torch.func a tangent does not show from here.
    """
    try:
        return (
            x.requires_grad
            or forward_ad._current_level >= 0
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
            or (residual_scale is not None and residual_scale.requires_grad)
            or (input_act_weight is not None and input_act_weight.requires_grad)
        )
    except AttributeError:  # no tensor: the op says which argument, by its schema
        return False


_NO_SCALE_GRADIENT = (
    "residual_scale has no gradient here; detach it, or apply the residual outside the quantized linear"
)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(h, bias, residual, residual_scale, run, dense_weight):
        return run(h, bias, residual, residual_scale)

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward, as torch.func wants it
        h, bias, residual, residual_scale, _, ctx.dense_weight = inputs
        ctx.dtypes = (h.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype)
        ctx.save_for_backward(residual_scale)

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


class _StraightThroughForward(_StraightThrough):
    """With tangents of forward mode: apart, since a Function that has them cannot be compiled."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _StraightThrough.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[3])
        ctx.set_materialize_grads(False)
        ctx.out_dtype = output.dtype

    @staticmethod
    def jvp(ctx, h, bias, residual, residual_scale, *_):
        if residual_scale is not None:
            raise InferenceOnlyError(_NO_SCALE_GRADIENT)
        (residual_scale,) = ctx.saved_tensors
        with torch.no_grad():
            weight = None if h is None else ctx.dense_weight().float()
        terms = [] if h is None else [h.float() @ weight.T]
        terms += [] if bias is None else [bias.float()]
        if residual_scale is not None:
            terms = [term * residual_scale.reshape(-1).float() for term in terms]
        terms += [] if residual is None else [residual.float()]
        return sum(terms).to(ctx.out_dtype) if terms else None

    @staticmethod
    def backward(ctx, grad):
        return _StraightThrough.backward(ctx, grad) if grad is not None else (None,) * 6


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
        raise InferenceOnlyError(_NO_SCALE_GRADIENT)
    h = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    function = _StraightThroughForward if forward_ad._current_level >= 0 else _StraightThrough
    return function.apply(h, bias, residual, residual_scale, run, dense_weight)
