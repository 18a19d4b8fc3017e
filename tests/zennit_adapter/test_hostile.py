"""Inputs and models that once gave wrong numbers or obscure errors: now right, or one clear sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn
from torchvision.models import densenet121
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import Canonizer
from zennit.composites import EpsilonPlus

from tests.closeness import assert_same
from tests.model_state import model_state
from tests.zennit_adapter.models import small_input, small_model, subspaces
from zennit_drsa import DisentangledAttributor, DisentangledComposite, SubspaceFilter, collect

TARGET = torch.eye(5, dtype=torch.float64)[[1, 4]]


class InPlace(nn.Module):
    """Overwrites its input before anything else."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.net, self.is_in_place = small_model(), is_in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2).sub_(1) if self.is_in_place else x * 2 - 1
        scores: Tensor = self.net(x)
        return scores


@pytest.mark.parametrize("attributor", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_models_that_work_in_place_on_their_input(attributor) -> None:
    x = small_input()
    given = x.clone()

    def maps(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        run = DisentangledAttributor(attributor(model), "net.pool", subspaces(6), context_steps=3)
        result: Tensor = run(given, TARGET)[1]
        return result

    in_place = maps(InPlace(True))
    assert torch.equal(given, x)
    torch.testing.assert_close(in_place, maps(InPlace(False)))


@pytest.mark.parametrize("layer", ["stem.1", "middle", "inner"])
def test_integrated_gradients_before_an_in_place_activation(layer: str) -> None:
    """An in-place ReLU follows these layers."""
    model, input = small_model(), small_input()
    run = DisentangledAttributor(IntegratedGradients(model, n_iter=3), layer, subspaces(6), tolerance=1)
    maps = run(input, TARGET)[1]
    totals = run.concept_relevance(input, TARGET)
    assert maps.shape == (2, 3, *input.shape[1:])
    assert torch.isfinite(maps).all()
    assert totals.shape == (2, 3)


def test_integrated_gradients_run_the_lower_part_once_for_many_steps() -> None:
    """20 steps below the layer; the 100 steps above it share a forward pass of the lower part."""
    model, input = small_model(), small_input(1)
    runs = []
    model.stem[0].register_forward_hook(lambda *_: runs.append(1))
    wrapped = IntegratedGradients(model, n_iter=20)
    run = DisentangledAttributor(wrapped, "pool", subspaces(6), context_steps=100, tolerance=1)
    run(input, TARGET[:1])
    # 20 for step 2; the rest: the pass to the layer twice, a trial, the path at once.
    assert len(runs) == 20 + 4


def test_concept_relevance_is_never_nan() -> None:
    run = DisentangledAttributor(Gradient(small_model()), "pool", subspaces(6))
    with pytest.raises(ValueError, match="the input itself holds NaN"):
        run.concept_relevance(small_input() * float("nan"), TARGET)


def test_vectors_have_relevances() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)).double()
    input = torch.randn(2, 4, dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model), "1", subspaces(6))
    a, c = run.context(input, [1, 4])
    expected = torch.stack([(a @ u * (c @ u)).sum(1) for u in subspaces(6).blocks], 1)
    torch.testing.assert_close(run.concept_relevance(input, TARGET), expected)


@pytest.mark.parametrize("composite", [None, EpsilonPlus()], ids=["none", "plus"])
@pytest.mark.parametrize("attributor", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_layers_that_are_bypassed_are_warned_about(attributor, composite) -> None:
    """`inner` lies in a residual branch."""
    model, input = small_model(), small_input()
    run = DisentangledAttributor(attributor(model, composite), "inner", subspaces(6), context_steps=3)
    with pytest.warns(RelevanceLossWarning, match=r"\d\.\d% of what reaches the input goes around layer"):
        run(input, TARGET)


def test_what_goes_around_is_in_the_residual() -> None:
    model, input = small_model(), small_input()
    with pytest.warns(RelevanceLossWarning):
        maps = DisentangledAttributor(Gradient(model), "inner", subspaces(6), residual=True)(input, TARGET)[1]
    whole = Gradient(model)(input.clone(), TARGET)[1]
    torch.testing.assert_close(maps.sum(1), whole)
    assert maps[:, -1].abs().max() > 0.1 * whole.abs().max()


@pytest.mark.parametrize("channel_dim", [0, -4])
def test_the_axis_of_the_examples_is_refused(channel_dim: int) -> None:
    run = DisentangledAttributor(Gradient(small_model()), "pool", subspaces(6), channel_dim=channel_dim)
    with pytest.raises(ValueError, match="is the axis of the examples"):
        run(small_input(), TARGET)


def test_tokens_that_would_be_split_are_warned_about() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(8 * 4, 5)).eval()
    with pytest.warns(UserWarning, match=r"looks like 4 tokens of 8 features.*channel_dim=-1"):
        collect(model, None, "1", [torch.randn(2, 4, 6)], 1)


