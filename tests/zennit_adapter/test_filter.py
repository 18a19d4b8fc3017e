"""`SubspaceFilter` and `DisentangledComposite`: values, placement, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from drsa_core import Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient
from zennit.composites import EpsilonPlus, GuidedBackprop, LayerMapComposite, NameMapComposite
from zennit.core import Composite
from zennit.rules import Epsilon, Pass, ZPlus
from zennit.types import Linear

from tests.model_state import model_state
from tests.zennit_adapter.models import slot_at, small_input, small_model, subspaces
from zennit_drsa import (
    DisentangledAttributor,
    DisentangledComposite,
    RelevanceLossWarning,
    SubspaceFilter,
)
from zennit_drsa.rules import GeneralizedGamma, PositiveGamma, ZeroRule


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


def relevance_at(
    model: nn.Module, composite: Composite, unfiltered: Composite | None, layer: str, input: Tensor
):
    """Activation, and gradient slot before and after the filter, at `layer`."""
    start = torch.zeros(len(input), 5, dtype=input.dtype)
    start[:, 1] = 1
    a, after = slot_at(model, composite, layer, input, start)
    _, before = slot_at(model, unfiltered, layer, input, start)
    return {"a": a, "before": before, "after": after}


@pytest.mark.parametrize("layer", ["act", "relu", "middle", "stem", "pool"])
def test_relevance_is_filtered_by_the_formula_and_the_forward_pass_is_untouched(layer):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    expected_output = model(input)
    composite = EpsilonPlus(canonizers=[SubspaceFilter(layer, blocks, 1)])
    with composite.context(model):
        assert torch.equal(model(input), expected_output)
    seen = relevance_at(model, composite, EpsilonPlus(), layer, input)
    expected = literal_filter(seen["a"], seen["before"], blocks.blocks[1])
    torch.testing.assert_close(seen["after"], expected)
    assert seen["after"].abs().max() > 0


@pytest.mark.parametrize("composite", [None, GuidedBackprop()])
def test_gradients_are_projected(composite):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    seen = relevance_at(model, DisentangledComposite(composite, "act", blocks, 2), composite, "act", input)
    u = blocks.blocks[2]
    expected = torch.einsum("ij,njyx->niyx", u @ u.T, seen["before"])
    torch.testing.assert_close(seen["after"], expected)


def test_slot_can_be_set_by_hand():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    composite = DisentangledComposite(None, "act", blocks, 2, signal="relevance")
    seen = relevance_at(model, composite, None, "act", input)
    expected = literal_filter(seen["a"], seen["before"], blocks.blocks[2])
    torch.testing.assert_close(seen["after"], expected)


def test_one_concept_per_sample():
    model, input, blocks = small_model(), small_input(3), subspaces(6)

    def run(concept):
        composite = DisentangledComposite(EpsilonPlus(), "relu", blocks, concept)
        return Gradient(model, composite)(input, torch.ones(3, 5))[1]

    mixed = run(torch.tensor([2, 0, 2]))
    torch.testing.assert_close(mixed, torch.stack([run(2)[0], run(0)[1], run("S3")[2]]))
    torch.testing.assert_close(run([2, 0, 2]), mixed)
    with pytest.raises(ValueError, match=r"3 samples.*\(2,\)"):
        run([0, 1])


def test_all_concepts_are_the_whole_or_the_span():
    model, input = small_model(), small_input()
    whole = Gradient(model, EpsilonPlus())(input, torch.ones(2, 5))[1]
    everything = DisentangledComposite(EpsilonPlus(), "relu", subspaces(6))
    torch.testing.assert_close(Gradient(model, everything)(input, torch.ones(2, 5))[1], whole)
    partial = subspaces(6, dims=[2, 1])
    span = DisentangledComposite(EpsilonPlus(), "relu", partial)
    parts = [DisentangledComposite(EpsilonPlus(), "relu", partial, k) for k in range(2)]
    maps = [Gradient(model, c)(input, torch.ones(2, 5))[1] for c in [span, *parts]]
    torch.testing.assert_close(maps[0], maps[1] + maps[2])
    assert (maps[0] - whole).abs().max() > 1e-3 * whole.abs().max()


def test_filters_at_two_layers_compose():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    target = torch.ones(2, 5)
    # Zennit 1's own rules leave other Parameter objects behind, of the same values.
    before, values = _without_tensors(model_state(model)), copy.deepcopy(model.state_dict())

    def run(lower, upper):
        filters = [SubspaceFilter("relu", blocks, lower), SubspaceFilter("act", blocks, upper)]
        return Gradient(model, EpsilonPlus(canonizers=filters))(input, target)[1]

    whole = Gradient(model, EpsilonPlus())(input, target)[1]
    total = sum(run(i, j) for i in range(3) for j in range(3))
    torch.testing.assert_close(total, whole)
    assert (run(0, 0) - run(0, 1)).abs().max() > 0
    assert _without_tensors(model_state(model)) == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


def _without_tensors(state):
    """Modules, hooks and attributes alone, whose keys have a colon."""
    return {key: value for key, value in state.items() if ": " in key}


def test_rules_on_the_layer_cover_the_layer_alone():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    target = torch.ones(2, 5)
    rules = [(nn.ReLU, Pass()), (Linear, Epsilon())]
    filters = [SubspaceFilter("act", blocks, 0)]
    plain = Gradient(model, LayerMapComposite(rules, canonizers=filters))(input, target)[1]
    # Pass on the ReLU would jump over a filter that ran inside the ReLU.
    whole = Gradient(model, LayerMapComposite(rules))(input, target)[1]
    assert (plain - whole).abs().max() > 1e-3 * whole.abs().max()


def test_nothing_is_added_to_the_modules():
    model = small_model()
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    composite = DisentangledComposite(EpsilonPlus(), "stem.2", subspaces(6))
    with composite.context(model):
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == keys


class AddsItsInput(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class SumOfChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([child(x) for child in self.children()]).sum(0)


@pytest.mark.parametrize("block", [AddsItsInput(nn.Conv2d(6, 6, 1), nn.ReLU()), SumOfChildren()])
def test_layers_whose_forward_goes_through_their_children(block):
    """A module added to such a layer would run in the wrong place, and change the output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), block, nn.Flatten(), nn.Linear(6 * 16, 5)).double().eval()
    input, blocks = torch.randn(2, 3, 4, 4, dtype=torch.float64), subspaces(6)
    expected, target = model(input), torch.ones(2, 5, dtype=torch.float64)
    composites = [DisentangledComposite(None, "1", blocks, k) for k in range(3)]
    outputs, maps = zip(*(Gradient(model, c)(input, target) for c in composites), strict=True)
    assert all(torch.equal(output, expected) for output in outputs)
    whole = Gradient(model)(input, target)[1]
    torch.testing.assert_close(sum(maps), whole)
    output, joint = DisentangledAttributor(Gradient(model), "1", blocks)(input, target)
    assert torch.equal(output, expected)
    torch.testing.assert_close(joint, torch.stack(maps, dim=1))


