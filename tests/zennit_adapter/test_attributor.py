"""`DisentangledAttributor` with each of Zennit's attributors; `tests/matrix` holds the literal formulas."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from drsa_core import RelevanceLossWarning, Subspaces
from torch import Tensor, nn
from torchvision.models import densenet121
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.composites import EpsilonAlpha2Beta1, EpsilonGammaBox, EpsilonPlus, LayerMapComposite
from zennit.core import BasicHook, Composite
from zennit.rules import Epsilon, ReLUDeconvNet, ReLUGuidedBackprop
from zennit.types import Linear

from tests.closeness import assert_same
from tests.toys import Skip, small_input, small_model, subspaces
from zennit_drsa import ConvNetGamma, DisentangledAttributor, DisentangledComposite, SubspaceFilter

TARGET = torch.eye(5, dtype=torch.float64)[[1, 4]]
COMPOSITES: dict[str, Any] = {
    "none": lambda: None,
    "gamma": lambda: EpsilonGammaBox(low=-3.0, high=3.0),
    "plus": EpsilonPlus,
    "alpha_beta": EpsilonAlpha2Beta1,
    "default_rule": lambda: LayerMapComposite([(Linear, BasicHook())]),
}
NOISELESS = {"n_iter": 3}


def attributor(kind: Any, composite: str = "none", model: nn.Module | None = None) -> Any:
    """One of Zennit's attributors with few steps."""
    options = {SmoothGrad: NOISELESS, IntegratedGradients: NOISELESS}.get(kind, {})
    return kind(small_model() if model is None else model, COMPOSITES[composite](), **options)


@pytest.mark.parametrize("composite", COMPOSITES)
@pytest.mark.parametrize("layer", ["pool", "act", "middle"])
def test_maps_are_those_of_one_filtered_pass_for_each_concept(composite, layer):
    model, input, blocks = small_model(), small_input(), subspaces(6, dims=[1, 3])
    output, maps = DisentangledAttributor(attributor(Gradient, composite, model), layer, blocks, tolerance=1)(
        input, TARGET
    )
    assert maps.shape == (2, 2, 3, 8, 8)
    assert_same(output, model(input))
    for k in range(2):
        single = DisentangledComposite(COMPOSITES[composite](), layer, blocks, k, tolerance=1)
        expected = Gradient(model, single)(input, TARGET)[1]
        torch.testing.assert_close(maps[:, k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Gradient, IntegratedGradients, SmoothGrad])
@pytest.mark.parametrize("composite", ["none", "plus"])
@pytest.mark.filterwarnings("ignore:.*goes around layer")
def test_the_residual_completes_the_map_of_the_wrapped_attributor(kind, composite):
    """`inner` has a path around it, and the subspaces do not span everything."""
    input, blocks, wrapped = small_input(), subspaces(6, dims=[1, 3]), attributor(kind, composite)
    run = DisentangledAttributor(wrapped, "inner", blocks, residual=True, context_steps=3, tolerance=1)
    torch.manual_seed(5)
    _, maps = run(input, TARGET)
    torch.manual_seed(5)
    _, whole = wrapped(input, TARGET)
    assert maps.shape == (2, 3, 3, 8, 8)
    torch.testing.assert_close(maps.sum(1), whole)
    assert maps[:, -1].abs().max() > 0.1 * whole.abs().max()


