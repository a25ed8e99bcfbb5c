"""Reading safetensors files without trusting them: headers parsed here with bounds, tensors by safetensors' own reader.

A ``Checkpoint`` is one file or the shards named by a ``*.safetensors.index.json``. Opening one reads headers only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from kitchen_core.errors import FormatError, UnsupportedError

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself
MAX_OBJECTS = 2_000_000  # of JSON in one header: a real one has two or three a tensor
MAX_COMMAS = 20_000_000
MAX_DIMS = 64
MAX_BIG = 2**63 - 1
READ_WINDOW = 64 << 20  # bytes read through one memory map before it is dropped, which bounds the resident set

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
TORCH_DTYPES = {name: getattr(torch, word) for name, word in _TORCH_NAMES.items() if hasattr(torch, word)}
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; ``begin`` and ``end`` are absolute positions in ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin

    def meta(self) -> torch.Tensor:
        """A tensor of this shape and dtype on the meta device. Raises UnsupportedError where torch lacks the dtype."""
        return torch.empty(self.shape, dtype=self.torch_dtype(), device="meta")

    def torch_dtype(self) -> torch.dtype:
        """Raises UnsupportedError where this torch has no such dtype."""
        if self.dtype not in TORCH_DTYPES:
            raise UnsupportedError(f"tensor {printable(self.name)!r} is {self.dtype}, which this torch cannot hold")
        return TORCH_DTYPES[self.dtype]


def printable(text: str) -> str:
    """A name from a file as it may be shown: control characters, which could drive a terminal, are escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


# ---------------------------------------------------------------------------------------------------------- headers


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name and the metadata strings of one safetensors file; no tensor is read.

    Raises FormatError, saying what was found, what is allowed and what to do, for anything that is not a whole and
    consistent safetensors file.
    """
    with open_binary(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = _header_length(path, stream.read(8), size)
        raw = stream.read(length)
    if len(raw) != length:
        _refuse(path, f"its header ends after {len(raw)} of {length} bytes", "download or copy the file again")
    table = _parse_json(path, raw)
    metadata = _metadata(path, table.pop("__metadata__", {}))
    tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in table.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors, metadata


def open_binary(path: Path) -> Any:
    """Open a file for reading. Raises FormatError where it is missing, unreadable, or anything else than a file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():  # to open a pipe would wait for its writer
            raise FormatError(
                f"cannot read {str(path)!r}: it is a device, pipe or socket; give a file, which can be read twice"
            )
        return open(path, "rb")
    except OSError as error:
        raise FormatError(
            f"cannot read {str(path)!r}: {error.strerror}; give the path of a .safetensors file"
        ) from error


