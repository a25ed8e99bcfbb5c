"""Puts weights into the resident order for few rows of x."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.devices import device_facts
from kitchen_core.errors import UnsupportedError

from . import resident
from ._extension import EXTENSION
from .format import AWQFormat
from .kernels import resident_group_reason


class Optimized(NamedTuple):
    """The weight, and why it lies as before; None where it is in the resident order."""

    weight: QuantizedTensor | QuantizedLinear
    reason: str | None


@torch.compiler.disable
def optimize_for_decode(weight: QuantizedTensor | QuantizedLinear, storage: torch.Tensor | None = None) -> Optimized:
    """Order the codes of an AWQ weight anew for ``linear`` with few rows of x, which then multiplies x as it lies in memory.

    The given tensor or layer is changed, so that whoever holds it (a module with that parameter) has the new order; other
    tensors that share its codes are void. The weight is the same to the bit in everything that it can do. What has no kernel
    for the order (more than 64 rows of x, other devices, ``dequantize``) puts the codes back first, at every call: order
    weights that mostly see few rows. Nothing of it is saved: pickling, ``torch.save`` and ``state_dict`` give what is stored,
    and a layer that loads a state dict (or is copied by ``copy.deepcopy``, which pickles it) holds that again.

    Two weights that share memory must not both be ordered in place; a backward of a forward that was made before reads the
    moved codes; and stored codes that are put into a weight by other ways than ``load_state_dict`` (``functional_call``,
    ``.data``) are not recognised as such.

    Shapes: weight [N, K]; storage N * K / 2 bytes.
    Dtypes and units: storage uint8.
    Layout: storage is contiguous, aligned to 16 bytes, on the weight's device, and the memory of ``weight.qdata``; its bytes
        are moved in place. Without one, new memory is taken, and the old is free once nobody holds it. In both cases the codes
        lie in memory twice and some 100 MB are needed besides, for the time of the call; what fails in it (memory that does
        not suffice) leaves the weight as it was.
    Returns: the same object, and the reason where it cannot be ordered so: it is unchanged then.
    Raises: UnsupportedError for another format, or a storage that does not hold the codes.
    Devices: any; on a GPU that has no kernel for the order the weight stays as it is.
    Source: docs/formats/awq_w4a16.md.
    """
    is_weight = isinstance(weight, (QuantizedTensor, QuantizedLinear))
    if is_weight and "_kitchen_loras" in vars(weight):
        raise UnsupportedError("the layer has a LoRA attached: optimize before attaching, or merge it")
    if not is_weight or not issubclass(weight.format, AWQFormat):
        found = weight.format.name if is_weight else type(weight).__name__
        raise UnsupportedError(
            f"optimize_for_decode takes a QuantizedTensor or QuantizedLinear of {AWQFormat.name}, got {found}; use that of the "
            "format's own package, where it has one"
        )
    reason = why_not(weight)
    if reason is not None:
        return Optimized(weight, reason)
    if storage is not None:
        _check_storage(weight.inner()["qdata"], storage)
    return Optimized(weight.relay_(*AWQFormat.lay_resident(weight.inner(), weight.config, storage is not None)), None)


def why_not(weight: QuantizedTensor | QuantizedLinear) -> str | None:
    """Why an AWQ weight cannot be ordered so, in words, or None if it can."""
    config, tensors = weight.config, weight.inner()
    device, scale = tensors["qdata"].device, tensors["scale"].dtype
    if AWQFormat.is_resident(config):
        return "it is in the resident order already"
    if isinstance(weight, QuantizedTensor) and weight.transposed:
        return "it is a transposed view: order the weight that it is a view of"
    held = weight.parameters() if isinstance(weight, QuantizedLinear) else tensors.values()
    if any(hasattr(tensor, "to_local") for tensor in held):  # DTensors
        return "it is divided over devices: optimize before, or leave it as stored"
    n, k = AWQFormat.shape(tensors, config)
    if n % 8 or k % resident.COLUMNS:
        return f"the order needs N a multiple of 8 and K of {resident.COLUMNS}, the weight is [{n}, {k}]"
    reason = resident_group_reason(config.group_size)
    if reason is not None:
        return reason
    if scale == torch.float32 or scale != tensors["zeros"].dtype:
        found = f"{scale} and {tensors['zeros'].dtype}"
        return f"its kernel takes scales and zeros of x's type, bfloat16 or float16, the weight has {found}"
    if device.type == "meta":
        return "it is on the meta device: it has no values"
    if device.type == "cuda":
        facts = device_facts(device)
        if facts.sm != 90:
            return f"the kernel that reads the order needs sm_90, the device is {facts}"
        return EXTENSION.why_not_path(facts, "sm90")
    return None


def _check_storage(codes: torch.Tensor, storage: torch.Tensor) -> None:
    if not isinstance(storage, torch.Tensor):
        raise UnsupportedError(
            f"storage must be a contiguous uint8 tensor, the bytes of qdata, got {type(storage).__name__}"
        )
    if (
        storage.dtype != torch.uint8
        or storage.dim() != 1
        or not storage.is_contiguous()
        or storage.numel() != codes.nbytes
    ):
        raise UnsupportedError(
            f"storage must be a contiguous uint8 [{codes.nbytes}], the bytes of qdata, got {storage.dtype} "
            f"{list(storage.shape)}"
        )
    if storage.device != codes.device:
        raise UnsupportedError(f"storage must be on the weight's device {codes.device}, got {storage.device}")
    if not codes.is_contiguous() or codes.data_ptr() != storage.data_ptr():
        raise UnsupportedError(
            "storage must be the memory of qdata, which is contiguous; copy qdata there and make the weight of a view of it, "
            "or call without storage"
        )
    if storage.data_ptr() % 16:
        raise UnsupportedError(
            "storage must be aligned to 16 bytes, as torch allocates; it starts within an allocation"
        )
