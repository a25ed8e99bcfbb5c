"""Quantizing files and models: every installed format, streaming, atomicity, dry run, errors."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kitchen_models as km
from kitchen_core import QuantizedLinear, get_format, installed_formats
from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_models import rows
from kitchen_models.dialect import find_layers
from kitchen_models.files import Checkpoint

QUANTIZED = {"blocks.0.attn.q", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"}
FORMATS = list(installed_formats())


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(-1).view(torch.uint8).equal(
        b.contiguous().view(-1).view(torch.uint8)
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_saved_then_loaded_is_on_the_fly_bit_for_bit(name, source, model, tmp_path):
    target = tmp_path / "q.safetensors"
    report = km.quantize_file(source, target, format=name)
    assert {d.layer for d in report.quantized} == QUANTIZED
    ids = torch.arange(7)[None]
    loaded = type(model)().eval()
    result = km.load_into(loaded, target)
    assert set(result.layers) == QUANTIZED
    km.quantize_(model, name)
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs)
    assert all(same_bits(mine[key], theirs[key]) for key in mine)
    with torch.no_grad():
        assert torch.equal(model(ids), loaded(ids))
    km.save(loaded, tmp_path / "again.safetensors")
    first, again = load_file(target), load_file(tmp_path / "again.safetensors")
    assert first.keys() == again.keys()
    assert all(same_bits(first[key], again[key]) for key in first)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_header_and_markers_say_the_same_and_enough(name, dtype, source, tmp_path):
    half = tmp_path / "half.safetensors"
    save_file(
        {key: value.to(dtype) for key, value in load_file(source).items()}, half, {"format": "pt", "author": "me"}
    )
    target = tmp_path / "q.safetensors"
    km.quantize_file(half, target, format=name)
    with safe_open(target, "pt") as file:
        metadata = file.metadata()
        table = json.loads(metadata["_quantization_metadata"])
        markers = {k: json.loads(bytes(file.get_tensor(k).tolist())) for k in file.keys() if k.endswith(".comfy_quant")}  # noqa: SIM118
    assert {f"{layer}.comfy_quant": marker for layer, marker in table["layers"].items()} == markers
    assert set(table["layers"]) == QUANTIZED
    assert all(marker["format"] == name for marker in markers.values())
    if "convrot_groupsize" in str(markers):
        assert all(marker["convrot"] is True for marker in markers.values()), "SGLang refuses a file without it"
    assert metadata["format"] == "pt"
    assert metadata["author"] == "me"
    assert metadata["source_sha256"] == hashlib.sha256(half.read_bytes()).hexdigest()
    recipe = json.loads(metadata["kitchen_recipe"])
    entry = recipe["layers"]["blocks.0.mlp.fc1"]
    assert (entry["format"], entry["rule"], entry["dtype"]) == (name, f"*={name}", str(dtype).removeprefix("torch."))
    assert get_format(name).Config(**entry["config"])
    assert set(recipe["left"]) == {"embed", "blocks.0.tiny", "lm_head"}
    layers = {k: v for k, v in km.load(target).items() if isinstance(v, QuantizedLinear)}
    assert {layer.compute_dtype for layer in layers.values()} == {dtype}


def test_what_is_not_quantized_is_copied_byte_for_byte(source, tmp_path):
    extra = tmp_path / "extra.safetensors"
    plain = {
        "ids": torch.arange(3),
        "f8": torch.ones(3).to(torch.float8_e5m2),
        "none": torch.empty(0),
        "nan": torch.tensor([float("nan")]),
    }
    save_file({**load_file(source), **plain}, extra)
    km.quantize_file(extra, tmp_path / "q.safetensors", "blocks.0.mlp.fc1=int8")
    before, after = load_file(extra), load_file(tmp_path / "q.safetensors")
    assert set(before) <= set(after)
    assert all(same_bits(before[key], after[key]) for key in before if key != "blocks.0.mlp.fc1.weight")


def test_layers_that_are_quantized_already_keep_their_tensors_and_markers(source, tmp_path):
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    km.quantize_file(source, first, "*fc1=int8(convrot_groupsize=64)")
    report = km.quantize_file(first, second, format="int8")
    assert next(d for d in report.decisions if d.layer == "blocks.0.mlp.fc1").reason.startswith("quantized already")
    assert {n: layer.marked_in for n, layer in find_layers(Checkpoint.open(second)).items()} == dict.fromkeys(
        QUANTIZED, ("tensor", "header")
    )
    assert km.load(second)["blocks.0.mlp.fc1"].config.convrot_groupsize == 64
    assert all(same_bits(v, load_file(second)[k]) for k, v in load_file(first).items() if "fc1" in k)


def test_sharded_source(source, tmp_path):
    state = load_file(source)
    names = sorted(state)
    mapping = {name: f"m-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(mapping.values()):
        save_file({n: state[n] for n in names if mapping[n] == shard}, tmp_path / shard)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    km.quantize_file(source, tmp_path / "a.safetensors", format="int8")
    km.quantize_file(index, tmp_path / "b.safetensors", format="int8")
    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert a.keys() == b.keys()
    assert all(same_bits(a[key], b[key]) for key in a)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_value_names_layer_and_place_and_writes_nothing(value, source, model, tmp_path):
    state = load_file(source)
    state["blocks.0.mlp.fc2.weight"][3, 5] = value
    save_file(state, source)
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.mlp\.fc2.*\[3, 5\]"):
        km.quantize_file(source, tmp_path / "q.safetensors", format="int8")
    assert {p.name for p in tmp_path.iterdir()} == before
    model.blocks[0].mlp.fc2.weight.data[3, 5] = value
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.mlp\.fc2.*\[3, 5\]"):
        km.quantize_(model, "int8")
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules()), "an error leaves the model as it was"


def test_refusals(source, tmp_path):
    with pytest.raises(UnsupportedError, match="nothing to do"):
        km.quantize_file(source, tmp_path / "q.safetensors", "absent=int8")
    with pytest.raises(FormatError, match="is the source itself"):
        km.quantize_file(source, source, format="int8")
    with pytest.raises(FormatError, match="folder"):
        km.quantize_file(source, tmp_path / "no" / "q.safetensors", format="int8")
    save_file({**load_file(source), "blocks.0.mlp.fc1.weight_scale": torch.ones(3)}, tmp_path / "clash.safetensors")
    with pytest.raises(FormatError, match="quantizing its layer makes another"):
        km.quantize_file(tmp_path / "clash.safetensors", tmp_path / "q.safetensors", format="int8")
    with pytest.raises(FormatError, match=r"must end in \.safetensors; give such an OUT"):
        km.quantize_file(source, tmp_path / "q.bin", format="int8")
    with pytest.raises(FormatError, match=r"must end in \.safetensors"):
        km.quantize_file(source, tmp_path / "q.safetensors.index.json", format="int8", dry_run=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clash.safetensors", "source.safetensors"]


@pytest.mark.parametrize("value", ["[1,2]", "word", "16.5", "null", '{"a": 1}'])
def test_options_of_the_wrong_kind_are_refused_with_the_rule(value, source, tmp_path, kitchen):
    with pytest.raises(UnsupportedError, match=r"\*=int8\(convrot_groupsize=.*wrong kind for int8_tensorwise"):
        kitchen(
            "quantize", source, tmp_path / "q.safetensors", "--format", "int8", "--option", f"convrot_groupsize={value}"
        )
    assert not (tmp_path / "q.safetensors").exists()


def test_options_that_no_layer_takes_are_told_as_such(source, tmp_path, kitchen):
    with pytest.raises(UnsupportedError, match=r"power of 4.*got 3.*; give the format other options, or take another"):
        kitchen("quantize", source, tmp_path / "q.safetensors", "--format", "int8", "--convrot-groupsize", "3")


def test_options_that_contradict_each_other_are_refused(source, tmp_path, kitchen):
    out = tmp_path / "q.safetensors"
    for twice in (["--group-size", "64", "--option", "group_size=32"], ["--option", "rank=4", "--option", "rank=8"]):
        with pytest.raises(UnsupportedError, match=r"is given twice, as .* and as .*; give it once"):
            kitchen("quantize", source, out, "--format", "awq", *twice)
    with pytest.raises(UnsupportedError, match=r"--report .* is OUT itself"):
        kitchen("quantize", source, out, "--format", "int8", "--report", tmp_path / "x" / ".." / "q.safetensors")
    assert not out.exists()


def quantized_already(source, path):
    km.quantize_file(source, path, {"*.q": "int8", "*fc*": "int8"})


def in_float8(source, path):
    save_file({k: v.to(torch.float8_e4m3fn) if v.dim() == 2 else v for k, v in load_file(source).items()}, path)


def of_another_toolkit(source, path):
    words = torch.zeros(128, 16, dtype=torch.int32)
    state = {
        "l.qweight": words,
        "l.qzeros": words[:4].clone(),
        "l.scales": torch.ones(4, 128),
        "norm.weight": torch.ones(128),
    }
    save_file(state, path)


@pytest.mark.parametrize(
    ("make", "layer", "reason", "told"),
    [
        (
            quantized_already, "blocks.0.mlp.fc1", "quantized already: int8_tensorwise",
            ["3 (quantized already: int8_tensorwise)", "1 (embeddings", "give the float file", "kitchen convert"],
        ),
        (
            in_float8, "blocks.0.mlp.fc1", "float8_e4m3fn: only float32, float16 and bfloat16",
            ["6 matrices left as they are: 6 (float8_e4m3fn: only", "make them bfloat16 first (times their scales"],
        ),
        (
            of_another_toolkit, "l", "quantized already, by a toolkit whose file has a qweight",
            ["1 matrix left as it is: 1 (quantized already, by a toolkit", "give the float file", "kitchen convert"],
        ),
    ],
)  # fmt: skip
def test_why_nothing_is_quantized_is_said_of_each_layer_with_what_to_do(
    make, layer, reason, told, source, tmp_path, kitchen, capsys
):
    make(source, tmp_path / "in.safetensors")
    words = ("quantize", tmp_path / "in.safetensors", tmp_path / "q.safetensors", "--format", "int8")
    with pytest.raises(UnsupportedError, match="nothing to do") as refused:
        kitchen(*words)
    assert all(word in str(refused.value) for word in told), refused.value
    capsys.readouterr()
    with pytest.raises(UnsupportedError, match="nothing to do") as dry:
        kitchen(*words, "--dry-run")
    assert str(dry.value) == str(refused.value)
    found = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert reason in found[layer]
    with pytest.raises(UnsupportedError, match="nothing to do"):
        kitchen(*words, "--dry-run", "--json")
    reasons = {entry["layer"]: entry["why"] for entry in json.loads(capsys.readouterr().out)["layers"]}
    assert reasons[layer].startswith(reason)
    assert not (tmp_path / "q.safetensors").exists()


@pytest.mark.parametrize(("seconds", "told"), [(0.04, "0.0 s: "), (20.0, "20.0 s (10.74 KiB/s): ")])
def test_the_last_line(seconds, told, source, tmp_path, kitchen, capsys, monkeypatch):
    """What stayed, and no speed of a run that was too short to have one."""
    real = km.quantize_file

    def timed(*arguments):
        return dataclasses.replace(real(*arguments), seconds=seconds, bytes_before=220_000)

    monkeypatch.setattr("kitchen_models.quantize.quantize_file", timed)
    target = tmp_path / "q.safetensors"
    assert kitchen("quantize", source, target, "--rules", "*.q=int8") == 0
    line = capsys.readouterr().out
    assert "; 5 matrices left as they are: 5 (no rule matches it); " in line
    assert line.endswith(f"; {told}{target}\n")
    assert kitchen("quantize", source, target, "--rules", "*=int8") == 0
    assert "; there is no other weight matrix; " in capsys.readouterr().out


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_use_a_calibration_are_told_of_it(name, source, tmp_path, kitchen, capsys):
    words = ("quantize", source, tmp_path / "q.safetensors", "--format", name)
    assert kitchen(*words) == 0
    told = capsys.readouterr().err
    assert (f"3 {name} without --calibration FILE" in told) == get_format(name).uses_calibration
    assert kitchen(*words, "--json") == 0
    assert "calibration" not in capsys.readouterr().err


def test_dry_run_lists_every_layer_and_writes_nothing(source, tmp_path, kitchen, capsys):
    target = tmp_path / "q.safetensors"
    assert kitchen("quantize", source, target, "--format", "int8", "--rules", "*.q=none", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert not target.exists()
    found = {line.split()[0]: line for line in lines}
    assert "*=int8" in found["blocks.0.mlp.fc1"]
    assert "convrot_groupsize=64" in found["blocks.0.mlp.fc1"]
    assert "excluded by rule" in found["blocks.0.attn.q"]
    assert "embeddings stay" in found["embed"]
    assert "too small" in found["blocks.0.tiny"]
    assert "4-D" in found["conv"]
    assert "1-D" in found["blocks.0.norm"]
    assert "2 layers quantized (2 int8_tensorwise)" in lines[-1]
    assert "4 matrices left" in lines[-1]


def test_command_with_options_and_json(source, tmp_path, kitchen, capsys):
    target = tmp_path / "q.safetensors"
    assert kitchen("quantize", source, target, "--format", "int8", "--convrot-groupsize", "16", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {e["layer"]: e["config"] for e in report["layers"] if e["format"]} == {
        layer: {"convrot_groupsize": 16} for layer in QUANTIZED
    }
    assert report["bytes_after"] == target.stat().st_size
    with pytest.raises(UnsupportedError, match="give --format"):
        kitchen("quantize", source, target)


@pytest.mark.parametrize("name", FORMATS)
def test_default_device_and_dtype_of_the_process_do_not_matter(name, source, tmp_path):
    km.quantize_file(source, tmp_path / "a.safetensors", format=name)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            km.quantize_file(source, tmp_path / "b.safetensors", format=name)
            report = km.write_report(source, tmp_path / "b.safetensors", tmp_path / "report")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert 0 < report.verification.worst < 0.5


# ------------------------------------------------------------------------------------------------- slices of rows


@pytest.mark.parametrize("name", FORMATS)
def test_slices_of_rows_make_the_same_bits(name, monkeypatch):
    format = get_format(name)
    weight = torch.randn(300, 128) * torch.logspace(-2, 2, 300)[:, None]
    config = format.config_for(300, 128)
    whole = {k: t for k, t in format.quantize(weight, config).items() if t is not None}
    shapes = rows.output_shapes(format, config, 300, 128, torch.float32)
    assert shapes == {k: (t.dtype, tuple(t.shape)) for k, t in whole.items()}
    monkeypatch.setattr(rows, "SLICE_ELEMENTS", 128 * 128)
    asked = []

    def read(part):
        asked.append(part)
        return weight if part is None else weight[part]

    made = rows.quantize_rows(read, format, config, (300, 128), torch.float32)
    assert made.keys() == whole.keys()
    assert all(same_bits(made[k], whole[k]) for k in whole)
    if name == "int8_tensorwise":
        assert asked == [slice(0, 128), slice(128, 256), slice(256, 300)]


def test_a_tensor_that_all_rows_share_forbids_slices():
    """The codebook of w4a8 is chosen from the whole weight: slices might choose otherwise."""
    if "asym_w4a8_int8" not in FORMATS:
        pytest.skip("kitchen-w4a8 is not installed")
    format = get_format("w4a8")
    assert rows.row_dims(format, format.config_for(256, 128), 128, torch.float32) is None


def test_bad_value_in_a_later_slice_is_named_by_its_own_row(monkeypatch):
    monkeypatch.setattr(rows, "SLICE_ELEMENTS", 128 * 128)
    format = get_format("int8")
    weight = torch.randn(300, 128)
    weight[290, 7] = float("inf")
    with pytest.raises(UnsupportedError, match=r"\[290, 7\]"):
        rows.quantize_rows(lambda part: weight[part], format, format.config_for(300, 128), (300, 128), torch.float32)


# ------------------------------------------------------------------------------------------- memory and atomicity


def sparse_file(path, write_raw, tensors):
    """A safetensors file of bfloat16 zeros that takes no disk."""
    table, position = {}, 0
    for name, shape in tensors.items():
        size = 2 * shape[0] * shape[1]
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    write_raw(path, table)
    os.truncate(path, path.stat().st_size + position)
    return path


MEASURE = """
    import resource, sys, torch
    import kitchen_models as km
    torch.set_num_threads(1)
    km.quantize_file(sys.argv[3], sys.argv[2] + ".warm.safetensors", "*=int8")
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    km.quantize_file(sys.argv[1], sys.argv[2], "q.*=int8(convrot_groupsize=0)")
    print(peak() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path, write_raw):
    layer = (4096, 4096)  # 32 MiB
    tensors = {f"q.{i}.weight": layer for i in range(2)} | {f"plain.{i}.weight": (2 * 8192, 8192) for i in range(5)}
    big = sparse_file(tmp_path / "big.safetensors", write_raw, tensors)
    assert big.stat().st_size > 1.4e9
    small = sparse_file(tmp_path / "small.safetensors", write_raw, {"a.weight": (64, 64)})
    target = tmp_path / "q.safetensors"
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), big, target, small], capture_output=True, text=True, check=True
    )
    largest = 2 * layer[0] * layer[1]
    assert int(made.stdout) <= largest + 2**30, "the promise: at most 1 GiB over the largest layer"
    assert int(made.stdout) <= largest + 2**29, "and what it takes: half of that, of a file of 1.4 GB"
    target.unlink()


