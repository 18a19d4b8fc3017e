"""`DisentangledAttributor` with each of Zennit's attributors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core import Subspaces, context_from_relevance
from torch import Tensor, nn
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, LayerMapComposite
from zennit.core import BasicHook
from zennit.rules import Epsilon, ReLUDeconvNet, ReLUGuidedBackprop
from zennit.types import Linear

from tests.closeness import assert_same
from tests.zennit_adapter.models import slot_at, small_input, small_model, subspaces
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, SubspaceFilter

TARGET = torch.eye(5, dtype=torch.float64)[[1, 4]]
COMPOSITES = {
    "none": lambda: None,
    "gamma": lambda: EpsilonGammaBox(low=-3.0, high=3.0),
    "plus": EpsilonPlus,
    "alpha_beta": EpsilonAlpha2Beta1,
    "default_rule": lambda: LayerMapComposite([(Linear, BasicHook())]),
}


def lower(model: Any, x: Tensor) -> Any:
    """Output of the layer `pool`."""
    x = model.stem(x)
    return model.pool(torch.relu(x + model.inner(x)))


def upper(model: Any, a: Tensor) -> Any:
    return model.head(torch.relu(model.middle(a)).flatten(1))


def by_hand(scores: Tensor, blocks, context: Tensor) -> Tensor:
    """R̂_k = (U_kᵀφ)ᵀ(U_kᵀ[c]) summed over positions, (N, K)."""
    return torch.stack(
        [torch.einsum("njyx,ij,niyx->n", scores, u @ u.T, context) for u in blocks.blocks], dim=1
    )


@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("layer", ["pool", "act", "middle"])
def test_maps_are_those_of_one_filtered_pass_for_each_concept(composite, layer):
    model, input, blocks = small_model(), small_input(), subspaces(6, dims=[1, 3])
    gradient = Gradient(model, COMPOSITES[composite]())
    output, maps = DisentangledAttributor(gradient, layer, blocks, tolerance=1)(input, TARGET)
    assert maps.shape == (2, 2, 3, 8, 8)
    assert_same(output, model(input))
    for k in range(2):
        single = DisentangledComposite(COMPOSITES[composite](), layer, blocks, k, tolerance=1)
        expected = Gradient(model, single)(input, TARGET)[1]
        torch.testing.assert_close(maps[:, k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attributor", [Gradient, IntegratedGradients, SmoothGrad])
@pytest.mark.parametrize("composite", ["none", "plus"])
def test_the_residual_completes_the_map_of_the_wrapped_attributor(attributor, composite):
    """`inner` has a path around it, and the subspaces do not span everything."""
    model, input, blocks = small_model(), small_input(), subspaces(6, dims=[1, 3])
    extra = {} if attributor is Gradient else {"n_iter": 3}
    wrapped = attributor(model, COMPOSITES[composite](), **extra)
    run = DisentangledAttributor(wrapped, "inner", blocks, residual=True, tolerance=1)
    torch.manual_seed(5)
    _, maps = run(input, TARGET)
    torch.manual_seed(5)
    _, whole = wrapped(input, TARGET)
    assert maps.shape == (2, 3, 3, 8, 8)
    torch.testing.assert_close(maps.sum(1), whole)


@pytest.mark.parametrize("composite", ["none", "plus"])
def test_filtered_paths_add_up_for_smoothgrad_and_integrated_gradients(composite):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    cases: list[tuple[Gradient, dict[str, Any]]] = [
        (SmoothGrad(model, COMPOSITES[composite](), n_iter=3), {}),
        (IntegratedGradients(model, COMPOSITES[composite](), n_iter=3), {"two_step": False}),
    ]
    for wrapped, extra in cases:
        torch.manual_seed(5)
        _, maps = DisentangledAttributor(wrapped, "pool", blocks, tolerance=1, **extra)(input, TARGET)
        torch.manual_seed(5)
        torch.testing.assert_close(maps.sum(1), wrapped(input, TARGET)[1])


def test_steps_of_the_path_are_chosen_where_the_sum_is_known():
    """The same number for a target and for Zennit's own start of it; 100 for one that follows the output."""
    model, input, blocks = small_model(), small_input(), subspaces(6)
    wrapped = IntegratedGradients(model, n_iter=2)
    run = DisentangledAttributor(wrapped, "pool", blocks, tolerance=1)
    relevance = run.concept_relevance(input, [1, 4])
    a = lower(model, input).detach()
    gained = ((upper(model, a) - upper(model, 0 * a)) * TARGET).sum(1).detach()
    torch.testing.assert_close(relevance.sum(1), gained, rtol=0.01, atol=0)
    assert torch.equal(run.concept_relevance(input, TARGET), relevance)

    fixed = DisentangledAttributor(wrapped, "pool", blocks, tolerance=1, context_steps=100)
    assert not torch.equal(fixed.concept_relevance(input, TARGET), relevance)

    def follows(output: Tensor) -> Tensor:
        return output * TARGET

    assert torch.equal(run(input, follows)[1], fixed(input, follows)[1])


