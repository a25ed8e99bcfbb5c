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
from ._forward_mode import as_constants, has_tangent, hides_gradients


def wants_grad(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    input_act_weight: torch.Tensor | None = None,
) -> bool:
    """Whether a derivative of any of the tensors is asked for.

    In forward mode, whatever the grad mode, it may be: under several transforms of torch.func a tangent does not show from
    here.
    """
    if forward_ad._current_level >= 0:
        return isinstance(x, torch.Tensor)  # no tensor: the op says which argument, by its schema
    if not torch.is_grad_enabled():
        return False
    if hides_gradients(x, bias, residual, residual_scale, input_act_weight):  # in vmap a tensor does not say it itself
        return True
    try:
        return (
            x.requires_grad
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
            or (residual_scale is not None and residual_scale.requires_grad)
            or (input_act_weight is not None and input_act_weight.requires_grad)
        )
    except AttributeError:
        return False


_NO_SCALE_GRADIENT = (
    "residual_scale has no gradient here; detach it, or apply the residual outside the quantized linear"
)


_NO_WEIGHT_GRADIENT = (
    "a tensor of the quantized weight is differentiated, and a weight has no derivative here; leave it out, pass the primal "
    "of it (torch.autograd.forward_ad.unpack_dual), or differentiate a linear of the dequantized weight"
)


def check_constant(*weight: torch.Tensor | None) -> None:
    """Raises InferenceOnlyError where torch.func.grad and the like differentiate a weight: its gradient would be zero."""
    if hides_gradients(*weight):
        raise InferenceOnlyError(_NO_WEIGHT_GRADIENT)


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
        ctx.out_shape, ctx.out_dtype = output.shape, output.dtype

    @staticmethod
    def jvp(ctx, h, bias, residual, residual_scale, *_):
        if residual_scale is not None:
            raise InferenceOnlyError(_NO_SCALE_GRADIENT)
        (residual_scale,) = ctx.saved_tensors
        with forward_ad._set_fwd_grad_enabled(True):  # off here, where a tangent may have one too: jvp of jvp
            terms = [] if h is None else [h.float() @ ctx.dense_weight().float().T]
            terms += [] if bias is None else [bias.float()]
            if residual_scale is not None:
                terms = [term * residual_scale.reshape(-1).float() for term in terms]
            terms += [] if residual is None else [residual.float()]
            if not terms:
                return None
            total = sum(terms)
            if h is None and residual is None:  # [N], of a bias alone: it may be no view
                total = total.expand(ctx.out_shape).clone(memory_format=torch.contiguous_format)
            return total.to(ctx.out_dtype)

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
    weight: tuple[torch.Tensor | None, ...],
) -> torch.Tensor:
    """The differentiable form of a linear op.

    ``run(h, bias, residual, residual_scale)`` calls the op without an activation on fp32 h, [..., K];
    ``dense_weight()`` is the dequantized [N, K] weight in the basis of x, made only for a derivative;
    ``weight`` holds the tensors that it is made of.
    Raises InferenceOnlyError where residual_scale, or in forward mode the weight, asks for a derivative.
    """
    if forward_ad._current_level >= 0 and torch.compiler.is_compiling():
        # Not compiled; nor is what runs behind a mere break of the graph: torch 2.11 loses its tangents.
        torch._dynamo.graph_break(msg="derivatives of forward mode through a quantized linear are not compiled")
        return torch.compiler.disable(linear_call)(
            x, bias, input_act, input_act_weight, input_act_eps, residual, residual_scale, run, dense_weight, weight
        )
    if hides_gradients(residual_scale) or (
        residual_scale is not None and residual_scale.requires_grad and torch.is_grad_enabled()
    ):
        raise InferenceOnlyError(_NO_SCALE_GRADIENT)
    check_constant(*weight)
    function, dense_weight = _StraightThrough, as_constants(dense_weight)
    if forward_ad._current_level >= 0:
        if any(t is not None and t.is_floating_point() and has_tangent(t) for t in weight):
            raise InferenceOnlyError(_NO_WEIGHT_GRADIENT)
        function, run = _StraightThroughForward, as_constants(run)
    h = x if input_act == "none" else apply_input_act(x.float(), input_act, input_act_weight, input_act_eps)
    return function.apply(h, bias, residual, residual_scale, run, dense_weight)
