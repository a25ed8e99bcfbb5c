"""Where commands are told to write, and what terminals can show: an answer in words, nothing broken left, never a traceback."""

import io
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import kitchen_models as km
from kitchen_core import cli

QUANTIZE = ("quantize", "--format", "int8")
CONVERT = ("convert", "--to", "comfy-quants")
both = pytest.mark.parametrize("command", [QUANTIZE, CONVERT], ids=lambda words: words[0])


@pytest.fixture
def given(tmp_path):
    """(a source for a command, what lies beside it)"""

    def make(command):
        torch.manual_seed(0)
        float_file = tmp_path / "f.safetensors"
        save_file({f"層.{i}.ü.weight": torch.randn(256, 256) for i in range(4)}, float_file)
        if command[0] == "quantize":
            return float_file
        km.quantize_file(float_file, tmp_path / "s.safetensors", format="int8")
        return tmp_path / "s.safetensors"

    return make


def words_of(command, source, target):
    return [command[0], os.fspath(source), os.fspath(target), *command[1:]]


def run(command, source, target, **options):
    """The command in a process of its own."""
    words = [sys.executable, "-m", "kitchen_core", *words_of(command, source, target)]
    return subprocess.run(words, capture_output=True, timeout=120, **options)


def refused(code, text, *words):
    """One line that says so."""
    assert code == 2, text
    assert "Traceback" not in text
    assert text.count("\n") == 1
    assert all(word in text for word in words), text


@both
def test_names_that_cannot_be_written(command, given, tmp_path, capsys):
    source = given(command)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "a file").write_text("x")
    for name, words in {
        "x" * 250 + ".safetensors": ("File name too long", "another OUT"),
        "x" * 235 + ".safetensors": ("File name too long", "another OUT"),
        "loop": ("a link that leads back to itself", "remove it"),
        ".": ("it is a folder", "name a file"),
        "a file/o.safetensors": ("Not a directory", "another OUT"),
        "a file/b/o.safetensors": ("cannot make the folder", "Not a directory", "another OUT"),
        "o.bin": ("'" + os.fspath(folder / "o.bin") + "'", "must end in .safetensors", "give such an OUT"),
        "o": ("must end in .safetensors",),
        ".safetensors": ("must end in .safetensors",),
        "new/folder/o.bin": ("must end in .safetensors",),
    }.items():
        refused(cli.main(words_of(command, source, folder / name)), capsys.readouterr().err, *words)
    for target, words in (("/dev/full", "a device, pipe or socket"), (source, "the source")):
        refused(cli.main(words_of(command, source, target)), capsys.readouterr().err, words)
    assert sorted(p.name for p in folder.iterdir()) == ["a file", "loop"]


