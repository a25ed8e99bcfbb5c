"""The ops of kitchen: importing this declares them all in ``torch.ops.kitchen``. A new op is one more name here."""

from .awq import awq_linear, dequantize_awq, gemv_awq_w4a16
from .int8 import int8_gate_up_mlp, int8_linear, int8_linear_fp16, int8_scaled_mm, int8_swiglu_mlp
from .quantize import (
    dequantize_int8,
    dequantize_int8_embedding,
    quantize_and_rotate_rowwise,
    quantize_int8_convrot_weight,
    quantize_int8_rowwise,
    quantize_int8_tensorwise,
)
from .svdquant import (
    dequantize_svdquant_w4a4,
    quantize_svdquant_w4a4,
    scaled_mm_svdquant_w4a4,
    svdquant_linear,
)
from .w4a8 import (
    W4A8_LEVELS,
    QuantizedW4A8Weight,
    check_w4a8_group,
    decode_w4a8_weight,
    dequantize_w4a8_weight,
    quantize_w4a8_weight,
    w4a8_group_sizes,
    w4a8_linear,
    w4a8_scaled_mm,
)

__all__ = [
    "W4A8_LEVELS",
    "QuantizedW4A8Weight",
    "awq_linear",
    "check_w4a8_group",
    "decode_w4a8_weight",
    "dequantize_awq",
    "dequantize_int8",
    "dequantize_int8_embedding",
    "dequantize_svdquant_w4a4",
    "dequantize_w4a8_weight",
    "gemv_awq_w4a16",
    "int8_gate_up_mlp",
    "int8_linear",
    "int8_linear_fp16",
    "int8_scaled_mm",
    "int8_swiglu_mlp",
    "quantize_and_rotate_rowwise",
    "quantize_int8_convrot_weight",
    "quantize_int8_rowwise",
    "quantize_int8_tensorwise",
    "quantize_svdquant_w4a4",
    "quantize_w4a8_weight",
    "scaled_mm_svdquant_w4a4",
    "svdquant_linear",
    "w4a8_group_sizes",
    "w4a8_linear",
    "w4a8_scaled_mm",
]
