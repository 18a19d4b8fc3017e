"""What was learned for one model, layer, target or method is not used for another in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from drsa_core import PairStore, ProvenanceWarning, RandomSubspaces, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient, SmoothGrad
from zennit.canonizers import AttributeCanonizer, Canonizer, SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus
from zennit.core import Composite
from zennit.torchvision import ResNetCanonizer

import captum_drsa
import zennit_drsa
from captum_drsa import DisentangledAttribution, IntegratedGradientsContext
from zennit_drsa import DisentangledAttributor, DisentangledComposite

SOLVER = RandomSubspaces(2, random_state=0)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def one_hot(target: int) -> Tensor:
    return torch.eye(5)[[target, target]]


def explain_zennit(
    model: nn.Module,
    layer: str,
    composite: Composite | None,
    subspaces: Subspaces,
    target: int,
    **options: Any,
) -> Tensor:
    run = DisentangledAttributor(Gradient(model, composite), layer, subspaces, **options)
    run.concept_relevance(images(), one_hot(target))
    maps: Tensor = run(images(), one_hot(target))[1]
    return maps


def explain_captum(
    model: nn.Module, layer: str, context: Any, subspaces: Subspaces, target: int, **options: Any
) -> Tensor:
    run = DisentangledAttribution(InputXGradient(model), layer, subspaces, context, **options)
    run.concept_relevance(images(), target)
    maps: Tensor = run.attribute(images(), target=target)
    return maps


def learned(backend: str, tmp_path: Any) -> Subspaces:
    model = network()
    if backend == "zennit":
        zennit = DisentangledAttributor(Gradient(model, EpsilonPlus()), "1")
        subspaces = zennit.fit([images()], 2, solver=SOLVER, random_state=0).subspaces
    else:
        captum = DisentangledAttribution(InputXGradient(model), "1")
        subspaces = captum.fit([images()], 2, solver=SOLVER, random_state=0).subspaces
    assert subspaces is not None
    subspaces.save(tmp_path / "concepts.safetensors")
    return Subspaces.load(tmp_path / "concepts.safetensors")


MERGED = EpsilonPlus(canonizers=[SequentialMergeBatchNorm()])
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("zennit", {"model": network(1)}, "model: weights"),
    ("zennit", {"layer": "3"}, "layer: '1' there, '3' here"),
    ("zennit", {"how": EpsilonPlus(epsilon=1e-2)}, "method: 'LRP"),
    ("zennit", {"how": MERGED}, "canonizers: 'none' there, 'SequentialMergeBatchNorm [0-9a-f]{12}' here"),
    ("zennit", {"how": None}, "method: 'LRP.*GradientContext"),
    ("zennit", {"target": 3}, "target: 2 there, 3 here"),
    ("captum", {"model": network(1)}, "model: weights"),
    ("captum", {"layer": "3"}, "layer: '1' there, '3' here"),
    ("captum", {"how": IntegratedGradientsContext(20)}, "method: 'GradientContext.*Integrated.*20"),
    ("captum", {"target": 3}, "target: 2 there, 3 here"),
]


@pytest.mark.parametrize(("backend", "change", "named"), CHANGES)
def test_subspaces_used_for_something_else_are_warned_about(backend, change, named, tmp_path) -> None:
    subspaces = learned(backend, tmp_path)
    explain: Callable[..., Tensor] = explain_zennit if backend == "zennit" else explain_captum
    own = EpsilonPlus() if backend == "zennit" else None
    used = {"model": network(), "layer": "1", "how": own, "subspaces": subspaces, "target": 2} | change

    def run(**options: Any) -> Tensor:
        return explain(used["model"], used["layer"], used["how"], subspaces, used["target"], **options)

    with pytest.warns(ProvenanceWarning, match=named):
        run()
    with pytest.raises(ValueError, match=named):
        run(strict=True)


@pytest.mark.parametrize(("backend", "change", "named"), CHANGES[:5])
def test_subspaces_in_a_composite_are_compared_too(backend, change, named, tmp_path) -> None:
    used: dict[str, Any] = {"model": network(), "layer": "1", "how": EpsilonPlus()} | change
    subspaces = learned(backend, tmp_path)
    composite = DisentangledComposite(used["how"], used["layer"], subspaces, 0)
    with pytest.warns(ProvenanceWarning, match=named):
        Gradient(used["model"], composite)(images(), one_hot(2))
    strict = DisentangledComposite(used["how"], used["layer"], subspaces, 0, strict=True)
    with pytest.raises(ValueError, match=named):
        Gradient(used["model"], strict)(images(), one_hot(2))
    right = DisentangledComposite(EpsilonPlus(), "1", subspaces, 0, strict=True)
    Gradient(network(), right)(images(), one_hot(2))


@pytest.mark.parametrize("backend", ["zennit", "captum"])
def test_subspaces_used_as_they_were_learned_are_not(backend, tmp_path) -> None:
    subspaces = learned(backend, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        if backend == "zennit":
            explain_zennit(network(), "1", EpsilonPlus(), subspaces, 2, strict=True)
            noisy = SmoothGrad(network(), EpsilonPlus(), n_iter=2)  # other maps, but the same contexts
            DisentangledAttributor(noisy, "1", subspaces, strict=True)(images(), one_hot(2))
        else:
            explain_captum(network(), "1", None, subspaces, 2, strict=True)
            run = DisentangledAttribution(Saliency(network()), "1", subspaces, strict=True)
            run.attribute(images(), target=torch.tensor([2, 2]))


@pytest.mark.parametrize("backend", ["zennit", "captum"])
def test_subspaces_of_many_classes_serve_each_of_them(backend) -> None:
    """Learned for the labels of a loader, or for a list of targets."""
    model, labels = network(), torch.tensor([1, 3])
    for target in ("label", [1, 3], labels):
        run: Any = (
            DisentangledAttributor(Gradient(model), "1")
            if backend == "zennit"
            else DisentangledAttribution(InputXGradient(model), "1")
        )
        run.fit([(images(), labels)], target, solver=SOLVER, random_state=0)
        run.strict = True
        assert run.explain(images(), 3).maps.shape == (2, 2, 3, 8, 8)
        if not isinstance(target, str):
            with pytest.raises(ValueError, match=r"target: \[1, 3\] there, 2 here"):
                run.explain(images(), 2)


def test_canonizers_are_told_apart_by_type_and_parameters() -> None:
    def described(*canonizers: Canonizer) -> str:
        run = DisentangledAttributor(Gradient(network(), EpsilonPlus(canonizers=list(canonizers))), "1")
        pairs = run.collect([images()], 2, positions=1, random_state=0)
        assert pairs.provenance is not None
        assert pairs.provenance.canonizers is not None
        return pairs.provenance.canonizers

    def attributes(key: str) -> Canonizer:
        return AttributeCanonizer(lambda name, module: {key: 1} if name == "0" else None)

    def cases() -> list[tuple[Canonizer, ...]]:
        merge = SequentialMergeBatchNorm()
        return [
            (),
            (merge,),
            (ResNetCanonizer(),),
            (attributes("a"),),
            (attributes("b"),),
            (merge, attributes("a")),
        ]

    found = [described(*case) for case in cases()]
    assert len(set(found)) == len(found)
    assert found == [described(*case) for case in cases()]
    assert found[0] == "none"


def first_minus_second(output: Tensor) -> Tensor:
    return output[:, 0] - output[:, 1]


def third(output: Tensor) -> Tensor:
    return output[:, 2]


@pytest.mark.parametrize("backend", ["zennit", "zennit lrp", "captum"])
@pytest.mark.parametrize(
    ("made", "used", "difference"),
    [
        (first_minus_second, first_minus_second, None),
        (first_minus_second, third, "first_minus_second .* there, .*third .* here"),
        (2, first_minus_second, "target: 2 there, .*first_minus_second"),
        (first_minus_second, 2, "first_minus_second .* there, 2 here"),
        (-1, 4, None),
        ([-1, 3], [3, 4], None),
        (-1, 3, "target: 4 there, 3 here"),
        ([-1, 4], -2, "target: 4 there, 3 here"),
    ],
)
def test_targets_are_compared_as_they_are_given(backend, made, used, difference) -> None:
    model = network()
    run: Any = (
        DisentangledAttribution(InputXGradient(model), "1", strict=True)
        if backend == "captum"
        else DisentangledAttributor(
            Gradient(model, EpsilonPlus() if "lrp" in backend else None), "1", strict=True
        )
    )
    run.fit([images()], made, solver=SOLVER, random_state=0)
    for call in (run.concept_relevance, run.explain):
        if difference is None:
            call(images(), used)
        else:
            with pytest.raises(ValueError, match=difference):
                call(images(), used)
    if backend != "captum" and made == 2:  # Zennit's attr_output says which outputs it starts from
        run(images(), one_hot(2))
        run.concept_relevance(images(), lambda output: one_hot(2) * output)
        with pytest.raises(ValueError, match="target: 2 there, 3 here"):
            run(images(), one_hot(3))


def test_negative_targets_with_masks_among_the_inputs() -> None:
    """To count the outputs, the model was to be differentiated by its masks."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 5)

        def forward(self, x: Tensor, mask: Tensor):
            return self.head(self.layer(x).relu() * mask)

    inputs = (torch.randn(2, 4), torch.ones(2, 1, dtype=torch.long))
    run = DisentangledAttribution(IntegratedGradients(Masked()), "layer", strict=True)
    run.fit([(inputs, None)], 4, solver=SOLVER)
    torch.testing.assert_close(run.concept_relevance(inputs, -1), run.concept_relevance(inputs, 4))


