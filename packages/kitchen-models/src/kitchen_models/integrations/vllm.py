"""kitchen's INT8 kernels for vLLM's W8A8 layers: any compressed-tensors model with dynamic INT8 activations runs on them.

vLLM finds ``register`` by the entry-point group ``vllm.general_plugins`` and calls it in each of its processes. It offers a
class to vLLM's choice of linear kernels and puts it first; files and models stay as they are.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import torch

import kitchen_core
from kitchen_core.errors import KitchenError, UnsupportedError
from kitchen_core.known_formats import install_hint
from kitchen_core.plugins import plugins

from .comfy import _why_not_device

log = logging.getLogger("kitchen")
KERNELS = "vllm.model_executor.kernels.linear"
_BASE = (f"{KERNELS}.scaled_mm.ScaledMMLinearKernel", f"{KERNELS}.scaled_mm", KERNELS)
_PLATFORMS = ("vllm.platforms.interface", "vllm.platforms", "vllm.backends.platform")


def register() -> bool:
    """Offer kitchen's kernel to vLLM, as its first choice for INT8; whether that was done. Never raises, only logs why not.

    Calling it again changes nothing.
    """
    try:
        if "int8_tensorwise" not in plugins("kitchen.formats"):
            raise UnsupportedError(f"kitchen-int8 is not installed: {install_hint('kitchen-int8')}")
        _offer()
    except KitchenError as error:
        log.warning("kitchen: vLLM keeps its own INT8 kernels: %s", error)
        return False
    return True


def _offer() -> None:
    module = _import(KERNELS)
    offer = _find("register_linear_kernel", (KERNELS,))
    cuda = _find("PlatformEnum", _PLATFORMS).CUDA
    kernel = kernel_class()
    candidates = getattr(module, "_POSSIBLE_INT8_KERNELS", None)  # vLLM's own list; its public call appends to it
    if isinstance(candidates, dict):
        if kernel in candidates.get(cuda, []):
            return
        offer(kernel, cuda, "int8")
        mine = candidates[cuda]
        mine.insert(0, mine.pop(mine.index(kernel)))
        log.info("kitchen: first choice of vLLM for INT8 W8A8 layers on CUDA")
    else:
        offer(kernel, cuda, "int8")
        log.warning(
            "kitchen: offered to vLLM for INT8 layers as its last choice; VLLM_DISABLED_KERNELS can take others away"
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"{name} cannot be imported ({error}); vLLM 0.33 has it") from error


def _find(name: str, homes: tuple[str, ...]) -> Any:
    for home in homes:
        try:
            module = importlib.import_module(home)
        except ImportError:
            continue
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsupportedError(f"vLLM has no {name} in {' or '.join(homes)}; kitchen knows the interface of vLLM 0.33")


@cache
def kernel_class() -> type:
    """The class for vLLM: a subclass of its Int8ScaledMMLinearKernel. Raises UnsupportedError where vLLM lacks that."""
    base = _find("Int8ScaledMMLinearKernel", _BASE)

    class KitchenInt8LinearKernel(base):
        """Dynamic symmetric INT8 activations, INT8 weights by channel or tensor: kitchen_core.int8_linear."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """Whether a CUDA kernel of kitchen serves the current device."""
            if not torch.cuda.is_available():
                return False, "kitchen serves this on CUDA devices only"
            reason = _why_not_device("int8_scaled_mm", torch.device("cuda", torch.cuda.current_device()))
            return reason is None, reason

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            """Activations must be quantized per token, symmetrically, at run time."""
            if c.is_static_input_scheme:
                return False, "kitchen quantizes activations at run time, this layer has a static input scale"
            if not c.input_symmetric:
                return False, "kitchen quantizes activations symmetrically, this layer has a zero point"
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """One fp32 scale a row: fused layers come with one a part."""
            names = self.layer_param_names
            weight, scale = getattr(layer, names[0]), getattr(layer, names[1])
            rows = scale_by_row(scale.data, weight.shape[0], getattr(layer, "logical_widths", None))
            setattr(layer, names[0], torch.nn.Parameter(weight.data.contiguous(), requires_grad=False))
            setattr(layer, names[1], torch.nn.Parameter(rows, requires_grad=False))
            for name in names[2:]:
                setattr(layer, name, None)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
        ) -> torch.Tensor:
            """x [..., K] -> [..., N] in x's dtype"""
            weight, scale = (getattr(layer, name) for name in self.layer_param_names[:2])
            return kitchen_core.int8_linear(x, weight, scale, bias, x.dtype)

    return KitchenInt8LinearKernel


def scale_by_row(scale: torch.Tensor, rows: int, widths: list[int] | None = None) -> torch.Tensor:
    """fp32 [N, 1] from one scale, one a row, or one for each of the fused parts whose ``widths`` are given.

    Raises UnsupportedError where the count fits none of these.
    """
    flat = scale.reshape(-1).float()
    if flat.numel() == rows:
        return flat.reshape(rows, 1).contiguous()
    if flat.numel() == 1:
        return flat.expand(rows).reshape(rows, 1).contiguous()
    if widths is not None and len(widths) == flat.numel() and sum(widths) == rows:
        return torch.repeat_interleave(flat, torch.tensor(widths, device=flat.device)).reshape(rows, 1)
    raise UnsupportedError(f"{flat.numel()} weight scales fit neither {rows} rows nor the parts {widths}")
