"""Writing one safetensors file, or several and their index, so that a killed run leaves nothing broken and can go on.

All is written in a hidden folder beside the target, ``.NAME.partial``, with a journal of the tensors whose data is on the
disk. A run with the same fingerprint takes up where the journal ends; any other starts over. At the end files are renamed
into place, the index last, so that a name which a reader asks for is complete or absent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kitchen_core.errors import FormatError, KitchenError

from .systems import BINARY, allocated, fcntl, sync_data, sync_folder, try_lock, unlock
from .writer import Planned, SafetensorsWriter, layout, writable_target

log = logging.getLogger("kitchen")

SYNC_BYTES = 256 << 20  # written between two entries in the journal: what a killed run loses at most
PUBLISHING = "publishing"  # the journal's line for: all data is there, renaming has begun


@dataclass(frozen=True)
class FilePlan:
    """One file to be: its final name, its tensors, its metadata strings."""

    name: str
    planned: tuple[Planned, ...]
    metadata: dict[str, str]


class Stage:
    """Where tensors are put. Use ``staging``."""

    def __init__(self, target: Path, work: Path, files: list[FilePlan]) -> None:
        self.target, self.work, self.files = target, work, files
        self.done: set[str] = set()  # tensors whose data an earlier run, or this one, brought to the disk
        self.remarks: list[str] = []  # what this run, and those that it goes on with, had to say about tensors
        self.publishing = self.removed = False
        self._home = {p.name: file.name for file in files for p in file.planned}
        self._descriptors: dict[str, int] = {}
        self._writers: dict[str, SafetensorsWriter] = {}
        self._unsynced: list[str | dict[str, str]] = []
        self._bytes = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of its planned dtype and shape."""
        self._writers[self._home[name]].put(name, tensor)
        self._wrote(name, tensor.nbytes)

    def put_blocks(self, name: str, blocks: Iterable[bytes]) -> None:
        """Write one tensor from its bytes."""
        writer = self._writers[self._home[name]]
        writer.put_blocks(name, blocks)
        self._wrote(name, writer.planned(name).nbytes)

    def remark(self, text: str) -> None:
        """Keep a remark with the tensors whose data is put next."""
        self.remarks.append(text)
        self._unsynced.append({"remark": text})

    def _wrote(self, name: str, nbytes: int) -> None:
        self._unsynced.append(name)
        self._bytes += nbytes
        if self._bytes >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Bring what was written to the disk, then into the journal."""
        for descriptor in self._descriptors.values():
            sync_data(descriptor)
        self._note(*self._unsynced)
        self.done.update(line for line in self._unsynced if isinstance(line, str))
        self._unsynced, self._bytes = [], 0

    def _note(self, *lines: str | dict[str, str]) -> None:
        with open(self.work / "journal", "ab") as journal:
            journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            journal.flush()
            os.fsync(journal.fileno())

    # -------------------------------------------------------------------------------------------- opening

    def open(self, fingerprint: str) -> None:
        """Take up what an earlier run with this fingerprint left, or start over."""
        if self._read_text("fingerprint") == fingerprint:
            self._read_journal()
        else:
            mark = self.work / "fingerprint"
            mark.write_text("")  # from here on of no run, and still ours
            for path in self.work.iterdir():
                if path.name not in ("fingerprint", "lock"):
                    path.unlink()
            mark.write_text(fingerprint)
        if self.publishing:
            return
        for file in self.files:
            path = self.work / file.name
            fresh = not path.exists()
            if fresh:
                self.done -= {p.name for p in file.planned}
            descriptor = self._descriptors[file.name] = os.open(path, os.O_CREAT | os.O_RDWR | BINARY, 0o666)
            self._writers[file.name] = writer = SafetensorsWriter(descriptor, file.planned, file.metadata)
            writer.skip(self.done)
        if self.done:
            log.info(
                "kitchen: goes on with an earlier run: %d of %d tensors are there", len(self.done), len(self._home)
            )

    def _read_text(self, name: str) -> str:
        path = self.work / name
        return path.read_text(errors="replace") if path.exists() else ""

    def _read_journal(self) -> None:
        """Whole lines alone count: the last may have been cut off."""
        for line in self._read_text("journal").split("\n")[:-1]:
            try:
                word = json.loads(line)
            except ValueError:
                break
            if word == PUBLISHING:
                missing = [
                    f.name for f in self.files if not ((self.work / f.name).exists() or self._final(f.name).exists())
                ]
                self.publishing = not missing
            elif isinstance(word, dict):
                self.remarks.append(word["remark"])
            elif word in self._home:
                self.done.add(word)

    def _final(self, name: str) -> Path:
        return self.target.parent / name

    # ------------------------------------------------------------------------------------------ publishing

    def publish(self, index: bytes | None) -> None:
        """Rename everything into place, the index last."""
        if not self.publishing:
            self.sync()
            for file in self.files:
                self._writers[file.name].finish()
                os.fsync(self._descriptors[file.name])
            sync_folder(self.work)
            self._note(PUBLISHING)
            self.close()  # Windows renames no open file
        for file in self.files:
            if (self.work / file.name).exists():
                os.replace(self.work / file.name, self._final(file.name))
        if index is not None:
            path = self.work / "index"
            with open(path, "wb") as stream:
                stream.write(index)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(path, self.target)
        sync_folder(self.target.parent)

    def close(self) -> None:
        """Close all files; what is in the folder stays."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def remove(self) -> None:
        """Delete the hidden folder; what says that it is ours goes last."""
        self.close()
        for path in self.work.iterdir():
            if path.name not in ("fingerprint", "lock"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.work, ignore_errors=True)
        self.removed = True


