"""What broke for users of other quantized kernels, tried on us. docs/reports.md says which report is which test.

Tests carry the numbers of the reports in their names where they belong to one; most are a kind, tried on every format.
What needs a GPU is in `test_runtime_gpu.py` and in the packages' own tests.
"""

import copy
import gc
import inspect
import logging
import multiprocessing
import os
import random
import re
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kitchen_core as kc
import kitchen_models as km
from kitchen_core import (
    DeviceFacts,
    FormatError,
    InferenceOnlyError,
    NonFiniteError,
    QuantizedLinear,
    QuantizedTensor,
    UnsupportedError,
    explain,
    get_format,
    ops,
    simulate,
    trace,
)
from kitchen_core.devices import SIMULATED_PARTS
from kitchen_core.known_formats import KNOWN_FORMATS
from kitchen_core.ops._define import problem_builders
from kitchen_core.registry import EAGER, kernels_of
from kitchen_core.testing import FLOAT_DTYPES, LINEAR_OPS, assert_close, assert_equal, tolerance, unit_roundoff
from kitchen_core.testing.cases import make_case, optional_arguments
from kitchen_core.typical import typical

FORMATS = sorted(KNOWN_FORMATS)
INT8_GRID = ("int8_tensorwise", "asym_w4a8_int8", "w6a8_int8")
ARCHS = sorted(SIMULATED_PARTS)


def layer(name, n=96, k=256, dtype=torch.bfloat16, bias=True, **options):
    return QuantizedLinear.from_linear(nn.Linear(k, n, bias=bias, dtype=dtype), name, **options)


