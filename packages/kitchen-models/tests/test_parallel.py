"""Tensor parallelism over two ranks on the CPU (gloo): every format, divided by outputs and by inputs, against one device."""

import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.utils import parametrizations

from kitchen_core import QuantizedLinear, QuantizedTensor, UnsupportedError, installed_formats
from kitchen_models import parallel
from kitchen_models.parallel import INPUTS, OUTPUTS, check_split, divided_dims

TWO_RANKS = types.SimpleNamespace(ndim=1, size=lambda: 2)  # enough of a mesh for what is refused
STYLES = ("ColwiseParallel", "RowwiseParallel")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import parallel_worker  # noqa: E402 - what the ranks run, and this process too
from parallel_worker import ROWS, K, N  # noqa: E402

CASES = list(parallel_worker.cases())
# Two results of independent roundings: the norms of ROWS * N rounding errors differ by a relative 1 / sqrt(2 * ROWS * N).
ROUNDING_NOISE = 1 + 2 / math.sqrt(2 * ROWS * N)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks computed: a dict a rank."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(HERE / "parallel_worker.py"), str(folder), "cpu"],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture
def alone(case):
    """The layer on one device, its inputs, and the exact output of its dequantized weight."""
    layer = parallel_worker.layer(case)
    x, residual, scale = parallel_worker.inputs()
    weight = layer.dequantize(torch.float32).double()
    exact = x.double() @ weight.T + layer.bias.double()
    return layer, x, residual, scale, exact


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def joined(ranks, case, key):
    return torch.cat([made[case][key] for made in ranks], -1)


