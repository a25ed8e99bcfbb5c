"""Selection, explanation, forcing, tracing, warnings and simulated devices."""

import contextlib
import contextvars
import logging
import threading

import pytest
import torch

from kitchen_core import UnsupportedError, explain, ops, registry, simulate, trace, use
from kitchen_core.registry import Kernel, Problem
from kitchen_core.testing.samples import SAMPLES


def problem(op="int8_linear", **fields):
    base = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "out_dtype": torch.bfloat16, "M": 1, "N": 8, "K": 8}
    return Problem(op=op, **{**base, **fields})


@pytest.fixture
def added():
    """A function that registers kernels for one test."""
    kernels = []

    def add(**fields):
        base = {"op": "int8_linear", "function": lambda *a: "ran", "supports": lambda p, f: None, "priority": 50}
        kernel = Kernel(**{**base, "provider": "test", **fields})
        kernels.append(kernel)
        registry.register(kernel)
        return kernel

    yield add
    registry.unregister(*kernels)


def test_highest_priority_that_supports_is_chosen(added):
    low = added(name="low", priority=40)
    added(name="refuses", priority=60, supports=lambda p, f: "never")
    assert registry.select(problem()) is low


def test_choice_depends_on_the_problem_and_is_remembered(added):
    asked = []
    small = added(name="small", supports=lambda p, f: asked.append(p) or (None if p.M <= 4 else "M > 4"))
    assert registry.select(problem(M=4)) is small
    assert registry.select(problem(M=4)) is small
    assert len(asked) == 1, "the second selection must come from the table"
    assert registry.select(problem(M=5)).id == registry.EAGER


def test_registering_forgets_earlier_choices(added):
    assert registry.select(problem()).id == registry.EAGER
    better = added(name="better")
    assert registry.select(problem()) is better


def test_use_forces_and_restores(added):
    added(name="fast")
    with use("core/eager"):
        assert registry.select(problem()).id == "core/eager"
    assert registry.select(problem()).id == "test/fast"


def test_forced_kernel_that_cannot_run_raises_with_its_reason(added):
    added(name="picky", supports=lambda p, f: "K must be 12345")
    with use("test/picky"), pytest.raises(UnsupportedError, match="K must be 12345"):
        registry.select(problem())


def test_use_of_an_unknown_kernel_lists_the_known(added):
    with pytest.raises(UnsupportedError, match="core/eager"), use("no/such"):
        pass


def test_forced_kernel_leaves_ops_that_it_does_not_serve_alone(added):
    added(name="fast")
    with use("test/fast"):
        assert registry.select(problem("dequantize_int8")).id == "core/eager"


@pytest.mark.parametrize("op", ["int8_linear", "int8_swiglu_mlp", "int8_gate_up_mlp"])
@pytest.mark.parametrize("inner", ["int8_scaled_mm", "quantize_and_rotate_rowwise"])
def test_forcing_an_inner_kernel_is_not_passed_by(added, monkeypatch, op, inner):
    added(op=op, name="whole", priority=500)
    added(op=inner, name="part", priority=1)
    gpu = torch.device("cuda")
    with simulate("sm_90"):
        assert registry.select(problem(op, device=gpu)).id == "test/whole"
        with use("test/part"):
            assert registry.select(problem(op, device=gpu)).id == "core/composed"
            assert registry.select(problem(op)).id == "test/whole"  # a CPU has no composition
        with use("test/whole"):
            assert registry.select(problem(op, device=gpu)).id == "test/whole"
        monkeypatch.setenv("KITCHEN_USE", f"{inner}=test/part")
        assert registry.select(problem(op, device=gpu)).id == "core/composed"


def test_forcing_by_environment(added, monkeypatch):
    added(name="fast")
    registry.register()  # forget choices
    monkeypatch.setenv("KITCHEN_USE", "int8_linear=core/eager")
    with simulate("sm_90"):  # simulated devices are never remembered
        assert registry.select(problem()).id == "core/eager"
        assert registry.select(problem("int8_scaled_mm", dtype=torch.int8)).id == "core/eager"


def test_forcing_an_op_by_environment_to_a_kernel_that_does_not_serve_it_is_refused(added, monkeypatch):
    added(op="int8_scaled_mm", name="part")
    monkeypatch.setenv("KITCHEN_USE", "int8_linear=test/part")
    with pytest.raises(UnsupportedError, match=r"int8_linear to run test/part, which does not serve it; .*core/eager"):
        registry.select(problem())


def test_forcing_is_per_thread(added):
    added(name="fast")
    seen = {}
    with use("core/eager"):
        thread = threading.Thread(target=lambda: seen.setdefault("other", registry.select(problem()).id))
        thread.start()
        thread.join()
        seen["mine"] = registry.select(problem()).id
    assert seen == {"other": "test/fast", "mine": "core/eager"}


