"""Every public method: how the library is called, and what the literal model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from captum._utils.models.linear_model import SkLearnLinearRegression
from captum.attr import (
    LRP,
    DeepLift,
    DeepLiftShap,
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    Lime,
    NoiseTunnel,
    Occlusion,
    Saliency,
    ShapleyValues,
    ShapleyValueSampling,
)
from captum.attr._utils.lrp_rules import GammaRule
from torch import Tensor, nn
from zennit import attribution as zennit_attribution
from zennit.composites import (
    BetaSmooth,
    DeconvNet,
    EpsilonGammaBox,
    EpsilonPlus,
    GuidedBackprop,
)
from zennit.core import Composite

from captum_drsa import DisentangledAttribution, IntegratedGradientsContext, ShapleyContext
from tests.matrix import lrp_rules, reference
from tests.matrix.networks import IMAGES, N_CLASSES, NETWORKS, TOKENS, Cut, feature_mask
from tests.matrix.reference import Problem
from zennit_drsa import DisentangledAttributor, DisentangledComposite, SubspaceFilter

SEED = 5
CONTEXT_STEPS, STEPS, PERMUTATIONS = 7, 6, 4


@dataclass(frozen=True)
class Case:
    """One method on one network: what the library gets, and the same for the reference."""

    network: str
    model: Cut
    problem: Problem

    @property
    def mask(self) -> Tensor:
        """The players of perturbation methods."""
        return feature_mask(self.network)

    @property
    def baselines(self) -> Tensor:
        """Two reference inputs for the methods that want a distribution."""
        shape = self.problem.x.shape[1:]
        generator = torch.Generator().manual_seed(23)
        return (0.3 * torch.randn(2, *shape, generator=generator)).to(self.problem.x)


Answer: TypeAlias = Callable[[Case], Tensor]


@dataclass(frozen=True)
class Method:
    """`library` and `literal` give the same numbers on `networks`."""

    library: Answer
    literal: Answer
    networks: tuple[str, ...] = NETWORKS
    # Captum itself gives float32 for every input: Occlusion, Shapley values, KernelShap and Lime.
    in_single_precision: bool = False


# ---------------------------------------------------------------------- the library


def _captum(make: Callable[[Cut], Any], context: Any = None, **options: Any) -> Answer:
    """A call of `attribute`; options that are functions are computed from the case."""

    def answer(case: Case) -> Tensor:
        problem, model = case.problem, case.model
        torch.manual_seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002  GradientShap draws from it
        wrapper = DisentangledAttribution(
            make(model), model.layer, problem.subspaces, context, channel_dim=problem.channel_dim
        )
        given = {key: value(case) if callable(value) else value for key, value in options.items()}
        maps: Tensor = wrapper.attribute(problem.x, target=problem.target, **given)
        return maps

    return answer


def _zennit(make: Callable[[Cut], Any], **options: Any) -> Answer:
    def answer(case: Case) -> Tensor:
        problem, model = case.problem, case.model
        torch.manual_seed(SEED)
        wrapper = DisentangledAttributor(
            make(model), model.layer, problem.subspaces, channel_dim=problem.channel_dim, **options
        )
        with wrapper as attributor:
            return attributor(problem.x, _one_hot(problem))[1].detach()

    return answer


def _gradient(composite: Callable[[], Composite] | None) -> Callable[[Cut], Any]:
    return lambda model: zennit_attribution.Gradient(model, None if composite is None else composite())


def _one_hot(problem: Problem) -> Tensor:
    return nn.functional.one_hot(problem.target, N_CLASSES).to(problem.x)


def _concept_by_concept(composite: Callable[[Case, int], Composite]) -> Answer:
    """Zennit's own Gradient with a composite that keeps one concept."""

    def answer(case: Case) -> Tensor:
        maps = []
        for k in range(case.problem.subspaces.n_subspaces):
            with zennit_attribution.Gradient(case.model, composite(case, k)) as attributor:
                maps.append(attributor(case.problem.x, _one_hot(case.problem))[1].detach())
        return torch.stack(maps, dim=1)

    return answer