@pytest.mark.parametrize("composite", ["none", "plus"])
@pytest.mark.parametrize("kind", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_what_goes_around_the_layer_is_warned_about(kind, composite):
    run = DisentangledAttributor(attributor(kind, composite), "inner", subspaces(6))
    with pytest.warns(RelevanceLossWarning, match=r"\d\.\d% of what reaches the input goes around layer"):
        run(small_input(), TARGET)


@pytest.mark.parametrize("composite", ["none", "plus"])
@pytest.mark.parametrize(("kind", "options"), [(SmoothGrad, {}), (IntegratedGradients, {"two_step": False})])
def test_filtered_paths_add_up(kind, options, composite):
    input, wrapped = small_input(), attributor(kind, composite)
    torch.manual_seed(5)
    _, maps = DisentangledAttributor(wrapped, "pool", subspaces(6), tolerance=1, **options)(input, TARGET)
    torch.manual_seed(5)
    torch.testing.assert_close(maps.sum(1), wrapped(input, TARGET)[1])


def test_integrated_gradients_in_two_steps_sum_to_what_is_known_without_step_2():
    """Note B.3: (φ(x) − φ(0))ᵀ U_kU_kᵀc. The path's sum is a Riemann sum of 200 steps, hence 3 %."""
    model, input, blocks = small_model(), small_input(), subspaces(6)
    run = DisentangledAttributor(IntegratedGradients(model, n_iter=200), "pool", blocks, context_steps=20)
    _, context = run.context(input, [1, 4])
    gained = model.lower(input).detach() - model.lower(0 * input).detach()
    expected = blocks.relevance(gained, context, 1).sum((2, 3))
    error = (run(input, TARGET)[1].flatten(2).sum(2) - expected).abs().max()
    assert error <= 0.03 * expected.abs().max()


def test_the_path_to_the_context_is_the_same_for_a_target_and_for_zennits_start():
    model, input = small_model(), small_input()
    wrapped = IntegratedGradients(model, n_iter=2)
    run = DisentangledAttributor(wrapped, "pool", subspaces(6), tolerance=1)
    relevance = run.concept_relevance(input, [1, 4])
    a = model.lower(input).detach()
    gained = ((model.upper(a) - model.upper(0 * a)) * TARGET).sum(1).detach()
    torch.testing.assert_close(relevance.sum(1), gained, rtol=0.01, atol=0)
    assert torch.equal(run.concept_relevance(input, TARGET), relevance)
    fixed = DisentangledAttributor(wrapped, "pool", subspaces(6), context_steps=100)
    assert not torch.equal(fixed.concept_relevance(input, TARGET), relevance)


@pytest.mark.parametrize("rule", [ReLUGuidedBackprop, ReLUDeconvNet])
def test_two_steps_under_rules_that_drop_what_is_negative(rule):
    """What passes of the whole relevance passes of its parts, so that these add up to the undivided one."""

    def maps(blocks: Subspaces) -> Any:
        wrapped = IntegratedGradients(small_model(), LayerMapComposite([(nn.ReLU, rule())]), n_iter=3)
        run = DisentangledAttributor(wrapped, "act", blocks, context_steps=3, tolerance=1)
        return run(small_input(), TARGET)[1]

    torch.testing.assert_close(maps(subspaces(6)).sum(1), maps(subspaces(6, 1))[:, 0])


def test_integrated_gradients_run_the_lower_part_once_for_many_steps():
    model, input = small_model(), small_input(1)
    runs: list[int] = []
    run = DisentangledAttributor(
        IntegratedGradients(model, n_iter=20), "pool", subspaces(6), context_steps=100, validated=True
    )
    model.stem[0].register_forward_hook(lambda *_: runs.append(1))
    run(input, TARGET[:1])
    # 20 for step 2; the rest: the pass to the layer, a trial, the path of 100 at once.
    assert len(runs) <= 20 + 4


@pytest.mark.parametrize("composite", [EpsilonPlus, ConvNetGamma])
def test_an_inactive_composite_leaves_plain_gradients(composite):
    model, input, blocks = small_model(), small_input(), subspaces(6)
    expected = DisentangledAttributor(Gradient(model), "pool", blocks, tolerance=1)(input, TARGET)[1]
    with DisentangledAttributor(Gradient(model, composite()), "pool", blocks, tolerance=1) as run:
        under_rules = run(input, TARGET)[1]
        with run.inactive():
            # Zennit merges batch norms up to their eps.
            torch.testing.assert_close(run(input, TARGET)[1], expected, rtol=1e-4, atol=0)
            torch.testing.assert_close(run.explain(input, [1, 4]).maps, expected, rtol=1e-4, atol=0)
        assert_same(run(input, TARGET)[1], under_rules)
    assert not torch.allclose(under_rules, expected)


def _log_probability(output: Tensor) -> Tensor:
    return output.log_softmax(1)[:, 1]


@pytest.mark.parametrize("target", [1, [1, 4], _log_probability], ids=["int", "list", "fn"])
def test_the_whole_map_of_occlusion_is_that_of_the_target(target):
    """Zennit's Occlusion sums what it is given: a gradient at the output would give one number everywhere."""
    model, input = small_model(), small_input()
    wrapped = Occlusion(model, EpsilonPlus(), window=(4, 4), stride=(4, 4))
    found = DisentangledAttributor(wrapped, "pool", subspaces(6)).explain(input, target).whole
    expected = torch.zeros_like(input)
    for y in (0, 4):
        for x in (0, 4):
            mask = torch.zeros_like(input)
            mask[:, :, y : y + 4, x : x + 4] = 1
            output = model(input * mask).detach()
            score = (
                target(output) if callable(target) else output[range(2), torch.as_tensor(target).expand(2)]
            )
            expected += score[:, None, None, None] * mask
    torch.testing.assert_close(found, expected)


def test_occlusion_takes_a_function_as_the_score_and_a_tensor_as_its_gradient():
    model, input = small_model(), small_input()
    windows: dict[str, Any] = {"window": (4, 4), "stride": (4, 4)}
    run = DisentangledAttributor(Occlusion(model, **windows), "pool", subspaces(6), residual=True)
    by_tensor, by_function = run(input, TARGET)[1], run(input, lambda output: output * TARGET)[1]
    torch.testing.assert_close(by_tensor, by_function)
    whole = Occlusion(model, **windows)(input, lambda output: output * TARGET)[1]
    torch.testing.assert_close(by_tensor.sum(1), whole)


# ---------------------------------------------------------------------- as Zennit's attributors


def test_it_is_a_zennit_attributor():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    run = DisentangledAttributor(Gradient(model, EpsilonPlus(), attr_output=TARGET), "pool", blocks)
    _, expected = run(input)  # attr_output of the wrapped attributor
    torch.testing.assert_close(run(input, TARGET)[1], expected)
    torch.testing.assert_close(run(input, lambda out: TARGET)[1], expected)
    with run as entered:
        assert entered is run
        for _ in range(2):
            torch.testing.assert_close(entered(input)[1], expected)
        assert entered.concept_relevance(input).shape == (2, 3)
    assert not input.requires_grad


class GradientTimesInput(Gradient):  # type: ignore[misc]
    """A method of a user's, by `forward`."""

    def forward(self, input: Tensor, attr_output_fn: Any) -> Any:
        output, gradient = super().forward(input, attr_output_fn)
        return output, gradient * input


class HalvedGradient(Gradient):  # type: ignore[misc]
    """A method of a user's, by `grad`."""

    def grad(self, input: Tensor, attr_output_fn: Any) -> Any:
        output, gradient = super().grad(input, attr_output_fn)
        return output, gradient / 2


class TwiceSmoothed(SmoothGrad):  # type: ignore[misc]
    """A method of a user's on one with random numbers."""

    def forward(self, input: Tensor, attr_output_fn: Any) -> Any:
        runs = [super(TwiceSmoothed, self).forward(input, attr_output_fn) for _ in range(2)]
        return runs[0][0], (runs[0][1] + runs[1][1]) / 2


@pytest.mark.parametrize("kind", [GradientTimesInput, HalvedGradient, TwiceSmoothed])
@pytest.mark.parametrize("composite", ["none", "plus"])
def test_subclasses_of_attributors_do_what_their_author_wrote(kind, composite):
    input, wrapped = small_input(), attributor(kind, composite)
    run = DisentangledAttributor(wrapped, "pool", subspaces(6))
    torch.manual_seed(5)
    found = run.explain(input, [1, 4])
    assert found.whole is not None
    torch.testing.assert_close(found.maps.sum(1), found.whole)
    torch.manual_seed(5)
    maps = run(input, TARGET)[1]
    torch.manual_seed(5)
    torch.testing.assert_close(maps.sum(1), wrapped(input, TARGET)[1])
    plain = DisentangledAttributor(attributor(kind.__base__, composite, wrapped.model), "pool", subspaces(6))
    torch.manual_seed(5)
    assert not torch.allclose(plain(input, TARGET)[1], maps)


def test_subclasses_of_composites_do_what_their_author_wrote():
    class HandsOnThrice(EpsilonPlus):  # type: ignore[misc]
        """Everything that arrives at the head, three times."""

        def register(self, module: Any) -> None:
            super().register(module)
            self.handles.append(module.head.register_forward_hook(lambda m, args, output: output * 3))
            self.was_registered = True

        def remove(self) -> None:
            super().remove()
            self.was_registered = False

    input, blocks = small_input(), subspaces(6)
    thrice, once = (
        DisentangledAttributor(Gradient(small_model(), c, TARGET), "pool", blocks, validated=True)
        for c in (HandsOnThrice(), EpsilonPlus())  # the hook changes the output
    )
    torch.testing.assert_close(thrice(input)[1], 3 * once(input)[1])
    assert thrice.composite.was_registered is False
    filtered = DisentangledComposite(HandsOnThrice(), "pool", blocks, 0)
    with filtered.context(filtered_model := small_model()):
        assert filtered.composite.was_registered
        assert len(filtered_model.head._forward_hooks) > 1


def test_one_forward_pass_and_a_second_one_for_the_whole():
    model, input = small_model(), small_input()
    runs: list[int] = []
    model.stem[0].register_forward_hook(lambda *_: runs.append(1))
    for composite in COMPOSITES.values():
        run = DisentangledAttributor(Gradient(model, composite()), "pool", subspaces(6), tolerance=1)
        run.explain(input, 1)  # with the validation at the first use
        for call, n_passes in (
            (lambda run=run: run.explain(input, 1, whole=False), 1),
            (lambda run=run: run.explain(input, 1), 2),
            (lambda run=run: run(input, TARGET), 1),
            (lambda run=run: run.concept_relevance(input, 1), 1),
            (lambda run=run: run.context(input, 1), 1),
        ):
            runs.clear()
            call()
            assert len(runs) == n_passes


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [Gradient, SmoothGrad, IntegratedGradients, Occlusion])
def test_copies_explain_as_the_original(kind, copied):
    input, run = small_input(), DisentangledAttributor(attributor(kind, "plus"), "pool", subspaces(6))
    torch.manual_seed(5)
    expected = run.explain(input, 1)
    other = copied(run)
    assert (other.model is run.model) == (copied is copy.copy)
    torch.manual_seed(5)
    found = other.explain(input, 1)
    assert torch.equal(found.maps, expected.maps)
    assert found.provenance == expected.provenance
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(run)