def test_integrated_gradients_in_two_steps():
    """Note B: c = ∫ ∂y/∂a along 0 → a; step 2 integrates ∂R̂_k/∂x with c held constant."""
    model, input, blocks = small_model(), small_input(), subspaces(6)
    n_iter, steps = 200, 7
    run = DisentangledAttributor(
        IntegratedGradients(model, n_iter=n_iter), "pool", blocks, context_steps=steps
    )
    output, maps = run(input, TARGET)
    assert_same(output, model(input))

    a = lower(model, input).detach()
    context = torch.zeros_like(a)
    for s in range(1, steps + 1):
        point = (a * s / steps).requires_grad_()
        context += torch.autograd.grad((upper(model, point) * TARGET).sum(), point)[0] / steps
    concepts = by_hand(a, blocks, context)
    torch.testing.assert_close(run.concept_relevance(input, TARGET), concepts)

    for k in range(3):
        total = torch.zeros_like(input)
        for t in range(1, n_iter + 1):
            point = (input * t / n_iter).requires_grad_()
            score = by_hand(lower(model, point), blocks, context)[:, k].sum()
            total += torch.autograd.grad(score, point)[0] / n_iter
        torch.testing.assert_close(maps[:, k], total * input)

    # Note B.3: the total is known without step 2. The path's sum is a Riemann sum of 200 steps, hence 3 %.
    expected = by_hand(a - lower(model, torch.zeros_like(input)), blocks, context)
    error = (maps.flatten(2).sum(2) - expected).abs().max()
    assert error <= 0.03 * expected.abs().max()


@pytest.mark.parametrize("rule", [ReLUGuidedBackprop, ReLUDeconvNet])
@pytest.mark.parametrize("chunk", [None, 2])
def test_two_steps_under_rules_that_drop_what_is_negative(rule, chunk):
    """What passes of the whole relevance passes of its parts, so that these add up to the undivided one."""
    model, input = small_model(), small_input()

    def maps(blocks: Subspaces) -> Any:
        wrapped = IntegratedGradients(model, LayerMapComposite([(nn.ReLU, rule())]), n_iter=3)
        run = DisentangledAttributor(wrapped, "act", blocks, context_steps=3, tolerance=1, chunk=chunk)
        return run(input, TARGET)[1]

    torch.testing.assert_close(maps(subspaces(6)).sum(1), maps(subspaces(6, 1))[:, 0])


@pytest.mark.parametrize("composite", [EpsilonPlus, ConvNetGamma, lambda: ConvNetGamma(low=-3.0, high=3.0)])
def test_an_inactive_composite_leaves_plain_gradients(composite):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    expected = DisentangledAttributor(Gradient(model), "pool", blocks, tolerance=1)(input, TARGET)[1]
    run = DisentangledAttributor(Gradient(model, composite()), "pool", blocks, tolerance=1)
    with run:
        under_rules = run(input, TARGET)[1]
        with run.inactive():
            # Zennit merges batch norms up to their eps.
            torch.testing.assert_close(run(input, TARGET)[1], expected, rtol=1e-4, atol=0)
            torch.testing.assert_close(run.explain(input, [1, 4]).maps, expected, rtol=1e-4, atol=0)
        assert_same(run(input, TARGET)[1], under_rules)
    assert not torch.allclose(under_rules, expected)


