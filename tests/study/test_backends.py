"""Methods of Note D by name on a small network: what they take, and that their maps add up."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")
from captum.attr import IntegratedGradients
from drsa_audit import Network
from drsa_core import Pairs, PairStore, ProvenanceWarning, Subspaces
from drsa_core.evaluation import Preprocessing
from study.backends import Backend, relevance_at
from study.checks import check_by_ablation
from study.classes import find_classes
from study.experiment import Evaluation, Experiment
from study.jobs import learned_job
from zennit.composites import EpsilonPlus

from tests.audit.photos import random_photos


@pytest.fixture
def network() -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 6, 4, stride=4), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()),
            *(nn.Flatten(1), nn.Linear(216, 4)),
        )
    return Network(model.eval(), 32, Preprocessing.from_mean_std(0.5, 0.25), "1", lambda layer: EpsilonPlus())


def images(n: int = 2) -> Tensor:
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(1)) - 0.5


def test_samples_are_the_steps_of_integrated_gradients(network) -> None:
    for samples, steps in ((None, 10), (3, 3)):
        maps = Backend("ig", network, "1", samples).attribute(images(), 2)
        by_hand = IntegratedGradients(network.model).attribute(images(), target=2, n_steps=steps)
        assert torch.equal(maps, by_hand)
    with pytest.raises(ValueError, match="backend must be one of lrp, ig, gxi, shapley, got 'LRP'"):
        Backend("LRP", network, "1")


@pytest.mark.parametrize("name", ["lrp", "gxi", "ig", "shapley"])
def test_pairs_and_maps(tmp_path, network, name: str) -> None:
    backend = Backend(name, network, "1", 2)
    batches = list(images(6).split(2))
    pairs = backend.collect(batches, 1, 5, 0, PairStore(tmp_path / "whole"))
    assert pairs.a.shape == (30, 6)
    subspaces = Subspaces(torch.eye(6), [2, 4])
    maps, whole = backend.explain(batches[0], 1, subspaces), backend.attribute(batches[0], 1)
    assert maps.shape == (2, 2, 3, 32, 32)
    assert whole.shape == (2, 3, 32, 32)
    if name in ("lrp", "gxi"):  # the others hold the context constant (Note B), so that maps may differ
        assert float((maps.sum(1) - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
    assert torch.equal(backend.explain(batches[0], 1, subspaces), maps)  # also of methods that sample
    # A collection that was interrupted goes on with the same contexts.
    backend.collect(batches[:1], 1, 5, 0, PairStore(tmp_path / "parts"))
    assert torch.equal(backend.collect(batches, 1, 5, 0, PairStore(tmp_path / "parts")).c, pairs.c)


def test_relevance_starts_as_the_output() -> None:
    output = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert relevance_at(1)(output).tolist() == [[0, 2, 0], [0, 5, 0]]
    assert relevance_at([0, 2])(output).tolist() == [[1, 0, 0], [0, 0, 6]]
    assert relevance_at(lambda y: y[:, 0] - y[:, 2])(output).tolist() == [[1, 0, -3], [4, 0, -6]]


def test_shapley_ablations_are_the_same_in_every_run(tmp_path, network) -> None:
    classes = find_classes(random_photos(tmp_path / "data", ["001_a"], 2, 2))
    backend, job = Backend("shapley", network, "1", 2), learned_job("drsa", 2, 0)
    found = []
    for run in range(2):
        experiment = Experiment(network, tmp_path / f"out{run}", {}, Evaluation(), say=lambda line: None)
        (record,) = check_by_ablation(experiment, "1", backend, classes, [job])
        found.append(record["relevance"])
    assert found[0] == found[1]


def test_subspaces_of_an_experiment_know_how_they_were_learned(tmp_path, network) -> None:
    (images_of_class,) = find_classes(random_photos(tmp_path / "data", ["001_a"], 2, 1))
    experiment = Experiment(network, tmp_path / "out", {}, Evaluation(fill="constant"))
    lrp = Backend("lrp", network, "1")
    subspaces = experiment.subspaces("1", lrp, images_of_class, learned_job("drsa", 2, 0))
    assert subspaces.provenance is not None
    assert (subspaces.provenance.layer, subspaces.provenance.target) == ("1", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        lrp.explain(images(), 1, subspaces)
    with pytest.warns(ProvenanceWarning, match="method: 'LRP"):
        Backend("gxi", network, "1").explain(images(), 1, subspaces)
    assert isinstance(experiment.pairs("1", lrp, images_of_class), Pairs)
    (record,) = experiment.run_attributions(["ig"], [images_of_class], 7)
    assert record["method"] == "ig"
