"""What kitchen-fallback-volta offers, and when: the records of its kernels for GPUs without INT8 tensor cores."""

from __future__ import annotations

import torch

from kitchen_core.registry import Kernel, Provider

from . import policy, torch_path

PROVIDER = "fallback-volta"
TORCH_PRIORITY = 20  # over the composition of kitchen-core (10), below compiled kernels

TORCH_KERNELS = (
    Kernel("int8_linear_fp16", "torch", torch_path.int8_linear_fp16, policy.not_cuda, TORCH_PRIORITY, PROVIDER),
    Kernel("int8_linear", "torch", torch_path.int8_linear, policy.linear, TORCH_PRIORITY, PROVIDER),
    Kernel("int8_scaled_mm", "torch", torch_path.int8_scaled_mm, policy.scaled_mm, TORCH_PRIORITY, PROVIDER),
)


def doctor() -> list[str]:
    """Lines for `kitchen doctor`: which path there is, the user's setting, and whether this torch can serve a V100."""
    lines = ["torch path; there is no compiled kernel for sm_70 in this version"]
    word = policy.setting()
    if word != policy.ON:
        lines.append(f"{policy.VARIABLE}={word}")
    archs = torch.cuda.get_arch_list()
    if archs and "sm_70" not in archs:
        lines.append(
            f"torch {torch.__version__} has no sm_70 code: a V100 needs one that has; the last on PyPI is "
            'pip install "torch==2.10.*"'
        )
    return lines


provider = Provider(name="kitchen-fallback-volta", kernels=TORCH_KERNELS, doctor=doctor)