def test_every_format_is_tried():
    assert {parallel_worker.canonical_name(parallel_worker.CASES[case][0]) for case in CASES} == set(
        installed_formats()
    )


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_divided_outputs_have_the_bits_of_one_device(case, ranks, alone):
    layer, x, residual, scale, _ = alone
    whole = layer(x)
    assert torch.equal(joined(ranks, case, "colwise"), whole)
    assert torch.equal(joined(ranks, case, "colwise one row"), layer(x[:1]))
    fused = layer(x, input_act="gelu_tanh", residual=residual, residual_scale=scale)
    assert torch.equal(joined(ranks, case, "colwise fused"), fused)
    assert torch.equal(joined(ranks, case, "colwise shared activation"), layer(layer.quantize_activation(x)))
    for rank, made in enumerate(ranks):
        assert torch.equal(made[case]["colwise replicated"], whole)
        assert torch.equal(made[case]["colwise dtensor"], whole)
        told = (rank * N // 2, N) if case in ("awq", "svdquant") else None  # whose order of sums is theirs
        assert made[case]["colwise part"] == told
        assert made[case]["colwise part of own order"] is None
    assert torch.equal(joined(ranks, case, "colwise own order"), whole), "on a CPU an order of its own is the same"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_divided_inputs_are_no_worse_than_one_device(case, ranks, alone):
    layer, x, residual, scale, exact = alone
    first, second = (made[case] for made in ranks)
    for key in ("rowwise", "rowwise fused", "rowwise from replicated", "rowwise shared activation", "rowwise one row"):
        assert torch.equal(first[key], second[key]), f"{key}: all ranks have the sum"
    limit = error(layer(x), exact) * ROUNDING_NOISE
    assert error(first["rowwise"], exact) <= limit
    assert error(first["rowwise one row"], exact[:1]) <= error(layer(x[:1]), exact[:1]) * (1 + 2 / math.sqrt(2 * N))
    assert torch.equal(first["rowwise from replicated"], first["rowwise"])
    assert torch.equal(first["rowwise shared activation"], first["rowwise"])
    scattered = torch.cat([first["rowwise scattered"], second["rowwise scattered"]])
    assert error(scattered, exact[:32]) <= error(layer(x[:32]), exact[:32]) * ROUNDING_NOISE
    h = torch.nn.functional.gelu(x.float(), approximate="tanh").double()
    exact_fused = residual.double() + scale.double() * (
        h @ layer.dequantize(torch.float32).double().T + layer.bias.double()
    )
    one = layer(x, input_act="gelu_tanh", residual=residual, residual_scale=scale)
    assert error(first["rowwise fused"], exact_fused) <= error(one, exact_fused) * ROUNDING_NOISE


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_part_and_gathering_gives_the_file_back(case, ranks, alone):
    layer = alone[0]
    whole = sum(t.nbytes for t in layer.inner().values())
    wanted = {key: value.detach() for key, value in layer.state_dict().items()}
    for made in ranks:
        for way in ("colwise", "rowwise"):
            assert int(made[case][f"{way} bytes"]) < 0.62 * whole, "half of it, and what both need"
            found = made[case][f"{way} gathered"]
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert found[key].dtype == value.dtype
                assert torch.equal(found[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key
        assert torch.equal(made[case]["rowwise weight"], layer.dequantize(torch.float32))


@pytest.mark.parametrize("case", CASES)
def test_colwise_then_rowwise_is_the_mlp(case, ranks):
    first, second = (made[case] for made in ranks)
    assert torch.equal(first["mlp"], second["mlp"])
    # The activation between is quantized in two halves instead of one: as far from the whole as its own error is.
    module = parallel_worker.Mlp(case)
    x = parallel_worker.inputs()[0]
    h = x.double() @ module.up.dequantize(torch.float32).double().T + module.up.bias.double()
    h = torch.nn.functional.gelu(h, approximate="tanh")
    exact = h @ module.down.dequantize(torch.float32).double().T + module.down.bias.double()
    assert error(first["mlp"], exact) <= error(first["mlp whole"], exact) * (1 + 2 / math.sqrt(2 * ROWS * 64))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_inputs_are_those_of_one_device(case, ranks):
    first, second = (made["gradients"][case] for made in ranks)
    assert torch.equal(first["x divided"], second["x divided"]), "the ranks' parts are summed"
    # bf16 roundings of dx on each side, and of its two parts before they are summed: at most 2^-8 of the largest each.
    limit = 4 * 2.0**-8 * float(first["x whole"].abs().max())
    assert float((first["x divided"].float() - first["x whole"].float()).abs().max()) <= limit
    for made in (first, second):
        assert torch.equal(made["part"], made["part of one"])
        assert torch.equal(made["residual"], torch.ones_like(made["residual"]))


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_compiles_to_one_graph(case, ranks):
    assert all(made["compiled"][case] for made in ranks)


def test_refusals_name_what_was_given_what_is_allowed_and_what_to_do(ranks):
    if len(installed_formats()) < 5:
        pytest.skip("the refusals are of all formats, and some are not installed")
    for made in ranks:
        said = made["refusals"]
        block = "int8_tensorwise [64, 768] over 2 ranks: 384 inputs a rank would cut a ConvRot block of 256 columns"
        assert said["rotation"].startswith(f"UnsupportedError: layer 'rotation': {block}; the K / 256 = 3 of them")
        assert "over 1, 3 ranks" in said["rotation"]
        assert "ColwiseParallel for this layer, or quantize it again" in said["rotation"]
        assert said["rotation, torch"].startswith(f"UnsupportedError: {block}"), "under torch's own function too"
        assert "96 inputs a rank would cut a quantization group (scale) of 64 columns" in said["group"]
        assert "96 inputs a rank would cut a quantization group (scale) of 64 columns" in said["svdquant"]
        assert "would cut a quantization group (scale) of 128 columns" in said["one group a row"]
        assert "its 63 outputs do not divide evenly; use a number of ranks that divides N=63" in said["outputs"]
        assert "needs whole rows of x" in said["whole rows"]
        assert "divided already, over 2 ranks" in said["twice"]
        assert "cannot be requantized" in said["requantize"]
        assert "stays on its mesh (cpu)" in said["moved"]
        assert "'b' names no module" in said["no module"]
        assert "layer 'b': the plan names it as 'a' as well; leave one of them out" in said["shared"]
        for style in ("ColwiseParallel", "RowwiseParallel"):
            assert said[f"tensor, {style}"].startswith("UnsupportedError: layer 'a': its weight is a QuantizedTensor")
            assert "divide a QuantizedLinear" in said[f"tensor, torch, {style}"]
        assert "outputs divided over 2 ranks" in said["instead"]
        assert said["half"] == "torch.float16"
        assert "inputs divided over 2 ranks" in said["repr"]
        assert said["plain"] == "S(0)", "plain linears are torch's own affair"


@pytest.mark.parametrize("case", CASES)
def test_dims_are_those_of_the_stored_tensors(case):
    """Each tensor's dim over outputs has N elements, and N appears nowhere else."""
    layer = parallel_worker.layer(case)
    tensors = layer.inner()
    for what, size in ((OUTPUTS, N), (INPUTS, K)):
        dims = divided_dims(layer.format, layer.config, tensors, what)
        assert dims["qdata"] == (0 if what == OUTPUTS else 1)
        for name, dim in dims.items():
            if what == OUTPUTS:
                assert (dim is None) == (size not in tensors[name].shape), name
                assert dim is None or tensors[name].shape[dim] == size


@pytest.mark.parametrize("case", CASES)
def test_number_of_ranks_that_blocks_allow(case):
    layer = parallel_worker.layer(case)
    rotation = getattr(layer.config, "convrot_groupsize", 0)
    group = getattr(layer.config, "group_size", 64 if layer.format.name == "svdquant_w4a4" else 1)
    for parts in (1, 2, 3, 4, 8, 16, 32, 64):
        fits = K % parts == 0 and K // parts % max(rotation, group) == 0
        if fits:
            check_split(layer, INPUTS, parts)
        else:
            with pytest.raises(ValueError, match=f"over {parts} ranks"):
                check_split(layer, INPUTS, parts)


def test_a_scale_for_all_rows_is_whole_on_every_rank():
    layer = parallel_worker.layer("int8 plain")
    tensors = layer.inner() | {"scale": torch.ones(1)}
    one = QuantizedLinear(tensors, layer.format, layer.config)
    assert check_split(one, OUTPUTS, 2) == {"qdata": 0, "scale": None}


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES)
def test_torchs_own_styles_are_refused_before_they_change_a_layer(case, style, one_rank):
    layer = parallel_worker.layer(case)
    x, before, theirs = parallel_worker.inputs()[0], dict(layer.named_parameters()), getattr(torch_parallel, style)
    want, model = layer(x), nn.ModuleDict({"a": nn.Linear(8, 8), "b": layer})
    with pytest.raises(UnsupportedError, match=f"layer 'b': torch's {style} does not know {layer.format.name}"):
        parallel.parallelize(model, TWO_RANKS, {"a": theirs(), "b": theirs()})
    refusal = UnsupportedError, r"weight of a QuantizedLinear .* styles .* of kitchen_models\.parallel"
    if torch.__version__ < "2.11":  # comes to no parameter of ours
        refusal = RuntimeError, "only Tensors of floating point dtype can require gradients"
    with pytest.raises(refusal[0], match=refusal[1]):
        torch_parallel.parallelize_module(model["b"], one_rank, theirs())
    assert not any(hasattr(parameter, "to_local") for parameter in model.parameters())
    assert all(layer.get_parameter(key) is parameter for key, parameter in before.items())
    assert torch.equal(layer(x), want)


@torch.no_grad()
@pytest.mark.parametrize(
    "case", [case for case in CASES if case in ("int8", "awq", "svdquant")]
)  # no float8: not sent by gloo
def test_fully_sharded_layers_are_not_refused(case, one_rank):
    """FSDP gathers what it divides before each forward, and loads parts in the place of parts."""
    layer, x = parallel_worker.layer(case), parallel_worker.inputs()[0]
    want, state = layer(x), {key: tensor.clone() for key, tensor in layer.named_parameters()}
    try:
        fully_shard(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.int8), False)]), mesh=one_rank)
    except RuntimeError as reason:  # torch 2.11
        pytest.skip(f"this torch's fully_shard takes no integer parameter: {reason}")
    fully_shard(layer, mesh=one_rank)
    assert torch.equal(layer(x), want)
    parts = {key: distribute_tensor(tensor, one_rank, [Shard(0)]) for key, tensor in state.items()}
    layer.load_state_dict(parts, strict=False, assign=True)
    assert torch.equal(layer(x), want)


