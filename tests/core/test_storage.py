"""Files: every damage is noticed, and no writer harms an old file or another writer."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from drsa_core import Pairs, Subspaces
from drsa_core.atomic_files import write_atomically
from drsa_core.file_locks import try_lock
from safetensors.torch import load_file, save_file


def save(path: Path, size: int = 2) -> None:
    Subspaces(torch.eye(size), [size], metadata={"layer": "größe"}).save(path)


def test_every_flipped_bit_is_noticed(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    whole = path.read_bytes()
    # All bits of what says how to read the file, and one bit, each time another, of every byte.
    begin = whole.index(b"format_version")
    keys = range(8 * begin, 8 * (begin + 24))
    one_each = (8 * byte + byte % 8 for byte in range(len(whole)))
    for position in sorted({*range(64), *keys, *one_each}):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            Subspaces.load(path)
    path.write_bytes(whole)
    assert torch.equal(Subspaces.load(path).basis, torch.eye(2))


def test_every_truncated_or_padded_file_is_noticed(tmp_path) -> None:
    path = tmp_path / "p.safetensors"
    Pairs(torch.rand(2, 3), torch.rand(2, 3)).save(path)
    whole = path.read_bytes()
    for damaged in [*(whole[:end] for end in range(0, len(whole), 7)), whole + b"\0", b"\xff" * 64]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            Pairs.load(path)


def test_files_of_the_first_format_still_load(tmp_path) -> None:
    path = tmp_path / "old.safetensors"
    described = {"project": "captum-zennit-drsa", "kind": "subspaces", "format_version": "1"}
    header = '{"dims": [2], "names": ["x"], "metadata": {"layer": "a"}}'
    save_file({"basis": torch.eye(2)}, path, {**described, "header": header})
    loaded = Subspaces.load(path)
    assert (loaded.names, loaded.metadata) == (("x",), {"layer": "a"})
    assert loaded.provenance is None
    for wrong in ("[]", "{", '{"dims": [1], "names": ["x"], "metadata": {}}', '{"dims": 2, "names": [1]}'):
        save_file({"basis": torch.eye(2)}, path, {**described, "header": wrong})
        with pytest.raises(ValueError, match=str(path)):
            Subspaces.load(path)
    described |= {"kind": "pairs", "header": "{}"}
    values = {"a": torch.rand(2, 3), "c": torch.rand(2, 3), "image": torch.tensor([0, 1])}
    save_file(values, path, described)
    assert torch.equal(Pairs.load(path).a, values["a"])
    save_file({"a": torch.rand(2, 3)}, path, described)
    with pytest.raises(ValueError, match="lacks the entry 'c'"):
        Pairs.load(path)


def test_other_programs_can_read_the_files(tmp_path) -> None:
    pairs = Pairs(torch.rand(3, 2), torch.rand(3, 2), torch.tensor([0, 1, 2]))
    pairs.save(tmp_path / "p.safetensors")
    found = load_file(tmp_path / "p.safetensors")
    assert torch.equal(found["a"], pairs.a)
    assert torch.equal(found["image"], pairs.image)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_new_file_has_the_permissions_of_the_umask(tmp_path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "s.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s.safetensors").stat().st_mode) == 0o666 & ~umask


def test_a_replaced_file_keeps_its_permissions(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    path.chmod(0o600)
    save(path, 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Subspaces.load(path).n_features == 3


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    for size in (2, 3):  # at first it names nothing
        save(link, size)
        assert link.is_symlink()
        assert Subspaces.load(target).n_features == size
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["real.safetensors"]


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        mode = os.fstat(descriptor)
        calls.append("folder" if stat.S_ISDIR(mode.st_mode) else f"file of {mode.st_size}")
        fsync(descriptor)

    def recorded_replace(source, target) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_atomically(tmp_path / "x", [b"abc", b"de"])
    assert calls == ["file of 5", "rename", "folder"]
    assert (tmp_path / "x").read_bytes() == b"abcde"


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    before = path.read_bytes()
    write = os.write

    def full(descriptor: int, data) -> int:
        if len(data) > 100:
            return write(descriptor, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"could not write .*s\.safetensors: No space left"):
        save(path, 3)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_disk_that_is_really_full_leaves_the_old_file(small_disk) -> None:
    path = small_disk / "s.safetensors"
    save(path, 8)
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"could not write .*s.safetensors: No space left on device"):
        save(path, 512)  # 1 MB on a disk of 256 kB
    assert path.read_bytes() == before
    assert os.listdir(small_disk) == ["s.safetensors"]
    save(path, 16)  # and there is room again
    assert len(Subspaces.load(path).basis) == 16


LIMITED = """
import resource, sys, torch
from drsa_core import Subspaces
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
Subspaces(torch.eye(512), [512]).save(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_file_larger_than_the_system_allows_leaves_the_old_one(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    before = path.read_bytes()
    command = [sys.executable, "-c", LIMITED, str(path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"could not write {path}: File too large" in ended.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.safetensors"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path) -> None:
    def leftover(name: str, age: float) -> Path:
        file = tmp_path / name
        file.write_bytes(b"half")
        then = file.stat().st_mtime - age
        os.utime(file, (then, then))
        return file

    stale = [leftover(".s.safetensors.0123abcd.tmp", 4000), leftover(".s.safetensors.a_b1c2d3.tmp", 4000)]
    kept = [
        leftover(".s.safetensors.00000000.tmp", 60),  # perhaps not locked yet
        leftover(".s.safetensors.11111111.tmp", 4000),  # of a writer at work
        leftover(".t.safetensors.0123abcd.tmp", 4000),  # of another file
        leftover("s.safetensors.0123abcd.tmp", 4000),
        leftover(".s.safetensors.backup", 4000),
        leftover(".s.safetensors.20261118", 4000),  # of the user, with a date
    ]
    descriptor = os.open(kept[1], os.O_RDWR)
    try:
        assert try_lock(descriptor)
        save(tmp_path / "s.safetensors")
    finally:
        os.close(descriptor)
    assert not any(file.exists() for file in stale)
    assert all(file.exists() for file in kept)
    save(tmp_path / "s.safetensors")
    assert not kept[1].exists()  # its writer is gone


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_replaced_by_a_file(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a pipe or a device"):
        save(pipe)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_killed_writer_leaves_the_old_file(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    code = f"""
import os, signal
from drsa_core.atomic_files import write_atomically
def chunks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically({str(path)!r}, chunks())
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, env=environment())
    assert killed.returncode == -9
    assert Subspaces.load(path).n_features == 2


def environment() -> dict[str, str]:
    """The parent's import path for a child process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_places_that_cannot_be_written_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing; make it first"):
        save(tmp_path / "missing" / "s.safetensors")
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file at"):
        Subspaces.load(tmp_path)


def test_empty_pairs_survive_a_file(tmp_path) -> None:
    Pairs(np.zeros((0, 3)), np.zeros((0, 3))).save(tmp_path / "p.safetensors")
    assert Pairs.load(tmp_path / "p.safetensors").a.shape == (0, 3)
