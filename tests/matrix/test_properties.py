"""What must hold for any input, weights and subspaces: properties, with cases drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from drsa_core import Subspaces
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")

from captum.attr import LRP, DeepLift, FeatureAblation, InputXGradient, IntegratedGradients
from zennit import attribution as zennit_attribution
from zennit.composites import EpsilonPlus, GuidedBackprop

from captum_drsa import DisentangledAttribution
from tests.matrix import networks
from zennit_drsa import DisentangledAttributor

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks",
    "ignore:Input Tensor",
    "ignore:.*sits on zero activations",
    "ignore:the integral above layer",
)

FEW = settings(
    derandomize=True,
    deadline=None,
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],  # the cases are small as they are
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)

# Both runs compute in one precision and in another order: float64 keeps eleven digits through these networks.
EXACT = 1e-10

# Captum's LRP has rules for chains of these alone.
_CHAINS = ("image_batch_norm", "image_in_place", "image_max_pool", "tokens", "vectors")
_NO_SUMS = tuple(name for name in networks.NETWORKS if "residual" not in name)

# Methods by the networks that they take; those whose maps depend on the draw of noise are not among them.
METHODS: dict[str, tuple[str, ...]] = {
    "captum_input_x_gradient": networks.NETWORKS,
    "captum_integrated_gradients": networks.NETWORKS,
    "captum_deep_lift": networks.NETWORKS,
    "captum_feature_ablation": networks.NETWORKS,
    "captum_lrp": _CHAINS,
    "zennit_gradient": networks.NETWORKS,
    "zennit_integrated_gradients": networks.NETWORKS,
    "zennit_guided_backprop": networks.NETWORKS,
    "zennit_epsilon_plus": _NO_SUMS,
}
# The maps of these are linear in what is filtered, and add up to the map of the wrapped method.
ADDITIVE = ("captum_input_x_gradient", "captum_lrp", "zennit_gradient", "zennit_epsilon_plus")


def explain(method: str, model: networks.Cut, x: Tensor, target: Tensor, blocks: Subspaces) -> Tensor:
    """Maps (N, K, *input)."""
    if method.startswith("zennit"):
        attributor = DisentangledAttributor(
            _zennit(method, model), model.layer, blocks, channel_dim=model.channel_dim, **_options(method)
        )
        start = nn.functional.one_hot(target, networks.N_CLASSES).to(x)
        return attributor(x, start)[1].detach()
    kinds: dict[str, Any] = {
        "captum_input_x_gradient": InputXGradient,
        "captum_integrated_gradients": IntegratedGradients,
        "captum_deep_lift": DeepLift,
        "captum_feature_ablation": FeatureAblation,
        "captum_lrp": LRP,
    }
    context = "gradient" if method == "captum_feature_ablation" else None
    wrapper = DisentangledAttribution(
        kinds[method](model), model.layer, blocks, context, channel_dim=model.channel_dim
    )
    steps: dict[str, Any] = {"n_steps": 8} if method == "captum_integrated_gradients" else {}
    maps: Tensor = wrapper.attribute(x, target=target, **steps)
    return maps


def whole(method: str, model: networks.Cut, x: Tensor, target: Tensor) -> Tensor:
    """The map of the wrapped method itself, (N, *input)."""
    if method.startswith("zennit"):
        start = nn.functional.one_hot(target, networks.N_CLASSES).to(x)
        return _zennit(method, model)(x, start)[1].detach()
    kind = {"captum_input_x_gradient": InputXGradient, "captum_lrp": LRP}[method]
    result: Tensor = kind(model).attribute(x.clone().requires_grad_(), target=target)
    return result.detach()


def _zennit(method: str, model: networks.Cut) -> Any:
    if method == "zennit_integrated_gradients":
        return zennit_attribution.IntegratedGradients(model, n_iter=4)
    composite = {"zennit_epsilon_plus": EpsilonPlus, "zennit_guided_backprop": GuidedBackprop}.get(method)
    return zennit_attribution.Gradient(model, composite() if composite else None)


def _options(method: str) -> dict[str, Any]:
    return {"context_steps": 4} if method == "zennit_integrated_gradients" else {}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    """Equal up to `tolerance` times the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@st.composite
def orthonormal_blocks(draw: st.DrawFn, complete: bool | None = None) -> Subspaces:
    """Orthonormal subspaces with random sizes that use all, or not all, of the features."""
    seed = draw(st.integers(0, 10**6))
    d = networks.N_FEATURES
    sizes: list[int] = []
    left = d
    while left and (not sizes or complete or draw(st.booleans())):
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    if complete is False and not left:
        sizes = [1, d - 2]
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    return Subspaces(basis[:, : sum(sizes)], sizes)


@st.composite
def problems(
    draw: st.DrawFn, names: tuple[str, ...], dtype: torch.dtype = torch.float64, n_max: int = 4
) -> tuple[networks.Cut, Tensor, Tensor]:
    """A network, a batch and its targets."""
    name, n = draw(st.sampled_from(names)), draw(st.integers(1, n_max))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(n, *networks.inputs(name, 1).shape[1:], generator=generator, dtype=torch.float64)
    target = torch.randint(networks.N_CLASSES, (n,), generator=generator)
    return networks.network(name, dtype), x.to(dtype), target