def test_registration_and_selection_race_freely(added):
    errors = []

    def work(n):
        try:
            for i in range(200):
                kernel = Kernel("int8_linear", f"t{n}", lambda *a: None, lambda p, f: None, 20 + n, "race")
                registry.register(kernel)
                assert registry.select(problem(M=i)).op == "int8_linear"
                registry.unregister(kernel)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert registry.select(problem()).id == registry.EAGER


def test_explain_takes_arguments_or_fields(added):
    added(name="picky", supports=lambda p, f: f"wants sm_90, is {f.arch}")
    x, weight = torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.int8)
    by_arguments = explain("int8_linear", x, weight, torch.ones(4))
    assert by_arguments.problem[:7] == ("int8_linear", x.device, torch.float32, torch.float32, 3, 4, 8)
    assert "wants sm_90, is cpu" in str(by_arguments)
    with simulate("sm_75"):
        by_fields = explain("int8_linear", M=3, N=4, K=8, device="cuda:3")
    assert "wants sm_90, is sm_75" in str(by_fields)
    assert by_fields.facts.name == "Tesla T4"


def test_explain_refuses_unknown_words():
    with pytest.raises(UnsupportedError, match="unknown op 'int9_linear'; known: "):
        explain("int9_linear")
    with pytest.raises(UnsupportedError, match="unknown fields"):
        explain("int8_linear", rows=3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype must be a dtype of torch, such as torch.bfloat16, got 'bfloat16'"),
        ({"dtype": torch.float64}, "dtype of int8_linear must be float32, float16, bfloat16, got float64"),
        ({"out_dtype": torch.int32}, "out_dtype of int8_linear must be float32, float16, bfloat16, got int32"),
        (
            {"options": ("input_act=swiglu", "bias", "input_act=situ")},
            "the options say input_act=situ and input_act=swiglu",
        ),
    ],
)
def test_explain_answers_for_no_call_that_cannot_be(fields, words):
    told = explain("int8_linear", M=1, N=64, K=64, **fields)
    assert words in told.refused
    assert told.chosen is None


@pytest.mark.parametrize("op", ["awq_linear", "dequantize_awq", "svdquant_linear", "scaled_mm_svdquant_w4a4"])
def test_explain_knows_how_many_bits_an_op_takes(op):
    assert explain(op, M=1, N=64, K=64, group=64, bits=4).refused is None
    assert "takes weights of 4 bits, got bits 3" in explain(op, M=1, N=64, K=64, group=64, bits=3).refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "tpu"}, "device must be one of torch, such as cpu or cuda:0, got 'tpu'"),
        ({"device": None}, "device must be one of torch"),
        ({"options": "bias"}, "options must be a tuple of words, .*, got 'bias'"),
        ({"options": None}, "options must be a tuple of words"),
        ({"options": (1,)}, "options must be a tuple of words"),
    ],
)
def test_explain_says_what_a_field_must_be(fields, words):
    with pytest.raises(UnsupportedError, match=words):
        explain("int8_linear", **fields)
    with pytest.raises(UnsupportedError, match="int8_linear takes x, weight, weight_scale"):
        explain("int8_linear", 1, 2, 3)
    with pytest.raises(UnsupportedError, match="unknown op"):
        explain(["int8_linear"])


@pytest.mark.parametrize("arch", [None, 91, b"sm_90"])
def test_a_gpu_to_simulate_is_named_or_refused(arch):
    with pytest.raises(UnsupportedError, match="unknown GPU architecture"), simulate(arch):
        pass
    with simulate(90) as facts:
        assert facts.sm == 90


def test_trace_records_what_ran():
    x, weight = torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.int8)
    with trace() as calls:
        ops.int8_linear(x, weight, torch.ones(4))
    assert calls == [("int8_linear", "core/eager")]


def test_slow_path_on_a_gpu_is_told_once(caplog):
    registry._warned.clear()
    with simulate("sm_90"), use("core/eager"), caplog.at_level(logging.WARNING, "kitchen"):
        for _ in range(3):
            registry.select(problem("int8_linear_fp16", device=torch.device("cuda:0")))
    told = [r for r in caplog.records if "slow path" in r.message]
    assert len(told) == 1
    assert "int8_linear_fp16" in told[0].message
    assert "NVIDIA H200" in told[0].message


def test_slow_path_is_an_error_in_strict_mode(monkeypatch):
    monkeypatch.setenv("KITCHEN_STRICT", "1")
    with simulate("sm_90"), use("core/eager"), pytest.raises(UnsupportedError, match="KITCHEN_STRICT=1"):
        registry.select(problem("int8_linear_fp16", device=torch.device("cuda:0")))


def test_cpu_is_no_slow_path(caplog):
    with caplog.at_level(logging.WARNING, "kitchen"):
        registry.select(problem())
    assert not caplog.records


