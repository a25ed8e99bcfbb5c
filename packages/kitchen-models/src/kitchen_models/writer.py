"""Writing a safetensors file of any size: the header first, then each tensor at its place, the whole atomically."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kitchen_core.errors import FormatError, UnsupportedError

from .files import DTYPE_BITS, FILE_DTYPES, MAX_HEADER
from .systems import BINARY, sync_folder, write_at


class Planned(NamedTuple):
    """A tensor to be written: its name, its dtype as files spell it, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Planned:
        """The plan for a tensor. Raises UnsupportedError for a dtype that safetensors cannot hold."""
        if tensor.dtype not in FILE_DTYPES:
            raise UnsupportedError(f"tensor {name!r} is {tensor.dtype}, which a safetensors file cannot hold")
        return cls(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BITS[self.dtype] // 8


class SafetensorsWriter:
    """Puts tensors, in any order, at the places that the header gives them. Use ``writing``, which makes it atomic."""

    def __init__(self, descriptor: int, planned: Iterable[Planned], metadata: dict[str, str]) -> None:
        self._descriptor = descriptor
        # Wide elements first, as safetensors' own writer does: then every tensor is aligned, and there are no holes.
        self._planned = {p.name: p for p in sorted(planned, key=lambda p: -DTYPE_BITS[p.dtype])}
        header, self._begin, self.file_bytes = layout(self._planned.values(), metadata)
        self._missing = set(self._planned)
        write_at(descriptor, memoryview(header), 0)

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._descriptor

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; it must have the planned dtype and shape."""
        made, wanted = Planned.of(name, tensor), self._planned[name]
        if made != wanted:
            raise FormatError(
                f"{name!r} was planned as {wanted.dtype} {list(wanted.shape)}, got {made.dtype} {made.shape}"
            )
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        write_at(self._descriptor, memoryview(data), self._begin[name])
        self._missing.discard(name)

    def put_blocks(self, name: str, blocks: Iterable[bytes]) -> None:
        """Write one tensor from its bytes."""
        position = self._begin[name]
        for block in blocks:
            write_at(self._descriptor, memoryview(block), position)
            position += len(block)
        if position - self._begin[name] != self._planned[name].nbytes:
            raise FormatError(f"{name!r} takes {self._planned[name].nbytes} bytes, got {position - self._begin[name]}")
        self._missing.discard(name)

    def planned(self, name: str) -> Planned:
        """The plan of one tensor."""
        return self._planned[name]

    def skip(self, names: Iterable[str]) -> None:
        """Take the data of these tensors to be in the file already."""
        self._missing -= set(names)

    def finish(self) -> None:
        """Set the length of the file. Raises FormatError where a tensor was not written."""
        if self._missing:
            raise FormatError(f"{len(self._missing)} tensors were planned and not written: {sorted(self._missing)[:3]}")
        os.ftruncate(self._descriptor, self.file_bytes)


def layout(planned: Iterable[Planned], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """(header with its length, position of each tensor, size of the file) for tensors in this order."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise FormatError(
                f"metadata of a safetensors file maps strings to strings, got {key!r}: {type(value).__name__}"
            )
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offsets, position = {}, 0
    for p in planned:
        table[p.name] = {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [position, position + p.nbytes]}
        offsets[p.name] = position
        position += p.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(
            f"the header would take {len(text)} bytes, allowed are {MAX_HEADER}; write fewer tensors a file"
        )
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: start + o for n, o in offsets.items()}, start + position


def hidden_name(target: Path) -> Path:
    """A new name beside ``target`` for what is not whole yet."""
    return target.parent / f".{target.name}.{secrets.token_hex(6)}.partial"


def writable_target(path: Path) -> Path:
    """The file behind ``path``, links followed. Raises FormatError where no file can be made there."""
    target = Path(os.path.realpath(path))
    for name in (target, hidden_name(target)):
        try:
            os.lstat(name)
        except FileNotFoundError:
            pass
        except OSError as error:  # a name that is too long, or becomes so while it is hidden
            raise FormatError(f"cannot write {str(path)!r}: {error.strerror}; give another OUT") from error
    if target.is_symlink():
        raise FormatError(f"cannot write {str(path)!r}: it is a link that leads back to itself; remove it")
    if target.is_dir():
        raise FormatError(f"cannot write {str(path)!r}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise FormatError(
            f"cannot write {str(path)!r}: the folder {str(target.parent)!r} does not exist; make it first"
        )
    if target.exists() and not target.is_file():
        raise FormatError(f"cannot write {str(path)!r}: it is a device, pipe or socket, not a file; give another OUT")
    return target


def refuse_name(path: Path, endings: tuple[str, ...] = (".safetensors",)) -> None:
    """Raises FormatError for a name that tells readers it is something else than what is written there."""
    if not path.name.endswith(endings) or path.name in endings:
        raise FormatError(
            f"cannot write {str(path)!r}: a safetensors file is made, so its name must end in {' or '.join(endings)}; give "
            "such an OUT"
        )


@contextlib.contextmanager
def writing(path: Path, planned: Iterable[Planned], metadata: dict[str, str]) -> Iterator[SafetensorsWriter]:
    """A writer for ``path`` that appears there complete or not at all.

    The data goes to a file in the same folder that has no name where the system can do that (O_TMPFILE: even a killed
    run leaves nothing), else a hidden ``.NAME.*.partial``; it is synced and renamed over ``path`` at the end.
    """
    target = writable_target(path)
    planned = list(planned)
    free, size = shutil.disk_usage(target.parent).free, layout(planned, metadata)[2]
    if size > free:
        raise FormatError(
            f"{str(path)!r} will take {size} bytes and its disk has {free} free; free space or write elsewhere"
        )
    hidden = hidden_name(target)
    descriptor, named = _create(target.parent, hidden)
    try:
        writer = SafetensorsWriter(descriptor, planned, metadata)
        yield writer
        writer.finish()
        os.fsync(descriptor)
        if not named:
            _give_name(descriptor, hidden)
        os.close(descriptor)  # first: Windows renames no open file
        descriptor = None
        os.replace(hidden, target)
        sync_folder(target.parent)
    except OSError as error:
        raise FormatError(f"cannot write {str(path)!r}: {error.strerror or error}; nothing was left there") from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
        hidden.unlink(missing_ok=True)


def _create(folder: Path, hidden: Path) -> tuple[int, bool]:
    """(descriptor, whether the file has a name)"""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(
            OSError
        ):  # the file system, or a missing /proc, may forbid it: then a named file it is
            probe = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            try:
                _give_name(probe, hidden)
                hidden.unlink()
            finally:
                os.close(probe)
            return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), False
    try:
        return os.open(hidden, os.O_CREAT | os.O_EXCL | os.O_RDWR | BINARY, 0o666), True
    except OSError as error:
        raise FormatError(f"cannot write in {str(folder)!r}: {error.strerror}; choose another folder") from error


def _give_name(descriptor: int, path: Path) -> None:
    # NOTE: only with a dir_fd does os.link follow the link in /proc; the path is absolute, so its value has no meaning.
    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