def python(*arguments, **environment):
    """Another interpreter, finished."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_b02_rotated_activations_with_huge_channels_stay_finite_and_near_the_dense_product(dtype):
    x = torch.randn(4096, 512)
    x[:, [3, 200, 431]] *= 1000
    x = x.to(dtype)
    weight = torch.randn(64, 512) / 512**0.5
    made = layer("int8_tensorwise", 64, 512, dtype, convrot_groupsize=256)
    made.requantize_(weight)
    y = made(x)
    assert torch.isfinite(y).all()
    # half a step a column of the rotated x, its scale being that of the rotated row; the weight's own step is in the dense
    rotated = x.double().unflatten(-1, (-1, 256)).abs().sum(-1).amax(-1) / 16
    bound = 0.5 * rotated / 127 * ops.dequantize_int8(made.weight, made.weight_scale).double().abs().sum(-1).max()
    error = (y.double() - x.double() @ made.dequantize(torch.float32).double().T).abs().amax(-1)
    assert (error <= 1.01 * bound + unit_roundoff(dtype) * y.double().abs().amax(-1)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_b02_the_first_op_that_is_not_finite_is_named(name):
    model = nn.Sequential(layer(name, 256), nn.GELU(), layer(name, 96))
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    with kc.check_finite():
        assert_equal(model(x), model(x))
    x[1, 5] = float("inf")
    with (
        kc.check_finite(),
        pytest.raises(NonFiniteError, match=rf"{LINEAR_OPS[name]} on core/eager gave .* at \[1, 0\]"),
    ):
        model(x)
    with kc.check_finite(), pytest.raises(NonFiniteError, match="not finite before: argument 0"):
        model(x)
    assert not torch.isfinite(model(x)[1]).any(), "without the switch nothing is said"
    finite = model[0](torch.full((1, 256), 3e38, dtype=torch.bfloat16))
    assert finite.shape == (1, 256)
    script = (
        "import torch, kitchen_core as kc\n"
        "try: kc.awq_linear(torch.full((1, 64), float('nan')), torch.zeros(8, 32, dtype=torch.int8), torch.ones(1, 8),"
        " torch.zeros(1, 8))\n"
        "except kc.NonFiniteError as error: print(error)"
    )
    if name == "awq_w4a16":
        assert "awq_linear on core/eager gave nan" in python("-c", script, KITCHEN_CHECK_FINITE="1").stdout


@pytest.mark.parametrize("name", FORMATS)
def test_b03_the_same_x_in_every_dtype_gives_the_same_result(name):
    made = layer(name, dtype=torch.float32)
    x = torch.randn(9, 256).bfloat16()  # exact in all three
    wide = made(x.float())
    for dtype in (torch.float16, torch.bfloat16):
        y = made(x.to(dtype))
        assert y.dtype == dtype
        if name in INT8_GRID:  # the same codes, the same sums, one rounding
            assert_equal(y, wide.to(dtype))
        elif name == "awq_w4a16":  # a half x multiplies a weight rounded to its dtype
            dense = made.dequantize(dtype).double()
            t = tolerance(dtype, 256, name)
            size = x.double().abs() @ dense.abs().T + made.bias.double().abs()
            assert_close(
                y, x.double() @ dense.T + made.bias.double(), relative=t.relative, absolute=t.accumulation * size
            )
        else:
            t = tolerance(dtype, 256, name)
            assert_close(y, wide, relative=t.relative, absolute=t.accumulation * (1 + wide.double().abs().max()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-23, 1.2e-38])
def test_b05_dead_rows_of_a_weight_give_the_bias_and_no_nan(name, size):
    weight = torch.randn(96, 256)
    weight[::3] = torch.randn(32, 256).sign() * size
    linear = nn.Linear(256, 96, dtype=torch.float32)
    linear.weight.data = weight
    made = QuantizedLinear.from_linear(linear, name)
    x = torch.randn(5, 256)
    y = made(x)
    assert torch.isfinite(y).all()
    spread = (y[:, ::3] - linear.bias.detach()[::3]).abs()
    if size == 0.0 and name != "svdquant_w4a4":  # its low-rank branch meets zero rows up to rounding
        assert_equal(y[:, ::3], linear.bias.detach()[::3].expand(5, 32).contiguous())
    assert spread.max() <= 1e-5 * x.abs().sum(-1).max()


@pytest.mark.parametrize("bits", [4, 6])
def test_b06_one_group_a_row_and_a_wrong_group(bits):
    k = 512
    name = "asym_w4a8_int8" if bits == 4 else "w6a8_int8"
    weight, x = torch.randn(48, k), torch.randn(7, k)
    whole = QuantizedTensor.quantize(weight, name, group_size=k)
    assert whole.s_rel.shape == (48, 1)
    y = whole.linear(x)
    assert torch.isfinite(y).all()
    dense = whole.dequantize().double()
    _, x_scale = ops.quantize_and_rotate_rowwise(x, whole.config.convrot_groupsize)
    rotated = ops.dequantize_w4a8_weight(*_w4a8(whole), None, k, 0).double()
    assert ((y.double() - x.double() @ dense.T).abs() <= 0.51 * x_scale.double() * rotated.abs().sum(-1) + 1e-4).all()
    arguments = [x, whole.qdata, whole.s_rel, whole.s_channel, whole.inner().get("codebook"), None, None, None]
    for wrong in (-1, 0, 128, 2 * k):
        with pytest.raises(UnsupportedError, match=r"group"):
            ops.w4a8_linear(*arguments, group_size=wrong)


def _w4a8(w):
    tensors = w.inner()
    return tensors["qdata"], tensors["s_rel"], tensors["s_channel"], tensors.get("codebook"), tensors.get("correction")


@pytest.mark.parametrize("name", ["asym_w4a8_int8", "w6a8_int8", "awq_w4a16"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512])
def test_b07_every_group_matches_its_dense_weight(name, group):
    weight = QuantizedTensor.quantize(torch.randn(64, 512), name, group_size=group)
    assert weight.config.group_size == group
    x = torch.randn(16, 512)
    error = (weight.linear(x) - x @ weight.dequantize().T).norm() / (x @ weight.dequantize().T).norm()
    crest = (x.abs().amax(-1) / x.square().mean(-1).sqrt()).max()  # of the row of the largest step
    assert error < (1e-5 if name == "awq_w4a16" else crest / (127 * 12**0.5))


@pytest.mark.parametrize("name", ["asym_w4a8_int8", "w6a8_int8", "awq_w4a16"])
@pytest.mark.parametrize("group", [7, 96, 1024, 0, -5, 2**63])
def test_b07_a_group_that_does_not_fit_is_refused_by_name(name, group):
    with pytest.raises((UnsupportedError, FormatError), match="group"):
        QuantizedTensor.quantize(torch.randn(64, 512), name, group_size=group)


@pytest.mark.parametrize("rank", [0, 1, 8, 16, 24, 32, 48, 64, 96, 128, 160, 256])
def test_b08_every_rank(rank):
    weight = torch.randn(256, 320)
    made = QuantizedTensor.quantize(weight, "svdquant_w4a4", rank=rank)
    x = torch.randn(33, 320)
    with trace() as calls:
        y = made.linear(x)
    assert [op for op, _ in calls] == ["svdquant_linear"]
    assert made.proj_up.shape == (256, rank)
    dense = x @ made.dequantize().T
    assert (y - dense).norm() / dense.norm() < 0.2  # 4-bit activations: 1 / (7 sqrt(12)) times the crest factor of 64
    exact = ops.dequantize_svdquant_w4a4(made.qdata, made.scale, made.smooth_factor, made.proj_down, made.proj_up)
    assert_equal(exact, made.dequantize())


@pytest.mark.parametrize("bits_of", ["asymmetric", "codebook"])
def test_b10_zero_points_are_scaled_like_the_weight(bits_of):
    """Asymmetric W4A8: one-hot rows of x read the dequantized weight out, offsets and all."""
    weight = torch.randn(32, 64) + 3.0  # far from symmetric
    made = ops.quantize_w4a8_weight(weight, 16, 0, 4, bits_of)
    tensors = [t if t is not None and t.numel() else None for t in made]
    dense = ops.dequantize_w4a8_weight(*tensors, None, 16, 0)
    eye = torch.eye(64) * 127.0  # codes of exactly 127, scale 1
    read = ops.w4a8_linear(eye, *tensors, None, None, 16, 0).T / 127
    assert_close(read, dense, relative=2.0**-21, absolute=2.0**-21)


# -------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 2, 8, 15, 16, 17])
def test_b11_few_rows_eager_and_compiled(name, m):
    made, x = layer(name), torch.randn(m, 256, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y = compiled(x)
    assert y.shape == (m, 96)
    assert_equal(y, made(x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [22473, 51865, 51866, 17, 7, 1])
def test_b12_any_number_of_outputs_forward_and_backward(name, n):
    made = layer(name, n, 64, torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    y = made(x)
    assert y.shape == (3, n)
    dense = made.dequantize(torch.float32).double()
    y.sum().backward()
    bound = tolerance(torch.float32, n, "").accumulation + 2 * n * 2.0**-24
    assert_close(x.grad, dense.sum(0).expand(3, 64), absolute=bound * dense.abs().sum(0).expand(3, 64))
    with pytest.raises(InferenceOnlyError):
        made.weight.requires_grad_(True) if isinstance(made.weight, QuantizedTensor) else made.requires_grad_(True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [32, 64, 256])
@pytest.mark.parametrize("n", [1, 8, 16, 32, 96, 120])
def test_b15_small_layers_are_right_or_refused_at_conversion(name, n, k):
    if name in ("svdquant_w4a4", "awq_w4a16") and k % 64:  # AWQ's message names the groups that would do
        with pytest.raises(UnsupportedError, match=f"K={k}"):
            layer(name, n, k)
        return
    made = layer(name, n, k, torch.float32)
    x = torch.randn(16, k)
    dense = x @ made.dequantize().T + made.bias
    assert (made(x) - dense).norm() <= 0.2 * dense.norm()


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 64])
def test_b17_the_decode_entry_takes_any_number_of_rows(rows):
    w = QuantizedTensor.quantize(torch.randn(40, 128), "awq_w4a16")
    x = torch.randn(rows, 128)
    y = kc.gemv_awq_w4a16(x, w.qdata, w.scale, w.zeros, group_size=w.config.group_size)
    assert_equal(y, w.linear(x))
    assert y.shape == (rows, 40)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lead", [(2, 1023), (3, 4080), (1, 7, 13), (2, 1, 3)])
def test_b18_b21_leading_dims_are_rows(name, lead):
    made = layer(name, 24, 64)
    x = torch.randn(*lead, 64, dtype=torch.bfloat16)
    y = made(x)
    assert y.shape == (*lead, 24)
    if name in INT8_GRID:  # exact sums: a row's bits never depend on the others
        assert_equal(y, made(x.reshape(-1, 64)).reshape(*lead, 24))
        assert_equal(y[-1], made(x[-1]))
    assert made(x[..., 0, :]).shape == (*lead[:-1], 24)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("lead", [(0,), (0, 5), (2, 0)])
def test_b20_no_rows(name, lead):
    y = layer(name)(torch.empty(*lead, 256, dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((*lead, 96), torch.bfloat16)


@pytest.mark.parametrize("k", [8192, 8200, 16384, 32768, 131072])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_b20_wide_rows_quantize_within_half_a_step(k, dtype):
    x = torch.randn(3, k).to(dtype)
    codes, scale = ops.quantize_int8_rowwise(x)
    assert codes.abs().amax() == 127
    assert ((codes.double() * scale.double() - x.double()).abs() <= 0.5 * scale.double() * (1 + 2.0**-14)).all()


AWKWARD = [(n, k) for k in (7392, 10944, 29568) for n in (16, 32, 1536)]


@pytest.mark.parametrize("sm", ARCHS)
@pytest.mark.parametrize("name", FORMATS)
def test_b22_b61_b62_a_kernel_is_chosen_for_every_shape_on_every_chip_and_the_others_say_why(name, sm):
    """Built for releases or not, known chip or newer: something right is chosen for every number of rows, with reasons."""
    op = LINEAR_OPS[name]
    fields = {"awq_w4a16": {"group": 32, "bits": 4}, "svdquant_w4a4": {"group": 64, "bits": 4, "rank": 32}}.get(
        name, {}
    )
    fields = {"group": 16, "bits": 4, **fields} if op == "w4a8_linear" else fields
    with simulate(f"sm_{sm}"):
        for n, k in AWKWARD:
            for m in (1, 255, 256, 4096):
                for dtype in (torch.bfloat16, torch.float16):
                    found = explain(op, M=m, N=n, K=k, dtype=dtype, device="cuda", **fields)
                    if op == "svdquant_linear" and k % 64:
                        assert "K must be a multiple of 64" in found.refused
                        continue
                    assert found.chosen is not None
                    for candidate in found.candidates:
                        assert candidate.reason is None or len(candidate.reason) > 10, candidate
                    assert "supports() failed" not in str(found)


@pytest.mark.parametrize("arch", ["sm_61", "sm_70", "sm_75", "sm_103", "sm_121"])
def test_b61_what_a_build_lacks_is_said_with_both_names(arch, monkeypatch):
    from kitchen_int8._extension import EXTENSION

    monkeypatch.setitem(
        EXTENSION.__dict__, "build_info", {"has_cuda": True, "archs": ["90a-real"], "nvcc": "13", "reason": ""}
    )
    with simulate(arch):
        found = explain("quantize_int8_rowwise", M=16, K=256, out_dtype=torch.int8, device="cuda")
    reasons = {c.kernel.id: c.reason for c in found.candidates}
    assert "built for 90a" in reasons["int8/rowwise"]
    assert arch in reasons["int8/rowwise"]
    assert found.chosen.id != "int8/rowwise"


def test_b23_layers_too_small_for_the_rotation_take_a_smaller_group_and_say_so(tmp_path):
    model = nn.ModuleDict({f"l{k}": nn.Linear(k, 64) for k in (8, 32, 96, 256)})
    km.quantize_(model, "*=int8")
    assert [model[f"l{k}"].config.convrot_groupsize for k in (8, 32, 96, 256)] == [0, 16, 16, 256]
    km.save(model, tmp_path / "m.safetensors")
    loaded = km.load(tmp_path / "m.safetensors")
    for k in (8, 32, 96, 256):
        assert loaded[f"l{k}"].config == model[f"l{k}"].config, "the choice is in the file, layer by layer"
        x = torch.randn(3, k)
        assert_equal(loaded[f"l{k}"](x), model[f"l{k}"](x))
    other = copy.deepcopy(model["l96"])
    with pytest.raises((FormatError, RuntimeError), match="the file"):
        other.load_state_dict({**other.state_dict(), "comfy_quant": model["l256"].comfy_quant})


@pytest.mark.parametrize("name", ["asym_w4a8_int8", "w6a8_int8", "awq_w4a16"])
def test_b25_a_packed_weight_cut_along_k(name):
    """As docs/guides/slicing.md: codes and scales are cut at whole groups; scales of the whole are refused by their shape."""
    k, cut, group = 256, 128, 32
    options = {"group_size": group, **({} if name == "awq_w4a16" else {"convrot_groupsize": 64})}
    w = QuantizedTensor.quantize(torch.randn(48, k), name, **options)
    x = torch.randn(5, k)
    tensors = w.inner()
    columns = {"asym_w4a8_int8": cut // 2, "w6a8_int8": None, "awq_w4a16": cut // 2}[name]
    if columns is None:  # two planes: low nibbles, then the top bits
        low, top = tensors["qdata"].split([k // 2, k // 4], dim=1)
        codes = torch.cat((low[:, : cut // 2], top[:, : cut // 4]), 1)
    else:
        codes = tensors["qdata"][:, :columns]
    if name == "awq_w4a16":
        scales = [tensors["scale"][: cut // group], tensors["zeros"][: cut // group]]
        part = ops.awq_linear(x[:, :cut], codes, *scales, group_size=group)
        refused = r"\[K/g, N\] = \[4, 48\] for group_size 32, got \[8, 48\]"
        call = lambda: ops.awq_linear(x[:, :cut], codes, tensors["scale"], tensors["zeros"], group_size=group)  # noqa: E731
    else:
        rest = [tensors["s_channel"], tensors.get("codebook")]
        options = {"group_size": group, "convrot_groupsize": 64}
        part = ops.w4a8_linear(x[:, :cut], codes, tensors["s_rel"][:, : cut // group], *rest, **options)
        refused = r"s_rel has 8 groups of 32, so K=256 .* are expected, got weight"
        call = lambda: ops.w4a8_linear(x[:, :cut], codes, tensors["s_rel"], *rest, **options)  # noqa: E731
    dense = w.dequantize()[:, :cut]
    error = (part - x[:, :cut] @ dense.T).norm() / (x[:, :cut] @ dense.T).norm()
    assert error < 0.03
    with pytest.raises(UnsupportedError, match=refused):
        call()


# ---------------------------------------------------------------------------------------------- nonsense arguments


def spoiled_calls(op):
    """Calls of one op with one argument that cannot be right: (what, arguments)."""
    case = make_case(op, random.Random(11).choice)
    while any(isinstance(a, torch.Tensor) and a.numel() == 0 for a in case.arguments):
        case = make_case(op, random.Random(random.random()).choice)
    names = [a.name for a in getattr(torch.ops.kitchen, op).default._schema.arguments]
    for i, (name, value) in enumerate(zip(names, case.arguments, strict=True)):

        def put(new, at=i):
            return [new if j == at else a for j, a in enumerate(case.arguments)]

        if isinstance(value, torch.Tensor):
            other = torch.int32 if value.dtype != torch.int32 else torch.float64
            yield f"{name} of another dtype", put(value.float().to(other))
            yield f"{name} in float64", put(value.float().double())
            if sum(isinstance(a, torch.Tensor) for a in case.arguments) > 1:
                yield f"{name} on another device", put(value.to("meta"))
            if (
                name not in ("x", "indices", "codes", "proj_down")
                and value.dim()
                and not op.startswith("quantize_int8")
            ):
                yield f"{name} one too long", put(_longer(value))
        elif name.endswith("group_size"):
            yield from ((f"{name} = {bad}", put(bad)) for bad in (0, -5, 2**62, 3))
        elif name.endswith("groupsize"):
            yield from ((f"{name} = {bad}", put(bad)) for bad in (-4, 2, 8, 2**62))
        elif name == "seed":
            yield "a negative seed", put(-1)
        elif name == "input_act":
            yield "an unknown activation", put("relu6")


def _longer(tensor):
    """The tensor's dtype and rank, its last dim one longer."""
    return tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype)


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_b27_nonsense_is_refused_before_anything_runs(op):
    tried = 0
    for what, arguments in spoiled_calls(op):
        tried += 1
        try:
            with trace() as calls:
                getattr(torch.ops.kitchen, op).default(*arguments)
        except UnsupportedError as error:
            caught = error
        else:
            pytest.fail(f"{op} accepts {what}")
        assert not calls, f"{op}, {what}: {calls} ran"
        assert re.search("got |is on |does not |allowed|takes |must be ", str(caught)), f"{op}, {what}: {caught}"
    assert tried >= 2


