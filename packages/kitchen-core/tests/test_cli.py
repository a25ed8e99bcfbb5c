"""`kitchen explain` and `kitchen doctor`: what they assume is said, and is what real calls ask for."""

import itertools
import json
import os
import random
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from kitchen_core import (
    PluginError,
    UnsupportedError,
    doctor,
    explain,
    get_format,
    plugins,
    quantize_int8_tensorwise,
    registry,
)
from kitchen_core._environment import is_on
from kitchen_core.cli import main
from kitchen_core.devices import simulate
from kitchen_core.explanation import option_words
from kitchen_core.known_formats import KERNEL_PACKAGES, install_hint
from kitchen_core.ops._define import check_sizes, problem_builders
from kitchen_core.testing.cases import make_case
from kitchen_core.testing.samples import SAMPLES
from kitchen_core.typical import TYPICAL_M, typical


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_a_typical_call_asks_what_a_real_one_does(op):
    """Some sample of the op has the same kinds of fields: dtypes, bits, and a group, rotation, rank or N where it has one."""
    fields = typical(op, M=17)

    def kinds(problem):
        exact = {
            name: problem.get(name, default) for name, default in (("dtype", None), ("out_dtype", None), ("bits", 8))
        }
        return exact | {name: bool(problem.get(name)) for name in ("M", "N", "K", "group", "rank")}

    samples = [sample for sample in SAMPLES if sample.op == op]
    real = [problem_builders()[op](*sample.make((17,), torch.bfloat16))._asdict() for sample in samples]
    assert kinds(fields) in [kinds(problem) for problem in real]
    assert any(set(fields.get("options", ())) <= set(problem["options"]) for problem in real)


def test_a_dtype_is_that_of_the_float_operands():
    half = torch.float16
    assert [typical("int8_linear", 1, half)[name] for name in ("dtype", "out_dtype")] == [half, half]
    assert [typical("int8_scaled_mm", 1, half)[name] for name in ("dtype", "out_dtype")] == [torch.int8, half]
    assert [typical("quantize_int8_rowwise", 1, half)[name] for name in ("dtype", "out_dtype")] == [half, torch.int8]


def explained(capsys, *arguments):
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_explain_says_what_it_assumed(capsys):
    assert "assumed, as not given: M=1, N=3072, K=3072, rotation=256, bfloat16" in explained(capsys, "int8_linear")
    told = explained(capsys, "awq_linear", "--m", "64", "--group", "128", "--as", "sm_90")
    assert told.startswith("awq_linear: M=64 N=3072 K=3072, bfloat16 -> bfloat16, group=128, 4 bits")
    assert told.rstrip().endswith("assumed, as not given: N=3072, K=3072, bits=4, bfloat16")
    everything = ["-M", "2", "-N", "64", "-K", "128", "--rotation", "0", "--dtype", "float16", "--as", "sm_90"]
    assert "assumed" not in explained(capsys, "int8_linear", *everything)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_explain_says_that_it_answered_for_the_cpu(capsys):
    assert "the CPU (torch sees no GPU here; --as sm_90 pretends to have one)" in explained(capsys, "int8_linear")
    assert "the CPU" not in explained(capsys, "int8_linear", "--as", "sm_90")


@pytest.mark.parametrize(
    ("op", "k", "rotation"),
    [
        ("int8_linear", 3072, 256),
        ("int8_linear", 96, 16),
        ("int8_linear", 100, 0),
        ("w4a8_linear", 192, 64),
        ("awq_linear", 192, 0),
    ],
)
def test_the_command_and_the_function_assume_the_same_rotation(op, k, rotation, capsys):
    told = json.loads(explained(capsys, op, "-M", "4", "-K", str(k), "--json", "--as", "sm_90"))
    fields = {**typical(op, 4), "K": k}
    fields.pop("rotation", None)
    with simulate("sm_90"):
        found = explain(op, **fields, device="cuda:0")
        plain = explain(op, **fields, device="cuda:0", rotation=0)
    assert str(found.problem) == told["problem"]
    assert found.problem.rotation == rotation
    assert any(f"rotation={rotation} is assumed" in note for note in found.notes) == (rotation > 0)
    assert (f"rotation={rotation}" in told["assumed"]) == (rotation > 0)
    assert plain.problem.rotation == 0
    assert not any("assumed" in note for note in plain.notes)


