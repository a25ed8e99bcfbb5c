"""The parts of a divided layer on one GPU, without ranks, against the whole layer."""

import pytest
import torch
from torch import nn

from kitchen_core import QuantizedLinear, get_format, installed_formats
from kitchen_models.parallel import OUTPUTS, _part, check_split

CUDA = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU; torch.cuda.is_available() is False here")
ROWS = (1, 5, 16, 33, 64, 256, 1000, 1500)
# Their sums are of integers, so no order of them matters. The kernels of the others cut K by the number of outputs.
EXACT = ("int8_tensorwise", "asym_w4a8_int8", "w6a8_int8")


def parts_of(layer, count):
    """The layers that the ranks would have."""
    dims = check_split(layer, OUTPUTS, count)
    for part in range(count):
        tensors = {name: _part(t, dims[name], (1,), part, count) for name, t in layer.inner().items()}
        yield QuantizedLinear(tensors, layer.format, layer.config, layer.bias.chunk(count)[part], layer.compute_dtype)


@needs_gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 3072)], ids=str)
@pytest.mark.parametrize("format", sorted(installed_formats()))
@torch.no_grad()
def test_parts_are_the_whole(format, shape):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], device="cuda", dtype=torch.bfloat16)
    layer = QuantizedLinear.from_linear(linear, get_format(format))
    for m in ROWS:
        x = torch.randn(m, shape[1], device="cuda", dtype=torch.bfloat16)
        x[:, 3] *= 20
        whole = layer(x)
        for count in (2, 4):
            made = torch.cat([part(x) for part in parts_of(layer, count)], -1)
            differing = f"M={m}, {count} parts: {int((made != whole).sum())} of {made.numel()} differ"
            if format in EXACT:
                assert torch.equal(made, whole), differing
            else:
                assert float((made.float() - whole.float()).norm()) < bound(x, layer, whole), differing


def bound(x, layer, whole):
    """What the norm of a difference stays under where parts run another kernel than the whole.

    Both outputs are rounded to bf16 once, each by at most 2^-9 of itself. One kernel may round the decoded weights to bf16 as
    well: errors of at most 2^-9 w x, independent and without a bias, whose sum over K has a root mean square of at most
    2^-9 sqrt(sum (w x)^2), and over millions of outputs the norm is that of its mean. The sums are fp32, far below both.
    """
    terms = (x.float().square() @ layer.dequantize(torch.float32).square().T).sum().sqrt()
    return 2.0**-8 * float(whole.float().norm()) + 2.0**-9 * float(terms)
