"""What every test of the workspace shares: the gpu and slow markers, and plug-ins limited to the workspace's own."""

import os

import pytest

# Plug-ins that a user happens to have installed stay out of the tests (before anything scans for them).
os.environ.setdefault(
    "KITCHEN_PLUGINS",
    "kitchen-core,kitchen-int8,kitchen-w4a8,kitchen-svdquant,kitchen-awq,kitchen-fallback-volta,kitchen-models",
)


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    reason = _no_gpu()
    for item in items:
        if "gpu" in item.keywords and reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow; pass --run-slow to run it"))


def _no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU; torch.cuda.is_available() is False here"


@pytest.fixture(autouse=True)
def _fixed_seed():
    import torch

    torch.manual_seed(0)