def test_explain_as_json_says_the_same(capsys):
    found = json.loads(explained(capsys, "w4a8_linear", "-M", "8", "--json", "--as", "sm_80"))
    assert "M=8" in found["problem"]
    assert found["assumed"] == ["N=3072", "K=3072", "group=16", "rotation=256", "bits=4", "bfloat16"]


@pytest.mark.parametrize("op", sorted(problem_builders()))
def test_explain_takes_the_sizes_and_options_of_every_call_that_the_op_takes(op):
    draw = random.Random(op).choice
    for case in (make_case(op, draw) for _ in range(60)):
        problem = problem_builders()[op](*case.arguments)
        check_sizes(problem)
        assert set(problem.options) <= set(option_words(op)), problem


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def linear_call(op, k, group, rotation):
    """A call of a linear whose weight has K columns in groups, without data. None: no tensors have such sizes."""
    i8, x = torch.int8, empty(2, k)
    if op == "int8_linear":
        return x, empty(8, k, dtype=i8), empty(8, dtype=torch.float32), None, None, rotation
    if (op != "svdquant_linear" and group < 1) or k % max(group, 1) or k % 2:
        return None
    codes = empty(8, k // 2, dtype=i8)
    if op == "w4a8_linear":
        s_rel, s_channel = empty(8, k // group, dtype=torch.float32), empty(8, dtype=torch.float32)
        return x, codes, s_rel, s_channel, None, None, None, None, group, rotation
    if op == "awq_linear":
        return x, codes, empty(k // group, 8), empty(k // group, 8), None, group
    return None if group != 64 else (x, codes, empty(k // 64, 8), empty(k), empty(k, 4), empty(8, 4))


@pytest.mark.parametrize("op", ["int8_linear", "w4a8_linear", "svdquant_linear", "awq_linear"])
def test_explain_refuses_what_the_op_refuses(op):
    """The same sizes, as fields and as tensors: both are refused, in the same words, or neither is."""
    seen = set()
    sizes = itertools.product((0, 1, 7, 16, 24, 64, 100, 192, 256), (0, 1, 4, 7, 16, 64, 96), (0, 3, 4, 16, 64, 256))
    for k, group, rotation in sizes:
        rotation = rotation if op in ("int8_linear", "w4a8_linear") else 0
        fields = {"M": 2, "N": 8, "K": k, "rotation": rotation, "group": 0 if op == "int8_linear" else group}
        told = explain(op, **fields, rank=4, bits=8 if op == "int8_linear" else 4)
        arguments = linear_call(op, k, group, rotation)
        said = None
        if arguments is not None:
            try:
                problem_builders()[op](*arguments)
            except UnsupportedError as error:
                said = str(error)
            if op == "svdquant_linear" and group != 64:
                said = told.refused
            assert told.refused == said
        elif op != "svdquant_linear" or group:
            assert told.refused
        assert (told.chosen is None) == (told.refused is not None)
        seen.add(told.refused is None)
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["awq_linear", "-K", "100"], 1, "refused: group_size must be a positive divisor of in_features K=100, got 64"),
        (["awq_linear", "-K", "0"], 1, "refused: in_features K must be even and positive"),
        (
            ["svdquant_linear", "-K", "100"],
            1,
            "refused: svdquant quantizes groups of 64 columns, got in_features K=100",
        ),
        (
            ["w4a8_linear", "-K", "24"],
            1,
            "refused: in_features K must be a positive multiple of 16 at 4 bits, got K=24",
        ),
        (["w4a8_linear", "--bits", "5"], 1, "refused: bits must be 4 or 6, got 5"),
        (["int8_linear", "--rotation", "48"], 1, "refused: convrot_groupsize must be 0 (none) or a power of 4"),
        (["int8_linear", "--option", "biass"], 1, "int8_linear knows no option biass; it has bias, residual,"),
        (["int8_linear", "--rank", "5"], 2, "int8_linear has no rank; what it depends on: M, N, K, rotation"),
        (["int8_linear", "-K", "100"], 0, "K=100, bfloat16 -> bfloat16, on "),  # not rotated, as no group divides it
    ],
)
def test_explain_names_no_kernel_for_a_call_that_the_op_refuses(words, status, told, capsys):
    assert main(["explain", *words, "--as", "sm_90"]) == status
    output = "".join(capsys.readouterr())
    assert told in output
    assert status == 0 or ">" not in output.replace("->", "")


def test_a_word_takes_the_place_of_the_usual_one(capsys):
    told = explained(capsys, "svdquant_linear", "-M", "64", "--option", "scales=float32", "--as", "sm_90")
    assert "4 bits, scales=float32, on " in told
    assert "scales=bfloat16" not in told


def test_sizes_that_no_tensor_can_have_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "int8_linear", "-N", str(10**20)])
    assert stopped.value.code == 2
    assert "-N/--n: must be at most 2^63 - 1" in capsys.readouterr().err
    assert main(["explain", "int8_linear", "-N", str(2**40), "-K", str(2**40), "--as", "sm_90"]) == 1
    told = capsys.readouterr().out
    assert f"refused: a weight [N, K] with M=1, N={2**40}, K={2**40} would take {2**80} bytes" in told
    assert ">" not in told.replace("->", "")
    assert "N is more than 2^63 - 1" in explain("int8_linear", N=10**20, K=64).refused
    assert "x [M, K]" in explain("awq_linear", M=2**62, K=64, group=64, bits=4).refused
    assert "low-rank branch" in explain("svdquant_linear", N=64, K=64, group=64, rank=2**62, bits=4).refused
    assert explain("int8_linear", M=1, N=2**40, K=2**22).refused is None, "4 EiB of codes can be counted"