@contextlib.contextmanager
def staging(target: Path, files: list[FilePlan], fingerprint: str) -> Iterator[Stage]:
    """A Stage whose files appear in ``target``'s folder when the block ends well.

    ``target`` is the one file, or the index of several. An error of ours in the block removes what was written; a kill, a full
    disk or an interrupt leaves the hidden folder, for the next run of the same command to go on with.
    Raises FormatError where the target cannot be written, or where another run is writing it.
    """
    target = writable_target(target)
    sharded = [file.name for file in files] != [target.name]
    work = target.parent / f".{target.name}.partial"
    lock = _lock(work, target)
    stage, begun = Stage(target, work, files), False
    try:
        stage.open(fingerprint)
        if not stage.publishing:
            if sharded:
                _refuse_present(target, files)
            _check_space(target, files, work)
        begun = True
        yield stage
        stage.publish(_index(files) if sharded else None)
        stage.remove()
    except KitchenError:
        if begun or not stage.done:  # what an earlier run brought here is not lost to a disk that is too full to go on
            stage.remove()
        raise
    except OSError as error:
        raise FormatError(
            f"cannot write {str(target)!r}: {error.strerror or error}; what was written waits in {str(work)!r}: run the same "
            "command again to go on, or delete that folder"
        ) from error
    finally:
        stage.close()
        unlock(lock)
        if stage.removed:
            _remove_locked(work)


def _lock(work: Path, target: Path) -> int:
    """The descriptor of the folder's lock file, locked; the folder is made where it is missing."""
    while True:
        if work.is_symlink():
            raise FormatError(f"{str(work)!r} is a link, and files would be deleted where it leads; remove the link")
        try:
            work.mkdir(exist_ok=True)
            try:
                lock = os.open(work / "lock", os.O_CREAT | os.O_RDWR | BINARY, 0o666)
            except FileNotFoundError:  # another run has just removed the folder
                continue
        except OSError as error:
            raise FormatError(
                f"cannot write in {str(target.parent)!r}: {error.strerror}; choose another folder"
            ) from error
        if not try_lock(lock):
            os.close(lock)
            raise FormatError(f"another run is writing {str(target)!r}; wait for it, or give another OUT")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(work / "lock")):
                _refuse_strange(work, lock)
                return lock
        unlock(lock)  # locked, and its folder is gone: another run ended between the two calls


def _remove_locked(work: Path) -> None:
    """Windows deletes no open file, so there the lock and its folder go last.

    Nothing is taken from a run that has begun since: its lock is open, and a folder that has anything in it stays.
    """
    if fcntl is None:
        with contextlib.suppress(OSError):
            (work / "lock").unlink()
            work.rmdir()


def _refuse_strange(work: Path, lock: int) -> None:
    """A folder of ours has a fingerprint as long as there is anything else."""
    there = sorted({path.name for path in work.iterdir()} - {"lock"})
    if there and "fingerprint" not in there:
        unlock(lock)
        raise FormatError(
            f"{str(work)!r} holds {there[0]!r} and was not made by an earlier run; move it away, or give another OUT"
        )


def _refuse_present(target: Path, files: list[FilePlan]) -> None:
    present = [file.name for file in files if (target.parent / file.name).exists()]
    if present:
        raise FormatError(
            f"{present[0]!r} is in {str(target.parent)!r} already, and shards cannot be replaced all at once; remove the old "
            "checkpoint or give another OUT"
        )


def _check_space(target: Path, files: list[FilePlan], work: Path) -> None:
    size = sum(layout(file.planned, file.metadata)[2] for file in files)
    there = sum(allocated(work / file.name) for file in files)
    free = shutil.disk_usage(target.parent).free
    if size - there > free:
        raise FormatError(
            f"{str(target)!r} will take {size} bytes and its disk has {free} free; free space or write elsewhere"
        )


def _index(files: list[FilePlan]) -> bytes:
    total = sum(p.nbytes for file in files for p in file.planned)
    mapping = {p.name: file.name for file in files for p in file.planned}
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}
    return json.dumps(table, indent=2).encode()
