"""Random calls of every op on every backend, against answers in float64 that share no code with the references.

A backend is forced, and the trace must name it: a kernel runs the call within the derived bound (and to the bit where bits
are promised), or refuses it with the reason that ``explain`` gives. Here, on a CPU, backends are the reference, the
compositions of kitchen-core and the torch path of kitchen-fallback-volta; on a GPU every kernel of every package.

KITCHEN_EXAMPLES is the number of calls an op (default 200); KITCHEN_SEED, if set, takes other calls than CI does.
"""

import contextlib
import dataclasses
import importlib
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitchen_core import UnsupportedError, explain, simulate, trace, use
from kitchen_core.ops._define import problem_builders
from kitchen_core.registry import EAGER, kernels_of, register, unregister
from kitchen_core.testing import assert_equal
from kitchen_core.testing.cases import BUILDERS, make_case, optional_arguments, options_given

OPS = sorted(BUILDERS)
EXAMPLES = int(os.environ.get("KITCHEN_EXAMPLES", "200"))
SEED = int(os.environ.get("KITCHEN_SEED", "0"))
OPTIONS = [(op, name) for op in OPS for name in optional_arguments(op)]
OF_VOLTA = [op for op in OPS if any(k.provider == "fallback-volta" for k in kernels_of(op))]
ANYWHERE = "anywhere"
RUN_ANYWHERE = ("core/composed", "fallback-volta/torch")  # plain torch, though their records are for CUDA devices

fuzzing = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=not SEED, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)  # fmt: skip


def call(case, device="cpu"):
    """The case's outputs as a tuple."""
    arguments = [moved(a, device) for a in case.arguments]
    with torch.no_grad():
        result = getattr(torch.ops.kitchen, case.op).default(*arguments)
    return result if isinstance(result, tuple) else (result,)


def changes_something(case, without):
    """Whether two calls differ in what they return, or in being refused."""
    try:
        pairs = zip(call(case), call(without), strict=True)
    except UnsupportedError:
        return True
    return any(
        a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.float().nan_to_num(), b.float().nan_to_num())
        for a, b in pairs
    )


def defaulted(case, name):
    """The case's arguments with one of them at its default."""
    schema = getattr(torch.ops.kitchen, case.op).default._schema.arguments
    default = {a.name: a.default_value for a in schema if a.has_default_value()}[name]
    default = {"out_dtype": None, "scale_dtype": torch.float8_e4m3fn}.get(name, default)
    if name == "out_dtype" and "scaled_mm" in case.op:
        default = torch.bfloat16
    return [default if a.name == name else v for a, v in zip(schema, case.arguments, strict=True)]


def moved(argument, device):
    """A tensor on another device with its strides; anything else as it is."""
    if not isinstance(argument, torch.Tensor) or device == "cpu":
        return argument
    storage = torch.empty(0, dtype=argument.dtype, device=device)
    whole = argument.untyped_storage().to(device=device)
    return storage.set_(whole, argument.storage_offset(), argument.shape, argument.stride())


@contextlib.contextmanager
def forced(op, kernel_id):
    """Within the block ``op`` runs on this kernel, and it must have run."""
    with use(kernel_id), trace() as calls:
        yield
    assert (op, kernel_id) in calls, f"{op} was forced to {kernel_id}; ran: {calls}"


@pytest.fixture(scope="module")
def cpu_backends():
    """The ids of kernels that can run on a CPU, by op: the reference, and the plain torch ones, registered for any device."""
    copies = [
        dataclasses.replace(kernel, provider=ANYWHERE, name=kernel.id.replace("/", "-"), priority=-1, supports=_always)
        for op in OPS
        for kernel in kernels_of(op)
        if kernel.id in RUN_ANYWHERE
    ]
    register(*copies)
    yield {op: [EAGER, *(k.id for k in copies if k.op == op)] for op in OPS}
    unregister(*copies)


def _always(problem, facts):
    return None


def check_on_cpu(case, backends):
    with forced(case.op, EAGER):
        reference = call(case)
    case.check(reference, f"{case.op} on {EAGER}")
    assert all(output.is_contiguous() for output in reference), case.about
    for kernel_id in backends[case.op][1:]:
        with forced(case.op, kernel_id):
            outputs = call(case)
        case.check(outputs, f"{case.op} on {kernel_id}")
        for promised, got, want in zip(case.bits, outputs, reference, strict=True):
            if promised:
                assert_equal(got, want, f"{case.op} on {kernel_id}, {case.about}")


def test_every_op_has_cases():
    assert set(BUILDERS) == set(problem_builders())
    assert len(OPS) >= 20
    assert len(OPTIONS) >= 95


@pytest.mark.parametrize("op", OPS)
def test_random_calls(op, cpu_backends):
    @fuzzing
    @given(st.data())
    def run(data):
        check_on_cpu(make_case(op, lambda options: data.draw(st.sampled_from(options))), cpu_backends)

    run()


