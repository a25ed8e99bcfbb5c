"""When the SVDQuant kernels offer themselves, on simulated devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kitchen_core import UnsupportedError, explain, simulate, use
from kitchen_core.devices import CPU, simulated_facts
from kitchen_core.registry import Problem, select
from kitchen_core.testing import FLOAT_DTYPES, RELEASE_ARCHS, pretend_built
from kitchen_svdquant import _hopper, _packed, _quantize
from kitchen_svdquant._extension import EXTENSION
from kitchen_svdquant.kernels import FEW_ROWS, FEW_ROWS_K, FEW_ROWS_NUMBERS, provider

GEMM, LINEAR = "scaled_mm_svdquant_w4a4", "svdquant_linear"
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def built(monkeypatch):
    return partial(pretend_built, monkeypatch, EXTENSION)


def answers(facts, op=GEMM, **changes) -> dict[str, str | None]:
    """By priority, the first that says None is chosen."""
    asked = {"M": 4096, "N": 3072, "K": 3072, "out_dtype": torch.bfloat16, "group": 64, "bits": 4} | changes
    problem = Problem(op, torch.device("cuda"), torch.int8, **asked)
    kernels = sorted((k for k in provider.kernels if k.op == op), key=lambda k: -k.priority)
    return {k.id: k.supports(problem, facts) for k in kernels}


def chosen(found: dict[str, str | None]) -> str | None:
    return next((name for name, reason in found.items() if reason is None), None)


@pytest.mark.parametrize(
    ("arch", "many", "few"),
    [
        ("sm_80", "svdquant/int4", "svdquant/int4"),
        ("sm_86", "svdquant/int4", "svdquant/int4"),
        ("sm_89", "svdquant/int4", "svdquant/int4"),
        ("sm_90", "svdquant/sm90", "svdquant/few_rows"),
        ("sm_100", "svdquant/sm80", "svdquant/few_rows"),
        ("sm_120", "svdquant/sm80", "svdquant/few_rows"),
        ("sm_75", "svdquant/sm75", "svdquant/sm75"),
        ("sm_70", None, None),
    ],
)
def test_gemm_by_device(built, arch, many, few):
    built(*RELEASE_ARCHS)
    assert chosen(answers(simulated_facts(arch))) == many
    assert chosen(answers(simulated_facts(arch), M=16)) == few


@pytest.mark.parametrize(
    ("columns", "first", "last"),
    [
        (96, 33, 128), (3168, 33, 128), (3169, 17, 96), (8447, 17, 96), (8448, 17, 64), (11087, 17, 64), (11088, 17, 96),
        (12672, 17, 96), (12673, 17, 64), (30720, 17, 64),
    ],
)  # fmt: skip
def test_some_rows_stay_packed_on_hopper(built, columns, first, last):
    """Between the rows that are streamed and those for which the weight is decoded first; a part goes where its whole does."""
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    for N, part in ((columns, None), (96, (0, columns))):
        found = {M: chosen(answers(facts, M=M, N=N, part=part)) for M in (1, first - 1, first, last, last + 1)}
        assert list(found.values()) == [*["svdquant/few_rows"] * 2, *["svdquant/packed"] * 2, "svdquant/sm90"]
        told = answers(facts, M=last + 1, N=N, part=part)["svdquant/packed"]
        assert told == f"with {columns} output columns, for M of {first} to {last}; the call has {last + 1}"
    assert answers(facts, M=0, N=columns)["svdquant/packed"] is None


def operands(op, M, N=256, K=192, rank=32, scales=BF16, up=BF16, device="cpu"):
    """A call's tensors, in the order of the op's arguments."""

    def zeros(*shape, dtype=BF16):
        return torch.zeros(shape, dtype=dtype, device=device)

    weight = zeros(N, K // 2, dtype=torch.int8), zeros(K // 64, N, dtype=scales)
    if op == LINEAR:
        return zeros(M, K), *weight, zeros(K), zeros(K, rank), zeros(N, rank, dtype=up)
    activation = zeros(M, K // 2, dtype=torch.int8), zeros(K // 64, M, dtype=FLOAT), zeros(M, rank, dtype=FLOAT)
    return activation[0], weight[0], activation[1], weight[1], activation[2], zeros(N, rank, dtype=up)


@pytest.mark.parametrize("op", [LINEAR, GEMM])
@pytest.mark.parametrize(("M", "other"), [(64, "svdquant/few_rows"), (100, "svdquant/sm90")])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 17}, "takes an even rank, the call has rank 17"),
        ({"scales": FLOAT}, "the call has scales=float32"),
        ({"up": HALF}, "the call has proj_up=float16"),
        ({"up": FLOAT}, "the call has proj_up=float32"),
        ({"scales": FLOAT, "up": FLOAT}, "the call has scales=float32 and proj_up=float32"),
    ],
    ids=str,
)
def test_packed_refuses_by_name_what_its_kernel_cannot_read(built, op, M, other, changes, told):
    built(*RELEASE_ARCHS)
    with simulate("sm_90"), FakeTensorMode():
        found = explain(op, *operands(op, M, device="cuda", **changes))
        assert found.candidates[0].kernel.id == "svdquant/packed"
        assert found.candidates[0].reason.endswith(told)
        assert found.chosen.id == other
        assert select(found.problem).id == other
        with use("svdquant/packed"), pytest.raises(UnsupportedError, match=told):
            select(found.problem)


@pytest.mark.parametrize("op", [LINEAR, GEMM])
@pytest.mark.parametrize("M", [64, 100])
def test_packed_takes_scales_of_16_bits_and_any_branch_of_rank_0(built, op, M):
    built(*RELEASE_ARCHS)
    cases = [{"scales": BF16}, {"scales": HALF}, *({"rank": 0, "up": dtype} for dtype in FLOAT_DTYPES)]
    with simulate("sm_90"), FakeTensorMode():
        for changes in cases:
            assert explain(op, *operands(op, M, device="cuda", **changes)).chosen.id == "svdquant/packed", changes
        assert explain(op, M=M, N=256, K=192, rank=32, device="cuda").chosen.id == "svdquant/packed"
        told = explain(op, M=M, N=256, K=192, rank=32, device="cuda", options=("proj_up=float32",)).candidates[0].reason
        assert told == "takes scales of 16 bits and a bfloat16 proj_up, the call has proj_up=float32"


class Launches:
    """Stands for the extension's module: notes what is launched, and refuses nothing."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        def launch(*args):
            self.names.append(name)

        return launch