def test_both_adapters_collect_the_same_pairs() -> None:
    """Gradient × Input: the same contexts, and positions by seed and image alone."""
    model = network()
    options: dict[str, Any] = {"positions": 3, "random_state": 7}
    zennit = zennit_drsa.collect(model, None, "1", [images()], 2, **options)
    captum = captum_drsa.collect(InputXGradient(model), "1", [images()[:1], images()[1:]], 2, **options)
    torch.testing.assert_close(zennit.a, captum.a)
    torch.testing.assert_close(zennit.c, captum.c)
    assert torch.equal(zennit.image, captum.image)
    assert zennit.provenance is not None
    assert captum.provenance is not None
    assert zennit.provenance.method == captum.provenance.method == "GradientContext()"
    assert not zennit.provenance.differences(captum.provenance)


STORE_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"layer": "3"}, "layer"),
    ({"target": 3}, "target"),
    ({"model": network(1)}, "model"),
    ({"how": "other"}, "method"),
]


@pytest.mark.parametrize("backend", ["zennit", "captum"])
@pytest.mark.parametrize(("change", "named"), STORE_CHANGES)
def test_a_store_refuses_another_collection(backend, change, named, tmp_path) -> None:
    runs: list[int] = []

    def gather(settings: dict[str, Any]) -> Any:
        model, options = settings["model"], {k: settings[k] for k in ("positions", "random_state")}
        handle = model.register_forward_hook(lambda *_: runs.append(1))
        options |= {"store": PairStore(tmp_path)}
        try:
            if backend == "zennit":
                composite = EpsilonPlus() if settings["how"] is None else None
                args = (model, composite, settings["layer"], [images()], settings["target"])
                return zennit_drsa.collect(*args, **options)
            method = (InputXGradient if settings["how"] is None else IntegratedGradients)(model)
            return captum_drsa.collect(method, settings["layer"], [images()], settings["target"], **options)
        finally:
            handle.remove()

    own = {"model": network(), "layer": "1", "target": 2, "positions": 3, "random_state": 0, "how": None}
    first = gather(own)
    n_runs = len(runs)
    assert torch.equal(gather(own).a, first.a)
    with pytest.raises(ValueError, match=f"another collection: .*{named}"):
        gather(own | change)
    assert len(runs) == n_runs  # refused before anything is computed