@pytest.mark.parametrize(("op", "name"), OPTIONS, ids=lambda value: value)
def test_no_optional_argument_is_dropped(op, name, cpu_backends):
    """Each optional argument, with others drawn beside it: given for certain, and right in every backend.

    Without it the same call has other bits, fails its check or is refused: a backend that dropped it could not pass.
    """
    noticed = 0
    for seed in range(4):
        case = make_case(op, random.Random(1000 * SEED + seed).choice, must_have=name)
        assert name in options_given(case), f"{name} was to be given: {case.about}"
        check_on_cpu(case, cpu_backends)
        noticed += changes_something(case, dataclasses.replace(case, arguments=defaulted(case, name)))
    assert noticed, f"{op} gives the same without {name}"


@pytest.mark.parametrize("op", OPS)
def test_a_forced_kernel_that_cannot_run_says_why(op):
    """Every GPU kernel, forced on CPU tensors: the reason of `explain`, never another kernel's result."""
    case = make_case(op, random.Random(3).choice)
    candidates = explain(op, *case.arguments).candidates
    reasons = {c.kernel.id: c.reason for c in candidates if c.kernel.provider != ANYWHERE}
    assert reasons.pop(EAGER) is None
    for kernel_id, reason in reasons.items():
        assert reason, f"{kernel_id} says that it runs on a CPU"
        with use(kernel_id), pytest.raises(UnsupportedError) as caught:
            call(case)
        assert reason in str(caught.value)


# ---------------------------------------------------------------------------------------------------- on a GPU


def check_on_gpu(case, counts, wanted=None):
    """Every kernel of the op that is ``wanted``: right, or refused with its reason. Counts what ran and what was refused."""
    arguments = [moved(a, "cuda") for a in case.arguments]
    candidates = [c for c in explain(case.op, *arguments).candidates if wanted is None or wanted(c)]
    if not candidates:
        return counts
    with forced(case.op, EAGER):
        reference = call(case)
    for candidate in candidates:
        kernel_id = candidate.kernel.id
        counts.setdefault(kernel_id, [0, 0])[candidate.reason is not None] += 1
        if candidate.reason is not None:
            with use(kernel_id), pytest.raises(UnsupportedError) as caught:
                call(case, "cuda")
            assert candidate.reason in str(caught.value)
            continue
        with forced(case.op, kernel_id):
            outputs = call(case, "cuda")
        what = f"{case.op} on {kernel_id}"
        case.check(outputs, what)
        for promised, got, want in zip(case.bits, outputs, reference, strict=True):
            assert got.is_contiguous()
            assert want.is_contiguous()
            if promised:
                assert_equal(got.cpu(), want, f"{what}, {case.about}")
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_random_calls_on_every_kernel(op, record_property):
    counts = {}
    for example in range(EXAMPLES):
        draw = random.Random(f"{op} {SEED} {example}").choice
        check_on_gpu(make_case(op, draw), counts)
    for name in optional_arguments(op):
        for example in range(4):
            case = make_case(op, random.Random(f"{op} {name} {SEED} {example}").choice, must_have=name)
            assert name in options_given(case)
            check_on_gpu(case, counts)
    for example in range(20 * EXAMPLES):  # kernels that few calls fit get a share of their own
        rare = {kernel for kernel, (ran, _) in counts.items() if 0 < ran < EXAMPLES // 2}
        if not rare:
            break
        case = make_case(op, random.Random(f"{op} rare {SEED} {example}").choice)
        check_on_gpu(case, counts, lambda c, rare=rare: c.kernel.id in rare and c.reason is None)
    record_property("calls", counts)
    print(f"{op}: " + ", ".join(f"{kernel} ran {ran}, refused {refused}" for kernel, (ran, refused) in counts.items()))
    built_here = {k for k, (ran, _) in counts.items() if ran}
    assert EAGER in built_here


@pytest.mark.gpu
@pytest.mark.parametrize("op", OF_VOLTA)
def test_random_calls_on_the_kernels_for_volta(op, record_property):
    """They hold code for this GPU too, but are offered to GPUs without INT8 tensor cores: facts of one are simulated."""
    if "90a" not in importlib.import_module("kitchen_fallback_volta._extension").EXTENSION.archs:
        pytest.skip("needs kitchen-fallback-volta built with CUDAARCHS=90a")
    counts = {}
    with simulate("sm_70"):
        for example in range(EXAMPLES):
            draw = random.Random(f"volta {op} {SEED} {example}").choice
            check_on_gpu(make_case(op, draw), counts, lambda c: c.kernel.provider == "fallback-volta")
    record_property("calls", counts)
    print(f"{op}: " + ", ".join(f"{kernel} ran {ran}, refused {refused}" for kernel, (ran, refused) in counts.items()))
    assert any(ran for kernel, (ran, _) in counts.items() if not kernel.endswith("/torch")), counts