@pytest.fixture
def launches(monkeypatch):
    """The launches of a Hopper GPU that is not there; packed's plan is one piece of K."""
    module = Launches()
    monkeypatch.setitem(EXTENSION.__dict__, "module", module)
    monkeypatch.setattr(_quantize, "is_hopper", lambda device: True)
    monkeypatch.setattr(_quantize, "_has_clusters", lambda device: True)
    monkeypatch.setattr(_quantize, "stream_of", lambda tensor: 0)
    monkeypatch.setattr(_quantize, "low_rank_product", lambda rows, down: rows.float() @ down.float())
    monkeypatch.setattr(_packed, "plan_of", lambda *args: _packed.Plan(0, 1, 0, 0))
    monkeypatch.setattr(_hopper, "plan_of", lambda *args: _hopper.Plan((0, 1, 1, 1), 96, ""))
    return module.names


@pytest.mark.parametrize(
    ("kernel", "launched"),
    [
        ("packed", "svdquant_packed_sm90"), ("few_rows", "svdquant_stream_sm90"), ("sm90", "svdquant_gemm_sm90"),
        ("int4", "svdquant_gemm_sm80"), ("sm80", "svdquant_gemm_sm80"), ("sm75", "svdquant_gemm_sm75"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("changes", [{}, {"rank": 17}, {"scales": FLOAT}, {"up": FLOAT}, {"up": HALF}], ids=str)
def test_a_record_launches_its_kernel_and_no_other(launches, kernel, launched, changes):
    """Whatever it is given: what a kernel cannot read is for ``supports`` to say."""
    for record in provider.kernels:
        if record.name == kernel:
            launches.clear()
            record.function(*operands(record.op, 64, **changes))
            assert [
                name for name in launches if name.startswith(("svdquant_gemm", "svdquant_stream", "svdquant_packed"))
            ] == [launched]


def test_the_plan_of_packed_is_of_the_rows_behind_the_activation(launches, monkeypatch):
    """swiglu takes x of twice K, and ``part_of`` the whole's columns."""
    asked = []
    monkeypatch.setattr(_packed, "plan_of", lambda *args: asked.append(args) or _packed.Plan(0, 1, 0, 0))
    [packed] = [record for record in provider.kernels if record.id == "svdquant/packed" and record.op == LINEAR]
    x, *weight = operands(LINEAR, 64)
    y = packed.function(
        x.repeat(1, 2).reshape(2, 32, -1), *weight, None, False, None, "swiglu", None, 0.0, None, None, 0, 512
    )
    assert y.shape == (2, 32, 256)
    assert asked == [(64, 256, 192, None, None, 512)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"K": FEW_ROWS_K, "N": 64}, {"K": 64 * 16, "N": FEW_ROWS_NUMBERS // 16},
        {"K": 64, "rank": 32, "N": FEW_ROWS_NUMBERS // 32},
    ],
    ids=str,
)  # fmt: skip
def test_few_rows_refuses_what_its_offsets_do_not_reach(built, sizes):
    """Of the whole, where the call has a part: both go to the same kernel."""
    built(*RELEASE_ARCHS)
    facts = simulated_facts("sm_90")
    assert chosen(answers(facts, M=16, **sizes)) == "svdquant/few_rows"
    grown = sizes | ({"K": sizes["K"] + 64} if sizes["K"] == FEW_ROWS_K else {"N": sizes["N"] + 1})
    for op in (GEMM, LINEAR):
        found = answers(facts, op, M=16, **grown)
        assert chosen(found) == "svdquant/sm90"
        assert f"takes K up to {FEW_ROWS_K}, and up to {FEW_ROWS_NUMBERS} scales" in found["svdquant/few_rows"]
        assert f"the call has K={grown['K']}, {grown['N']} output columns" in found["svdquant/few_rows"]
    part = {**grown, "N": 64, "part": (0, grown["N"])}
    assert chosen(answers(facts, M=16, **part)) == "svdquant/sm90"
    assert chosen(answers(simulated_facts("sm_100"), M=16, **grown)) == "svdquant/few_rows"


def test_older_paths_can_be_forced_on_hopper(built):
    built(*RELEASE_ARCHS)
    found = answers(simulated_facts("sm_90"))
    assert found["svdquant/int4"] is None
    assert found["svdquant/sm80"] is None
    assert found["svdquant/sm75"] is None
    assert "4-bit MMA exists on sm_80 to sm_90" in answers(simulated_facts("sm_120"))["svdquant/int4"]


def test_turing_without_tensor_cores_is_told_by_name(built):
    built(*RELEASE_ARCHS)
    facts = replace(simulated_facts("sm_75"), name="NVIDIA GeForce GTX 1660 Ti")
    assert "needs INT8 tensor cores" in answers(facts)["svdquant/sm75"]


def test_whole_linear_has_kernels_of_its_own_where_they_fuse(built):
    built(*RELEASE_ARCHS)
    assert chosen(answers(simulated_facts("sm_90"), "svdquant_linear")) == "svdquant/sm90"
    assert chosen(answers(simulated_facts("sm_90"), "svdquant_linear", M=1)) == "svdquant/few_rows"
    assert chosen(answers(simulated_facts("sm_80"), "svdquant_linear")) is None, "composed of the two halves"
    assert f"for M of at most {FEW_ROWS}" in answers(simulated_facts("sm_90"))["svdquant/few_rows"]


def test_quantizer_runs_wherever_the_package_was_built_for(built):
    built(*RELEASE_ARCHS)
    for arch in ("sm_75", "sm_80", "sm_90", "sm_120"):
        assert answers(simulated_facts(arch), "quantize_svdquant_w4a4") == {"svdquant/groups": None}


def test_cpu_and_no_extension(built):
    built(*RELEASE_ARCHS)
    assert all("CUDA device" in reason for reason in answers(CPU, M=1).values())
    built()
    assert all("no nvcc" in reason for reason in answers(simulated_facts("sm_90"), M=1).values())
    built("80-real")
    assert "was built for 80" in answers(simulated_facts("sm_90"))["svdquant/sm90"]


@pytest.mark.parametrize("changes", [{"M": 2**30 + 1}, {"N": 2**30 + 1}, {"K": 2**30 + 64}])
def test_what_a_problem_must_keep_to(built, changes):
    built(*RELEASE_ARCHS)
    for arch in ("sm_90", "sm_80"):
        assert chosen(answers(simulated_facts(arch), **changes)) is None


def test_weight_is_decoded_whole_where_rows_of_the_output_are_no_multiple_of_16_bytes(monkeypatch):
    monkeypatch.setattr(_hopper, "CHUNK_BYTES", 1)
    assert _hopper.chunk_columns(1000, 1088) == _hopper.CHUNK_COLUMNS
    assert _hopper.chunk_columns(1001, 1088) == 1001
    assert _hopper.chunk_columns(1004, 1088, out_bytes=4) == _hopper.CHUNK_COLUMNS
    assert _hopper.chunk_columns(1004, 1088, out_bytes=2) == 1004


@pytest.mark.parametrize("n", [1000, 1536, 12288])
def test_chunks_of_a_part_end_where_the_whole_s_do_and_split_k_as_they_do(monkeypatch, n):
    """Of any part, in plans of as many pieces of K as the whole's chunk has, whatever a part of that width would choose."""

    def plan_of(M, N, K, device, variant=None):
        variant = N % 5 if variant is None else variant
        pieces = 1 + N % 3
        return _hopper.Plan((variant, pieces * (1 + N // 96), 8, pieces), 96, "")

    monkeypatch.setattr(_hopper, "plan_of", plan_of)
    monkeypatch.setattr(_hopper, "CHUNK_BYTES", 1)
    whole = _hopper.chunks_of(300, n, 1088, 2, 0)
    assert [c.first for c in whole] == list(range(0, n, _hopper.CHUNK_COLUMNS))
    for first, columns in ((0, 8), (0, n // 2 // 8 * 8), (n - 8, 8), (8, n - 16), (376, 400), (384, 384)):
        chunks = _hopper.chunks_of(300, columns, 1088, 2, 0, None, first, n)
        assert sum(c.columns for c in chunks) == columns
        at = 0
        for chunk in chunks:
            assert chunk.first == at
            begin, end = first + at, first + at + chunk.columns
            [inside] = [c for c in whole if c.first <= begin and end <= c.first + c.columns]
            variant, grid, _, pieces = chunk.plan.arguments
            assert pieces == inside.plan.arguments[3]
            if pieces > 1:
                assert variant == inside.plan.arguments[0]
            assert grid == pieces * (1 + chunk.columns // 96)
            at += chunk.columns
