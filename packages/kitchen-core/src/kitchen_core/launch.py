"""What every package's launch code says to its extension in the same words: dtypes and activations as numbers, pointers, the
stream; and the one launch that several extensions have alike, of the rowwise quantizer."""

from __future__ import annotations

from types import ModuleType

import torch

from .arithmetic import input_width

DTYPE_CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
}  # DType of shared_cuda/include/kitchen/common/dtype.h

# InputAct of shared_cuda/include/kitchen/quant/input_act.h
ACT_CODES = {"none": 0, "gelu_tanh": 1, "swiglu": 2, "rms_norm": 3, "situ": 4}


def pointer(tensor: torch.Tensor | None, elements: int = 0) -> int:
    """The address of a tensor, ``elements`` behind its first; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr() + elements * tensor.element_size()


def current_stream(device: int) -> int:
    """The stream on which torch works on a CUDA device, as an address (torch.cuda.current_stream takes 3 us, for an object)."""
    return torch._C._cuda_getCurrentRawStream(device)


def launch_quantize_rowwise(
    module: ModuleType,
    x: torch.Tensor,
    convrot_groupsize: int = 0,
    input_act: str = "none",
    input_act_weight: torch.Tensor | None = None,
    input_act_eps: float = 0.0,
    seed: int = 0,
    *more: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] (or [..., 2K]) on a CUDA device -> int8 codes [..., K] and fp32 scales [..., 1], by ``module``, an extension.

    Arguments have been checked by the op. Any row stride is read in place; a last dim that is not contiguous is copied
    first. ``more`` goes to the extension behind the stream.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    features = rows.shape[1] // input_width(1, input_act)
    codes = torch.empty((*x.shape[:-1], features), dtype=torch.int8, device=x.device)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    weight = weight_dtype = 0
    if input_act == "rms_norm":
        input_act_weight = input_act_weight.contiguous()
        weight, weight_dtype = input_act_weight.data_ptr(), DTYPE_CODES[input_act_weight.dtype]
    module.quantize_int8_rowwise(
        rows.data_ptr(), rows.stride(0), DTYPE_CODES[x.dtype], codes.data_ptr(), scales.data_ptr(), rows.shape[0], features,
        convrot_groupsize, ACT_CODES[input_act], weight, weight_dtype, input_act_eps, seed, x.device.index,
        current_stream(x.device.index), *more,
    )  # fmt: skip
    return codes, scales