@pytest.mark.parametrize(
    ("words", "command", "told"),
    [
        (["explain", "int8_linear", "--optoin", "bias"], "explain", "--optoin bias; did you mean --option?"),
        (["explain", "int8_linear", "--device", "cuda"], "explain", "unrecognized arguments: --device cuda\n"),
        (["doctor", "--vrbose=1"], "doctor", "--vrbose=1; did you mean --verbose?"),
        (["--verson"], "", "--verson; did you mean --version?"),
    ],
)
def test_a_misspelt_option_is_answered_by_its_command(words, command, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith(f"usage: kitchen {command}".strip())
    assert told in output


def test_version_names_every_installed_package(capsys):
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"kitchen-core {version('kitchen-core')}"
    distributions = {p.distribution for group in plugins.GROUPS for p in plugins.plugins(group).values()}
    assert set(lines[1:]) == distributions


@pytest.mark.parametrize("words", [["-M", "-3"], ["-M", "many"], ["--dtype", "int8"], ["--grop", "3"]])
def test_nonsense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "int8_linear", *words])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert words[0].lstrip("-") in told
    assert words[0] != "-M" or f"must be a whole number of 0 or more, got '{words[1]}'" in told


@pytest.mark.parametrize("command", [["explain", "int8_linear"], ["doctor"]])
def test_a_name_without_an_architecture_is_refused(command, capsys):
    assert main([*command, "--name", "NVIDIA GeForce GTX 1660"]) == 2
    assert "give its architecture too, such as --as sm_75" in capsys.readouterr().err


def test_doctor_says_for_which_rows_a_reason_holds():
    cases = {
        "M=1": {"candidates": [{"kernel": "a", "reason": "no"}, {"kernel": "b", "reason": None}]},
        "M=4096": {"candidates": [{"kernel": "a", "reason": "no"}, {"kernel": "b", "reason": "too many rows"}]},
    }
    assert doctor._reasons(cases) == {"no": ["a"], "too many rows": ["b at M=4096"]}


def test_doctor_says_what_layer_it_asked_for():
    told = doctor.render(doctor.examine("sm_90"))
    assert all(f"M={m}" in told for m in TYPICAL_M)
    assert "a layer of N=3072, K=3072, bfloat16" in told


