"""Every method of the Captum adapter, and what the literal model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Lime,
    NoiseTunnel,
    Occlusion,
    Saliency,
    ShapleyValues,
    ShapleyValueSampling,
)
from captum.attr._utils.lrp_rules import GammaRule
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution, IntegratedGradientsContext, ShapleyContext
from tests.matrix import lrp_rules, reference
from tests.matrix.case import (
    CONTEXT_STEPS,
    PERMUTATIONS,
    SEED,
    STEPS,
    Answer,
    Case,
    Method,
    first_module,
    literal_maps,
    literal_maps_of_players,
    lrp_context,
)
from tests.matrix.networks import IDS, IMAGES, NETWORKS, TOKENS, Cut
from tests.matrix.reference import gradient_context


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


def _wrapper_numbers(name: str, make: Callable[[Cut], Any], context: Any = None) -> Answer:
    """(N, K): `concept_relevance`, `exact_totals`."""

    def answer(case: Case) -> Tensor:
        p, model = case.problem, case.model
        wrapper = DisentangledAttribution(
            make(model), model.layer, p.subspaces, context, channel_dim=p.channel_dim
        )
        result: Tensor = getattr(wrapper, name)(p.x, target=p.target)
        return result.detach()

    return answer


def _with_gamma(model: Cut) -> LRP:
    model.lower[0].rule = GammaRule()
    return LRP(model)


def _lime(model: nn.Module) -> Lime:
    """Not the default Lasso: its penalty leaves nothing of relevance as small as here."""
    return Lime(model, interpretable_model=SkLearnLinearRegression())


def _windows(case: Case) -> tuple[int, ...]:
    return (2, 3, 3) if case.network in IMAGES else (1, 3) if case.network in TOKENS else (1,)


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


def _on_first(method: Callable[..., Any]) -> Callable[[Cut], Any]:
    """A layer method on the first module, such as the embedding."""
    return lambda model: method(model, model.lower[0])


def _below(answer: Callable[[Case, Tensor], Tensor], baseline: int = 0) -> Answer:
    """The answer to the case with the first module's output as the input, given that of the baseline."""

    def at_layer(case: Case) -> Tensor:
        p = case.problem
        reference_output = p.lower[0](torch.full_like(p.x[:1], baseline)).detach()
        return answer(Case(case.network, case.model, p.below()), reference_output)

    return at_layer


def _masks_of_layer(case: Case) -> Tensor:
    """A player for each token of the embedding, or for each channel."""
    shape = case.problem.below().x.shape[1:]
    return torch.arange(shape[0]).reshape(1, -1, *[1] * (len(shape) - 1)).expand(1, *shape).contiguous()


_captum_path = reference.path_context(reference.exact_gauss_legendre(CONTEXT_STEPS))


_ig_context = IntegratedGradientsContext(n_steps=CONTEXT_STEPS)


_shapley_context = reference.shapley_context(PERMUTATIONS)


_players: dict[str, Any] = {"feature_mask": lambda case: case.mask}


# Captum's LRP has rules for these alone.
_CAPTUM_LRP = ("image_batch_norm", "image_in_place", "image_max_pool", "tokens", "vectors")


_NO_POOLING_BELOW = tuple(name for name in NETWORKS if name != "image_max_pool")


_TWO_MODULES_BELOW = (*IDS, *(name for name in NETWORKS if name != "image_in_place"))


_MASK_TOKEN = 1


# After a ReLU, where Σ a_j does not vanish: what the contexts R_j / Σ a_j are for.
_POSITIVE = ("image_max_pool", "tokens", "vectors")

