"""Hostile and broken files: an error that says what was found, what is allowed, what to do."""

import contextlib
import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kitchen_core.errors import FormatError
from kitchen_models.files import MAX_OBJECTS, Checkpoint, printable, read_header
from kitchen_models.writer import Planned, writing


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD = {
    "empty": (b"", None, b"", "0 bytes"),
    "header length absurd": ({}, 2**63, b"", "allowed are 2 to 100000000"),
    "header longer than the file": ({}, 5000, b"", "truncated"),
    "pickle": (b"", int.from_bytes(b"PK\x03\x04abcd", "little"), b"", "a torch pickle"),
    "not json": (b"{nope}", None, b"", "not UTF-8 JSON"),
    "not utf-8": (b'{"\xff": 1}', None, b"", "not UTF-8 JSON"),
    "a list": ([], None, b"", "a JSON list"),
    "nested deeply": (b"[" * 100_000, None, b"", "nested too deeply|not UTF-8 JSON"),
    "json bomb": (b"{" + b'"a":{},' * (MAX_OBJECTS + 1) + b'"b":{}}', None, b"", "objects"),
    "long number": (b'{"a":' + b"9" * 10_000 + b"}", None, b"", "not UTF-8 JSON"),
    "key twice": (b'{"a":1,"a":2}', None, b"", "twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, None, b"", "strings to strings"),
    "entry without dtype": ({"a": {"shape": [1]}}, None, b"", "needs dtype"),
    "unknown dtype": ({"a": entry("F99")}, None, bytes(8), "known are BOOL"),
    "dtype no string": ({"a": entry(["F32"])}, None, bytes(8), "known are BOOL"),
    "negative size": ({"a": entry(shape=(-2,))}, None, bytes(8), "sizes >= 0"),
    "fractional size": ({"a": entry(shape=(2.0,))}, None, bytes(8), "sizes >= 0"),
    "boolean size": ({"a": entry(shape=(True, 2))}, None, bytes(8), "sizes >= 0"),
    "product overflows": ({"a": entry(shape=(2**62, 2**62))}, None, bytes(8), "takes"),
    "dtype does not fit the offsets": ({"a": entry("F16")}, None, bytes(8), "takes 4 bytes"),
    "half bytes": ({"a": entry("F4", (3,), (0, 1))}, None, bytes(1), "takes 1.5 bytes"),
    "offsets reversed": ({"a": entry(offsets=(8, 0))}, None, bytes(8), "data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, None, bytes(8), "two numbers"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, None, bytes(12), "overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, None, bytes(20), "belong to no tensor"),
    "data truncated": ({"a": entry()}, None, bytes(7), "truncated"),
    "data left over": ({"a": entry()}, None, bytes(9), "belong to none"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_a_format_error(tmp_path, write_raw, name):
    table, length, data, words = BAD[name]
    path = write_raw(tmp_path / "bad.safetensors", table, data, length)
    if name == "empty":
        path.write_bytes(b"")
    with pytest.raises(FormatError, match=words) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_missing_file_folder_and_index(tmp_path):
    for path in (tmp_path / "no.safetensors", tmp_path / "no.safetensors.index.json", tmp_path):
        with pytest.raises(FormatError, match=r"give (the path of )?a \.safetensors file"):
            Checkpoint.open(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_mutation_of_a_header_escapes_as_another_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a.weight": torch.zeros(4, 4, dtype=torch.int8), "b": torch.zeros(3)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(FormatError):
        read_header(path)


def test_sharded_checkpoint_reads_as_one(tmp_path):
    tensors = {f"l{i}.weight": torch.full((4, 4), float(i)) for i in range(4)}
    for i in range(2):
        save_file(
            {k: tensors[k] for k in list(tensors)[2 * i : 2 * i + 2]}, tmp_path / f"m-{i}.safetensors", {"format": "pt"}
        )
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {k: f"m-{i // 2}.safetensors" for i, k in enumerate(tensors)}}))
    checkpoint = Checkpoint.open(index)
    assert all(torch.equal(checkpoint.read(k), v) for k, v in tensors.items())
    assert torch.equal(checkpoint.read("l3.weight", slice(1, 3)), tensors["l3.weight"][1:3])


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"a": "../secret.safetensors"}, "in the folder of the index"),
        ({"a": "/etc/x.safetensors"}, "in the folder of the index"),
        ({"a": "weights.bin"}, "in the folder of the index"),
        ({"a": 3}, "weight_map"),
        ({}, "weight_map"),
        ({"a": "there.safetensors"}, "lacks it"),
        ({"a": "absent.safetensors"}, "cannot read"),
    ],
)
def test_bad_index(tmp_path, mapping, words):
    save_file({"b": torch.zeros(1)}, tmp_path / "there.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(FormatError, match=words):
        Checkpoint.open(index)


def test_names_cannot_drive_a_terminal():
    assert printable("a\x1b[31mb\n") == "a\\x1b[31mb\\n"
    assert printable("größe.weight") == "größe.weight"


def test_writer_is_read_back_by_safetensors_and_aligned(tmp_path):
    tensors = {
        "codes": torch.arange(3, dtype=torch.int8),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scale": torch.ones(1),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.0),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "x.safetensors"
    with writing(path, [Planned.of(k, t) for k, t in tensors.items()], {"note": 'ünï "quoted"'}) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    back = load_file(path)
    assert all(torch.equal(back[k].view(torch.uint8) if k == "f8" else back[k],
                           t.view(torch.uint8) if k == "f8" else t) for k, t in tensors.items())  # fmt: skip
    found, metadata = read_header(path)
    assert metadata == {"note": 'ünï "quoted"'}
    widths = {"F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1}
    assert all(info.begin % widths[info.dtype] == 0 for info in found.values())
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def test_writer_leaves_nothing_after_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(FormatError, match="planned and not written"), writing(path, [Planned("a", "F32", (2,))], {}):
        pass
    with pytest.raises(FormatError, match="was planned as"), writing(path, [Planned("a", "F32", (2,))], {}) as writer:
        writer.put("a", torch.zeros(3))
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_writer_without_unnamed_files(tmp_path, monkeypatch):
    monkeypatch.delattr("os.O_TMPFILE")
    path = tmp_path / "x.safetensors"
    with writing(path, [Planned("a", "F32", (2,))], {}) as writer:
        assert len(list(tmp_path.glob(".x.safetensors.*.partial"))) == 1
        writer.put("a", torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert torch.equal(load_file(path)["a"], torch.ones(2))


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}])
def test_writer_refuses_metadata_that_is_no_string(tmp_path, metadata):
    with pytest.raises(FormatError, match="strings to strings"), writing(tmp_path / "x", [], metadata):
        pass
