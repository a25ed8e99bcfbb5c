"""Formats and packages of kernels that exist, installed or not, and how to install them. Imports no torch."""

import shlex

# The package that has each, its other names in files, its short name.
KNOWN_FORMATS = {
    "int8_tensorwise": ("kitchen-int8", ("int8_rowwise",), "int8"),
    "asym_w4a8_int8": ("kitchen-w4a8", (), "w4a8"),
    "w6a8_int8": ("kitchen-w4a8", (), "w6a8"),
    "svdquant_w4a4": ("kitchen-svdquant", (), "svdquant"),
    "awq_w4a16": ("kitchen-awq", (), "awq"),
}

_TENSOR_CORES = range(75, 1000)  # compute capabilities that these packages have kernels for

# Package, where its kernels run, the ops that they serve. Not told: kitchen-w4a8's own rowwise quantizer.
KERNEL_PACKAGES = (
    (
        "kitchen-int8",
        _TENSOR_CORES,
        (
            "dequantize_int8", "dequantize_int8_embedding", "int8_linear", "int8_scaled_mm", "int8_swiglu_mlp",
            "quantize_and_rotate_rowwise", "quantize_int8_convrot_weight", "quantize_int8_rowwise",
            "quantize_int8_tensorwise",
        ),
    ),
    (
        "kitchen-w4a8",
        _TENSOR_CORES,
        ("decode_w4a8_weight", "dequantize_w4a8_weight", "quantize_w4a8_weight", "w4a8_linear", "w4a8_scaled_mm"),
    ),
    ("kitchen-svdquant", _TENSOR_CORES, ("quantize_svdquant_w4a4", "scaled_mm_svdquant_w4a4", "svdquant_linear")),
    ("kitchen-awq", _TENSOR_CORES, ("awq_linear", "dequantize_awq")),
    (
        "kitchen-fallback-volta",
        range(70, 71),
        (
            "int8_linear", "int8_scaled_mm", "quantize_and_rotate_rowwise", "quantize_int8_convrot_weight",
            "quantize_int8_rowwise",
        ),
    ),
    ("kitchen-fallback-volta", range(50, 1000), ("int8_linear_fp16",)),
)  # fmt: skip


def install_hint(*packages: str) -> str:
    """How to install packages of kitchen, extras such as ``kitchen-models[demo]`` too, from an index or a checkout."""
    checkout = [f"./packages/{package}" for package in packages]
    return f"pip install {shlex.join(packages)}, or from a checkout: pip install {shlex.join(checkout)}"