def test_a_composite_may_bring_a_filter_of_its_own():
    model, input, blocks = small_model(), small_input(), subspaces(6)
    wrapped = Gradient(model, EpsilonPlus(canonizers=[SubspaceFilter("act", blocks, 1)]))
    maps = DisentangledAttributor(wrapped, "relu", blocks)(input, TARGET)[1]
    torch.testing.assert_close(maps.sum(1), wrapped(input, TARGET)[1])


def test_nested_attributors():
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


@pytest.mark.parametrize("composite", ["none", "plus"])
def test_a_function_of_a_single_output_is_a_score(composite):
    """(N, 1) is the shape of an `attr_output` too: contexts were those of the value, not of its slope."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)).double().eval()
    input = torch.rand(3, 4, dtype=torch.float64)
    run = DisentangledAttributor(Gradient(model, COMPOSITES[composite]()), "1", subspaces(6))
    column, flat = run.explain(input, torch.sigmoid), run.explain(input, lambda y: torch.sigmoid(y[:, 0]))
    assert_same(column.maps, flat.maps)
    assert_same(column.concept_relevance, flat.concept_relevance)
    # What does not depend on the output is an `attr_output`.
    one = torch.ones(3, 1, dtype=torch.float64)
    assert_same(run.concept_relevance(input, torch.ones_like), run.concept_relevance(input, one))


def test_higher_order_gradients():
    """create_graph: the maps can be differentiated, as the map of Zennit's Gradient can."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 2)]
    model = nn.Sequential(*layers).double()
    input, start = torch.randn(1, 4, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    _, maps = DisentangledAttributor(Gradient(model, create_graph=True), "1", subspaces(6))(input, start)
    gradients = torch.autograd.grad(maps.square().sum(), list(model.parameters()), allow_unused=True)
    assert all(g is not None and g.abs().sum() > 0 for g in gradients[:5])
    # Rules in the graph of the model have no true derivatives, and filters would filter once more.
    with pytest.raises(ValueError, match="create_graph=True"):
        DisentangledAttributor(Gradient(model, ConvNetGamma(0.25), create_graph=True), "1", subspaces(6))(
            input, start
        )
    filtered = DisentangledComposite(None, "1", subspaces(6), 0)
    with Gradient(model, filtered, create_graph=True) as attributor:
        relevance = attributor(input.clone(), start)[1]
        with pytest.raises(RuntimeError, match="once_differentiable"):
            relevance.square().sum().backward()


def test_weights_that_change_while_rules_are_registered():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)]
    model: Any = nn.Sequential(*layers).eval()
    input = torch.rand(1, 3, 2, 2)
    with DisentangledAttributor(Gradient(model, ConvNetGamma(0.5)), "3", subspaces(6)) as run:
        before = run.explain(input, 1).maps
        with torch.no_grad():
            model[2].weight.mul_(torch.randn(6, 6, 1, 1))
        after = run.explain(input, 1).maps
    fresh = DisentangledAttributor(Gradient(model, ConvNetGamma(0.5)), "3", subspaces(6)).explain(input, 1)
    assert torch.equal(after, fresh.maps)  # the same operations
    assert not torch.allclose(before, after)