@torch.no_grad()
def test_layers_that_are_distributed_by_others_are_refused(one_rank):
    layer = parallel_worker.layer(next(iter(CASES)))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, one_rank), False)
    with pytest.raises(UnsupportedError, match="distributed already, by something else"):
        check_split(layer, OUTPUTS, 2)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    torch_parallel.parallelize_module(model["b"], one_rank, parallel.ColwiseParallel())
    with pytest.raises(UnsupportedError, match="layer 'b': torch has divided the layer already"):
        parallel.parallelize(model, one_rank, {"*": parallel.ColwiseParallel()})
    assert not any(hasattr(parameter, "to_local") for parameter in model["a"].parameters())


PLAIN = {
    "parametrized": (lambda mesh: parametrizations.weight_norm(nn.Linear(8, 8)), "its weight is made of other tensors"),
    "weight norm of old": (
        lambda mesh: torch.nn.utils.weight_norm(nn.Linear(8, 8)),
        "its weight is made of other tensors",
    ),
    "lazy": (lambda mesh: nn.LazyLinear(8), "its weight has no shape yet; run the model once"),
    "distributed": (lambda mesh: distributed(nn.Linear(8, 8), mesh), "its weight is distributed already"),
}


def distributed(layer, mesh):
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh))
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("bad", PLAIN)
def test_plain_layers_that_torch_would_fail_at_are_refused_before_a_layer_is_changed(bad, name, one_rank):
    make, words = PLAIN[bad]
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": make(one_rank)})
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedError, match=f"layer 'b': {words}"):
        parallel.parallelize(model, one_rank, {"*": getattr(parallel, name)()})
    assert all(model.get_parameter(key) is parameter for key, parameter in before.items())


