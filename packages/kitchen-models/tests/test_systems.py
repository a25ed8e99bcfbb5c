"""Files are written alike where the system lacks what Linux has. Each lack is simulated: no other system was tried."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

import kitchen_models as km
from kitchen_models import systems

# A process that is as on Windows: no fcntl but msvcrt, none of POSIX's calls, and neither renaming nor deleting of open files.
WINDOWS = """
    import errno, fcntl, os, shutil, sys, types

    real_flock, locked, unlocked = fcntl.flock, [], []
    msvcrt = types.ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.LK_UNLCK = 2, 0
    def locking(descriptor, mode, count):
        assert (os.lseek(descriptor, 0, os.SEEK_CUR), count) == (0, 1), "always the same byte"
        if mode == msvcrt.LK_UNLCK:
            unlocked.append(descriptor)
            return real_flock(descriptor, 8)
        try:
            real_flock(descriptor, 2 | 4)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None
        locked.append(descriptor)
    msvcrt.locking = locking

    def is_open(path):
        if not os.path.exists(path):
            return False
        there = os.stat(path)
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                if os.path.samestat(os.fstat(number), there):
                    return True
            except OSError:
                pass
        return False
    def refusing(real):
        def call(path, *more, **named):
            if any(is_open(p) for p in (path, *more)):
                raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used", str(path))
            return real(path, *more, **named)
        return call
    def binary_only(path, flags, *more, **named):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        assert not flags & os.O_RDWR or flags & os.O_BINARY, "newlines would be changed"
        return real_open(path, flags & ~os.O_BINARY, *more, **named)

    import numpy, torch, safetensors, kitchen_core, rich  # they may need what is taken away
    for name in ("pwrite", "fdatasync", "O_TMPFILE", "O_DIRECTORY", "uname"):
        delattr(os, name)
    os.O_BINARY, real_open, os.open = 1 << 30, os.open, binary_only
    os.replace, os.unlink = refusing(os.replace), refusing(os.unlink)
    shutil._use_fd_functions = False
    sys.modules["fcntl"], sys.modules["msvcrt"] = None, msvcrt
    import kitchen_models as km
    from kitchen_core.errors import FormatError
    from kitchen_models import systems
    assert systems.fcntl is None and systems.msvcrt is msvcrt
"""


def as_on_windows(body, *words):
    """What a process that runs ``body`` under WINDOWS prints, as JSON."""
    script = textwrap.dedent(WINDOWS) + textwrap.dedent(body)
    ran = subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def stored(tmp_path, source):
    """The source, quantized."""
    path = tmp_path / "q.safetensors"
    km.quantize_file(source, path, format="int8")
    return path


def test_quantizing_and_converting_give_the_same_files(source, stored, tmp_path):
    km.convert_file(stored, tmp_path / "c.safetensors", "comfy-quants")
    km.convert_file(stored, tmp_path / "s.safetensors.index.json", "comfy-quants", shard_bytes=60_000)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    other = tmp_path / "other"
    other.mkdir()
    found = as_on_windows(
        """
        import json, pathlib
        source, stored, out = map(pathlib.Path, sys.argv[1:])
        km.quantize_file(source, out / "q.safetensors", format="int8")
        km.quantize_file(source, out / "q.safetensors", format="int8")  # over an older file
        km.convert_file(stored, out / "c.safetensors", "comfy-quants")
        km.convert_file(stored, out / "s.safetensors.index.json", "comfy-quants", shard_bytes=60_000)
        print(json.dumps([len(locked), len(unlocked)]))
        """,
        source, stored, other,
    )  # fmt: skip
    assert found == [2, 2], "each conversion locks and unlocks"
    made = {p.name: p.read_bytes() for p in other.iterdir()}
    assert made == {name: data for name, data in before.items() if name != source.name}
    assert len(made) > 4


def test_two_runs_are_kept_apart_and_the_second_takes_over(stored, tmp_path):
    found = as_on_windows(
        """
        import json, pathlib
        stored, target = map(pathlib.Path, sys.argv[1:])
        from kitchen_models import staging
        staging.SYNC_BYTES = 1
        said = []
        def stop(name, done, total):
            if not name.startswith("hashing") and done > total // 2:
                try:
                    km.convert_file(stored, target, "comfy-quants")
                except FormatError as error:
                    said.append(str(error))
                raise KeyboardInterrupt
        try:
            km.convert_file(stored, target, "comfy-quants", progress=stop)
        except KeyboardInterrupt:
            said.append(sorted(os.listdir(target.parent / f".{target.name}.partial")))
        km.convert_file(stored, target, "comfy-quants")
        print(json.dumps(said))
        """,
        stored, tmp_path / "c.safetensors",
    )  # fmt: skip
    assert "another run is writing" in found[0]
    assert {"c.safetensors", "fingerprint", "journal", "lock"} == set(found[1])
    assert km.load(tmp_path / "c.safetensors").keys() == km.load(stored).keys()
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_an_error_in_the_middle_leaves_nothing(stored, tmp_path):
    (tmp_path / "out").mkdir()
    found = as_on_windows(
        """
        import json, pathlib
        stored, folder = map(pathlib.Path, sys.argv[1:])
        from kitchen_models import staging
        said = []
        def fail(name, done, total):
            if not name.startswith("hashing") and done > total // 2:
                said.append(sorted(os.listdir(folder)))
                raise FormatError("stop")
        for call in (
            lambda: km.convert_file(stored, folder / "c.safetensors", "comfy-quants", progress=fail),
            lambda: km.quantize_file(stored, folder / "q.safetensors", "lm_head=int8", progress=fail),
        ):
            try:
                call()
            except FormatError as error:
                said.append([str(error), sorted(os.listdir(folder))])
        print(json.dumps(said))
        """,
        stored, tmp_path / "out",
    )  # fmt: skip
    (hidden,), converted, (partial,), quantized = found
    assert hidden == ".c.safetensors.partial"
    assert partial.startswith(".q.safetensors.")
    assert converted == quantized == ["stop", []]


def test_threads_that_seek_and_write_do_not_cross(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.setattr(systems, "PIECE", 7)
    with open(tmp_path / "f", "w+b") as stream:
        parts = [bytes([number]) * 1001 for number in range(8)]
        threads = [
            threading.Thread(target=systems.write_at, args=(stream.fileno(), memoryview(part), number * 1001))
            for number, part in enumerate(parts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)


def test_a_system_without_locks_keeps_no_runs_apart_and_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(systems, "fcntl", None)
    monkeypatch.setattr(systems, "msvcrt", None)
    for _ in range(2):
        descriptor = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
        assert systems.try_lock(descriptor)
        systems.unlock(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
