"""What operating systems do differently about files that are being written: locks, writes at a place, what is synced.

Every branch looks for what is there (``fcntl``, ``os.pwrite``), never for the system's name.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # Windows
    fcntl: ModuleType | None = None  # type: ignore[no-redef]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt: ModuleType | None = None  # type: ignore[no-redef]

BINARY = getattr(os, "O_BINARY", 0)  # Windows would write two bytes for each newline without it
PIECE = 64 << 20  # bytes given to the system at once
_seeking = threading.Lock()


def same_file(path: Path, other: Path) -> bool:
    """Whether both are one file; False where ``path`` is none, or no name that the system takes."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def write_at(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of ``data`` at a place of a file. Where the system has no pwrite, threads take turns to seek and write."""
    while data:
        if hasattr(os, "pwrite"):
            count = os.pwrite(descriptor, data[:PIECE], position)
        else:
            with _seeking:
                os.lseek(descriptor, position, os.SEEK_SET)
                count = os.write(descriptor, data[:PIECE])
        data, position = data[count:], position + count


def sync_data(descriptor: int) -> None:
    """Bring a file's data to the disk, and no more where the system can tell them apart."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk. Windows opens no folders and keeps its names itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def allocated(path: Path) -> int:
    """Bytes that a file takes on its disk; its length, holes included, where the system does not say."""
    stat = os.stat(path)
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


def try_lock(descriptor: int) -> bool:
    """Lock a file for this process, until ``unlock`` or its end; False where another one has it.

    True as well on a file system that knows no locks, and on a system without them: then nothing keeps two runs apart.
    """
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
    elif msvcrt is not None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # its first byte, which need not be there
        except OSError:
            return False
    return True


def unlock(descriptor: int) -> None:
    """Give up what ``try_lock`` took and close the file."""
    if fcntl is None and msvcrt is not None:  # a closed file stays locked on Windows for a while
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    os.close(descriptor)