@pytest.mark.parametrize("concept", [torch.tensor([0.9]), 0.9, True, [[0, 1]]], ids=str)
def test_concepts_that_are_no_index(concept) -> None:
    with pytest.raises((TypeError, ValueError), match="concept must be"):
        SubspaceFilter("pool", subspaces(6), concept)
    with pytest.raises(ValueError, match="block 3 does not exist"):
        SubspaceFilter("pool", subspaces(6), [0, 3])
    number: Any = np.int64(1)
    assert SubspaceFilter("pool", subspaces(6), number).concept == 1


def test_inputs_that_cannot_be_explained() -> None:
    run: Any = DisentangledAttributor(Gradient(small_model()), "pool", subspaces(6))
    for call in (run, run.concept_relevance):
        with pytest.raises(TypeError, match="must be a tensor, got ndarray"):
            call(small_input().numpy(), TARGET)
        with pytest.raises(TypeError, match=r"floating point, got torch\.int64"):
            call(small_input().long(), TARGET)
        with pytest.raises(ValueError, match="at least one example"):
            call(small_input()[:0], TARGET[:0])
        with pytest.raises(ValueError, match=r"have the output's shape \(2, 5\), got \(5,\)"):
            call(small_input(), TARGET[0])
    with pytest.raises(TypeError, match=r"attr_output must be a tensor .* got int"):
        run(small_input(), 1)
    with pytest.raises(TypeError, match=r"got one tensor of shape .* pass \[x\]"):
        run.fit(small_input(), 1)
    unfitted = DisentangledAttributor(Gradient(small_model()), "pool")
    with pytest.raises(ValueError, match="there are no subspaces yet"):
        unfitted(small_input(), TARGET)


def test_nested_attributors() -> None:
    model, input = small_model(), small_input()
    expected = DisentangledAttributor(Gradient(model), "pool", subspaces(6))(input, TARGET)[1]
    with (
        DisentangledAttributor(Gradient(model), "pool", subspaces(6)) as outer,
        DisentangledAttributor(Gradient(model), "pool", subspaces(6)) as inner,
    ):
        assert_same(outer(input, TARGET)[1], expected)
        assert_same(inner(input, TARGET)[1], expected)
    with Gradient(model, EpsilonPlus()), pytest.raises(ValueError, match="another Zennit composite"):
        DisentangledAttributor(Gradient(model), "pool", subspaces(6))(input, TARGET)


@pytest.mark.parametrize("what", ["call", "collect", "concept_relevance", "composite"])
def test_training_mode_is_warned_about_and_statistics_stay(what: str) -> None:
    model, input = small_model().train(), small_input()
    before = model_state(model)
    run = DisentangledAttributor(Gradient(model), "pool", subspaces(6))
    filtered = DisentangledComposite(None, "pool", subspaces(6))
    calls: dict[str, Any] = {
        "call": lambda: run(input, TARGET),
        "collect": lambda: collect(model, None, "pool", [input], 1),
        "concept_relevance": lambda: run.concept_relevance(input, TARGET),
        "composite": lambda: Gradient(model, filtered)(input, TARGET),
    }
    with pytest.warns(UserWarning, match=r"'stem.1' \(BatchNorm2d\) is in training mode"):
        calls[what]()
    assert model_state(model) == before


class Doubling(Canonizer):  # type: ignore[misc]
    """A canonizer that does not suit the model: it changes what the model computes."""

    def apply(self, root_module: Any) -> list[Canonizer]:
        instance = Doubling()
        instance.head, instance.weight = root_module.head, root_module.head.weight.data
        instance.register()
        return [instance]

    def register(self) -> None:
        self.head.weight.data = 2 * self.weight

    def remove(self) -> None:
        self.head.weight.data = self.weight


def test_canonizers_that_change_the_output_are_refused() -> None:
    model, input = small_model(), small_input()
    before = model_state(model)
    run = DisentangledAttributor(Gradient(model, EpsilonPlus(canonizers=[Doubling()])), "pool", subspaces(6))
    with pytest.raises(ValueError, match=r"changes the model's output by .*canonizers: Doubling\); see"):
        run(input, TARGET)
    assert model_state(model) == before


