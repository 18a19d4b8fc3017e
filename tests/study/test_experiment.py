"""Experiments on a small network: they go on, add up, and become tables and figures."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drsa_core import Pairs, Subspaces
from drsa_core.evaluation import Preprocessing
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("cv2")
pytest.importorskip("matplotlib")
from drsa_audit import Network
from study.classes import find_classes
from study.experiment import Evaluation, Experiment, OutOfTime
from study.figures import draw_figures
from study.jobs import learned_job, random_job, single_job
from study.results import Series, on_common_images
from study.tables import write_tables

from tests.audit.photos import random_photos


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 4, stride=4)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).relu().mean((2, 3)))
        return out


class CountingBackend:
    """Gradient × Input at `features`, by hand; counts what it is asked for."""

    def __init__(self, model: Model) -> None:
        self.model, self.collected, self.explained = model, 0, 0

    def collect(self, batches, target, positions, seed, store) -> Pairs:
        self.collected += 1
        a, c, _ = self._context(torch.cat(batches), target)
        return Pairs(a.movedim(1, -1).flatten(0, 2), c.movedim(1, -1).flatten(0, 2))

    def explain(self, inputs: Tensor, target: int, subspaces: Subspaces) -> Tensor:
        self.explained += 1
        a, c, x = self._context(inputs, target)
        parts = [subspaces.project_context(c, k) for k in range(subspaces.n_subspaces)]
        maps = [torch.autograd.grad(a, x, part, retain_graph=True)[0] * x for part in parts]
        return torch.stack(maps, 1).detach()

    def _context(self, inputs: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
        x = inputs.clone().requires_grad_()
        a = self.model.features(x)
        score = self.model.head(a.relu().mean((2, 3)))[:, target].sum()
        return a, torch.autograd.grad(score, a, retain_graph=True)[0], x


def experiment_on(out: Path, model: Model, settings: dict[str, str] | None = None, deadline=None):
    network = Network(model, 32, Preprocessing.from_mean_std(0.5, 0.25), "features", lambda layer: None)
    evaluation = Evaluation("squares", "constant", patch_size=8)
    return Experiment(network, out, settings or {"layer": "features"}, evaluation, 20, 0, 2, deadline)


@pytest.fixture
def model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model().eval()


def test_a_run_goes_on_where_it_ended_and_writes_tables(tmp_path, model) -> None:
    data = random_photos(tmp_path / "data", ["001_a", "003_b"], 3, 2)
    classes = find_classes(data)
    jobs = [learned_job("drsa", 2, 0, with_whole=True), single_job("prca", [1], 0)]
    jobs += [single_job("pca", [1], 0), learned_job("dsa", 2, 0), random_job(2, 0), random_job(2, 1)]
    out = tmp_path / "out"

    backend = CountingBackend(model)
    first = experiment_on(out, model).run("main", "features", backend, classes, jobs[:2])
    assert backend.collected == 2
    assert len(first) == 2 * 3
    backend = CountingBackend(model)
    late = experiment_on(out, model, deadline=time.monotonic() - 1)
    with pytest.raises(OutOfTime):
        late.run("main", "features", backend, classes, jobs)
    assert backend.explained == 0
    experiment = experiment_on(out, model)
    records = experiment.run("main", "features", backend, classes, jobs)
    assert (backend.collected, backend.explained) == (0, 2 * 4)  # pairs and the first two jobs were there
    assert records[: len(first)] == first

    for k in (4,):
        records += experiment.run("subspaces", "features", backend, classes, [learned_job("drsa", k, 0)])
        records += experiment.run("subspaces", "features", backend, classes, [learned_job("dsa", k, 0)])
    dims = [single_job(method, [1, 2, 4], 0) for method in ("prca", "random")]
    records += experiment.run("dims", "features", backend, classes, dims)
    text = write_tables(records, out, "features", 2)
    assert "### K = 2 subspaces at features" in text
    assert "| random (2 seeds) |" in text
    assert "d = 4" in text
    rows = json.loads((out / "tables.json").read_text())
    (whole,) = [r for r in rows if r["method"] == "whole" and r["metric"] == "aupc"]
    by_hand = [sum(r["aupc"]) / 2 for r in records if r["method"] == "whole"]
    assert whole["mean"] == pytest.approx(sum(by_hand) / 2)
    assert whole["n_images"] == 4
    # d = 1 of the nested subspaces is the single subspace.
    nested, alone = ([r for r in rows if r["method"] == "prca" and r["stage"] == s] for s in ("dims", "main"))
    assert [r["mean"] for r in nested if r["dims"] == 1] == pytest.approx(
        [r["mean"] for r in alone], rel=1e-5
    )
    drawn = {file.name for file in draw_figures(records, out, "features", 2)}
    assert {"flipping_k2.png", "dims.png", "subspaces.png", "delta_aupc.png", "training.png"} <= drawn

    with pytest.raises(ValueError, match="begun with other settings \\(layer: features → other\\)"):
        experiment_on(out, model, {"layer": "other"})


def test_tables_of_one_class_are_json(tmp_path, model) -> None:
    classes = find_classes(random_photos(tmp_path / "data", ["001_a"], 3, 2))
    out = tmp_path / "out"
    jobs = [single_job("prca", [1], 0), single_job("pca", [1], 0)]
    records = experiment_on(out, model).run("main", "features", CountingBackend(model), classes, jobs)
    write_tables(records, out, "features", 2)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    rows = json.loads((out / "tables.json").read_text(), parse_constant=refuse)
    assert {row["standard_error"] for row in rows} == {None}  # there is no spread over one class
    assert "nan" not in (out / "tables.csv").read_text()


def test_maps_of_blocks_add_up_to_those_of_their_union(model) -> None:
    backend = CountingBackend(model)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    pairs = backend.collect([x], 1, 20, 0, None)
    for job in (random_job(4, 0), single_job("prca", [1, 3, 4], 0)):
        fine = job.fit(pairs)
        blocks = backend.explain(x, 1, fine)
        for reading in job.readings:
            for group in reading.groups:
                basis = torch.cat([fine.blocks[i] for i in group], dim=1)
                union = backend.explain(x, 1, Subspaces(basis, [basis.shape[1]]))
                torch.testing.assert_close(blocks[:, list(group)].sum(1), union[:, 0], atol=1e-6, rtol=0)
    assert [reading.dims for reading in job.readings] == [1, 3, 4]


def test_numbers_of_classes_are_of_the_classes_of_the_images() -> None:
    """Means of a table that is about common images were those of all classes for ablation and stability."""
    images = (("1_x", "a"), ("2_y", "b"))
    stability = {"stability": {"1_x": 0.9, "2_y": 0.1}}
    both = Series("main", "1", "drsa", 2, None, images, {"aupc": torch.tensor([1.0, 5.0])}, [], 1, stability)
    alone = replace(both, method="nmf", images=images[:1], values={"aupc": torch.tensor([2.0])})
    found, _ = on_common_images(both, alone)
    assert (found.summary("aupc").mean, found.summary("stability").mean) == (1.0, 0.9)
    assert both.summary("stability").mean == 0.5


def test_images_of_one_name_in_two_folders_stay_apart() -> None:
    images = tuple(("1_x", name) for name in ("a/1.png", "b/1.png", "b/2.png"))
    series = [
        Series("main", "layer", method, 2, None, images, {"aupc": torch.tensor(values)}, [], 1)
        for method, values in (("drsa", [1.0, 2.0, 3.0]), ("dsa", [1.0, 5.0, 3.0]))
    ]
    assert [s.values["aupc"].tolist() for s in on_common_images(*series)] == [[1, 2, 3], [1, 5, 3]]
