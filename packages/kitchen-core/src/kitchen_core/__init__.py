"""kitchen: quantized linear layers for PyTorch. The core: ops, references, registry, formats, quantized tensors.

Names are loaded on first use, so that the ``kitchen`` command and the listing of plug-ins need no torch. Where torch is
imported already, ``import kitchen_core`` declares the ops in ``torch.ops.kitchen`` at once; else the first use of any name
does, or ``import kitchen_core.ops``.
"""

import importlib
import sys

__version__ = "0.1.0"

_EXPORTS = {
    "activation": ("QuantizedActivation",),
    "calibration": ("Calibration",),
    "devices": ("DeviceFacts", "device_facts", "simulate"),
    "errors": (
        "BuildMismatchError",
        "FormatError",
        "InferenceOnlyError",
        "KitchenError",
        "NonFiniteError",
        "PluginError",
        "UnsupportedError",
    ),
    "explanation": ("accepts", "explain"),
    "fallback": ("fp16_fallback",),
    "finite": ("check_finite",),
    "formats": ("Format", "get_format", "installed_formats"),
    "linear": ("QuantizedLinear",),
    "resident": ("optimize_for_decode",),
    "registry": ("Explanation", "Kernel", "Problem", "Provider", "register", "trace", "unregister", "use"),
    "tensor": ("QuantizedTensor",),
    "ops": (
        "awq_linear",
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
        "w4a8_linear",
        "w4a8_scaled_mm",
    ),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kitchen_core' has no attribute {name!r}")
    importlib.import_module(".ops", __name__)
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if "torch" in sys.modules:
    importlib.import_module(".ops", __name__)