KILLED = """
    import sys, time
    import kitchen_models as km
    def slow(what, done, total):
        if what.startswith("hashing"):
            return
        print(what, flush=True)
        time.sleep(0.2)
    km.quantize_file(sys.argv[1], sys.argv[2], format="int8", progress=slow)
"""


@pytest.mark.parametrize("existing", [None, b"an older file"])
def test_killed_run_leaves_no_half_file(source, tmp_path, existing):
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "q.safetensors"
    if existing:
        target.write_bytes(existing)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), source, target], stdout=subprocess.PIPE, text=True
    )
    for _ in range(5):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert (target.read_bytes() if target.exists() else None) == existing
    time.sleep(0.05)
    left = [p.name for p in folder.iterdir() if p != target]
    assert all(name.startswith(".q.safetensors.") and name.endswith(".partial") for name in left)
    if hasattr(os, "O_TMPFILE"):
        assert left == []


# -------------------------------------------------------------------------------------------------------- models


def test_quantize_leaves_tied_and_special_linears(model):
    model.lm_head.weight = model.embed.weight
    model.attention = torch.nn.MultiheadAttention(128, 4)
    report = km.quantize_(model, "*=int8")
    reasons = {d.layer: d.reason for d in report.left}
    assert "tied to 'embed.weight'" in reasons["lm_head"]
    assert "NonDynamicallyQuantizableLinear" in reasons["attention.out_proj"]
    assert isinstance(model.blocks[0].tiny, QuantizedLinear), "a user's rule takes small layers too"


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            {"blocks.*.k": "int8"},
            r"5 \(no rule matches it\); a rule that names a float layer \('blocks.0.attn.q', 'blocks.0.mlp.fc1', .*, \.\.\.\)",
        ),
        ({}, "nothing to do: 5 matrices left as they are: 5 .no rule matches it"),
        ({"*.fc2": ("awq", {"group_size": 3})}, r"1 \(awq_w4a16 cannot hold a layer \[128, 256\].*--group-size"),
    ],
)  # fmt: skip
def test_quantize_refuses_where_nothing_would_be(rules, told, model):
    with pytest.raises(UnsupportedError, match=told) as refused:
        km.quantize_(model, rules)
    assert str(refused.value).count("awq_w4a16") < 2, "the format says once that it cannot"
    km.quantize_(model, "int8")
    with pytest.raises(UnsupportedError, match=r"nothing to do.*quantized already"):
        km.quantize_(model, "blocks.*.fc?=int8")
    with pytest.raises(UnsupportedError, match=r"is this layer: use QuantizedLinear.from_linear\); plain nn.Linear is"):
        km.quantize_(torch.nn.Linear(64, 64), "int8")