def test_b27_sparse_tensors_and_arrays_are_named():
    x, w, s = torch.randn(3, 64), torch.zeros(8, 64, dtype=torch.int8), torch.ones(8)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(
            kc.UnsupportedError, match=r"x must be a dense tensor, got layout sparse_\w+; pass x\.to_dense"
        ):
            kc.int8_linear(sparse, w, s)
    for wrong, name in (((x.numpy(), w, s), "x"), ((x, w.numpy(), s), "weight"), ((x, w, s, "bias"), "bias")):
        with pytest.raises(RuntimeError, match=f"argument '{name}'"):
            kc.int8_linear(*wrong)


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_b27_none_and_other_layouts_are_named_for_every_argument(op):
    """After a good call of the same shapes: what is remembered for them must not let these pass."""
    call = getattr(torch.ops.kitchen, op).default
    case = make_case(op, random.Random(11).choice)
    call(*case.arguments)
    tried = 0
    for i, (argument, value) in enumerate(zip(call._schema.arguments, case.arguments, strict=False)):
        if not isinstance(value, torch.Tensor) or value.dtype == torch.float8_e4m3fn:
            continue
        others = [value.to_sparse()] if value.dim() else []
        others += [value.to_sparse_csr()] if value.dim() == 2 else []
        others += [value.to_mkldnn()] if value.dtype == torch.float32 and value.dim() and value.numel() else []
        for other in others:
            said = rf"{op}: {argument.name} must be a dense tensor, got layout _?\w+; pass"
            with pytest.raises(UnsupportedError, match=said):
                call(*case.arguments[:i], other, *case.arguments[i + 1 :])
            tried += 1
        if str(argument.type) == "Tensor":
            with pytest.raises(UnsupportedError, match=f"{op}: {argument.name} must be a tensor, got None"):
                call(*case.arguments[:i], None, *case.arguments[i + 1 :])
            tried += 1
    assert tried >= 2