CAPTUM_METHODS: dict[str, Method] = {
    # Captum, one pass
    "captum_input_x_gradient": Method(
        _captum(InputXGradient), literal_maps(gradient_context, reference.input_times_gradient)
    ),
    "captum_saliency": Method(_captum(Saliency), literal_maps(gradient_context, reference.saliency)),
    # Captum, two steps
    "captum_integrated_gradients": Method(
        _captum(IntegratedGradients, _ig_context, n_steps=STEPS),
        literal_maps(_captum_path, reference.integrated(reference.gauss_legendre(STEPS))),
    ),
    "captum_integrated_gradients_baseline": Method(
        _captum(IntegratedGradients, "gradient", n_steps=STEPS, baselines=0.25, internal_batch_size=4),
        literal_maps(gradient_context, reference.integrated(reference.gauss_legendre(STEPS), 0.25)),
    ),
    "captum_deep_lift": Method(
        _captum(DeepLift),
        lambda case: reference.rescale_maps(case.problem, torch.zeros_like(case.problem.x[:1])),
        _NO_POOLING_BELOW,
    ),
    "captum_deep_lift_pooling": Method(
        _captum(DeepLift), _sampled(gradient_context, DeepLift), ("image_max_pool",)
    ),
    "captum_deep_lift_shap": Method(
        _captum(DeepLiftShap, baselines=lambda case: case.baselines),
        lambda case: reference.rescale_maps(case.problem, case.baselines),
        _NO_POOLING_BELOW,
    ),
    "captum_gradient_shap": Method(
        _captum(GradientShap, baselines=lambda case: case.baselines, n_samples=3, stdevs=0.1),
        _sampled(
            gradient_context, GradientShap, baselines=lambda case: case.baselines, n_samples=3, stdevs=0.1
        ),
    ),
    "captum_noise_tunnel_saliency": Method(
        _captum(lambda model: NoiseTunnel(Saliency(model)), nt_samples=3, nt_type="smoothgrad", stdevs=0.1),
        _sampled(
            gradient_context,
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
        _captum(FeatureAblation, "gradient", **_players),
        literal_maps_of_players(gradient_context, reference.ablation),
    ),
    "captum_occlusion": Method(
        _captum(Occlusion, "gradient", sliding_window_shapes=_windows, strides=_windows),
        literal_maps_of_players(gradient_context, reference.ablation),
        in_single_precision=True,
    ),
    "captum_shapley_values": Method(
        _captum(ShapleyValues, "gradient", **_players),
        literal_maps_of_players(gradient_context, reference.shapley),
        in_single_precision=True,
    ),
    "captum_shapley_values_shapley_context": Method(
        _captum(ShapleyValues, ShapleyContext(n_samples=PERMUTATIONS), **_players),
        _seeded(literal_maps_of_players(_shapley_context, reference.shapley)),
        _POSITIVE,
        in_single_precision=True,
    ),
    "captum_shapley_value_sampling": Method(
        _captum(ShapleyValueSampling, "gradient", n_samples=3, **_players),
        _sampled(gradient_context, ShapleyValueSampling, n_samples=3, **_players),
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
        _sampled(gradient_context, KernelShap, n_samples=12, **_players),
        in_single_precision=True,
    ),
    "captum_lime": Method(
        _captum(_lime, "gradient", n_samples=12, **_players),
        _sampled(gradient_context, _lime, n_samples=12, **_players),
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
        lambda case: reference.propagated_relevance(
            case.problem, lrp_rules.captum_gamma(first_module(case)), True
        ),
        _CAPTUM_LRP,
    ),
    # Captum, numbers (N, K)
    "captum_concept_relevance": Method(
        _wrapper_numbers("concept_relevance", InputXGradient),
        lambda case: reference.concept_relevance(case.problem, gradient_context),
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
    "captum_exact_totals": Method(
        _wrapper_numbers("exact_totals", IntegratedGradients, _ig_context),
        lambda case: reference.exact_totals(case.problem, _captum_path),
    ),
    # Captum, layer methods on the first module
    "captum_layer_gradient_x_activation": Method(
        _captum(_on_first(LayerGradientXActivation)),
        _below(lambda case, _: case.problem.maps(gradient_context, reference.input_times_gradient)),
        _TWO_MODULES_BELOW,
    ),
    "captum_layer_gradient": Method(
        _captum(lambda model: LayerGradientXActivation(model, model.lower[0], multiply_by_inputs=False)),
        _below(lambda case, _: case.problem.maps(gradient_context, reference.slope)),
        IDS,
    ),
    "captum_layer_integrated_gradients": Method(
        _captum(_on_first(LayerIntegratedGradients), _ig_context, n_steps=STEPS),
        _below(
            lambda case, e: case.problem.maps(
                _captum_path, reference.integrated(reference.gauss_legendre(STEPS), e)
            )
        ),
        _TWO_MODULES_BELOW,
    ),
    "captum_layer_integrated_gradients_mask_token": Method(
        _captum(
            _on_first(LayerIntegratedGradients),
            "gradient",
            n_steps=STEPS,
            baselines=_MASK_TOKEN,
            internal_batch_size=4,
        ),
        _below(
            lambda case, e: case.problem.maps(
                gradient_context, reference.integrated(reference.gauss_legendre(STEPS), e)
            ),
            _MASK_TOKEN,
        ),
        IDS,
    ),
    "captum_layer_deep_lift": Method(
        _captum(_on_first(LayerDeepLift)),
        _below(lambda case, e: reference.rescale_maps(case.problem, e)),
        tuple(name for name in _TWO_MODULES_BELOW if name != "image_max_pool"),
    ),
    "captum_layer_feature_ablation": Method(
        _captum(_on_first(LayerFeatureAblation), "gradient", layer_mask=_masks_of_layer),
        lambda case: case.problem.below().maps(gradient_context, reference.ablation(_masks_of_layer(case))),
        _TWO_MODULES_BELOW,
    ),
    # Captum, perturbations of token numbers
    "captum_feature_ablation_of_ids": Method(
        _captum(FeatureAblation, "gradient", baselines=_MASK_TOKEN),
        lambda case: case.problem.maps(gradient_context, reference.ablation(case.mask, _MASK_TOKEN)),
        IDS,
    ),
    "captum_occlusion_of_ids": Method(
        _captum(Occlusion, _ig_context, sliding_window_shapes=(1,), baselines=_MASK_TOKEN),
        lambda case: case.problem.maps(_captum_path, reference.ablation(case.mask, _MASK_TOKEN)),
        IDS,
        in_single_precision=True,
    ),
    "captum_shapley_values_of_ids": Method(
        _captum(ShapleyValues, "gradient", baselines=_MASK_TOKEN),
        lambda case: case.problem.maps(gradient_context, reference.shapley(case.mask, _MASK_TOKEN)),
        IDS,
        in_single_precision=True,
    ),
    "captum_shapley_value_sampling_of_ids": Method(
        _captum(
            ShapleyValueSampling,
            ShapleyContext(n_samples=PERMUTATIONS),
            n_samples=3,
            baselines=_MASK_TOKEN,
        ),
        _sampled(_shapley_context, ShapleyValueSampling, n_samples=3, baselines=_MASK_TOKEN),
        ("ids",),
        in_single_precision=True,
    ),
    "captum_kernel_shap_of_ids": Method(
        _captum(KernelShap, "gradient", n_samples=12, baselines=_MASK_TOKEN),
        _sampled(gradient_context, KernelShap, n_samples=12, baselines=_MASK_TOKEN),
        IDS,
        in_single_precision=True,
    ),
    "captum_lime_of_ids": Method(
        _captum(_lime, "gradient", n_samples=12, baselines=_MASK_TOKEN),
        _sampled(gradient_context, _lime, n_samples=12, baselines=_MASK_TOKEN),
        IDS,
        in_single_precision=True,
    ),
    "captum_exact_totals_of_ids": Method(
        _wrapper_numbers("exact_totals", _on_first(LayerIntegratedGradients), _ig_context),
        lambda case: reference.exact_totals(case.problem, _captum_path),
        IDS,
    ),
}
