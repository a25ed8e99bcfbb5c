"""Puts weights into the resident layout for few rows of x."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kitchen_core import QuantizedLinear, QuantizedTensor
from kitchen_core.devices import device_facts
from kitchen_core.errors import UnsupportedError
from kitchen_core.formats import Tensors

from . import resident
from ._extension import EXTENSION
from .format import W4A8Format, W6A8Format
from .kernels import GROUPS


class Optimized(NamedTuple):
    """The weight, and why it is laid out as before; None where it is in the resident layout."""

    weight: QuantizedTensor | QuantizedLinear
    reason: str | None


@torch.compiler.disable
def optimize_for_decode(weight: QuantizedTensor | QuantizedLinear, storage: torch.Tensor | None = None) -> Optimized:
    """Lay out a W4A8 or W6A8 weight anew for ``linear`` with few rows of x: codes and scales interleaved, read from end to end.

    The given tensor or layer is changed, so that whoever holds it (a module with that parameter) has the new layout; other
    tensors that share its memory are void. Values are the same to the bit in everything that the weight can do. What has no
    kernel for the layout (more than 32 rows of x, other devices, ``dequantize``) unpacks it first, at every call: lay out
    weights that mostly see one row (docs/kernels/w4a8.md has the times by rows). Nothing of it is saved: pickling,
    ``torch.save`` and ``state_dict`` give what is stored, and a layer that loads a state dict (or is copied by
    ``copy.deepcopy``, which pickles it) holds that again.

    Two weights that share memory must not both be laid out in place, and a backward of a forward that was made before reads
    the moved bytes.

    Shapes: weight [N, K]; storage N * (K * bits / 8 + K / g) bytes.
    Dtypes and units: storage uint8.
    Layout: storage is contiguous, aligned to 16 bytes, on the weight's device, and holds ``weight.qdata`` and right behind it
        ``weight.s_rel``; the records take their place. Without one, new memory is taken, and the old is free once nobody holds
        it. For the time of the call another copy of the weight and some 100 MB are needed besides; what fails in it (memory
        that does not suffice) leaves the weight as it was.
    Returns: the same object, and the reason where it cannot be laid out so: it is unchanged then.
    Raises: UnsupportedError for another format, or a storage that does not hold the weight.
    Devices: any; on a GPU that has no kernel for the layout the weight stays as it is.
    Source: docs/formats/asym_w4a8_int8.md.
    """
    is_weight = isinstance(weight, (QuantizedTensor, QuantizedLinear))
    if is_weight and "_kitchen_loras" in vars(weight):
        raise UnsupportedError("the layer has a LoRA attached: optimize before attaching, or merge it")
    if not is_weight or not issubclass(weight.format, (W4A8Format, W6A8Format)):
        found = weight.format.name if is_weight else type(weight).__name__
        raise UnsupportedError(
            f"optimize_for_decode takes a QuantizedTensor or QuantizedLinear of {W4A8Format.name} or {W6A8Format.name}, "
            f"got {found}; other formats have no resident layout"
        )
    reason = why_not(weight)
    if reason is not None:
        return Optimized(weight, reason)
    if storage is not None:
        _check_storage(weight.inner(), storage)
    return Optimized(weight.relay_(*weight.format.lay_resident(weight.inner(), weight.config, storage)), None)


def why_not(weight: QuantizedTensor | QuantizedLinear) -> str | None:
    """Why a weight of this package cannot be laid out so, in words, or None if it can."""
    format, config, tensors = weight.format, weight.config, weight.inner()
    device = tensors["qdata"].device
    if format.is_resident(config):
        return "it is in the resident layout already"
    if isinstance(weight, QuantizedTensor) and weight.transposed:
        return "it is a transposed view: lay out the weight that it is a view of"
    held = weight.parameters() if isinstance(weight, QuantizedLinear) else tensors.values()
    if any(hasattr(tensor, "to_local") for tensor in held):  # DTensors
        return "it is divided over devices: optimize before, or leave it as stored"
    n, k = format.shape(tensors, config)
    if n % 16 or k % resident.COLUMNS:
        return f"the layout needs N a multiple of 16 and K of {resident.COLUMNS}, the weight is [{n}, {k}]"
    if config.group_size not in GROUPS:
        return f"the layout takes groups of {', '.join(map(str, GROUPS))}, the weight has {config.group_size}"
    if tensors["s_rel"].dtype != torch.float8_e4m3fn:
        found = str(tensors["s_rel"].dtype).removeprefix("torch.")
        return f"the layout takes e4m3 scales, the weight's s_rel is {found}"
    if tensors.get("correction") is not None:
        return "no kernel for few rows takes a correction (levels='asymmetric')"
    if device.type == "meta":
        return "it is on the meta device: it has no values"
    if device.type == "cuda":
        facts = device_facts(device)
        if facts.sm != 90:
            return f"the kernel that reads the layout needs sm_90, the device is {facts}"
        return EXTENSION.why_not_path(facts, "sm90")
    return None


def _check_storage(tensors: Tensors, storage: torch.Tensor) -> None:
    if not isinstance(storage, torch.Tensor):
        raise UnsupportedError(
            f"storage must be a contiguous uint8 tensor, the bytes of qdata and s_rel, got {type(storage).__name__}"
        )
    qdata, s_rel = tensors["qdata"], tensors["s_rel"]
    wanted = qdata.nbytes + s_rel.nbytes
    if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous() or storage.numel() != wanted:
        raise UnsupportedError(
            f"storage must be a contiguous uint8 [{wanted}], the bytes of qdata and s_rel, got {storage.dtype} "
            f"{list(storage.shape)}"
        )
    if storage.device != qdata.device:
        raise UnsupportedError(f"storage must be on the weight's device {qdata.device}, got {storage.device}")
    whole = qdata.is_contiguous() and s_rel.is_contiguous()
    if not whole or qdata.data_ptr() != storage.data_ptr() or s_rel.data_ptr() != storage.data_ptr() + qdata.nbytes:
        raise UnsupportedError(
            "storage must hold the weight: qdata at its start and s_rel right behind, both contiguous; copy them there and "
            "make the weight of views of it, or call without storage"
        )
    if storage.data_ptr() % 16:
        raise UnsupportedError(
            "storage must be aligned to 16 bytes, as torch allocates; it starts within an allocation"
        )