@pytest.mark.parametrize("op", ["int8_linear", "w4a8_linear", "svdquant_linear", "awq_linear"])
def test_b27_numbers_beyond_64_bits_and_words_for_numbers(op):
    case = make_case(op, random.Random(5).choice)
    for bad in (2**63, 2**70, "256", 1.5):
        with pytest.raises((RuntimeError, TypeError, OverflowError, UnsupportedError)):
            getattr(ops, op)(case.arguments[0], *case.arguments[1:4], convrot_groupsize=bad)


# ------------------------------------------------------------------------------------------------ graphs, compiling


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_b32_no_op_changes_an_argument(op):
    schema = getattr(torch.ops.kitchen, op).default._schema
    assert not schema.is_mutable
    case = make_case(op, random.Random(7).choice)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in case.arguments]
    versions = [a._version for a in case.arguments if isinstance(a, torch.Tensor)]
    getattr(torch.ops.kitchen, op).default(*case.arguments)
    assert versions == [a._version for a in case.arguments if isinstance(a, torch.Tensor)]
    for a, b in zip(before, case.arguments, strict=True):
        if isinstance(a, torch.Tensor):
            assert_equal(b.float(), a.float())


class Branch(nn.Module):
    """A quantized layer with a low-rank branch beside it whose strength may change: the usual form of LoRA."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base, self.strength = base, 0.0
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1, requires_grad=False)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1, requires_grad=False)

    def forward(self, x):
        y = self.base(x)
        return y if self.strength == 0.0 else y + self.strength * (x @ self.down.T) @ self.up.T


@pytest.mark.parametrize("name", FORMATS)
def test_b36_b47_a_branch_beside_a_compiled_layer_is_used_replaced_and_removed(name):
    model, x = Branch(layer(name, dtype=torch.float32)), torch.randn(4, 256)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    delta = (x @ model.down.T) @ model.up.T
    with torch.no_grad():
        plain = compiled(x)
        for _ in range(10):
            for strength in (0.7, 1.0, 0.0):
                model.strength = strength
                y = compiled(x)
                want = plain + strength * delta
                bound = 8 * 2.0**-24 * (plain.double().abs() + delta.double().abs())
                assert_close(y, want, absolute=bound if strength else 0.0)
        assert_equal(compiled(x), plain)


@pytest.mark.parametrize("name", FORMATS)
def test_b48_the_quantized_kernel_still_runs_beside_a_branch(name):
    model = Branch(layer(name, dtype=torch.float32))
    model.strength = 1.0
    with trace() as calls:
        model(torch.randn(4, 256))
    assert calls == [(LINEAR_OPS[name], EAGER)]


def test_b46_a_delta_below_one_step_lives_in_the_branch_and_in_stochastic_merges_only():
    """What each way keeps of it; docs/guides/lora.md says which to use."""
    weight = torch.randn(64, 256)
    w = QuantizedTensor.quantize(weight, "int8", convrot_groupsize=0)
    step = w.scale.mean()
    down, up = torch.randn(8, 256), torch.randn(64, 8)
    delta = up @ down
    delta *= 0.2 * step / delta.abs().amax()  # at most a fifth of a step
    delta[w.qdata.abs() == 127] = 0.0  # which would move the scale
    base = w.dequantize()

    def kept(merged):
        return ((merged.dequantize() - base) * delta).sum() / (delta * delta).sum()

    assert kept(w.requantize(base + delta)) == 0.0, "rounding to nearest loses all of it: said, not hidden"
    stochastic = torch.stack([kept(w.requantize(base + delta, seed=s)) for s in range(1, 33)])
    # each element is unbiased; its variance is at most step^2 / 4, so the mean of 32 projections scatters by this
    scatter = (0.5 * step / delta.norm()) / 32**0.5
    assert abs(stochastic.mean() - 1.0) < 5 * scatter
    x = torch.randn(9, 256)
    branch = w.linear(x) + (x @ delta.T)
    assert_close(branch - w.linear(x), x @ delta.T, absolute=1e-5 * w.linear(x).double().abs().max())


# -------------------------------------------------------------------------------------------- offload, copying, files


@pytest.mark.parametrize("name", FORMATS)
def test_b37_state_is_plain_tensors_that_an_offloader_can_swap(name):
    made, x = layer(name), torch.randn(3, 256, dtype=torch.bfloat16)
    y = made(x)
    kept = {key: t.data for key, t in (*made.named_parameters(), *made.named_buffers())}
    for key, tensor in (*made.named_parameters(), *made.named_buffers()):
        assert type(tensor.data) is torch.Tensor
        tensor.data = torch.empty_like(kept[key], device="meta") if False else torch.zeros_like(kept[key])
    for key, tensor in (*made.named_parameters(), *made.named_buffers()):
        tensor.data = kept[key].clone()
    assert_equal(made(x), y)
    away = copy.deepcopy(made).to("meta")  # sequential offload leaves placeholders
    with pytest.raises(UnsupportedError, match="is on meta"):
        away(x)
    away.load_state_dict(made.state_dict(), assign=True)
    assert_equal(away(x), y)


@pytest.mark.parametrize("name", FORMATS)
def test_b39_blocks_of_mixed_precision_go_through_one_staging_block(name):
    """Ten blocks, the first and the last dense; the quantized ones have one list of names, shapes and dtypes."""
    blocks = [nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(10)]
    first = QuantizedLinear.from_linear(blocks[1], name)
    quantized = [first]
    for block in blocks[2:9]:
        other = copy.deepcopy(first)
        other.requantize_(block.weight.detach())
        other.bias.data = block.bias.detach().clone()
        quantized.append(other)
    described = [[(k, tuple(t.shape), t.dtype) for k, t in b.state_dict().items()] for b in quantized]
    assert all(d == described[0] for d in described)
    staging, x = copy.deepcopy(first), torch.randn(2, 128, dtype=torch.bfloat16)
    for block in quantized:
        state = staging.state_dict()
        for key, tensor in block.state_dict().items():
            state[key].copy_(tensor)
        assert_equal(staging(x), block(x))


@pytest.mark.parametrize("name", FORMATS)
def test_b40_tied_layers_save_and_load(name, tmp_path):
    model = nn.ModuleDict({"a": layer(name), "c": nn.Linear(4, 4)})
    model["b"] = model["a"]
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    fresh = nn.ModuleDict({"a": copy.deepcopy(model["a"]), "c": nn.Linear(4, 4)})
    fresh["b"] = fresh["a"]
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert_equal(fresh["b"](x), model["a"](x))
    km.save(model, tmp_path / "m.safetensors")
    loaded = km.load(tmp_path / "m.safetensors")
    assert_equal(loaded["a"](x), model["a"](x))


@pytest.mark.parametrize("name", ["int8_tensorwise", "asym_w4a8_int8"])
def test_b41_a_spawned_process_takes_a_module(name):
    made, x = layer(name), torch.randn(3, 256, dtype=torch.bfloat16)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_worker_target(), args=(there,))
    worker.start()
    here.send((made, x))
    assert here.poll(100), "the worker did not answer"
    assert_equal(torch.tensor(here.recv(), dtype=torch.bfloat16), made(x))
    worker.join(20)
    assert worker.exitcode == 0


def _worker_target():
    """A function that a spawned interpreter can import: this file is not a module there, kitchen_core.testing is."""
    from kitchen_core.testing.workers import run_module

    return run_module


@pytest.mark.parametrize("name", FORMATS)
def test_b41_copies_share_nothing(name):
    made, x = layer(name), torch.randn(3, 256, dtype=torch.bfloat16)
    again = copy.deepcopy(made)
    for (key, a), (_, b) in zip(made.named_parameters(), again.named_parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr(), key
    made.weight.data.zero_()
    assert not torch.equal(again(x), made(x))
    shallow = copy.copy(again)
    assert_equal(shallow(x), again(x))


def test_b42_unknown_formats_say_layer_found_known_and_what_to_do(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256))
    km.quantize_(model, "*=int8")
    km.save(model, tmp_path / "good.safetensors")
    state = load_file(tmp_path / "good.safetensors")
    for found, words in (
        ("int8_tensorwize", "unknown format 'int8_tensorwize'"),
        ("int3_rowwise_v7", "unknown format 'int3_rowwise_v7'"),
    ):
        marker = kc.formats.marker_tensor({"format": found}) if hasattr(kc, "formats") else None
        state["0.comfy_quant"] = marker
        save_file(state, tmp_path / "bad.safetensors")
        with pytest.raises(FormatError) as caught:
            km.load(tmp_path / "bad.safetensors")
        message = str(caught.value)
        assert words in message
        assert "'0'" in message or "layer 0" in message or "0:" in message, message
        assert "int8_tensorwise" in message
        assert "pip install --upgrade" in message


def test_b44_a_file_of_another_variant_is_refused_by_name():
    made = layer("svdquant_w4a4", 96, 256)
    state = made.state_dict()
    scales = next(spec.key for spec in made.format.tensors if spec.name == "scale")
    fp4 = {**state, scales: torch.ones(256 // 16, 96).to(torch.float8_e4m3fn)}  # groups of 16, e4m3 scales
    with pytest.raises((FormatError, RuntimeError), match=scales) as caught:
        made.load_state_dict(fp4)
    assert "float8_e4m3fn" in str(caught.value)
    assert "bfloat16" in str(caught.value)
    coarse = {**state, scales: torch.ones(256 // 16, 96, dtype=torch.bfloat16)}
    with pytest.raises((FormatError, RuntimeError), match=r"16, 96.*4, 96|4, 96.*16, 96"):
        made.load_state_dict(coarse)


@pytest.mark.parametrize("group", [0, 64, 256])
def test_b45_a_rotation_flag_that_was_lost_shows_in_verify(group, tmp_path):
    save_file({"l.weight": torch.randn(256, 256)}, tmp_path / "source.safetensors")
    km.quantize_file(tmp_path / "source.safetensors", tmp_path / "q.safetensors", f"*=int8(convrot_groupsize={group})")
    model = nn.ModuleDict({"l": nn.Linear(256, 256, bias=False)})
    model["l"].weight.data = load_file(tmp_path / "source.safetensors")["l.weight"]
    fly = QuantizedLinear.from_linear(model["l"], "int8", convrot_groupsize=group)
    stored = km.load(tmp_path / "q.safetensors")["l"]
    x = torch.randn(5, 256)
    assert_equal(stored(x), fly(x))
    state = load_file(tmp_path / "q.safetensors")
    state["l.comfy_quant"] = kc.formats.marker_tensor({"format": "int8_tensorwise"})
    save_file(state, tmp_path / "lost.safetensors")  # without our header and with the flag dropped
    found = km.verify_files(tmp_path / "source.safetensors", tmp_path / "lost.safetensors")
    assert (found.worst > 1.0) == (group > 0), "a checker against the source shows it, layer by layer"


# -------------------------------------------------------------------------------------------------- dtypes, devices


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_b49_b50_a_layer_follows_its_source_and_tells_the_truth(name, dtype):
    source = nn.Linear(256, 96, dtype=dtype)
    made = QuantizedLinear.from_linear(source, name)
    assert made.compute_dtype == made.bias.dtype == dtype
    assert (made.in_features, made.out_features) == (256, 96)
    assert made.weight.device == source.weight.device
    for x in (torch.randn(2, 256, dtype=d) for d in FLOAT_DTYPES):  # whatever x is, the result is of its dtype
        assert made(x).dtype == x.dtype
    assert made.dequantize().dtype == dtype


@pytest.mark.parametrize("name", FORMATS)
def test_b51_dtypes_of_bias_and_scales_change_no_output_dtype(name):
    for x_dtype in FLOAT_DTYPES:
        for bias_dtype in FLOAT_DTYPES:
            made = layer(name)
            made.bias.data = made.bias.data.to(bias_dtype)
            assert made(torch.randn(3, 256).to(x_dtype)).dtype == x_dtype


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_b52_the_report_for_an_old_card_names_no_bf16_tensor_cores(arch):
    with simulate(arch) as facts:
        assert not facts.bf16_tensor_cores
        for op in ("int8_linear", "awq_linear", "svdquant_linear"):
            chosen = explain(op, M=16, N=256, K=256, dtype=torch.bfloat16, device="cuda", group=64, bits=4).chosen
            assert chosen is not None


def test_b74_another_vendor_gets_the_reference_and_reasons():
    with simulate(DeviceFacts("hip", "AMD Radeon")):
        for op in sorted(problem_builders()):
            found = explain(op, device="cuda", **typical(op, M=16))
            assert found.chosen.id == EAGER, op
            others = [c for c in found.candidates if c.kernel.id != EAGER]
            assert all(c.reason for c in others), op


# ------------------------------------------------------------------------------------------------- install, loading


def test_b56_a_broken_binary_is_named_with_its_own_error(tmp_path, monkeypatch):
    """In the reason, in doctor's line and in the exception: never as a partly imported module."""
    import kitchen_int8
    from kitchen_core.extension import CudaExtension

    broken = tmp_path / "kitchen_broken"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    suffix = ".so"
    (broken / f"_C{suffix}").write_bytes(b"\x7fELF and no more")
    (broken / "_build_info.json").write_text('{"has_cuda": true, "archs": ["90a-real"], "nvcc": "13.0", "reason": ""}')
    monkeypatch.syspath_prepend(str(tmp_path))
    extension = CudaExtension("kitchen_broken")
    facts = DeviceFacts("cuda", "H200", (9, 0), 132, 227 << 10, 60 << 20, 13000)
    reason = extension.why_not(facts)
    assert "cannot be loaded: ImportError" in reason
    assert "file too short" in reason or "invalid ELF" in reason
    assert any("cannot be loaded" in line for line in extension.describe())
    with pytest.raises(ImportError):
        _ = extension.module
    assert kitchen_int8.__name__ == "kitchen_int8"