# ---------------------------------------------------------------------- models of every kind


@pytest.mark.parametrize("shape", [(3, 4), (3, 5, 4), (3, 4, 6, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_rank_and_precision(shape, dtype):
    torch.manual_seed(0)
    first = nn.Conv3d(4, 6, 3) if len(shape) == 5 else nn.Linear(4, 6)
    dim = 1 if len(shape) in (2, 5) else -1
    size = first(torch.zeros(shape)).flatten(1).shape[1]
    model = nn.Sequential(first, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(size, 2)).to(dtype)
    input, start = torch.randn(shape, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    wrapped = Gradient(model, EpsilonPlus())
    _, maps = DisentangledAttributor(wrapped, "1", subspaces(6), channel_dim=dim)(input, start)
    assert maps.shape == (3, 3, *shape[1:])
    assert maps.dtype == dtype
    torch.testing.assert_close(maps.sum(1), wrapped(input, start)[1])


class InPlace(nn.Module):
    """Overwrites its input before anything else."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.net, self.is_in_place = small_model(), is_in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(2).sub_(1) if self.is_in_place else x * 2 - 1)


@pytest.mark.parametrize("kind", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_models_that_work_in_place_on_their_input(kind):
    x = small_input()
    given = x.clone()

    def maps(is_in_place: bool) -> Tensor:
        torch.manual_seed(0)
        run = DisentangledAttributor(
            attributor(kind, model=InPlace(is_in_place)), "net.pool", subspaces(6), context_steps=3
        )
        result: Tensor = run(given, TARGET)[1]
        return result

    in_place = maps(True)
    assert torch.equal(given, x)
    torch.testing.assert_close(in_place, maps(False))


@pytest.mark.filterwarnings("ignore:.*is off by", "ignore:.*goes around layer")
@pytest.mark.parametrize("layer", ["stem.1", "middle", "inner"])
def test_integrated_gradients_before_an_in_place_activation(layer):
    run = DisentangledAttributor(attributor(IntegratedGradients), layer, subspaces(6), tolerance=1)
    assert run(small_input(), TARGET)[1].isfinite().all()


def test_layers_of_densenet_that_go_through_their_children():
    torch.manual_seed(0)
    model = densenet121().eval()
    input, target = torch.randn(1, 3, 32, 32), torch.eye(1000)[[3]]
    split = Subspaces(torch.eye(256), [128, 128])
    output, maps = DisentangledAttributor(Gradient(model), "features.denseblock1", split)(input, target)
    assert_same(output, model(input))
    assert_same(maps.sum(1), Gradient(model)(input.clone(), target)[1])


@pytest.mark.parametrize("kind", [Gradient, IntegratedGradients])
def test_inference_mode_and_compiled_models(kind):
    model, input = small_model(), small_input()

    def maps(model: nn.Module, start: Tensor = TARGET) -> Tensor:
        run = DisentangledAttributor(
            attributor(kind, model=model), "pool", subspaces(6), residual=True, context_steps=3, tolerance=1
        )
        result: Tensor = run(input, start)[1]
        return result

    expected = maps(model)
    with torch.inference_mode():
        assert_same(maps(model), expected)
        assert_same(maps(model, TARGET.clone()), expected)  # the start is an inference tensor, too
    compiled: Any = torch.compile(model, backend="eager")
    compiled(input)  # warm
    assert_same(maps(compiled), expected)
    with pytest.raises(TypeError, match="TorchScript"):
        maps(torch.jit.trace(model, input))


def test_a_layer_may_be_named_by_any_of_its_names():
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model()
            self.last = self.net.pool

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Alias()
    runs = [DisentangledAttributor(Gradient(model), name, subspaces(6)) for name in ("net.pool", "last")]
    assert runs[0].layer_name == runs[1].layer_name == "net.pool"
    assert torch.equal(*(run.concept_relevance(small_input(), 1) for run in runs))


# ---------------------------------------------------------------------- what a user may get wrong


def wrapped(attributor: Any = None, layer: Any = "pool", **options: Any) -> Any:
    attributor = Gradient(small_model()) if attributor is None else attributor
    return DisentangledAttributor(attributor, layer, subspaces(6), **options)


CONSTRUCTED: dict[str, tuple[Any, type[Exception], str]] = {
    "a model": (lambda: wrapped(small_model()), TypeError, "got Skip"),
    "nested": (lambda: wrapped(wrapped()), TypeError, "got DisentangledAttributor"),
    "two_step": (lambda: wrapped(two_step=True), ValueError, "two_step is for IntegratedGradients"),
    "signal": (lambda: wrapped(signal="context"), ValueError, "'relevance', 'gradient' or None"),
    "layer": (lambda: wrapped(layer="pol"), ValueError, "did you mean 'pool'"),
    "module of another model": (lambda: wrapped(layer=nn.ReLU()), ValueError, "not a module of this Skip"),
    "subspaces": (
        lambda: DisentangledAttributor(Gradient(small_model()), "pool", subspaces(6).basis),  # type: ignore[arg-type]
        TypeError,
        "must be a drsa_core.Subspaces",
    ),
}


@pytest.mark.parametrize("what", CONSTRUCTED)
def test_bad_arguments(what):
    make, error, message = CONSTRUCTED[what]
    with pytest.raises(error, match=message):
        make()


CALLED: dict[str, tuple[Any, type[Exception], str]] = {
    "NumPy": (lambda x: x.numpy(), TypeError, "tensor.* got ndarray"),
    "integers": (lambda x: x.long(), TypeError, r"got torch\.int64"),
    "no example": (lambda x: x[:0], ValueError, "at least one example"),
    "a NaN pixel": (
        lambda x: x.index_put([torch.tensor(i) for i in (0, 0, 4, 4)], torch.tensor(torch.nan).double()),
        ValueError,
        "the input itself holds NaN",
    ),
    "two inputs": (lambda x: (x, x), TypeError, "one input tensor"),
}


@pytest.mark.parametrize("what", CALLED)
@pytest.mark.parametrize("composite", ["none", "plus"])
@pytest.mark.parametrize("kind", [Gradient, IntegratedGradients, SmoothGrad, Occlusion])
def test_bad_inputs(what, composite, kind):
    """A pixel that is NaN gave finite maps where no rule was registered."""
    make, error, message = CALLED[what]
    x, run = make(small_input()), wrapped(attributor(kind, composite), context_steps=3)
    calls = [lambda: run.explain(x, 1), lambda: run.concept_relevance(x, 1), lambda: run.context(x, 1)]
    for call in calls if what == "two inputs" else [lambda: run(x, TARGET), *calls]:
        with pytest.raises(error, match=message):
            call()


def test_bad_starts_and_layers():
    run, x = wrapped(), small_input()
    assert torch.equal(run.concept_relevance((x,), 1), run.concept_relevance(x, 1))
    for call in (run, run.concept_relevance):
        with pytest.raises(ValueError, match=r"have the output's shape \(2, 5\), got \(5,\)"):
            call(x, TARGET[0])
    with pytest.raises(TypeError, match=r"attr_output must be a tensor .* got int"):
        run(x, 1)
    with pytest.raises(TypeError, match=r"pass \[x\]"):
        run.fit(x, 1)
    with pytest.raises(ValueError, match="there are no subspaces yet"):
        DisentangledAttributor(Gradient(small_model()), "pool")(x, TARGET)
    with pytest.raises(ValueError, match="two steps integrate gradients"):
        wrapped(IntegratedGradients(small_model(), EpsilonPlus()), two_step=True)(x, TARGET)
    with pytest.raises(ValueError, match="D = 6 features, but layer 'head' has 5"):
        wrapped(layer="head")(x, TARGET)
    for dim in (0, -4):
        with pytest.raises(ValueError, match="no axis of features"):
            wrapped(channel_dim=dim)(x, TARGET)
    composite = EpsilonPlus()
    with composite.context(model := small_model()), pytest.raises(ValueError, match="registered to a model"):
        wrapped(Gradient(model, composite))(x, TARGET)


class Two(Skip):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Aside(Skip):
    def forward(self, x: Tensor) -> Tensor:
        self.pool(x)
        return x.flatten(1)[:, :5] * 2


def test_bad_models():
    x = small_input()
    with pytest.raises(TypeError, match="must return a tensor, got tuple; wrap the model"):
        wrapped(Gradient(Two().double()))(x, TARGET)
    with pytest.raises(TypeError, match="must return a tensor, got tuple; wrap the model"):
        wrapped(Gradient(Two().double())).concept_relevance(x, 1)
    with pytest.raises(ValueError, match="no gradient flows from the explained score to layer 'pool'"):
        DisentangledAttributor(Gradient(Aside()), "pool", subspaces(3))(x, TARGET)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    attention = DisentangledAttributor(
        Gradient(nn.Sequential(encoder, nn.Linear(8, 3)).eval()), "0.self_attn", subspaces(8), channel_dim=-1
    )
    with pytest.raises(TypeError, match=r"must return one floating-point tensor .* got tuple"):
        attention(torch.randn(2, 4, 8), torch.ones(2, 4, 3))
    tokens = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(8 * 4, 5)).eval()
    with pytest.warns(UserWarning, match=r"looks like tokens of 8 features.*channel_dim=-1"):
        DisentangledAttributor(Gradient(tokens), "1").context(torch.randn(2, 4, 6), 1)


def test_relevance_that_is_not_finite_is_located():
    model, input, blocks = small_model(), small_input(), subspaces(6)

    def run(composite: Composite, layer: str = "pool") -> Any:
        return DisentangledAttributor(Gradient(model, composite), layer, blocks, tolerance=1, validated=True)

    with pytest.raises(ValueError, match="attr_output holds NaN"):
        run(EpsilonPlus())(input, torch.full((2, 5), float("nan")))
    zero = LayerMapComposite([(nn.Conv2d, Epsilon(epsilon=0.0)), (nn.Linear, Epsilon())])
    with torch.no_grad():
        model.middle.weight[:] = 0  # 0/0 in the rule on `middle`
    with pytest.raises(ValueError, match="first in what arrives at the output of layer 'pool'"):
        run(zero, "relu")(input, TARGET)
    with torch.no_grad():
        model.inner.weight[:] = float("inf")
    with pytest.raises(ValueError, match="first at the output of layer 'inner'"):
        run(EpsilonPlus())(input, TARGET)