@pytest.mark.parametrize(("method", "network"), [(m, n) for m in METHODS for n in METHODS[m]])
@settings(FEW, max_examples=3)
@given(data=st.data())
def test_a_batch_is_its_examples_one_by_one(method: str, network: str, data: st.DataObject) -> None:
    model, x, target = data.draw(problems((network,)))
    blocks = data.draw(orthonormal_blocks())
    together = explain(method, model, x, target, blocks)
    for i in range(len(x)):
        alone = explain(method, model, x[i : i + 1], target[i : i + 1], blocks)
        torch.testing.assert_close(
            alone[0], together[i], rtol=0, atol=EXACT * float(together.abs().max()) + 1e-300
        )


@pytest.mark.parametrize("method", METHODS)
@FEW
@given(data=st.data())
def test_permuted_blocks_permute_the_maps(method: str, data: st.DataObject) -> None:
    model, x, target = data.draw(problems(METHODS[method]))
    blocks = data.draw(orthonormal_blocks())
    order = data.draw(st.permutations(range(blocks.n_subspaces)))
    maps = explain(method, model, x, target, blocks)
    permuted = explain(method, model, x, target, blocks.select(order))
    assert_close(permuted, maps[:, order])


@pytest.mark.parametrize("method", METHODS)
@FEW
@given(data=st.data())
def test_split_blocks_add_up(method: str, data: st.DataObject) -> None:
    """Every method here is linear in the filtered context: the parts of a block add up to the block."""
    model, x, target = data.draw(problems(METHODS[method]))
    blocks = data.draw(orthonormal_blocks())
    maps = explain(method, model, x, target, blocks)
    split = explain(method, model, x, target, Subspaces(blocks.basis, [1] * sum(blocks.dims)))
    parts = torch.stack([part.sum(1) for part in split.split(blocks.dims, dim=1)], dim=1)
    # Parts may be larger than their sum: the error is relative to them.
    torch.testing.assert_close(parts, maps, rtol=0, atol=EXACT * float(split.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@FEW
@given(data=st.data())
def test_a_rotation_inside_a_block_changes_nothing(method: str, data: st.DataObject) -> None:
    """A concept is a subspace: U_kU_kᵀ does not depend on the basis of it."""
    model, x, target = data.draw(problems(METHODS[method]))
    blocks = data.draw(orthonormal_blocks())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    rotated = [
        block @ torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
        for block, d in zip(blocks.blocks, blocks.dims, strict=True)
    ]
    other = Subspaces(torch.cat(rotated, dim=1), blocks.dims)
    assert_close(explain(method, model, x, target, other), explain(method, model, x, target, blocks))


@pytest.mark.parametrize("method", METHODS)
@settings(FEW, max_examples=4)
@given(data=st.data())
def test_names_change_nothing(method: str, data: st.DataObject) -> None:
    model, x, target = data.draw(problems(METHODS[method]))
    blocks = data.draw(orthonormal_blocks())
    names = [f"concept {k}" for k in reversed(range(blocks.n_subspaces))]
    renamed = Subspaces(blocks.basis, blocks.dims, names, metadata={"note": "renamed"})
    maps = explain(method, model, x, target, blocks)
    assert torch.equal(explain(method, model, x, target, renamed), maps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("method", ADDITIVE)
@settings(FEW, max_examples=20)
@given(data=st.data())
def test_completed_subspaces_sum_to_the_whole(method: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """≤ 1e-5 in float32 for every batch size, one included."""
    model, x, target = data.draw(problems(METHODS[method], dtype))
    # After a layer norm or a sum, LRP brings no relevance to zero activations: there are none.
    blocks = data.draw(orthonormal_blocks(complete=False)).to(dtype=dtype).completed()
    assert blocks.is_complete
    maps = explain(method, model, x, target, blocks)
    total = whole(method, model, x, target)
    # Parts that cancel are larger than the whole; their rounding is relative to them.
    scale = max(float(total.abs().max()), float(maps.abs().max()))
    tolerance = EXACT if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(maps.sum(1), total, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("method", METHODS)
@FEW
@given(data=st.data(), factor=st.sampled_from([-2.0, 0.25, 1e3]))
def test_maps_scale_with_the_output(method: str, data: st.DataObject, factor: float) -> None:
    """A head that is multiplied by s gives maps times s.

    Where it is not true: GuidedBackprop with s < 0, and Zennit's LRP, which starts from 1 and not from y.
    """
    if method == "zennit_epsilon_plus":
        pytest.skip("Zennit's relevance starts from 1, whatever the output is")
    model, x, target = data.draw(problems(METHODS[method]))
    blocks = data.draw(orthonormal_blocks())
    factor = abs(factor) if method == "zennit_guided_backprop" else factor
    maps = explain(method, model, x, target, blocks)
    with torch.no_grad():
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    # Captum's LRP adds 1e-9 to every denominator, which does not scale.
    tolerance = 1e-6 if method == "captum_lrp" else EXACT
    assert_close(explain(method, model, x, target, blocks), factor * maps, tolerance)