def _disentangled(inner: Callable[[], Composite] | None) -> Callable[[Case, int], Composite]:
    return lambda case, k: DisentangledComposite(
        None if inner is None else inner(),
        case.model.layer,
        case.problem.subspaces,
        k,
        channel_dim=case.problem.channel_dim,
    )


def _canonized(case: Case, k: int) -> Composite:
    p = case.problem
    return EpsilonPlus(canonizers=[SubspaceFilter(case.model.layer, p.subspaces, k, p.channel_dim)])


def _wrapper_numbers(name: str, make: Callable[[Cut], Any], context: Any = None) -> Answer:
    """(N, K): `concept_relevance`, `total_relevance`."""

    def answer(case: Case) -> Tensor:
        p, model = case.problem, case.model
        wrapper = DisentangledAttribution(
            make(model), model.layer, p.subspaces, context, channel_dim=p.channel_dim
        )
        result: Tensor = getattr(wrapper, name)(p.x, target=p.target)
        return result.detach()

    return answer


def _zennit_concept_relevance(make: Callable[[Cut], Any], **options: Any) -> Answer:
    def answer(case: Case) -> Tensor:
        p, model = case.problem, case.model
        attributor = DisentangledAttributor(
            make(model), model.layer, p.subspaces, channel_dim=p.channel_dim, **options
        )
        return attributor.concept_relevance(p.x, _one_hot(p)).detach()

    return answer


def _with_gamma(model: Cut) -> LRP:
    model.lower[0].rule = GammaRule()
    return LRP(model)


def _lime(model: nn.Module) -> Lime:
    """Not the default Lasso: its penalty leaves nothing of relevance as small as here."""
    return Lime(model, interpretable_model=SkLearnLinearRegression())


def _windows(case: Case) -> tuple[int, ...]:
    return (2, 3, 3) if case.network in IMAGES else (1, 3) if case.network in TOKENS else (1,)


def _zennit_windows(model: Cut) -> Any:
    """The windows are the players of `feature_mask`."""
    first = model.lower[0]
    window = (2, 3, 3) if isinstance(first, nn.Conv2d) else (1, 3) if model.channel_dim == -1 else (1,)
    return zennit_attribution.Occlusion(model, window=window, stride=window)


# ---------------------------------------------------------------------- the literal model


def _maps(context: Any, explain: Any) -> Answer:
    return lambda case: case.problem.maps(context, explain)


def _of_mask(context: Any, method: Any) -> Answer:
    return lambda case: case.problem.maps(context, method(case.mask))


def _sampled(context: Any, make: Callable[[nn.Module], Any], **options: Any) -> Answer:
    def answer(case: Case) -> Tensor:
        given = {key: value(case) if callable(value) else value for key, value in options.items()}
        return reference.captum_maps(case.problem, context, make, SEED, **given)

    return answer


def _seeded(answer: Answer) -> Answer:
    def from_the_seed(case: Case) -> Tensor:
        torch.manual_seed(SEED)
        return answer(case)

    return from_the_seed


def _smoothed(case: Case) -> Tensor:
    """SmoothGrad: the mean over noisy copies, the last of them clean, of the filtered gradient there."""
    p = case.problem
    torch.manual_seed(SEED)
    axes = tuple(range(1, p.x.ndim))
    deviation = 0.1 * (p.x.amax(axes, keepdim=True) - p.x.amin(axes, keepdim=True))
    points = [p.x + torch.randn_like(p.x) * deviation for _ in range(STEPS - 1)] + [p.x]
    return reference.sum_of(
        reference.propagated_gradient(_at(p, point), reference.gradient) / STEPS for point in points
    )