@both
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are of POSIX systems")
def test_sources_that_are_no_files(command, tmp_path, capsys):
    """A pipe nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    for source in (tmp_path / "pipe.safetensors", "/dev/zero"):
        code = cli.main(words_of(command, source, tmp_path / "o.safetensors"))
        refused(code, capsys.readouterr().err, os.fspath(source), "a device, pipe or socket", "give a file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe.safetensors"]


@both
def test_links_are_followed_and_stay_links(command, given, tmp_path):
    source, folder = given(command), tmp_path / "out"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to("behind")
    link = folder / "link.safetensors"
    for _ in range(2):  # to a file that is not there yet, then to one that is
        assert cli.main(words_of(command, source, link)) == 0
        assert link.is_symlink()
        assert km.inspect_file(folder / "behind")["problems"] == []
    assert sorted(p.name for p in folder.iterdir()) == ["behind", "link.safetensors"]


@both
def test_the_folder_of_the_output_is_made_and_goes_again_where_nothing_is_written(command, given, tmp_path, capsys):
    source, target = given(command), tmp_path / "new" / "folder" / "o.safetensors"
    assert cli.main([*words_of(command, source, target), "--dry-run"]) == 0
    assert not (tmp_path / "new").exists()
    assert cli.main(words_of(command, tmp_path / "absent.safetensors", target)) == 2
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    assert cli.main(words_of(command, tmp_path / "absent.safetensors", tmp_path / "there" / "o.safetensors")) == 2
    assert (tmp_path / "there").is_dir(), "an empty folder that was there is not ours to remove"
    assert cli.main(words_of(command, source, target)) == 0
    assert [p.name for p in target.parent.iterdir()] == ["o.safetensors"]


NAMES = ["重み ü.safetensors", "a\nb.safetensors", os.fsdecode(b"\xff\xfe.safetensors")]


@both
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_of_every_kind_and_terminals_that_show_few(command, given, tmp_path, encoding, monkeypatch):
    source, shown = given(command), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding))
    for name in NAMES:
        assert cli.main(words_of(command, source, tmp_path / name)) == 0
        assert cli.main(["inspect", str(tmp_path / name)]) == 0
    sys.stdout.flush()
    text = shown.getvalue()
    assert text.count(b"4 layers") == 3
    assert text.count(("層.0.ü " if encoding == "utf-8" else r"\u5c64.0.\xfc ").encode()) == 3


def test_a_name_that_safetensors_cannot_open_is_said(given, tmp_path, capsys):
    source = given(QUANTIZE)
    strange = tmp_path / NAMES[-1]
    source.rename(strange)
    refused(cli.main(words_of(QUANTIZE, strange, tmp_path / "o.safetensors")), capsys.readouterr().err, "rename it")
    assert not (tmp_path / "o.safetensors").exists()


@both
def test_streams_that_are_closed(command, given, tmp_path):
    source, target = given(command), tmp_path / "o.safetensors"
    words = shlex.join([sys.executable, "-m", "kitchen_core", *words_of(command, source, target)])
    for closed in ("1>&-", "2>&-", "1>&- 2>&-"):
        assert subprocess.run(f"{words} {closed}", shell=True, timeout=120).returncode == 0, closed
        assert km.inspect_file(target)["problems"] == []
        target.unlink()


@both
def test_a_disk_that_is_full_in_the_middle(command, given, tmp_path):
    """A limit on the length of files stands for it: the same OSError from the same write, unknown before it happens."""
    source, folder = given(command), tmp_path / "out"
    folder.mkdir()

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    ran = run(command, source, folder / "o.safetensors", preexec_fn=limit)
    refused(ran.returncode, ran.stderr.decode(), "File too large")
    left = sorted(p.name for p in folder.iterdir())
    if command is QUANTIZE:
        assert b"nothing was left there" in ran.stderr
        assert left == []
    else:
        assert b"run the same command again to go on" in ran.stderr
        assert left == [".o.safetensors.partial"]
    assert cli.main(words_of(command, source, folder / "o.safetensors")) == 0
    assert [p.name for p in folder.iterdir()] == ["o.safetensors"]
    assert km.inspect_file(folder / "o.safetensors")["problems"] == []


@both
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(command, given, tmp_path, capsys):
    source, folder = given(command), tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o555)
    code = cli.main(words_of(command, source, folder / "o.safetensors"))
    refused(code, capsys.readouterr().err, "cannot write", "another folder")


@both
def test_a_file_system_that_is_read_only(command, given, monkeypatch, capsys):
    """As above for root: what opening and making there say."""
    source = given(command)
    real_open, real_mkdir = os.open, os.mkdir

    def refusing(real):
        def call(path, *arguments, **named):
            writes = real is real_mkdir or arguments[0] & (os.O_RDWR | os.O_WRONLY)
            if writes and str(path).startswith(str(source.parent / "out")):
                raise OSError(30, "Read-only file system", str(path))
            return real(path, *arguments, **named)

        return call

    (source.parent / "out").mkdir()
    monkeypatch.setattr(os, "open", refusing(real_open))
    monkeypatch.setattr(os, "mkdir", refusing(real_mkdir))
    assert cli.main(words_of(command, source, source.parent / "out" / "o.safetensors")) == 2
    assert "Read-only file system; choose another folder" in capsys.readouterr().err
