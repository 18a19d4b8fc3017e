"""Files: every damage is noticed, and no writer harms an old file or another writer."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drsa_core import Pairs, Subspaces
from drsa_core.storage import locked, write_atomically
from safetensors.torch import load_file, save_file


def environment() -> dict[str, str]:
    """The parent's import path for a child process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def save(path: Path, size: int = 2) -> None:
    Subspaces(torch.eye(size), [size], metadata={"layer": "größe"}).save(path)


def test_every_flipped_bit_is_noticed(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    whole = path.read_bytes()
    # All bits of the lengths and of the first of the header, and one bit of every other byte.
    for position in sorted({*range(64 + 8 * 100), *(8 * byte + byte % 8 for byte in range(len(whole)))}):
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


def test_the_same_content_has_the_same_bytes(tmp_path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_files_of_version_0_2_still_load_and_those_of_later_ones_say_so(tmp_path) -> None:
    path = tmp_path / "old.safetensors"
    old = {"project": "captum-zennit-drsa", "kind": "subspaces", "format_version": "2"}
    header = '{"dims": [2], "names": ["x"], "metadata": {"layer": "a"}}'
    save_file({"basis": torch.eye(2)}, path, {**old, "header": header})
    loaded = Subspaces.load(path)
    assert (loaded.names, loaded.metadata) == (("x",), {"layer": "a"})
    save_file({"basis": torch.eye(2)}, path, {**old, "format_version": "9", "header": header})
    with pytest.raises(ValueError, match="upgrade"):
        Subspaces.load(path)
    save_file({"basis": torch.eye(2)}, path)
    with pytest.raises(ValueError, match="does not hold subspaces"):
        Subspaces.load(path)


def test_other_programs_can_read_the_files(tmp_path) -> None:
    pairs = Pairs(torch.rand(3, 2), torch.rand(3, 2).double(), torch.tensor([0, 1, 2]))
    pairs.save(tmp_path / "p.safetensors")
    found = load_file(tmp_path / "p.safetensors")
    assert torch.equal(found["a"], pairs.a)
    assert torch.equal(found["image"], pairs.image)


def test_a_replaced_file_keeps_its_permissions_and_links_stay(tmp_path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "real.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    save(link)  # at first it names nothing
    target.chmod(0o600)
    save(link, 3)
    assert link.is_symlink()
    assert Subspaces.load(target).n_features == 3
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["real.safetensors"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "s.safetensors"
    save(path)
    before = path.read_bytes()
    monkeypatch.setattr("drsa_core.storage.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(path, 3)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


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
    assert f"could not write {path}: File too large" in ended.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s.safetensors"]


def test_a_folder_has_one_writer_who_removes_what_killed_ones_left(tmp_path) -> None:
    leftover, of_user = tmp_path / ".s.safetensors.0123abcd.tmp", tmp_path / ".s.safetensors.20261118"
    leftover.touch()
    of_user.touch()
    with locked(tmp_path), pytest.raises(RuntimeError, match="another writer"), locked(tmp_path):
        pytest.fail("the block was entered")
    assert not leftover.exists()
    assert of_user.exists()


def test_places_that_cannot_be_written_are_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"could not write .*missing"):
        save(tmp_path / "missing" / "s.safetensors")
    with pytest.raises(OSError, match="it is no file"):
        write_atomically(tmp_path, b"")
    with pytest.raises(FileNotFoundError, match="nothing"):
        Subspaces.load(tmp_path / "nothing")


def test_empty_pairs_survive_a_file(tmp_path) -> None:
    Pairs(torch.zeros(0, 3), torch.zeros(0, 3)).save(tmp_path / "p.safetensors")
    assert Pairs.load(tmp_path / "p.safetensors").a.shape == (0, 3)
