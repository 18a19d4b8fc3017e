"""A job over many classes: it goes on, names what is damaged, and redoes that alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drsa_core import DRSA, PRCA, ClassIndex, PairStore, fit_many
from torch.utils.data import DataLoader, TensorDataset

from .work import GradientTimesInput, photographs

SOLVER = PRCA(2)


def run(folder: Path, solver: Any = SOLVER, loader: Any = None, **options: Any) -> tuple[ClassIndex, int]:
    """The index, and how many images were explained."""
    explainer = GradientTimesInput()
    loader = photographs() if loader is None else loader
    index = fit_many(explainer, loader, folder, solver, **{"positions": 5, **options})
    return index, explainer.images


def files(folder: Path) -> dict[str, bytes]:
    """Every file of the pass over the data set, with its content."""
    found = [*(folder / "pairs").rglob("*"), *(folder / "batches").rglob("*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in found if file.is_file()}


def test_each_class_is_what_it_is_by_itself(tmp_path) -> None:
    index, images = run(tmp_path, names={1: "one"})
    assert images == 23
    x, labels = photographs().dataset.tensors  # type: ignore[attr-defined]
    assert sorted(index.classes) == sorted(set(labels.tolist()))
    for label in index.classes:
        pairs = PairStore(tmp_path / "pairs" / str(label)).load()
        numbers = (labels == label).nonzero().flatten().tolist()
        assert index.classes[label]["n_images"] == len(numbers)
        # All positions of those images hold the chosen ones, each with the context of its own label.
        everything = GradientTimesInput().collect([x[numbers]], label, None)
        for a, c, image in zip(pairs.a, pairs.c, pairs.image, strict=True):
            of_image = everything.image == image
            same = torch.isclose(everything.a[of_image], a).all(1)
            assert same.sum() == 1
            torch.testing.assert_close(everything.c[of_image][same][0], c)
        assert pairs.provenance is not None
        assert pairs.provenance.target == label
        expected = PRCA(2).fit(pairs).subspaces_
        assert torch.equal(index.subspaces(label).basis, expected.basis)
        assert index.subspaces(label).provenance == pairs.provenance
    assert index.classes[1]["name"] == "one"
    assert ClassIndex.load(tmp_path) == index


def test_only_classes_that_are_wanted(tmp_path) -> None:
    index, images = run(tmp_path, classes=[2, 3])
    labels = photographs().dataset.tensors[1]  # type: ignore[attr-defined]
    assert sorted(index.classes) == [2, 3]
    assert images == int((labels >= 2).sum())
    with pytest.raises(ValueError, match=r"class 1 has no subspaces in .*no such class"):
        index.subspaces(1)
    with pytest.raises(ValueError, match=r"begun with other settings \(classes: \[2, 3\] there, None here\)"):
        run(tmp_path)


def test_a_second_run_does_what_is_missing_and_nothing_else(tmp_path, monkeypatch) -> None:
    index, _ = run(tmp_path)
    before = files(tmp_path)
    assert run(tmp_path) == (index, 0)
    # A batch whose entry is missing, one of whose files is missing, and a class without a result.
    (tmp_path / "batches" / "000002.json").unlink()
    PairStore(tmp_path / "pairs" / "1").files()[0].unlink()
    (tmp_path / "subspaces" / "3.safetensors").unlink()
    (tmp_path / "index.json").unlink()
    fitted = []
    fit = PRCA.fit

    def counted(self: PRCA, *pairs: Any) -> PRCA:
        fitted.append(self)
        return fit(self, *pairs)

    monkeypatch.setattr(PRCA, "fit", counted)
    again, images = run(tmp_path)
    assert images == 6
    assert len(fitted) == 1
    assert files(tmp_path) == before
    assert sorted(again.classes) == sorted(index.classes)
    with pytest.raises(ValueError, match=r"batch 0 of .* has 3 images, but the loader gives 4"):
        run(tmp_path, loader=DataLoader(photographs().dataset, 4))
    with pytest.raises(ValueError, match=r"other settings \(solver"):
        run(tmp_path, PRCA(3))


def test_a_damaged_file_is_named_and_redone_alone(tmp_path) -> None:
    run(tmp_path)
    before = files(tmp_path)
    store = PairStore(tmp_path / "pairs" / "2")
    file = store.files()[1]
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    (tmp_path / "subspaces" / "2.safetensors").unlink()
    index, images = run(tmp_path)
    assert images == 0
    assert list(index.failed) == [2]
    assert str(file) in index.failed[2]
    assert "SHA-256" in index.failed[2]
    assert sorted(index.classes) == [0, 1, 3]  # the others have theirs
    assert list(store.damaged()) == [file]
    file.unlink()
    index, images = run(tmp_path)
    assert images == 3  # the images of that batch
    assert not index.failed
    assert files(tmp_path) == before
    assert not store.damaged()


def test_a_disk_that_is_really_full_is_no_loss_either(small_disk, tmp_path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(160_000))  # of 256 kB: less is left than the job needs
    with pytest.raises(OSError, match=r"could not write .*: No space left"):
        run(small_disk / "job")
    run(tmp_path / "whole")
    done, whole = files(small_disk / "job"), files(tmp_path / "whole")
    assert done
    assert all(whole[name] == content for name, content in done.items())
    filler.unlink()
    _, images = run(small_disk / "job")
    assert 0 < images < 23
    assert files(small_disk / "job") == whole


def test_a_class_that_cannot_be_fitted_does_not_end_the_job(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 6, 6, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.tensor([0, 0, 0, 0, 0, 1])), 2)
    index, _ = run(tmp_path, DRSA(3, random_state=0, n_init=1), loader, positions=2)
    assert list(index.classes) == [0]
    assert "3 subspaces need at least as many samples, got 2" in index.failed[1]
    assert json.loads((tmp_path / "index.json").read_text())["failed"]["1"] == index.failed[1]


def test_a_class_that_is_larger_than_the_memory_is_read_in_chunks(tmp_path) -> None:
    whole, _ = run(tmp_path / "whole")
    chunked, _ = run(tmp_path / "chunked", memory=1)
    for label in whole.classes:
        ours, theirs = chunked.subspaces(label), whole.subspaces(label)
        torch.testing.assert_close(ours.basis, theirs.basis, rtol=0, atol=1e-10)
        assert ours.provenance == theirs.provenance


def test_more_data_is_learned_from_and_other_data_refused(tmp_path) -> None:
    x, labels = photographs().dataset.tensors  # type: ignore[attr-defined]

    def loader(n_images: int, x: torch.Tensor = x, labels: torch.Tensor = labels) -> DataLoader[Any]:
        return DataLoader(TensorDataset(x[:n_images], labels[:n_images]), 3)

    before, _ = run(tmp_path / "grows", loader=loader(18))
    grown, images = run(tmp_path / "grows", loader=loader(23))
    whole, _ = run(tmp_path / "whole", loader=loader(23))
    assert images == 5
    new = set(labels[18:].tolist())
    for label in whole.classes:
        assert torch.equal(grown.subspaces(label).basis, whole.subspaces(label).basis)
        assert grown.classes[label]["n_images"] == whole.classes[label]["n_images"]
        if label in new:
            assert before.classes[label]["n_images"] < grown.classes[label]["n_images"]
    with pytest.raises(ValueError, match="holds 8 batches, but the loader gives 6"):
        run(tmp_path / "grows", loader=loader(18))
    for other in (loader(23, x=x.flip(3)), loader(23, labels=labels.flip(0))):
        with pytest.raises(ValueError, match=r"batch 0 of .* was made from other examples or labels"):
            run(tmp_path / "grows", loader=other)
    with pytest.raises(ValueError, match="shuffle=False"):
        run(tmp_path / "grows", loader=DataLoader(loader(23).dataset, 3, shuffle=True))


def test_batches_that_were_made_anew_are_learned_from_anew(tmp_path) -> None:
    x, labels = photographs().dataset.tensors  # type: ignore[attr-defined]
    run(tmp_path)
    other = x.clone()
    other[3:6] *= -1
    (tmp_path / "batches" / "000001.json").unlink()  # neither the first nor the last
    again, images = run(tmp_path, loader=DataLoader(TensorDataset(other, labels), 3))
    assert images == 3
    for label in set(labels[3:6].tolist()):
        pairs = PairStore(tmp_path / "pairs" / str(label)).load()
        assert torch.equal(again.subspaces(label).basis, PRCA(2).fit(pairs).subspaces_.basis)


def test_what_a_killed_run_left_of_other_labels_is_not_learned_from(tmp_path) -> None:
    x, labels = photographs().dataset.tensors  # type: ignore[attr-defined]
    other = (labels + 1) % 4
    other[:3], other[6:] = labels[:3], labels[6:]
    run(tmp_path / "killed", loader=DataLoader(TensorDataset(x, other), 3))
    # As if the run had been killed before the second batch was in the journal.
    (tmp_path / "killed" / "batches" / "000001.json").unlink()
    again, _ = run(tmp_path / "killed")
    whole, _ = run(tmp_path / "whole")
    assert set(other[3:6].tolist()) - set(labels[3:6].tolist())  # there is a class with a file too many
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    for label in whole.classes:
        assert torch.equal(again.subspaces(label).basis, whole.subspaces(label).basis)


class OwnSolver:
    """One without `get_params`, whose `repr` holds its address."""

    def __init__(self, n_components: int) -> None:
        self.n_components = n_components

    def fit(self, a: Any, c: Any) -> None:
        self.subspaces_ = PRCA(self.n_components).fit(a, c).subspaces_


def test_jobs_with_solvers_of_ones_own_go_on(tmp_path) -> None:
    index, _ = run(tmp_path, OwnSolver(2))
    assert run(tmp_path, OwnSolver(2)) == (index, 0)
    with pytest.raises(ValueError, match=r"other settings \(solver"):
        run(tmp_path, OwnSolver(3))


def test_labels_that_are_no_labels(tmp_path) -> None:
    with pytest.raises(TypeError, match="needs batches"):
        run(tmp_path / "a", loader=[photographs().dataset[0][0][None]])
    for labels in (torch.tensor([0.5, 1]), torch.tensor([[0], [1]])):
        with pytest.raises(ValueError, match="labels must be 2 integers"):
            run(tmp_path / "b", loader=[(torch.zeros(2, 3, 6, 6, dtype=torch.float64), labels)])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        run(tmp_path / "c", loader=[(torch.zeros(1, 3, 6, 6, dtype=torch.float64), torch.tensor([-1]))])
    with pytest.raises(ValueError, match="gave no images"):
        run(tmp_path / "d", loader=[])