@pytest.mark.parametrize("composite", ["none", "plus"])
def test_occlusion_explains_the_model_of_the_relevance(composite):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    wrapped = Occlusion(model, COMPOSITES[composite](), window=(4, 4), stride=(4, 4))
    run = DisentangledAttributor(wrapped, "pool", blocks)
    output, maps = run(input, TARGET)
    torch.testing.assert_close(output, model(input))
    a = lower(model, input).detach()
    if composite == "none":
        point = a.clone().requires_grad_()
        context = torch.autograd.grad((upper(model, point) * TARGET).sum(), point)[0]
    else:
        _, r = slot_at(model, EpsilonPlus(), "pool", input, TARGET)
        context = context_from_relevance(a, r)
    expected = torch.zeros_like(maps)
    for y in range(0, 8, 4):
        for x in range(0, 8, 4):
            mask = torch.zeros_like(input)
            mask[:, :, y : y + 4, x : x + 4] = 1
            score = by_hand(lower(model, input * mask).detach(), blocks, context)
            expected += score[:, :, None, None, None] * mask[:, None]
    torch.testing.assert_close(maps, expected)


def _log_probability(output: Tensor) -> Tensor:
    return output.log_softmax(1)[:, 1]


@pytest.mark.parametrize("composite", ["none", "plus"])
@pytest.mark.parametrize("target", [1, [1, 4], _log_probability], ids=["int", "list", "fn"])
def test_the_whole_map_of_occlusion_is_that_of_the_target(composite, target):
    """Zennit's Occlusion sums what it is given: a gradient at the output would give one number everywhere."""
    model, input = small_model(), small_input()
    wrapped = Occlusion(model, COMPOSITES[composite](), window=(4, 4), stride=(4, 4))
    found = DisentangledAttributor(wrapped, "pool", subspaces(6)).explain(input, target).whole
    expected = torch.zeros_like(input)
    for y in range(0, 8, 4):
        for x in range(0, 8, 4):
            mask = torch.zeros_like(input)
            mask[:, :, y : y + 4, x : x + 4] = 1
            output = model(input * mask).detach()
            score = (
                target(output) if callable(target) else output[range(2), torch.as_tensor(target).expand(2)]
            )
            expected += score[:, None, None, None] * mask
    torch.testing.assert_close(found, expected)


def test_occlusion_takes_a_function_as_the_score_and_a_tensor_as_its_gradient():
    model, input, options = small_model(), small_input(), {"window": (4, 4), "stride": (4, 4)}
    run = DisentangledAttributor(Occlusion(model, **options), "pool", subspaces(6), residual=True)
    by_tensor, by_function = run(input, TARGET)[1], run(input, lambda output: output * TARGET)[1]
    torch.testing.assert_close(by_tensor, by_function)
    whole = Occlusion(model, **options)(input, lambda output: output * TARGET)[1]
    torch.testing.assert_close(by_tensor.sum(1), whole)
    torch.testing.assert_close(
        run.concept_relevance(input, TARGET), run.concept_relevance(input, lambda output: output * TARGET)
    )


def test_two_steps_of_integrated_gradients_need_gradients():
    """With relevance in the place of gradients, step 2 would hand contexts to rules as if they were it."""
    wrapped = IntegratedGradients(small_model(), EpsilonPlus(), n_iter=2)
    run = DisentangledAttributor(wrapped, "pool", subspaces(6), two_step=True)
    with pytest.raises(ValueError, match="two steps integrate gradients, but the composite has rules"):
        run(small_input(), TARGET)


def test_attributors_with_a_way_of_their_own_are_refused():
    class GradientTimesInput(Gradient):  # type: ignore[misc]
        def forward(self, input, attr_output_fn):
            output, gradient = super().forward(input, attr_output_fn)
            return output, gradient * input

    class Named(Gradient):  # type: ignore[misc]
        """Nothing but a name."""

    with pytest.raises(TypeError, match="GradientTimesInput has a method 'forward' of its own"):
        DisentangledAttributor(GradientTimesInput(small_model()), "pool", subspaces(6))
    DisentangledAttributor(Named(small_model()), "pool", subspaces(6))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_change_nothing(chunk):
    model, input, blocks = small_model(), small_input(), subspaces(6, 3)
    for wrapped in (Gradient(model, EpsilonPlus()), IntegratedGradients(model, n_iter=2)):
        whole = DisentangledAttributor(wrapped, "pool", blocks, context_steps=2)(input, TARGET)[1]
        parts = DisentangledAttributor(wrapped, "pool", blocks, context_steps=2, chunk=chunk)(input, TARGET)[
            1
        ]
        torch.testing.assert_close(parts, whole)