def _path_filtered(case: Case) -> Tensor:
    """IG with each gradient on the path filtered by itself (`two_step=False`)."""
    p = case.problem
    total = reference.sum_of(
        w * reference.propagated_gradient(_at(p, t * p.x), reference.gradient)
        for t, w in reference.right_ends(STEPS)
    )
    return total * p.x.unsqueeze(1)


def _at(p: Problem, x: Tensor) -> Problem:
    return Problem(p.lower, p.upper, x, p.target, p.subspaces, p.channel_dim)


def lrp_context(rule: reference.Rule, times_output: bool) -> reference.Context:
    """c = R ⊘ a. Captum's LRP and both `collect` start from y, Zennit's own call from 1."""

    def context(p: Problem, x: Tensor, target: int) -> Tensor:
        a, arrived = reference.arriving(p, x, target, rule, times_output)
        return torch.where(a == 0, 0, arrived / torch.where(a == 0, 1, a))

    return context


def _first(case: Case) -> nn.Module:
    return case.problem.lower[0]


_gradient_context = reference.gradient_context
_captum_path = reference.path_context(reference.gauss_legendre(CONTEXT_STEPS))
_zennit_path = reference.path_context(reference.right_ends(CONTEXT_STEPS))
_ig_context = IntegratedGradientsContext(n_steps=CONTEXT_STEPS)
_shapley_context = reference.shapley_context(PERMUTATIONS)
_players: dict[str, Any] = {"feature_mask": lambda case: case.mask}

# Captum's LRP has rules for these alone.
_CAPTUM_LRP = ("image_batch_norm", "image_in_place", "image_max_pool", "tokens", "vectors")
# A sum needs a canonizer for Zennit's LRP; `test_families` has real ones.
_CHAINS = tuple(name for name in NETWORKS if "residual" not in name)
_NO_POOLING_BELOW = tuple(name for name in NETWORKS if name != "image_max_pool")
# Zennit's BetaSmooth reads the input of a ReLU after an in-place ReLU has overwritten it.
_NOT_IN_PLACE = tuple(name for name in NETWORKS if name != "image_in_place")
# After a ReLU, where Σ a_j does not vanish: what the contexts R_j / Σ a_j are for.
_POSITIVE = ("image_max_pool", "tokens", "vectors")