def test_a_context_that_outlives_the_block_does_not_poison_later_calls(added):
    added(name="forced", priority=-5)
    with use("test/forced"):
        kept = contextvars.copy_context()
    x, weight = torch.zeros(13, 8), torch.zeros(4, 8, dtype=torch.int8)
    with contextlib.suppress(Exception):  # the forced kernel returns no tensor
        kept.run(lambda: ops.int8_linear(x, weight, torch.ones(4)))
    with trace() as calls:
        ops.int8_linear(x, weight, torch.ones(4))
    assert ops.int8_linear(x, weight, torch.ones(4)).shape == (13, 4)
    assert calls == [("int8_linear", "core/eager")]


def test_a_provider_with_rules_for_a_block(added):
    """Choices in the block follow the provider's variable, and none of them is remembered, nor an earlier one used."""
    allowed = contextvars.ContextVar("allowed", default=True)
    mine = added(name="mine", supports=lambda p, f: None if allowed.get() else "not in this block")
    assert registry.select(problem()) is mine
    with registry.choose_anew(allowed, False):
        assert registry.select(problem()).id == registry.EAGER
        with registry.choose_anew(allowed, True):
            assert registry.select(problem()) is mine
        x, weight = torch.zeros(13, 8), torch.zeros(4, 8, dtype=torch.int8)
        assert ops.int8_linear(x, weight, torch.ones(4)).shape == (13, 4)
    assert registry.select(problem()) is mine
    with trace() as calls, contextlib.suppress(RuntimeError):  # the kernel returns no tensor
        ops.int8_linear(x, weight, torch.ones(4))
    assert calls == [("int8_linear", mine.id)]


def test_a_supports_that_raises_counts_as_its_reason(added):
    added(name="broken", supports=lambda p, f: 1 / 0)
    assert registry.select(problem()).id == registry.EAGER
    assert "supports() failed: ZeroDivisionError" in str(registry.explain_problem(problem()))


@pytest.mark.parametrize("nonsense", ["nonsense", "int8_linear=foo/bar", "int8_lineer=core/eager"])
def test_nonsense_in_the_environment_is_refused(monkeypatch, nonsense):
    monkeypatch.setenv("KITCHEN_USE", nonsense)
    with simulate("sm_90"), pytest.raises(UnsupportedError, match="KITCHEN_USE names"):
        registry.select(problem())


PARTS = [
    (0, 64), (8, 64), (56, 64), (57, 64), (64, 64), (-1, 64), (0, 7), (0, 8), (0, None), (None, 64), (0.5, 64), ("0", "64"),
    (0, 2.0**6), (8, 10**30), (True, 64), (8,), (), (0, 8, 64), 8, "08",
]  # fmt: skip


@pytest.mark.parametrize("op", ["awq_linear", "svdquant_linear", "scaled_mm_svdquant_w4a4"])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_explain_takes_and_refuses_the_parts_that_the_op_does(op, part):
    arguments = list(next(sample for sample in SAMPLES if sample.op == op).make((3,), torch.bfloat16))
    whole = explain(op, *arguments)
    rows = whole.problem.N
    scaled = isinstance(part, tuple) and len(part) == 2  # the list is for a weight of 8 rows
    if scaled:
        part = tuple(rows // 8 * number if type(number) is int and number < 2**32 else number for number in part)
    told = explain(**whole.problem._asdict() | {"part": part})
    assert (told.chosen is None) == (told.refused is not None)
    if not scaled:
        assert told.refused.startswith("part must be (part_first, part_of), ")
        assert f"got {part!r}; leave it out for a weight that is whole" in told.refused
        return
    given = dict(zip(("part_first", "part_of"), part, strict=True))
    if told.refused is None:
        assert told.problem == explain(op, *arguments, **given).problem
        assert getattr(ops, op)(*arguments, **given).shape[-1] == rows
        return
    with pytest.raises(UnsupportedError) as caught:
        explain(op, *arguments, **given)
    assert told.refused == str(caught.value)
    with pytest.raises((UnsupportedError, RuntimeError)):  # torch itself refuses what is no number
        getattr(ops, op)(*arguments, **given)


@pytest.mark.parametrize("part", [(0, 64), (8,), 8, "ab"], ids=str)
def test_explain_refuses_a_part_where_the_op_takes_none(part):
    told = explain("int8_linear", N=8, K=8, part=part)
    assert told.refused.startswith(f"int8_linear takes no part of a weight, got part={part!r}; awq_linear, ")
    assert told.chosen is None
    assert str(told)


def test_explain_refuses_arguments_that_the_op_does_not_take():
    x, weight, scale = torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.int8), torch.ones(4)
    with pytest.raises(UnsupportedError, match="int8_linear takes no part_first; it takes x, weight, weight_scale, "):
        explain("int8_linear", x, weight, scale, part_first=0)
    for arguments in ((x, weight), (x, weight, scale, *range(20))):
        with pytest.raises(UnsupportedError, match=r"int8_linear takes x, weight, .*; .* positional argument"):
            explain("int8_linear", *arguments)
