"""Launches the tensorwise quantizer on tensors. Arguments have been checked by the op; here only what the kernel needs."""

from __future__ import annotations

import torch

from kitchen_core.launch import DTYPE_CODES, current_stream

from ._extension import EXTENSION


def quantize_tensorwise(
    x: torch.Tensor, scale: torch.Tensor | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [...] on a CUDA device, and a scale of one element or None -> int8 codes [...] and the fp32 scale [].

    What is not contiguous or not aligned to 16 bytes is copied first.
    """
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    device = x.device
    codes = torch.empty(x.shape, dtype=torch.int8, device=device)
    out_scale = torch.empty((), dtype=torch.float32, device=device)
    workspace = None
    if scale is None:
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        blocks = EXTENSION.module.tensorwise_blocks(x.numel(), sm_count)
        workspace = torch.empty(blocks, dtype=torch.int32, device=device)
    EXTENSION.module.quantize_int8_tensorwise(
        x.data_ptr(), DTYPE_CODES[x.dtype], x.numel(), 0 if scale is None else scale.data_ptr(), codes.data_ptr(),
        out_scale.data_ptr(), 0 if workspace is None else workspace.data_ptr(), seed, device.index,
        current_stream(device.index),
    )  # fmt: skip
    return codes, out_scale