@pytest.mark.parametrize(
    ("mesh", "plan", "words"),
    [
        ("cuda", {}, "mesh must be a DeviceMesh, as init_device_mesh makes one, got 'cuda'"),
        (None, {}, "mesh must be a DeviceMesh"),
        (TWO_RANKS, parallel.ColwiseParallel(), "the plan must give each name its style"),
        (TWO_RANKS, None, "the plan must give each name its style, .*, got None"),
    ],
)
def test_what_is_no_mesh_or_no_plan_is_refused(mesh, plan, words):
    with pytest.raises(UnsupportedError, match=words):
        parallel.parallelize(nn.Linear(8, 8), mesh, plan)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("bad", ["norm", "style", "quantized tensor", "twice", "dims"])
def test_a_plan_is_refused_before_its_first_layer_is_changed(name, bad):
    style, weight = getattr(parallel, name)(), torch.randn(64, 256).bfloat16()
    held = nn.Linear(256, 64, device="meta")
    held.weight = nn.Parameter(QuantizedTensor.quantize(weight, next(iter(installed_formats()))), False)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.LayerNorm(8), "c": held})
    mesh = types.SimpleNamespace(ndim=2, size=lambda: 2) if bad == "dims" else TWO_RANKS
    plan, words = {
        "norm": ({"b": style}, f"layer 'b': {name} divides an nn.Linear, .*, this is a LayerNorm"),
        "style": ({"b": name}, f"'b' must have a style, such as ColwiseParallel.., got '{name}'"),
        "quantized tensor": ({"c": getattr(torch_parallel, name)()}, "layer 'c': its weight is a QuantizedTensor"),
        "twice": ({"[a]": style}, "layer 'a': the plan names it as 'a' as well"),
        "dims": ({}, "one dim of a mesh, got 2 dims; take one"),
    }[bad]
    with pytest.raises(UnsupportedError, match=words):
        parallel.parallelize(model, mesh, {"a": style, **plan})
    assert not any(hasattr(parameter, "to_local") for parameter in model.parameters())


def test_options_of_styles_are_checked_where_they_are_given():
    for given in ("fp32", torch.int8, None, torch.float64):
        with pytest.raises(UnsupportedError, match=r"sum_dtype is one of torch.float32, .*, got "):
            parallel.RowwiseParallel(sum_dtype=given)
    for given in ("no", 0, None):
        with pytest.raises(UnsupportedError, match="bit_equal is True or False, got "):
            parallel.ColwiseParallel(bit_equal=given)
    assert parallel.RowwiseParallel(sum_dtype=torch.bfloat16).sum_dtype is torch.bfloat16