def _refuse(path: Path, found: str, advice: str) -> NoReturn:
    raise FormatError(f"{str(path)!r} is not a valid safetensors file: {found}; {advice}")


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        _refuse(path, f"it has {size} bytes and the header length alone takes 8", "download or copy the file again")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER or length < 2:
        kinds = {b"PK": "a zip, such as a torch pickle", b"GGUF": "a GGUF file", b"\x80": "a pickle", b"{": "JSON"}
        looks = next((f" (it looks like {kind})" for magic, kind in kinds.items() if prefix.startswith(magic)), "")
        _refuse(
            path, f"its first 8 bytes give a header of {length} bytes, allowed are 2 to {MAX_HEADER}{looks}",
            "convert it to safetensors, or download it again",
        )  # fmt: skip
    if length > size - 8:
        _refuse(
            path, f"its header should take {length} bytes and the file has only {size - 8} after the length",
            "it is truncated: download or copy it again",
        )  # fmt: skip
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {printable(twice)[:80]!r} appears twice")
    return made


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def parse_bounded_json(raw: bytes) -> Any:
    """JSON of at most MAX_OBJECTS objects and lists, no key twice. Raises ValueError in words."""
    objects, commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    if objects > MAX_OBJECTS or commas > MAX_COMMAS:
        raise ValueError(f"it holds {objects} objects and {commas} commas, allowed are {MAX_OBJECTS} and {MAX_COMMAS}")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        table = parse_bounded_json(raw)
    except ValueError as error:
        _refuse(path, f"its header is not UTF-8 JSON ({error})", "download it again, or have its maker write it anew")
    if not isinstance(table, dict):
        _refuse(path, f"its header is a JSON {type(table).__name__}, not an object", "download it again")
    return table


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        _refuse(path, "__metadata__ must map strings to strings", "have its maker nest other values as JSON strings")
    return metadata


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BIG


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    shown = printable(name)[:200]
    advice = "the header is damaged or forged; get the file again from its maker"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        _refuse(path, f"the entry of {shown!r} needs dtype, shape and data_offsets, got {str(entry)[:120]}", advice)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"{shown!r} has dtype {str(dtype)[:40]!r}, known are {', '.join(DTYPE_BITS)}", advice)
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_whole(n) for n in shape):
        _refuse(path, f"{shown!r} has shape {str(shape)[:120]}, allowed are up to {MAX_DIMS} sizes >= 0", advice)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_whole(n) for n in offsets):
        _refuse(path, f"{shown!r} has data_offsets {str(offsets)[:120]}, allowed are two numbers >= 0", advice)
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if begin > end or bits % 8 or bits // 8 != end - begin:
        _refuse(
            path, f"{shown!r} is {dtype} {shape}, which takes {bits / 8:g} bytes, and its data_offsets {offsets} "
            f"give {end - begin}", advice,
        )  # fmt: skip
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, start + end)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Tensors must follow each other without overlap or hole and end where the file ends."""
    position, previous = start, "the header"
    for info in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        name = printable(info.name)[:200]
        if info.begin < position:
            _refuse(path, f"the data of {name!r} overlaps that of {previous!r}", "the header is damaged or forged")
        if info.begin > position:
            _refuse(
                path, f"{info.begin - position} bytes between {previous!r} and {name!r} belong to no tensor",
                "the header is damaged or forged",
            )  # fmt: skip
        position, previous = info.end, name
    if position > size:
        _refuse(
            path, f"the data of {previous!r} ends at byte {position} and the file at {size}",
            "it is truncated: download or copy it again",
        )  # fmt: skip
    if position < size:
        _refuse(path, f"{size - position} bytes after the last tensor belong to none", "download or copy it again")


# ------------------------------------------------------------------------------------------------------ checkpoints


@dataclass
class Checkpoint:
    """A safetensors file, or the shards of an index: tensors by name, metadata, and how to read one tensor."""

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    notes: list[str] = field(default_factory=list)
    _readers: dict[Path, Any] = field(default_factory=dict, repr=False)
    _read: int = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read the header, or all headers of a sharded checkpoint. Raises FormatError for a bad file."""
        path = Path(path)
        if path.is_dir():
            raise FormatError(f"{str(path)!r} is a folder; give a .safetensors file or its .safetensors.index.json")
        if path.suffix == ".json":
            return cls._open_index(path)
        tensors, metadata = read_header(path)
        return cls(path, (path,), tensors, metadata)

    @classmethod
    def _open_index(cls, path: Path) -> Checkpoint:
        with open_binary(path) as stream:
            raw = stream.read(MAX_HEADER + 1)
        if len(raw) > MAX_HEADER:
            raise FormatError(f"the index {str(path)!r} is larger than {MAX_HEADER} bytes; it cannot be an index")
        try:
            index = parse_bounded_json(raw)
        except ValueError as error:
            raise FormatError(f"the index {str(path)!r} is not JSON: {error}; download it again") from error
        mapping = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(v, str) for v in mapping.values()):
            raise FormatError(f"the index {str(path)!r} needs a 'weight_map' from tensor names to file names")
        shards = sorted(set(mapping.values()))
        for shard in shards:
            if not shard.endswith(".safetensors") or "\\" in shard or "\0" in shard or Path(shard).name != shard:
                raise FormatError(
                    f"the index {str(path)!r} names the shard {printable(shard)!r}; allowed are .safetensors files in the "
                    "folder of the index"
                )
        return cls._join(path, mapping, {shard: read_header(path.parent / shard) for shard in shards})

    @classmethod
    def _join(cls, path: Path, mapping: dict[str, str], headers: dict[str, Any]) -> Checkpoint:
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        notes = []
        for name, shard in mapping.items():
            if name not in headers[shard][0]:
                raise FormatError(
                    f"the index {str(path)!r} says that {printable(name)!r} is in {shard!r}, and that file lacks it; "
                    "the shards and the index are not of one download"
                )
            tensors[name] = headers[shard][0][name]
        for shard, (found, strings) in headers.items():
            extra = sorted(name for name in found if mapping.get(name) != shard)
            if extra:
                notes.append(f"{len(extra)} tensors of {shard} are not in the index, such as {printable(extra[0])!r}")
            _merge_metadata(metadata, strings)
        return cls(path, tuple(path.parent / shard for shard in headers), tensors, metadata, notes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, or of all shards."""
        return sum(file.stat().st_size for file in self.files)

    def in_file_order(self) -> list[TensorInfo]:
        """All tensors in the order in which reading them is sequential."""
        return sorted(self.tensors.values(), key=lambda t: (str(t.file), t.begin))

    # --------------------------------------------------------------------------------------------- reading tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One tensor, or a slice of its rows, on the CPU, through a memory map that stays alive with the tensor."""
        info = self.tensors[name]
        info.torch_dtype()
        size = (
            info.nbytes if rows is None or not info.shape else info.nbytes * (rows.stop - rows.start) // info.shape[0]
        )
        self._read += size
        if self._read > READ_WINDOW:
            self.close()
            self._read = size
        reader = self._readers.get(info.file)
        if reader is None:
            try:
                reader = self._readers[info.file] = safe_open(info.file, framework="pt").__enter__()
            except Exception as error:  # safetensors raises its own SafetensorError, and OSError
                advice = "get the file again" if str(info.file).isprintable() else "rename it or its folder"
                raise FormatError(f"safetensors cannot open {str(info.file)!r}: {error}; {advice}") from error
        with torch.device("cpu"):  # safetensors makes slices on the default device
            return reader.get_tensor(name) if rows is None else reader.get_slice(name)[rows]

    def read_bytes(self, name: str, limit: int) -> bytes:
        """The bytes of a small tensor, without torch. Raises FormatError above ``limit`` bytes."""
        info = self.tensors[name]
        if info.nbytes > limit:
            raise FormatError(f"{printable(name)!r} takes {info.nbytes} bytes, allowed are {limit}")
        with open_binary(info.file) as stream:
            stream.seek(info.begin)
            return stream.read(info.nbytes)

    def blocks(self, name: str, size: int = 8 << 20) -> Iterator[bytes]:
        """The bytes of one tensor in blocks, whatever its dtype."""
        info = self.tensors[name]
        with open_binary(info.file) as stream:
            stream.seek(info.begin)
            left = info.nbytes
            while left:
                block = stream.read(min(size, left))
                if not block:
                    raise FormatError(f"{str(info.file)!r} became shorter while it was read; nothing was written")
                left -= len(block)
                yield block

    def close(self) -> None:
        """Drop the memory maps; tensors that were read stay valid."""
        for reader in self._readers.values():
            with contextlib.suppress(OSError):
                reader.__exit__(None, None, None)
        self._readers.clear()
        self._read = 0


def _merge_metadata(into: dict[str, str], strings: dict[str, str]) -> None:
    """Join the metadata of shards. Each shard may describe its own layers, so those tables are united."""
    for key, text in strings.items():
        if key == "_quantization_metadata" and key in into and into[key] != text:
            try:
                mine, theirs = (parse_bounded_json(value.encode()) for value in (into[key], text))
                layers = {**mine["layers"], **theirs["layers"]}
            except (ValueError, KeyError, TypeError) as error:
                raise FormatError(f"the shards' _quantization_metadata cannot be joined: {error!r}") from error
            text = json.dumps({**mine, "layers": layers})
        into[key] = text
