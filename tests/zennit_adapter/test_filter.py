"""`SubspaceFilter` and `DisentangledComposite`: values, placement, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus, GuidedBackprop, LayerMapComposite
from zennit.core import Composite
from zennit.rules import Epsilon, Flat, Pass
from zennit.types import Linear

from tests.model_state import model_state
from tests.toys import Around, arriving_at, small_input, small_model, subspaces
from zennit_drsa import DisentangledAttributor, DisentangledComposite, SubspaceFilter

ALL = torch.ones(2, 5)


def literal_filter(a: Tensor, r: Tensor, u: Tensor) -> Tensor:
    """R⁽ᵏ⁾ = a ⊙ U_kU_kᵀ(R ⊘ a), 0 where a = 0, position by position."""
    result = torch.zeros_like(r)
    for n in range(a.shape[0]):
        for y in range(a.shape[2]):
            for x in range(a.shape[3]):
                here, relevance = a[n, :, y, x], r[n, :, y, x]
                c = torch.zeros_like(here)
                for j in range(len(c)):
                    if here[j] != 0:
                        c[j] = relevance[j] / here[j]
                result[n, :, y, x] = here * (u @ (u.T @ c))
    return result


def before_and_after(composite: Composite, unfiltered: Composite | None, layer: str) -> Any:
    """Activation at the layer, and what arrives there before and after the filter."""
    model, input = small_model(), small_input()
    start = torch.eye(5, dtype=torch.float64)[[1, 1]]
    a, after = arriving_at(model, composite, layer, input, start)
    _, before = arriving_at(model, unfiltered, layer, input, start)
    return a, before, after


@pytest.mark.filterwarnings("ignore:.*sits on zero activations")
@pytest.mark.parametrize("layer", ["act", "relu", "middle", "stem", "pool"])
def test_relevance_is_filtered_by_the_formula_and_the_forward_pass_is_untouched(layer):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    expected_output, names = model(input), [name for name, _ in model.named_modules()]
    composite = EpsilonPlus(canonizers=[SubspaceFilter(layer, blocks, 1)])
    with composite.context(model):
        assert torch.equal(model(input), expected_output)
        assert [name for name, _ in model.named_modules()] == names
    a, before, after = before_and_after(composite, EpsilonPlus(), layer)
    torch.testing.assert_close(after, literal_filter(a, before, blocks.blocks[1]))
    assert after.abs().max() > 0


@pytest.mark.parametrize("composite", [None, GuidedBackprop()])
def test_gradients_are_projected(composite):
    blocks = subspaces(6)
    _, before, after = before_and_after(DisentangledComposite(composite, "act", blocks, 2), composite, "act")
    u = blocks.blocks[2]
    torch.testing.assert_close(after, torch.einsum("ij,njyx->niyx", u @ u.T, before))


@pytest.mark.filterwarnings("ignore:.*sits on zero activations")
def test_what_flows_backwards_can_be_said():
    blocks = subspaces(6)
    composite = DisentangledComposite(None, "act", blocks, 2, signal="relevance")
    a, before, after = before_and_after(composite, None, "act")
    torch.testing.assert_close(after, literal_filter(a, before, blocks.blocks[2]))


def test_non_orthogonal_concepts_use_the_dual():
    """Note I: the context passes back through U_kV_kᵀ."""
    basis = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    blocks = Subspaces(basis, [2, 4], dual=torch.linalg.inv(basis).T)
    _, before, after = before_and_after(DisentangledComposite(None, "act", blocks, 1), None, "act")
    expected = torch.einsum("ij,njyx->niyx", blocks.blocks[1] @ blocks.dual_blocks[1].T, before)
    torch.testing.assert_close(after, expected)


def test_one_concept_for_each_example():
    model, input, blocks = small_model(), small_input(3), subspaces(6)

    def run(concept):
        composite = DisentangledComposite(EpsilonPlus(), "relu", blocks, concept)
        return Gradient(model, composite)(input, torch.ones(3, 5))[1]

    mixed = run(torch.tensor([2, 0, 2]))
    torch.testing.assert_close(mixed, torch.stack([run(2)[0], run(0)[1], run("S3")[2]]))
    torch.testing.assert_close(run(np.array([2, 0, 2])), mixed)
    torch.testing.assert_close(run(np.int64(2))[0], mixed[0])
    with pytest.raises(ValueError, match=r"the batch has 3 examples.*\(2,\)"):
        run([0, 1])


def test_all_concepts_are_the_whole_or_the_span():
    model, input = small_model(), small_input()
    whole = Gradient(model, EpsilonPlus())(input, ALL)[1]
    everything = DisentangledComposite(EpsilonPlus(), "relu", subspaces(6))
    torch.testing.assert_close(Gradient(model, everything)(input, ALL)[1], whole)
    partial = subspaces(6, dims=[2, 1])
    composites = [DisentangledComposite(EpsilonPlus(), "relu", partial, k) for k in (None, 0, 1)]
    span, *parts = (Gradient(model, composite)(input, ALL)[1] for composite in composites)
    torch.testing.assert_close(span, sum(parts))
    assert (span - whole).abs().max() > 1e-3 * whole.abs().max()


def test_filters_at_two_layers_compose():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    before = model_state(model)

    def run(lower, upper):
        filters = [SubspaceFilter("relu", blocks, lower), SubspaceFilter("act", blocks, upper)]
        return Gradient(model, EpsilonPlus(canonizers=filters))(input, ALL)[1]

    torch.testing.assert_close(
        sum(run(i, j) for i in range(3) for j in range(3)), Gradient(model, EpsilonPlus())(input, ALL)[1]
    )
    after = model_state(model)
    # Zennit 1's own rules leave other Parameter objects behind, of the same values.
    assert [after[key] for key in before if ": " in key] == [before[key] for key in before if ": " in key]
    assert all(after[key][-2:] == value[-2:] for key, value in before.items() if ": " not in key and value)


def test_filters_may_be_removed_in_any_order():
    model, blocks = small_model(), subspaces(6)
    before = model_state(model)
    first, second = (SubspaceFilter(layer, blocks).apply(model)[0] for layer in ("act", "relu"))
    model(small_input())
    for applied in (first, second, second):
        applied.remove()
    assert model_state(model) == before


def test_rules_on_the_layer_cover_the_layer_only():
    """`Pass` on the ReLU would jump over a filter that ran inside the ReLU."""
    model, input = small_model(), small_input()
    rules = [(nn.ReLU, Pass()), (Linear, Epsilon())]
    filters = [SubspaceFilter("act", subspaces(6), 0)]
    filtered = Gradient(model, LayerMapComposite(rules, canonizers=filters))(input, ALL)[1]
    whole = Gradient(model, LayerMapComposite(rules))(input, ALL)[1]
    assert (filtered - whole).abs().max() > 1e-3 * whole.abs().max()


def test_a_filter_is_validated_once():
    """As validation takes a pass of the model, not at each of the calls."""
    model, runs = small_model(), []
    model.stem[0].register_forward_hook(lambda *_: runs.append(1))
    for composite in (
        DisentangledComposite(EpsilonPlus(), "act", subspaces(6), 0),
        EpsilonPlus(canonizers=[SubspaceFilter("act", subspaces(6), 0)]),
    ):
        Gradient(model, composite)(small_input(), ALL)
        runs.clear()
        Gradient(model, composite)(small_input(), ALL)
        assert len(runs) == 1


class SumOfChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([child(x) for child in self.children()]).sum(0)


@pytest.mark.parametrize("block", [Around(nn.Conv2d(6, 6, 1)), SumOfChildren()])
def test_layers_whose_forward_goes_through_their_children(block):
    """A module added to such a layer would run in the wrong place, and change the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), block, nn.Flatten(), nn.Linear(6 * 16, 5)).double().eval()
    input, blocks = torch.randn(2, 3, 4, 4, dtype=torch.float64), subspaces(6)
    expected, target = model(input), ALL.double()
    composites = [DisentangledComposite(None, "1", blocks, k) for k in range(3)]
    outputs, maps = zip(*(Gradient(model, c)(input, target) for c in composites), strict=True)
    assert all(torch.equal(output, expected) for output in outputs)
    torch.testing.assert_close(sum(maps), Gradient(model)(input, target)[1])
    _, joint = DisentangledAttributor(Gradient(model), "1", blocks)(input, target)
    torch.testing.assert_close(joint, torch.stack(maps, dim=1))