def test_concept_relevance_is_the_sum_of_the_filtered_relevance():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "pool", blocks)
    concepts = run.concept_relevance(input, TARGET)
    assert concepts.shape == (2, 3)
    _, r = slot_at(model, EpsilonPlus(), "pool", input, TARGET)
    torch.testing.assert_close(concepts.sum(1), r.flatten(1).sum(1))
    a = lower(model, input).detach()
    torch.testing.assert_close(concepts, by_hand(a, blocks, context_from_relevance(a, r)))


def test_it_is_a_zennit_attributor():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    wrapped = Gradient(model, EpsilonPlus(), attr_output=TARGET)
    run = DisentangledAttributor(wrapped, "pool", blocks)
    _, expected = run(input)  # attr_output of the wrapped attributor
    torch.testing.assert_close(run(input, TARGET)[1], expected)
    torch.testing.assert_close(run(input, lambda out: TARGET)[1], expected)
    with run as entered:
        assert entered is run
        for _ in range(2):
            torch.testing.assert_close(entered(input)[1], expected)
        concepts = entered.concept_relevance(input)
        assert concepts.shape == (2, 3)
    assert not input.requires_grad


@pytest.mark.parametrize("shape", [(3, 4), (3, 5, 4), (3, 4, 6, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_rank_and_precision(shape, dtype):
    torch.manual_seed(0)
    first = nn.Conv3d(4, 6, 3) if len(shape) == 5 else nn.Linear(4, 6)
    dim = 1 if len(shape) in (2, 5) else -1
    size = first(torch.zeros(shape)).flatten(1).shape[1]
    model = nn.Sequential(first, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(size, 2)).to(dtype)
    input = torch.randn(shape, dtype=dtype)
    wrapped = Gradient(model, EpsilonPlus())
    run = DisentangledAttributor(wrapped, "1", subspaces(6), channel_dim=dim)
    _, maps = run(input, torch.ones(3, 2, dtype=dtype))
    assert maps.shape == (3, 3, *shape[1:])
    assert maps.dtype == dtype
    torch.testing.assert_close(maps.sum(1), wrapped(input, torch.ones(3, 2, dtype=dtype))[1])
    assert run.concept_relevance(input, torch.ones(3, 2, dtype=dtype)).shape == (3, 3)


def test_higher_order_gradients():
    """create_graph: the maps can be differentiated, as the map of Zennit's Gradient can."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 2)
    ).double()
    input = torch.randn(1, 4, dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model, create_graph=True), "1", subspaces(6))
    _, maps = run(input, torch.ones(1, 2, dtype=torch.float64))
    gradients = torch.autograd.grad(maps.square().sum(), list(model.parameters()), allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in gradients[:5])


def test_rules_without_derivatives_are_not_differentiated():
    """Their relevance has a graph, but one whose derivatives are others than those of the relevance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 2)).double()
    input, start = torch.randn(1, 4, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    wrapped = Gradient(model, ConvNetGamma(0.25), create_graph=True)
    with pytest.raises(ValueError, match="create_graph=True: the rule GeneralizedGamma"):
        DisentangledAttributor(wrapped, "1", subspaces(6))(input, start)
    # By Zennit alone, torch says so; and for a filter, whose derivatives would be filtered once more.
    filtered = Gradient(model, DisentangledComposite(None, "1", subspaces(6), 0), create_graph=True)
    for attributor in (wrapped, filtered):
        with attributor:
            relevance = attributor(input.clone(), start)[1]
            with pytest.raises(RuntimeError, match="once_differentiable"):
                relevance.square().sum().backward()


@pytest.mark.parametrize("composite", ["none", "plus"])
def test_a_function_of_a_single_output_is_a_score(composite):
    """(N, 1) is the shape of an `attr_output` too: contexts were those of the value, not of its slope."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double().eval()
    input = torch.rand(3, 4, dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model, COMPOSITES[composite]()), "1", subspaces(6))
    columns: list[Any] = [torch.sigmoid, lambda output: 3 * output]
    rows: list[Any] = [lambda output: torch.sigmoid(output[:, 0]), lambda output: 3 * output[:, 0]]
    for of_column, of_row in zip(columns, rows, strict=True):
        column, flat = run.explain(input, of_column), run.explain(input, of_row)
        assert_same(column.maps, flat.maps)
        assert_same(column.concept_relevance, flat.concept_relevance)
    # What does not depend on the output is an `attr_output`, as before.
    one = torch.ones(3, 1, dtype=torch.float64)
    assert_same(run.concept_relevance(input, torch.ones_like), run.concept_relevance(input, one))


def test_weights_that_change_while_rules_are_registered():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)]
    model: Any = nn.Sequential(*layers).eval()
    input = torch.rand(1, 3, 2, 2)

    def maps(run: DisentangledAttributor) -> Tensor:
        return run.explain(input, 1).maps

    with DisentangledAttributor(Gradient(model, ConvNetGamma(0.5)), "3", subspaces(6)) as run:
        before = maps(run)
        with torch.no_grad():
            model[2].weight.mul_(torch.randn(6, 6, 1, 1))
        after = maps(run)
    fresh = maps(DisentangledAttributor(Gradient(model, ConvNetGamma(0.5)), "3", subspaces(6)))
    assert torch.equal(after, fresh)  # the same operations
    assert not torch.allclose(before, after)


def test_an_output_that_does_not_depend_on_the_layer():
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            used: Tensor = self.used(x)
            return used

    run = DisentangledAttributor(Gradient(Aside()), "aside", subspaces(6))
    with pytest.raises(ValueError, match="no gradient flows from the explained score to layer 'aside'"):
        run(torch.randn(2, 4))


def test_relevance_that_is_not_finite_is_located():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    run = DisentangledAttributor(Gradient(model, EpsilonPlus()), "pool", blocks, tolerance=1)
    with pytest.raises(ValueError, match="attr_output holds NaN"):
        run(input, torch.full((2, 5), float("nan")))
    with pytest.raises(ValueError, match="the input itself holds NaN"):
        run(input * float("nan"), TARGET)
    zero = LayerMapComposite([(nn.Conv2d, Epsilon(epsilon=0.0)), (nn.Linear, Epsilon())])
    with torch.no_grad():
        model.middle.weight[:] = 0  # 0/0 in the rule on `middle`
    run = DisentangledAttributor(Gradient(model, zero), "relu", blocks, tolerance=1)
    with pytest.raises(ValueError, match="first in the relevance that arrives at the output of layer 'pool'"):
        run(input, TARGET)
    with torch.no_grad():
        model.inner.weight[:] = float("inf")
    with pytest.raises(ValueError, match="activations do so already, first at the output of layer 'inner'"):
        DisentangledAttributor(Gradient(model, EpsilonPlus()), "pool", blocks, tolerance=1)(input, TARGET)


def test_bad_arguments():
    model, blocks = small_model(), subspaces(6)
    with pytest.raises(TypeError, match="SmoothGrad, IntegratedGradients or Occlusion, got Skip"):
        DisentangledAttributor(model, "pool", blocks)
    nested = DisentangledAttributor(Gradient(model), "pool", blocks)
    with pytest.raises(TypeError, match="got DisentangledAttributor"):
        DisentangledAttributor(nested, "pool", blocks)
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1, got 0"):
        DisentangledAttributor(Gradient(model), "pool", blocks, chunk=0)
    with pytest.raises(ValueError, match="two_step is for"):
        DisentangledAttributor(Gradient(model), "pool", blocks, two_step=True)
    with pytest.raises(ValueError, match="leave two_step at None"):
        DisentangledAttributor(Occlusion(model), "pool", blocks, two_step=False)
    inner = EpsilonPlus()
    with inner.context(model), pytest.raises(ValueError, match="registered to a model already"):
        DisentangledAttributor(Gradient(model, inner), "pool", blocks)(small_input())


def test_a_composite_may_bring_a_filter_of_its_own():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    wrapped = Gradient(model, EpsilonPlus(canonizers=[SubspaceFilter("act", blocks, 1)]))
    maps = DisentangledAttributor(wrapped, "relu", blocks)(input, TARGET)[1]
    torch.testing.assert_close(maps.sum(1), wrapped(input, TARGET)[1])