def test_the_table_of_packages_names_the_ops_that_they_serve():
    told = {}
    for package, _, served in KERNEL_PACKAGES:
        told.setdefault(package.removeprefix("kitchen-"), set()).update(served)
    for name, plugin in plugins.plugins("kitchen.kernels").items():
        real = {kernel.op for kernel in plugin.require().kernels}
        assert told[name] == real - ({"quantize_and_rotate_rowwise"} if name == "w4a8" else set()), name
    assert set().union(*told.values()) <= set(problem_builders())


@pytest.fixture
def only_core(monkeypatch):
    """As where no other package is installed."""
    monkeypatch.setattr(plugins, "plugins", lambda group: {})
    monkeypatch.setattr(plugins, "is_excluded", lambda group, name: False)
    records = {op: tuple(k for k in ks if k.provider == "core") for op, ks in registry._kernels.items()}
    monkeypatch.setattr(registry, "_kernels", records)


def test_a_package_that_is_not_there_is_named(only_core, capsys):
    hint = "pip install kitchen-awq, or from a checkout: pip install ./packages/kitchen-awq"
    told = explained(capsys, "awq_linear", "-M", "16", "--as", "sm_80")
    assert "> core/eager   chosen (slow path)\n" in told
    assert f"  kitchen-awq  not installed: it has kernels for this; {hint}\n" in told
    told = explained(capsys, "int8_gate_up_mlp", "--as", "sm_70")  # which calls what the package serves
    assert "kitchen-fallback-volta  not installed: it has kernels for this; pip install" in told
    assert "kitchen-int8            not installed: its kernels for this need sm_75\n" in told
    assert "kitchen-fallback-volta" not in explained(capsys, "int8_linear", "--as", "sm_90")
    assert "kitchen-awq" not in explained(capsys, "awq_linear"), "no kernel runs on a CPU"
    told = doctor.render(doctor.examine("sm_80"))
    assert "formats: none; they come as packages, such as kitchen-int8: pip install kitchen-int8, or" in told
    assert f"core/eager (slow path)\n      kitchen-awq: not installed: it has kernels for this; {hint}\n" in told
    assert "      kitchen-awq: not installed (see above)\n" in told


def test_a_package_that_is_left_out_is_named(only_core, monkeypatch, capsys):
    monkeypatch.setattr(plugins, "is_excluded", lambda group, name: True)
    told = explained(capsys, "awq_linear", "--as", "sm_80")
    assert "  kitchen-awq  left out by KITCHEN_PLUGINS: it has kernels for this\n" in told


def test_explain_and_doctor_mark_a_slow_path_in_the_same_words(only_core, capsys):
    inner = "slow path in quantize_and_rotate_rowwise, int8_scaled_mm"
    assert f"chosen ({inner}); calls quantize_and_rotate_rowwise" in explained(capsys, "int8_linear", "--as", "sm_90")
    told = doctor.render(doctor.examine("sm_90"))
    assert f"  int8_linear                    core/composed ({inner})\n" in told
    assert "  int8_swiglu_mlp                core/composed (slow path in int8_linear)\n" in told
    assert "slow" not in explained(capsys, "int8_linear"), "on a CPU the reference is what there is"


def test_doctor_is_short_on_a_cpu_and_tells_all_when_asked(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["doctor"]) == 0
    short = capsys.readouterr().out
    assert short.startswith("Summary\n  formats: ")
    assert "cpu: no GPU; every op runs as core/eager, plain PyTorch. --verbose says why" in short
    assert "problems: none" in short
    assert "int8_linear " not in short
    assert main(["doctor", "--verbose"]) == 0
    long = capsys.readouterr().out
    assert all(f"\n  {op} " in long for op in problem_builders())
    assert len(short.splitlines()) < 30 < len(long.splitlines())
    notes = [line for line in long.splitlines() if line.startswith("      ") and "extension" in line]
    assert all(note in short for note in notes), "what a package says of itself is never left out"


