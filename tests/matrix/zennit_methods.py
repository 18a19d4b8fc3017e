"""Every method of the Zennit adapter, and what the literal model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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

from tests.matrix import lrp_rules, reference
from tests.matrix.case import (
    CHAINS,
    CONTEXT_STEPS,
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
from tests.matrix.networks import IMAGES, N_CLASSES, NETWORKS, Cut
from tests.matrix.reference import Problem, gradient_context
from zennit_drsa import DisentangledAttributor, DisentangledComposite, SubspaceFilter


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


def _zennit_concept_relevance(make: Callable[[Cut], Any], **options: Any) -> Answer:
    def answer(case: Case) -> Tensor:
        p, model = case.problem, case.model
        attributor = DisentangledAttributor(
            make(model), model.layer, p.subspaces, channel_dim=p.channel_dim, **options
        )
        return attributor.concept_relevance(p.x, _one_hot(p)).detach()

    return answer


def _zennit_windows(model: Cut) -> Any:
    """The windows are the players of `feature_mask`."""
    first = model.lower[0]
    window = (2, 3, 3) if isinstance(first, nn.Conv2d) else (1, 3) if model.channel_dim == -1 else (1,)
    return zennit_attribution.Occlusion(model, window=window, stride=window)


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


_zennit_path = reference.path_context(reference.exact_gauss_legendre(CONTEXT_STEPS))


# Zennit's BetaSmooth reads the input of a ReLU after an in-place ReLU has overwritten it.
_NOT_IN_PLACE = tuple(name for name in NETWORKS if name != "image_in_place")

ZENNIT_METHODS: dict[str, Method] = {
    # Zennit, gradients
    "zennit_gradient": Method(
        _zennit(_gradient(None)),
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
        literal_maps(_zennit_path, reference.integrated(reference.right_ends(STEPS))),
    ),
    "zennit_integrated_gradients_one_step": Method(
        _zennit(lambda model: zennit_attribution.IntegratedGradients(model, n_iter=STEPS), two_step=False),
        _path_filtered,
    ),
    "zennit_occlusion": Method(
        _zennit(_zennit_windows), literal_maps_of_players(gradient_context, reference.only_the_window)
    ),
    # Zennit, LRP
    "zennit_epsilon_plus": Method(
        _zennit(_gradient(EpsilonPlus)),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        CHAINS,
    ),
    "zennit_epsilon_gamma_box": Method(
        _zennit(_gradient(lambda: EpsilonGammaBox(low=-3.0, high=3.0))),
        lambda case: reference.propagated_relevance(
            case.problem, lrp_rules.epsilon_gamma_box(first_module(case), -3.0, 3.0)
        ),
        tuple(name for name in CHAINS if name in IMAGES),
    ),
    # Zennit, one concept at a time
    "zennit_composite_gradient": Method(
        _concept_by_concept(_disentangled(None)),
        lambda case: reference.propagated_gradient(case.problem, reference.gradient),
    ),
    "zennit_composite_epsilon_plus": Method(
        _concept_by_concept(_disentangled(EpsilonPlus)),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        CHAINS,
    ),
    "zennit_subspace_filter": Method(
        _concept_by_concept(_canonized),
        lambda case: reference.propagated_relevance(case.problem, lrp_rules.epsilon_plus),
        CHAINS,
    ),
    # Zennit, numbers (N, K)
    "zennit_concept_relevance": Method(
        _zennit_concept_relevance(_gradient(None)),
        lambda case: reference.concept_relevance(case.problem, gradient_context),
    ),
    "zennit_concept_relevance_lrp": Method(
        _zennit_concept_relevance(_gradient(EpsilonPlus)),
        lambda case: reference.concept_relevance(case.problem, lrp_context(lrp_rules.epsilon_plus, False)),
        CHAINS,
    ),
    "zennit_concept_relevance_path": Method(
        _zennit_concept_relevance(
            lambda model: zennit_attribution.IntegratedGradients(model, n_iter=STEPS),
            context_steps=CONTEXT_STEPS,
        ),
        lambda case: reference.concept_relevance(case.problem, _zennit_path),
    ),
}