def test_tokens_with_features_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(30, 3)).double()
    input, start = torch.randn(2, 5, 4, dtype=torch.float64), torch.ones(2, 3)
    composites = [DisentangledComposite(None, "1", subspaces(6), k, -1) for k in range(3)]
    maps = [Gradient(model, composite)(input, start)[1] for composite in composites]
    torch.testing.assert_close(sum(maps), Gradient(model)(input, start)[1])


def test_lost_relevance_is_measured():
    """Flat rules ignore activations, and so give relevance to zero ones."""
    composite = LayerMapComposite([(Linear, Flat())], canonizers=[SubspaceFilter("act", subspaces(6), 0)])
    with pytest.warns(RelevanceLossWarning, match=r"\d+\.\d% of the relevance at layer 'act'"):
        Gradient(small_model(), composite)(small_input(), ALL)


def test_bad_layers():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    with pytest.raises(ValueError, match="no layer 'stam'; did you mean 'stem'"):
        SubspaceFilter("stam", blocks).apply(model)
    with pytest.raises(ValueError, match="'unused' was not run"):
        Gradient(model, DisentangledComposite(None, "unused", blocks))(input)
    with pytest.raises(ValueError, match=r"D = 7.*'act' has 6"):
        Gradient(model, DisentangledComposite(None, "act", subspaces(7)))(input)
    model.act = model.relu
    with pytest.raises(ValueError, match="'relu' runs more than once"):
        Gradient(model, DisentangledComposite(None, "relu", blocks))(input)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "basis": (lambda b: SubspaceFilter("act", b.basis), TypeError, r"drsa_core\.Subspaces, got Tensor"),
    "block": (lambda b: SubspaceFilter("act", b, 3), IndexError, "block 3 does not exist"),
    "blocks": (lambda b: SubspaceFilter("act", b, [0, 3]), IndexError, "block 3 does not exist"),
    "half": (lambda b: SubspaceFilter("act", b, torch.tensor(0.9)), TypeError, "concept must be"),
    "bool": (lambda b: SubspaceFilter("act", b, True), TypeError, "concept must be"),
    "signal": (lambda b: SubspaceFilter("act", b, signal="x"), ValueError, "'relevance', 'gradient' or None"),
    "composite": (lambda b: DisentangledComposite("plus", "act", b), TypeError, "or None, got str"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what):
    make, error, message = BAD[what]
    with pytest.raises(error, match=message):
        make(subspaces(6))


def test_what_is_registered_already():
    model, blocks, inner = small_model(), subspaces(6), EpsilonPlus()
    applied = SubspaceFilter("act", blocks).apply(model)
    with pytest.raises(ValueError, match="'act' has a SubspaceFilter already"):
        SubspaceFilter("act", blocks).apply(model)
    applied[0].remove()
    with inner.context(small_model()), pytest.raises(ValueError, match="EpsilonPlus is registered"):
        DisentangledComposite(inner, "act", blocks).register(model)
    with EpsilonPlus().context(model), pytest.raises(ValueError, match="another Zennit composite"):
        DisentangledComposite(inner, "act", blocks).register(model)
    with pytest.warns(UserWarning, match=r"'stem.1' \(BatchNorm2d\) is in training mode"):
        SubspaceFilter("act", blocks).apply(model.train())