def test_doctor_sums_up_a_gpu_and_its_problems():
    report = doctor.examine("sm_90")
    ops = report["devices"][0]["ops"]
    slow = sum(any(case["slow_path"] for case in asked.values()) for asked in ops.values())
    report["problems"], report["plugins"][0]["error"] = ["a first one"], "its file is damaged"
    told = doctor.render(report, verbose=False)
    word = f"{slow} of {len(ops)} ops take a slow path" if slow else "every op has a fast path"
    assert f"cuda:0: NVIDIA H200, sm_90 (simulated); {word}" in told
    assert "problems: 1, see the end" in told
    assert told.endswith("Problems: 1\n  a first one")
    assert f"{report['plugins'][0]['name']} is BROKEN: its file is damaged" in told
    assert all(f"\n  {op} " in told for op in ops), "for a GPU every op is listed"


def test_doctor_names_a_gpu_that_torch_has_no_code_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a"])
    with simulate("sm_90"):
        assert not doctor.examine("sm_90")["problems"]
    assert not doctor.examine("sm_86")["problems"], "code of one major version serves its later minor ones"
    [problem] = doctor.examine("sm_70")["problems"]
    assert "has no code for sm_70, only for sm_75, sm_80, sm_90a" in problem
    assert problem.endswith('pip install "torch==2.10.*"'), "and what to do"
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["compute_80"])
    assert not doctor.examine("sm_120")["problems"], "PTX serves every later GPU"
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    assert not doctor.examine("sm_70")["problems"], "a CPU build of torch says nothing of GPUs"


def test_doctor_names_plugins_that_are_not_there(monkeypatch):
    monkeypatch.setenv("KITCHEN_PLUGINS", "kitchen-core, kitchen-int9")
    [problem] = [p for p in doctor.examine("sm_90")["problems"] if "KITCHEN_PLUGINS" in p]
    assert "names kitchen-int9, and no plug-in or distribution here is called so" in problem


@pytest.mark.parametrize("name", ["KITCHEN_STRICT", "KITCHEN_CHECK_FINITE"])
def test_a_switch_is_0_or_1(name, monkeypatch):
    for word, on in (("", False), ("0", False), (" 1 ", True)):
        monkeypatch.setenv(name, word)
        assert is_on(name) is on
    monkeypatch.setenv(name, "true")
    with pytest.raises(UnsupportedError, match=rf"{name}='true' is not 0 or 1; correct or unset it"):
        is_on(name)
    if name == "KITCHEN_STRICT":  # wherever a kernel is chosen, on a CPU too
        registry.register()  # forget choices
        for asks in (
            lambda: explain("int8_linear"),
            doctor.examine,
            lambda: quantize_int8_tensorwise(torch.ones(2, 2)),
        ):
            with pytest.raises(UnsupportedError, match="is not 0 or 1"):
                asks()
    importing = subprocess.run([sys.executable, "-c", "import kitchen_core.ops"], capture_output=True, text=True)
    assert (importing.returncode != 0) == (name == "KITCHEN_CHECK_FINITE"), "the one that is read at import"
    assert importing.returncode == 0 or "is not 0 or 1" in importing.stderr


def test_what_the_system_says_is_a_message(capsys, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error", "model.safetensors")

    monkeypatch.setattr(doctor, "examine", fails)
    assert main(["doctor"]) == 2
    assert "kitchen doctor: [Errno 5] Input/output error: 'model.safetensors'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "policy"),
    [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"GOMP_SPINCOUNT": "9"}, None)],
)
def test_threads_of_the_command_wait_without_spinning_unless_told_to(given, policy):
    code = "import os, sys; from kitchen_core.cli import main; main(['formats', '--json']); "
    code += "print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    clean = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{policy} False", "set before torch is loaded"


def test_how_to_install_is_said_in_one_way(only_core, capsys):
    assert install_hint("kitchen-models[demo]").endswith(
        "from a checkout: pip install './packages/kitchen-models[demo]'"
    )
    hint = "pip install kitchen-int8, or from a checkout: pip install ./packages/kitchen-int8"
    assert main(["formats"]) == 0
    assert f"not installed: {hint}\n" in capsys.readouterr().out
    with pytest.raises(PluginError) as caught:
        get_format("int8")
    assert str(caught.value).endswith(f"Install its package: {hint}")