def test_a_layer_whose_in_place_successor_overwrites_its_output():
    """`inner` and `middle` are followed by in-place operations; without a rule there nothing copies."""
    model, input, blocks = small_model(), small_input(), subspaces(6)
    seen = relevance_at(model, DisentangledComposite(None, "middle", blocks, 0), None, "middle", input)
    assert (seen["a"] < 0).any()  # the values before the ReLU


def test_tokens_with_features_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(30, 3)).double()
    input, blocks = torch.randn(2, 5, 4, dtype=torch.float64), subspaces(6)
    maps = [
        Gradient(model, DisentangledComposite(None, "1", blocks, k, -1))(input, torch.ones(2, 3))[1]
        for k in range(3)
    ]
    whole = Gradient(model)(input, torch.ones(2, 3))[1]
    torch.testing.assert_close(sum(maps), whole)


def test_lost_relevance_is_measured():
    """Flat rules ignore activations, and so give relevance to zero ones."""
    from zennit.rules import Flat

    model, input = small_model(), small_input()
    composite = LayerMapComposite([(Linear, Flat())], canonizers=[SubspaceFilter("act", subspaces(6), 0)])
    with pytest.warns(RelevanceLossWarning, match=r"\d+\.\d% of the relevance at layer 'act'"):
        Gradient(model, composite)(input, torch.ones(2, 5))


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