METHODS: dict[str, Method] = {
    # Captum, one pass
    "captum_input_x_gradient": Method(
        _captum(InputXGradient), _maps(_gradient_context, reference.input_times_gradient)
    ),
    "captum_saliency": Method(_captum(Saliency), _maps(_gradient_context, reference.saliency)),
    # Captum, two steps
    "captum_integrated_gradients": Method(
        _captum(IntegratedGradients, _ig_context, n_steps=STEPS),
        _maps(_captum_path, reference.integrated(reference.gauss_legendre(STEPS))),
    ),
    "captum_integrated_gradients_baseline": Method(
        _captum(IntegratedGradients, "gradient", n_steps=STEPS, baselines=0.25, internal_batch_size=4),
        _maps(_gradient_context, reference.integrated(reference.gauss_legendre(STEPS), 0.25)),
    ),
    "captum_deep_lift": Method(
        _captum(DeepLift),
        lambda case: reference.rescale_maps(case.problem, torch.zeros_like(case.problem.x[:1])),
        _NO_POOLING_BELOW,
    ),
    "captum_deep_lift_pooling": Method(
        _captum(DeepLift), _sampled(_gradient_context, DeepLift), ("image_max_pool",)
    ),
    "captum_deep_lift_shap": Method(
        _captum(DeepLiftShap, baselines=lambda case: case.baselines),
        lambda case: reference.rescale_maps(case.problem, case.baselines),
        _NO_POOLING_BELOW,
    ),
    "captum_gradient_shap": Method(
        _captum(GradientShap, baselines=lambda case: case.baselines, n_samples=3, stdevs=0.1),
        _sampled(
            _gradient_context, GradientShap, baselines=lambda case: case.baselines, n_samples=3, stdevs=0.1
        ),
    ),
    "captum_noise_tunnel_saliency": Method(
        _captum(lambda model: NoiseTunnel(Saliency(model)), nt_samples=3, nt_type="smoothgrad", stdevs=0.1),
        _sampled(
            _gradient_context,
            lambda model: NoiseTunnel(Saliency(model)),
            nt_samples=3,
            nt_type="smoothgrad",
            stdevs=0.1,
        ),
    ),
    "captum_noise_tunnel_integrated_gradients": Method(
        _captum(
            lambda model: NoiseTunnel(IntegratedGradients(model)),
            _ig_context,
            nt_samples=2,
            nt_type="smoothgrad_sq",
            n_steps=STEPS,
        ),
        _sampled(
            _captum_path,
            lambda model: NoiseTunnel(IntegratedGradients(model)),
            nt_samples=2,
            nt_type="smoothgrad_sq",
            n_steps=STEPS,
        ),
    ),
    # Captum, perturbations
    "captum_feature_ablation": Method(
        _captum(FeatureAblation, "gradient", **_players), _of_mask(_gradient_context, reference.ablation)
    ),
    "captum_occlusion": Method(
        _captum(Occlusion, "gradient", sliding_window_shapes=_windows, strides=_windows),
        _of_mask(_gradient_context, reference.ablation),
        in_single_precision=True,
    ),
    "captum_shapley_values": Method(
        _captum(ShapleyValues, "gradient", **_players),
        _of_mask(_gradient_context, reference.shapley),
        in_single_precision=True,
    ),
    "captum_shapley_values_shapley_context": Method(
        _captum(ShapleyValues, ShapleyContext(n_samples=PERMUTATIONS), **_players),
        _seeded(_of_mask(_shapley_context, reference.shapley)),
        _POSITIVE,
        in_single_precision=True,
    ),
    "captum_shapley_value_sampling": Method(
        _captum(ShapleyValueSampling, "gradient", n_samples=3, **_players),
        _sampled(_gradient_context, ShapleyValueSampling, n_samples=3, **_players),
        in_single_precision=True,
    ),
    "captum_shapley_value_sampling_shapley_context": Method(
        _captum(ShapleyValueSampling, ShapleyContext(n_samples=PERMUTATIONS), n_samples=3, **_players),
        _sampled(_shapley_context, ShapleyValueSampling, n_samples=3, **_players),
        _POSITIVE,
        in_single_precision=True,
    ),
    "captum_kernel_shap": Method(
        _captum(KernelShap, "gradient", n_samples=12, **_players),
        _sampled(_gradient_context, KernelShap, n_samples=12, **_players),
        in_single_precision=True,
    ),
    "captum_lime": Method(
        _captum(_lime, "gradient", n_samples=12, **_players),
        _sampled(_gradient_context, _lime, n_samples=12, **_players),
        in_single_precision=True,
    ),
    # Captum, LRP
    "captum_lrp": Method(
        _captum(LRP),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.captum_epsilon, True),
        _CAPTUM_LRP,
    ),
    "captum_lrp_gamma": Method(
        _captum(_with_gamma),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.captum_gamma(_first(case)), True),
        _CAPTUM_LRP,
    ),
    # Captum, numbers (N, K)
    "captum_concept_relevance": Method(
        _wrapper_numbers("concept_relevance", InputXGradient),
        lambda case: reference.concept_relevance(case.problem, _gradient_context),
    ),
    "captum_concept_relevance_path": Method(
        _wrapper_numbers("concept_relevance", IntegratedGradients, _ig_context),
        lambda case: reference.concept_relevance(case.problem, _captum_path),
    ),
    "captum_concept_relevance_lrp": Method(
        _wrapper_numbers("concept_relevance", LRP),
        lambda case: reference.concept_relevance(case.problem, lrp_context(lrp_rules.captum_epsilon, True)),
        _CAPTUM_LRP,
    ),
    "captum_total_relevance": Method(
        _wrapper_numbers("total_relevance", IntegratedGradients, _ig_context),
        lambda case: reference.total_relevance(case.problem, _captum_path),
    ),
    # Zennit, gradients
    "zennit_gradient": Method(
        _zennit(_gradient(None)),
        lambda case: reference.propagated_gradient(case.problem, reference.gradient),
    ),
    "zennit_gradient_chunked": Method(
        _zennit(_gradient(None), chunk=1),
        lambda case: reference.propagated_gradient(case.problem, reference.gradient),
    ),
    "zennit_smooth_grad": Method(
        _zennit(lambda model: zennit_attribution.SmoothGrad(model, noise_level=0.1, n_iter=STEPS)), _smoothed
    ),
    "zennit_beta_smooth": Method(
        _zennit(_gradient(BetaSmooth)),
        lambda case: reference.propagated_gradient(case.problem, lrp_rules.beta_smooth),
        _NOT_IN_PLACE,
    ),
    "zennit_guided_backprop": Method(
        _zennit(_gradient(GuidedBackprop)),
        lambda case: reference.propagated_by_sign(case.problem, lrp_rules.guided),
    ),
    "zennit_deconv_net": Method(
        _zennit(_gradient(DeconvNet)),
        lambda case: reference.propagated_by_sign(case.problem, lrp_rules.deconv),
    ),
    # Zennit, two steps
    "zennit_integrated_gradients": Method(
        _zennit(
            lambda model: zennit_attribution.IntegratedGradients(model, n_iter=STEPS),
            context_steps=CONTEXT_STEPS,
        ),
        _maps(_zennit_path, reference.integrated(reference.right_ends(STEPS))),
    ),
    "zennit_integrated_gradients_one_step": Method(
        _zennit(lambda model: zennit_attribution.IntegratedGradients(model, n_iter=STEPS), two_step=False),
        _path_filtered,
    ),
    "zennit_occlusion": Method(
        _zennit(_zennit_windows), _of_mask(_gradient_context, reference.only_the_window)
    ),
    # Zennit, LRP
    "zennit_epsilon_plus": Method(
        _zennit(_gradient(EpsilonPlus)),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        _CHAINS,
    ),
    "zennit_epsilon_gamma_box": Method(
        _zennit(_gradient(lambda: EpsilonGammaBox(low=-3.0, high=3.0))),
        lambda case: reference.propagated_relevance(
            case.problem, lrp_rules.epsilon_gamma_box(_first(case), -3.0, 3.0)
        ),
        tuple(name for name in _CHAINS if name in IMAGES),
    ),
    # Zennit, one concept at a time
    "zennit_composite_gradient": Method(
        _concept_by_concept(_disentangled(None)),
        lambda case: reference.propagated_gradient(case.problem, reference.gradient),
    ),
    "zennit_composite_epsilon_plus": Method(
        _concept_by_concept(_disentangled(EpsilonPlus)),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        _CHAINS,
    ),
    "zennit_subspace_filter": Method(
        _concept_by_concept(_canonized),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        _CHAINS,
    ),
    # Zennit, numbers (N, K)
    "zennit_concept_relevance": Method(
        _zennit_concept_relevance(_gradient(None)),
        lambda case: reference.concept_relevance(case.problem, _gradient_context),
    ),
    "zennit_concept_relevance_lrp": Method(
        _zennit_concept_relevance(_gradient(EpsilonPlus)),
        lambda case: reference.concept_relevance(case.problem, lrp_context(lrp_rules.epsilon_plus, False)),
        _CHAINS,
    ),
    "zennit_concept_relevance_path": Method(
        _zennit_concept_relevance(
            lambda model: zennit_attribution.IntegratedGradients(model, n_iter=STEPS),
            context_steps=CONTEXT_STEPS,
        ),
        lambda case: reference.concept_relevance(case.problem, _zennit_path),
    ),
}
