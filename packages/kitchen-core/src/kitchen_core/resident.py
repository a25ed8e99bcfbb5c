"""The resident layout: a weight laid out in memory for the kernel that multiplies few rows of x by it.

A format that has one says how it is made and undone, and for which weights (``Format.is_resident`` and what stands by it); here
is what all of them share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .devices import device_facts
from .errors import UnsupportedError
from .linear import QuantizedLinear
from .tensor import QuantizedTensor


class Optimized(NamedTuple):
    """The weight, and why it is laid out as before; None where it is in the resident layout."""

    weight: QuantizedTensor | QuantizedLinear
    reason: str | None


@torch.compiler.disable
def optimize_for_decode(weight: QuantizedTensor | QuantizedLinear, storage: torch.Tensor | None = None) -> Optimized:
    """Lay out a weight anew for ``linear`` with few rows of x, if its format has a kernel for that.

    The given tensor or layer is changed, so that whoever holds it (a module with that parameter) has the new layout; other
    tensors that share its memory are void. Values are the same to the bit in everything that the weight can do. What has no
    kernel for the layout (more rows, other devices, ``dequantize``) unpacks it first, at every call: lay out weights that
    mostly see few rows (docs/kernels has the times by rows).

    Nothing of it is saved: pickling, ``torch.save`` and ``state_dict`` give what is stored, and a layer that loads a state dict
    (or is copied by ``copy.deepcopy``, which pickles it) holds that again. Stored tensors that are put into it by other ways
    (``functional_call``, ``.data``) are known by their dtype and shape and taken for what they are. They are not copied into a
    laid out parameter, which is of another size, so that its ``copy_`` raises: use the layer's ``load_state_dict``.

    Two weights that share memory must not both be laid out in place, and a backward of a forward that was made before reads the
    moved bytes.

    Shapes: weight [N, K]; storage has the bytes of the tensors that the layout moves: ``qdata`` of awq_w4a16, ``qdata`` and
        ``s_rel`` of asym_w4a8_int8 and w6a8_int8.
    Dtypes and units: storage uint8.
    Layout: storage is contiguous, aligned to 16 bytes, on the weight's device, and holds these tensors, one right behind the
        other; the layout takes their place. Without one, new memory is taken, and the old is free once nobody holds it. For the
        time of the call another copy of the weight and some 100 MB are needed besides; what fails in it (memory that does not
        suffice) leaves the weight as it was.
    Returns: the same object, and the reason where it cannot be laid out so: it is unchanged then.
    Raises: UnsupportedError for what is no quantized weight, a layer with a LoRA, or a storage that does not hold the weight.
    Devices: any; on a GPU that has no kernel for the layout the weight stays as it is.
    Source: docs/formats/awq_w4a16.md, docs/formats/asym_w4a8_int8.md.
    """
    if not isinstance(weight, (QuantizedTensor, QuantizedLinear)):
        raise UnsupportedError(
            f"optimize_for_decode takes a QuantizedTensor or a QuantizedLinear, got {type(weight).__name__}; "
            "quantize it first, or take the layers of a model"
        )
    if "_kitchen_loras" in vars(weight):
        raise UnsupportedError("the layer has a LoRA attached: optimize before attaching, or merge it")
    reason = why_not(weight)
    if reason is not None:
        return Optimized(weight, reason)
    tensors, format = weight.inner(), weight.format
    if storage is not None:
        _check_storage([(name, tensors[name]) for name in format.resident_tensors], storage)
    return Optimized(weight.relay_(format.lay_resident(tensors, weight.config, storage)), None)


def why_not(weight: QuantizedTensor | QuantizedLinear) -> str | None:
    """Why a weight cannot be laid out so, in words, or None if it can."""
    tensors, format = weight.inner(), weight.format
    if format.is_resident(tensors):
        return "it is in the resident layout already"
    if isinstance(weight, QuantizedTensor) and weight.transposed:
        return "it is a transposed view: lay out the weight that it is a view of"
    held = weight.parameters() if isinstance(weight, QuantizedLinear) else tensors.values()
    if any(hasattr(tensor, "to_local") for tensor in held):  # DTensors
        return "it is divided over devices: optimize before, or leave it as stored"
    device = tensors[format.tensors[0].name].device
    if device.type == "meta":
        return "it is on the meta device: it has no values"
    return format.why_not_resident(tensors, weight.config, device_facts(device) if device.type == "cuda" else None)


def _check_storage(parts: list[tuple[str, torch.Tensor]], storage: torch.Tensor) -> None:
    """Raises UnsupportedError unless the tensors lie in ``storage`` one right behind the other, and nothing else."""
    names, wanted = " and ".join(name for name, _ in parts), sum(tensor.nbytes for _, tensor in parts)
    if not isinstance(storage, torch.Tensor):
        found = type(storage).__name__
        raise UnsupportedError(f"storage must be a contiguous uint8 tensor, the bytes of {names}, got {found}")
    plain = storage.dtype == torch.uint8 and storage.dim() == 1 and storage.is_contiguous()
    if not plain or storage.numel() != wanted:
        raise UnsupportedError(
            f"storage must be a contiguous uint8 [{wanted}], the bytes of {names}, got {storage.dtype} {list(storage.shape)}"
        )
    device = parts[0][1].device
    if storage.device != device:
        raise UnsupportedError(f"storage must be on the weight's device {device}, got {storage.device}")
    at = storage.data_ptr()
    for _, tensor in parts:
        if not tensor.is_contiguous() or tensor.data_ptr() != at:
            raise UnsupportedError(
                f"storage must be the memory of the weight: {names}, contiguous, one right behind the other; copy them there "
                "and make the weight of views of it, or call without storage"
            )
        at += tensor.nbytes
    if storage.data_ptr() % 16:
        raise UnsupportedError(
            "storage must be aligned to 16 bytes, as torch allocates; it starts within an allocation"
        )