def test_bad_arguments():
    model, blocks = small_model(), subspaces(6)
    with pytest.raises(TypeError, match=r"drsa_core\.Subspaces, got Tensor"):
        SubspaceFilter("act", blocks.basis)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block 3 does not exist"):
        SubspaceFilter("act", blocks, 3)
    with pytest.raises(ValueError, match="'relevance', 'gradient' or None"):
        SubspaceFilter("act", blocks, signal="context")
    with pytest.raises(TypeError, match="Zennit composite or None, got str"):
        DisentangledComposite("epsilon_plus", "act", blocks)
    applied = SubspaceFilter("act", blocks).apply(model)
    with pytest.raises(ValueError, match="'act' has a SubspaceFilter already"):
        SubspaceFilter("act", blocks).apply(model)
    applied[0].remove()


def test_composites_that_are_registered_already():
    model, blocks = small_model(), subspaces(6)
    inner = EpsilonPlus()
    with (
        inner.context(small_model()),
        pytest.raises(ValueError, match="EpsilonPlus is registered to a model already"),
    ):
        DisentangledComposite(inner, "act", blocks).register(model)
    with EpsilonPlus().context(model), pytest.raises(ValueError, match="another Zennit composite"):
        DisentangledComposite(inner, "act", blocks).register(model)


def test_training_mode_is_warned_about():
    model = small_model().train()
    with pytest.warns(UserWarning, match=r"'stem.1' \(BatchNorm2d\) is in training mode"):
        SubspaceFilter("act", subspaces(6)).apply(model)


def test_non_orthogonal_concepts_use_the_dual():
    """Note I: the context passes back through U_kV_kᵀ."""
    model, input = small_model(), small_input()
    basis = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    blocks = Subspaces(basis, [2, 4], dual=torch.linalg.inv(basis).T)
    seen = relevance_at(model, DisentangledComposite(None, "act", blocks, 1), None, "act", input)
    dual = blocks.dual_blocks[1]
    expected = torch.einsum("ij,njyx->niyx", blocks.blocks[1] @ dual.T, seen["before"])
    torch.testing.assert_close(seen["after"], expected)


@pytest.mark.parametrize(
    "rule",
    [Epsilon(), ZPlus(), GeneralizedGamma(0.25), PositiveGamma(0.25), ZeroRule()],
    ids=lambda r: type(r).__name__,
)
def test_a_layer_inside_of_a_module_with_a_rule_is_refused(rule):
    """Between the modules inside there are gradients, which would be filtered as if they were relevance."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), nn.Linear(3, 2)).double()
    composite = NameMapComposite([(["0", "1"], rule)])
    x, start = torch.rand(2, 6, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    message = rf"'0\.0' is inside of 0 \(Sequential\), whose rule {type(rule).__name__} is for the whole"
    with (
        Gradient(model, DisentangledComposite(composite, "0.0", subspaces(4), 0)) as attributor,
        pytest.raises(ValueError, match=message),
    ):
        attributor(x, start)
    with pytest.raises(ValueError, match=message):
        DisentangledAttributor(Gradient(model, composite), "0.0", subspaces(4))(x, start)
    _, maps = DisentangledAttributor(Gradient(model, composite), "0", subspaces(3))(x, start)
    assert maps.shape == (2, 3, 6)
