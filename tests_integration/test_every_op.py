"""Every op of kitchen, over shapes, ranks, strides and dtypes: reference, fake, opcheck, compile.

The ops come from the registry, so a new one without samples fails here. On this machine the eager reference must be what
runs, and each test says so.
"""

import warnings

import pytest
import torch

from kitchen_core.ops._define import problem_builders
from kitchen_core.registry import EAGER
from kitchen_core.testing import (
    FLOAT_DTYPES,
    M_VALUES,
    assert_equal,
    expect_kernel,
    leading_shapes,
    strided_copies,
)
from kitchen_core.testing.samples import SAMPLES

LINEARS = ("int8_linear", "int8_linear_fp16", "w4a8_linear", "svdquant_linear", "awq_linear")


def op_of(sample):
    return getattr(torch.ops.kitchen, sample.op).default


def call(sample, arguments):
    """Run an op, asserting the kernel, and return its outputs as a tuple."""
    with expect_kernel(sample.op, EAGER):
        result = op_of(sample)(*arguments)
    return result if isinstance(result, tuple) else (result,)


def leads(sample):
    """All leading shapes to try for a sample."""
    rows = [m for m in M_VALUES if m >= sample.least_rows]
    return [lead for m in rows for lead in leading_shapes(m)] if sample.any_rank else [(m,) for m in rows]


def test_every_op_has_a_sample():
    assert {s.op for s in SAMPLES} == set(problem_builders())


def test_the_matrix_has_not_shrunk():
    assert len(SAMPLES) >= 23
    assert sum(len(leads(s)) for s in SAMPLES) * len(FLOAT_DTYPES) >= 700


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_shapes_ranks_and_fakes_agree(sample, dtype):
    for lead in leads(sample):
        arguments = sample.make(lead, dtype)
        results = call(sample, arguments)
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        fakes = op_of(sample)(*meta)
        fakes = fakes if isinstance(fakes, tuple) else (fakes,)
        for result, fake in zip(results, fakes, strict=True):
            assert (result.shape, result.dtype, result.stride()) == (fake.shape, fake.dtype, fake.stride()), lead
        if sample.op in LINEARS:
            assert results[0].shape[:-1] == lead
            assert results[0].dtype == dtype


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.strided_argument == 0], ids=str)
def test_strides_do_not_matter(sample):
    arguments = sample.make((17,), torch.bfloat16)
    expected = call(sample, arguments)
    for layout, x in strided_copies(arguments[0]).items():
        for got, want in zip(call(sample, (x, *arguments[1:])), expected, strict=True):
            assert_equal(got, want, f"{sample}, {layout}")


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_rows_do_not_depend_on_each_other(sample):
    if sample.op not in LINEARS:
        pytest.skip("row independence is asserted of the linear ops")
    arguments = list(sample.make((17,), torch.bfloat16))
    residuals = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.shape[:1] == (17,)]
    (whole,) = call(sample, arguments)
    for row in (0, 8, 16):
        one = [a[row : row + 1] if i in residuals else a for i, a in enumerate(arguments)]
        assert_equal(call(sample, one)[0][0], whole[row], f"row {row}")


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_opcheck(sample):
    arguments = sample.make((7,), torch.float32)
    # the schema test multiplies its inputs, which the CPU cannot do in float8: e4m3 scales go in as their bytes
    as_bytes = [
        a.view(torch.uint8) if isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn else a for a in arguments
    ]
    torch.library.opcheck(op_of(sample), tuple(as_bytes))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_compiles_as_one_graph(sample):
    op = op_of(sample)
    for lead in ((17,), (2, 3)) if sample.any_rank else ((17,),):
        arguments = sample.make(lead, torch.bfloat16)
        expected = call(sample, arguments)
        torch._dynamo.reset()
        got = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*arguments)
        for a, b in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize("op", LINEARS)
def test_inductor_agrees(op):
    sample = next(s for s in SAMPLES if s.op == op)
    arguments = sample.make((7,), torch.bfloat16)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own deprecations
        got = torch.compile(lambda *a: op_of(sample)(*a) * 1, fullgraph=True)(*arguments)
    assert_equal(got, call(sample, arguments)[0])