def test_b58_doctor_names_interpreter_versions_and_backends():
    done = python("-m", "kitchen_core.cli", "doctor")
    text = done.stdout
    for word in (sys.executable, torch.__version__, "kitchen-core", "kitchen ABI", "int8_tensorwise"):
        assert word in text, text[:500]
    again = python("-m", "kitchen_core", "doctor")
    assert again.returncode in (0, 1)
    assert sys.executable in again.stdout


def test_b65_one_warning_per_op_and_a_strict_mode():
    """Without a built extension every op on a GPU is slow: said once each, or an error under KITCHEN_STRICT=1."""
    script = (
        "import logging, torch, kitchen_core as kc\n"
        "from kitchen_core import registry\n"
        "logging.basicConfig(format='WARNED %(message)s')\n"
        "with kc.simulate('sm_90'):\n"
        "  for _ in range(3):\n"
        "    for m in (1, 8):\n"
        "      cuda, kind = torch.device('cuda'), torch.float32\n"
        "      registry.select(registry.Problem('awq_linear', cuda, kind, kind, m, 64, 60, group=6, bits=4))\n"
    )
    done = python("-c", script, KITCHEN_STRICT="0")
    assert done.stderr.count("WARNED") <= 1, done.stderr
    if "WARNED" in done.stderr:
        strict = python("-c", script, KITCHEN_STRICT="1")
        assert "KITCHEN_STRICT=1 and awq_linear would take the slow path" in strict.stderr


