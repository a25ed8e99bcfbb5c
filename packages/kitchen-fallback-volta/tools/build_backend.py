"""scikit-build-core, and NVRTC of CUDA 12 as one more build requirement where sm_70 code is going to be built.

That is 90 MB, which nobody without a V100 should fetch: it is asked for when CUDAARCHS or TORCH_CUDA_ARCH_LIST names
sm_70, when KITCHEN_CUDA=ON, or when nvidia-smi sees such a GPU. CMakeLists.txt decides in the same way.
"""

from __future__ import annotations

import os
import re
import subprocess

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403

NVRTC = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-runtime-cu12==12.9.79"]


def wants_volta() -> bool:
    """Whether sm_70 code is asked for, by the environment or by a GPU in sight."""
    mode = os.environ.get("KITCHEN_CUDA", "").upper()
    if mode in ("ON", "OFF"):
        return mode == "ON"
    if os.environ.get("CUDAARCHS"):
        return re.search(r"(^|[;, ])70(-real)?($|[;, ])", os.environ["CUDAARCHS"]) is not None
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return re.search(r"(^|[;, ])7\.0(\+PTX)?($|[;, ])", os.environ["TORCH_CUDA_ARCH_LIST"]) is not None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        seen = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return seen.returncode == 0 and "7.0" in seen.stdout.split()


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """What scikit-build-core asks for, and NVRTC."""
    return [*build.get_requires_for_build_wheel(config_settings), *(NVRTC if wants_volta() else [])]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    """What scikit-build-core asks for, and NVRTC."""
    return [*build.get_requires_for_build_editable(config_settings), *(NVRTC if wants_volta() else [])]
