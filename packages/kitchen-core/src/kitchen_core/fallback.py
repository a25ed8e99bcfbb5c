"""A caller's word on INT8 linears as FP16 GEMMs, for a block or a call. Providers with such kernels read it; core has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch

from .errors import UnsupportedError
from .registry import choose_anew

OFF, ON, FP32_TOO = "0", "1", "fp32"

_asked: ContextVar[str] = ContextVar("kitchen_fp16_fallback", default="")
_activations: ContextVar[torch.dtype | None] = ContextVar("kitchen_activation_dtype", default=None)


def fp16_fallback(allowed: bool, fp32_activations: bool = False) -> AbstractContextManager[None]:
    """For a ``with`` block in this thread: whether INT8 linears, w4a8's too, may run as FP16 GEMMs on GPUs without INT8
    tensor cores (kitchen-fallback-volta). Goes before KITCHEN_INT8_FP16_FALLBACK.

    ``with fp16_fallback(False):`` keeps the block on the INT8 path; ``fp32_activations`` allows it for FP32 ones too.
    int8_linear_fp16, which is called by name, is not concerned. Raises UnsupportedError for anything but bools.
    """
    if not isinstance(allowed, bool) or not isinstance(fp32_activations, bool):
        raise UnsupportedError(
            f"fp16_fallback takes True or False, got {allowed!r}, fp32_activations={fp32_activations!r}"
        )
    if fp32_activations and not allowed:
        raise UnsupportedError(
            "fp16_fallback(False, fp32_activations=True) allows float32 and nothing else; drop one of the two"
        )
    return choose_anew(_asked, OFF if not allowed else FP32_TOO if fp32_activations else ON)


def asked() -> str:
    """The word of the innermost block or call: OFF, ON or FP32_TOO; empty outside of any."""
    return _asked.get()


def codes_of(dtype: torch.dtype, out_dtype: torch.dtype) -> AbstractContextManager[None]:
    """For compositions: the codes that the block multiplies were made from activations of this dtype.

    An op on codes takes the output's dtype for the activations', so only where one of the two is float32 is there
    anything to say.
    """
    if (dtype == torch.float32) == (out_dtype == torch.float32):
        return nullcontext()
    return choose_anew(_activations, dtype)


def activation_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the activations behind the codes of an op with this output."""
    return _activations.get() or out_dtype