def test_quantize_takes_no_file():
    with pytest.raises(UnsupportedError, match=r"got 'x\.safetensors'; quantize_file"):
        km.quantize_("x.safetensors", "int8")
    with pytest.raises(UnsupportedError, match=r"an nn\.Module, got dict"):
        km.quantize_({}, "int8")


def test_quantize_a_module_used_twice_is_replaced_at_both_places(model):
    model.again = model.blocks[0].mlp.fc1
    km.quantize_(model, "int8")
    assert model.again is model.blocks[0].mlp.fc1
    assert isinstance(model.again, QuantizedLinear)


def test_report_counts_bytes_and_formats(model):
    report = km.quantize_(model, "int8")
    assert report.by_format() == {"int8_tensorwise": 3}
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    held = sum(
        sum(t.nbytes for t in m.inner().values()) if isinstance(m, QuantizedLinear) else m.weight.nbytes
        for m in linears
    )
    assert report.bytes_after == held < report.bytes_before
    assert "\n" not in report.summary()


def test_a_pipe_as_output_is_refused_and_stays_a_pipe(source, tmp_path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(FormatError, match="not a file"):
        km.quantize_file(source, pipe, format="int8")
    assert not pipe.is_file()


def test_a_rule_that_matches_nothing_is_told(source, model, tmp_path, caplog):
    rules = {"blocks.0.atn.*": "int8", "blocks.*": "int8"}
    km.quantize_file(source, tmp_path / "q.safetensors", rules)
    km.quantize_(model, rules)
    told = [r.getMessage() for r in caplog.records if "matches none" in r.getMessage()]
    assert len(told) == 2
    assert all("blocks.0.atn.*=int8" in message for message in told)