# ----------------------------------------------------------------------------------------------- memory, robustness


class Live(TorchDispatchMode):
    """The most bytes of tensors made within the block that lived at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not any(
                isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                for a in args
            ):
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._freed, size)
        return result

    def _freed(self, size):
        self.now -= size


@pytest.mark.parametrize("name", FORMATS)
def test_b72_the_reference_makes_no_float_copy_of_a_weight(name):
    n = k = 4096
    format = get_format(name)
    options = {"rank": 16} if name == "svdquant_w4a4" else {}
    config = format.config_for(n, k, **options)
    meta = format.quantize(torch.empty(n, k, device="meta", dtype=torch.bfloat16), config)
    tensors = {key: _filled(t) for key, t in meta.items()}
    x = torch.randn(1, k)
    kernel = next(kernel for kernel in kernels_of(LINEAR_OPS[name]) if kernel.id == EAGER)
    with Live() as live, torch.no_grad():
        format.linear(x, tensors, config)
    assert kernel.id == EAGER
    assert live.most > 0
    # 64 MiB would be the weight in fp32; pieces of 2^22 weights in a few fp32 forms, and INT8 codes of the whole (16 MiB)
    assert live.most < (5 << 22) * 4 + n * k, f"{live.most / 2**20:.0f} MiB"


def _filled(t):
    if t.dtype == torch.int8:
        return torch.randint(-128, 128, t.shape, dtype=torch.int8)
    return (torch.rand(t.shape) * 0.01 + 0.01).to(t.dtype)


def test_b73_checks_hold_under_dash_o_and_refused_calls_leave_nothing():
    script = (
        "import gc, resource, torch, kitchen_core as kc\n"
        "x, w, s = torch.randn(2, 64), torch.zeros(8, 128, dtype=torch.int8), torch.ones(8)\n"
        "def fail():\n"
        "    try: kc.int8_linear(x, w, s)\n"
        "    except kc.UnsupportedError as error: return str(error)\n"
        "    raise SystemExit('accepted')\n"
        "assert False, 'asserts are on'\n"
        "for _ in range(2000): fail()\n"
        "gc.collect(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(100000): fail()\n"
        "gc.collect(); after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print('grown', after - before); print(fail())\n"
    )
    done = python("-O", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "x has 64 columns" in done.stdout
    assert int(re.search(r"grown (\d+)", done.stdout).group(1)) < 2048, "KiB"


def test_b75_a_caller_can_ask_what_an_op_takes():
    assert kc.accepts("int8_linear", "residual", "residual_scale", "convrot_groupsize")
    assert kc.accepts("int8_linear", "x", "fp16_fallback"), "the public function's own argument"
    assert not kc.accepts("int8_linear_fp16", "fp16_fallback")
    assert not kc.accepts("int8_linear", "residual", "a_newer_feature")
    assert not kc.accepts("an_op_of_a_newer_version")
    for op in problem_builders():
        assert kc.accepts(op, *optional_arguments(op))
        assert kc.accepts(op, *inspect.signature(getattr(kc.ops, op)).parameters)
    with pytest.raises(TypeError, match="a_newer_feature"):
        kc.int8_linear(torch.randn(1, 8), torch.zeros(8, 8, dtype=torch.int8), torch.ones(8), a_newer_feature=1)


# ------------------------------------------------------------------------------------ settings of the whole process


def layer_of(weight, name):
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(weight)
    return QuantizedLinear.from_linear(linear, name)


@pytest.mark.parametrize("name", FORMATS)
def test_settings_of_the_process_change_no_result(name):
    """Default dtypes and devices, precision switches, grad modes and threads are the caller's, and not ours to follow."""
    made = layer(name, dtype=torch.float32)
    x = torch.randn(5, 256)
    want = made(x)

    def check(what, call=lambda: made(x)):
        got = call()
        if name in INT8_GRID:
            assert_equal(got, want, what)
        else:  # fp32 sums may take another order with other threads
            assert_close(got, want, absolute=256 * 2.0**-23 * (1 + want.double().abs().max()), what=what)

    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)
            check(f"default dtype {dtype}")
            again = layer_of(made.dequantize(torch.float32), name)
        finally:
            torch.set_default_dtype(before)
        assert again.compute_dtype == torch.float32
        assert_equal(again(x), layer_of(made.dequantize(torch.float32), name)(x))
    with torch.device("meta"):
        check("default device meta")
        again = layer_of(made.dequantize(torch.float32), name)
    assert {t.device.type for t in again.state_dict().values()} == {"cpu"}
    assert_equal(again(x), layer_of(made.dequantize(torch.float32), name)(x))
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        check("matmul precision medium")
    finally:
        torch.set_float32_matmul_precision(precision)
    with torch.inference_mode():
        check("inference mode")
    torch.use_deterministic_algorithms(True)
    try:
        check("deterministic algorithms")
    finally:
        torch.use_deterministic_algorithms(False)


def test_warnings_and_logs_are_quiet_in_a_plain_call(caplog, recwarn):
    with caplog.at_level(logging.DEBUG, "kitchen"):
        for name in FORMATS:
            layer(name)(torch.randn(2, 256, dtype=torch.bfloat16))
    gc.collect()
    assert not caplog.records
    assert not [w for w in recwarn if "kitchen" in str(w.filename)]


def test_f_linear_and_modules_agree_where_a_float_weight_meets_a_quantized_input():
    w = QuantizedTensor.quantize(torch.randn(64, 64), "int8")
    with pytest.raises((UnsupportedError, RuntimeError, TypeError)):
        F.linear(torch.randn(2, 32), w)