def test_layers_of_densenet_that_go_through_their_children() -> None:
    torch.manual_seed(0)
    model = densenet121().eval()
    input, target = torch.randn(1, 3, 32, 32), torch.eye(1000)[[3]]
    split = Subspaces(torch.eye(256), [128, 128])
    output, maps = DisentangledAttributor(Gradient(model), "features.denseblock1", split)(input, target)
    assert_same(output, model(input))
    assert_same(maps.sum(1), Gradient(model)(input.clone(), target)[1])


@pytest.mark.parametrize("attributor", [Gradient, IntegratedGradients])
def test_inference_mode_and_compiled_models(attributor) -> None:
    model, input = small_model(), small_input()
    options: dict[str, Any] = {"residual": True, "context_steps": 3, "tolerance": 1}

    def maps(model: nn.Module) -> Tensor:
        result: Tensor = DisentangledAttributor(attributor(model), "pool", subspaces(6), **options)(
            input, TARGET
        )[1]
        return result

    expected = maps(model)
    with torch.inference_mode():
        assert_same(maps(model), expected)
        run = DisentangledAttributor(attributor(model), "pool", subspaces(6), **options)
        assert_same(run(input, TARGET.clone())[1], expected)  # the start is an inference tensor, too
    compiled: Any = torch.compile(model, backend="eager")
    compiled(input)  # warm
    assert_same(maps(compiled), expected)
    with pytest.raises(TypeError, match="TorchScript modules"):
        maps(torch.jit.trace(model, input))


def test_composites_with_a_register_of_their_own() -> None:
    class Registers(EpsilonPlus):  # type: ignore[misc]
        def register(self, module: Any) -> None:
            super().register(module)
            self.handles.append(module.head.register_forward_hook(lambda m, args, output: output * 3))

    class Removes(EpsilonPlus):  # type: ignore[misc]
        def remove(self) -> None:
            super().remove()

    for composite, name in ((Registers(), "register"), (Removes(), "remove")):
        for use in (
            lambda c: DisentangledAttributor(Gradient(small_model(), c), "pool", subspaces(6)),
            lambda c: DisentangledComposite(c, "pool", subspaces(6)),
            lambda c: collect(small_model(), c, "pool", [small_input()], 0),
        ):
            with pytest.raises(TypeError, match=f"{name!r} of its own, which would be ignored .* canonizer"):
                use(composite)

    class Inherits(EpsilonPlus):  # type: ignore[misc]
        """Rules alone."""

    x = small_input()
    maps = [
        DisentangledAttributor(Gradient(small_model(), composite), "pool", subspaces(6)).explain(x, 1).maps
        for composite in (Inherits(), EpsilonPlus())
    ]
    assert torch.equal(*maps)


def test_attention_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)).eval()
    run = DisentangledAttributor(
        Gradient(model), "0.self_attn", Subspaces(torch.eye(8), [4, 4]), channel_dim=-1
    )
    with pytest.raises(TypeError, match=r"must return one tensor .* got tuple"):
        run(torch.randn(2, 4, 8), torch.ones(2, 4, 3))


def test_models_that_return_a_tuple() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), x

    run = DisentangledAttributor(Gradient(Two()), "net.pool", subspaces(6))
    with pytest.raises(TypeError, match="must return a tensor, got tuple; wrap the model"):
        run(small_input(), TARGET)
    with pytest.raises(TypeError, match="must return a tensor, got tuple; wrap the model"):
        run.concept_relevance(small_input(), 1)


def test_a_layer_may_be_named_by_any_of_its_names() -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()
            self.last = self.net.pool

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.net(x)
            return scores

    model, x = Alias(), small_input()
    runs = [DisentangledAttributor(Gradient(model), name, subspaces(6)) for name in ("net.pool", "last")]
    assert runs[0].layer_name == runs[1].layer_name == "net.pool"
    assert torch.equal(*(run.concept_relevance(x, 1) for run in runs))


def test_a_tuple_of_one_input_is_that_input() -> None:
    run, x = DisentangledAttributor(Gradient(small_model()), "pool", subspaces(6)), small_input()
    assert torch.equal(run.concept_relevance((x,), 1), run.concept_relevance(x, 1))
    assert torch.equal(run.context((x,), 1)[1], run.context(x, 1)[1])
    with pytest.raises(TypeError, match="takes one input tensor"):
        run.concept_relevance((x, x), 1)
