"""Layer methods on an embedding below the concept layer: token numbers, masks, baselines, conservation.

`tests/matrix` compares them with the literal relevance model; here is what it has no attention, no further
arguments and no mistakes for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    FeatureAblation,
    IntegratedGradients,
    LayerDeepLift,
    LayerFeatureAblation,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    ShapleyValues,
    TokenReferenceBase,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from drsa_core import DRSA, Subspaces
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import subspaces
from tests.closeness import assert_same
from tests.model_state import model_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks",
    "ignore:Input Tensor",
    "ignore:Required gradients",
    "ignore:In order to make embedding",
)

PAD, MASK = 0, 1
D = 8


class Encoder(nn.Module):
    """Tokens, positions, attention with a mask, two blocks; all in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, D), nn.Embedding(10, D)
        # Smooth, so that quadrature is exact to the last digits.
        self.first, self.second = (
            nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(D, 3)
        self.double().eval()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(ids.shape[:2]) if mask is None else mask
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in (self.first, self.second):
            x = block(x, src_key_padding_mask=mask == 0)
        weight = (mask / mask.sum(1, keepdim=True))[:, :, None].to(x)
        scores: Tensor = self.head((x * weight).sum(1))
        return scores


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


def sentences() -> tuple[Tensor, Tensor]:
    """Three sentences of five tokens; the last one is padded."""
    ids = torch.randint(2, 20, (3, 5), generator=torch.Generator().manual_seed(1))
    ids[2, 3:] = PAD
    return ids, (ids != PAD).long()


def concepts(n_subspaces: int = 3) -> Subspaces:
    return subspaces(D, n_subspaces, torch.float64)


def split(method: Any, context: Any = "gradient", **options: Any) -> DisentangledAttribution:
    return DisentangledAttribution(method, "first", concepts(), context, channel_dim=-1, **options)


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "integrated_gradients": (LayerIntegratedGradients, {"n_steps": 6, "baselines": MASK}),
    "gradient_x_activation": (LayerGradientXActivation, {}),
    "deep_lift": (LayerDeepLift, {"baselines": MASK}),
    "feature_ablation": (LayerFeatureAblation, {}),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_whole_is_what_captum_gives(name: str) -> None:
    """Explaining the layer's output in the place of the input is the layer method itself."""
    model, (ids, mask) = encoder(), sentences()
    method, options = METHODS[name]
    # Fused attention, which Captum would run without gradients, takes no replaced output.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = method(model, model.words).attribute(
            ids, target=1, additional_forward_args=(mask,), **options
        )
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    da = split(method(model, model.words))
    explanation = da.explain(ids, 1, additional_forward_args=(mask,), **options)
    assert explanation.maps.shape == (3, 3, 5, D)
    assert explanation.whole is not None
    assert_same(explanation.whole, expected.detach())
    assert_same(explanation.score, model(ids, mask)[:, 1].detach())


@pytest.mark.parametrize("method", [LayerIntegratedGradients, LayerDeepLift])
def test_totals_of_note_b3(method: Any) -> None:
    """Σ_p R_pk = (φ(x) − φ(x̃))ᵀU_kU_kᵀc, and the delta says by how much it is missed."""
    model, (ids, mask) = encoder(), sentences()
    da = split(method(model, model.words))
    options: dict[str, Any] = {"baselines": MASK, "additional_forward_args": (mask,)}
    steps = {"n_steps": 100} if method is LayerIntegratedGradients else {}
    maps, delta = da.attribute(ids, target=1, return_convergence_delta=True, **options, **steps)
    totals = da.exact_totals(ids, 1, **options)
    assert_same(maps.sum((2, 3)) - totals, delta)
    if method is LayerIntegratedGradients:  # DeepLift does not conserve in attention and layer norms
        # Captum's weights in float32 leave 1e-7.
        assert float(delta.abs().max()) < 1e-6 * float(totals.abs().max())


@pytest.mark.parametrize("name", METHODS)
def test_a_sentence_alone_is_the_same_sentence_in_a_batch(name: str) -> None:
    model, (ids, mask) = encoder(), sentences()
    method, options = METHODS[name]
    da = split(method(model, model.words))
    maps = da.attribute(ids, target=[0, 1, 2], additional_forward_args=(mask,), **options)
    for i in range(3):
        alone = da.attribute(ids[i : i + 1], target=i, additional_forward_args=(mask[i : i + 1],), **options)
        assert_same(alone, maps[i : i + 1])


def test_interpretable_embeddings_give_the_same() -> None:
    model, (ids, mask) = encoder(), sentences()
    options: dict[str, Any] = {"target": 1, "additional_forward_args": (mask,), "n_steps": 6}
    one = TokenReferenceBase(MASK).generate_reference(5, device=torch.device("cpu"))
    reference = one.unsqueeze(0)
    expected = split(LayerIntegratedGradients(model, model.words)).attribute(ids, baselines=one, **options)
    before = model_state(model)
    embedding = configure_interpretable_embedding_layer(model, "words")
    try:
        inputs, baselines = (embedding.indices_to_embeddings(i).detach() for i in (ids, reference))
        maps = split(IntegratedGradients(model)).attribute(inputs, baselines=baselines, **options)
    finally:
        remove_interpretable_embedding_layer(model, embedding)
    assert_same(maps, expected)
    assert model_state(model) == before


def test_perturbations_of_token_numbers_conserve() -> None:
    """Shapley values of the tokens of a sentence add up to what Note B.3 says."""
    model, (ids, mask) = encoder(), sentences()
    da = split(ShapleyValues(model))
    options: dict[str, Any] = {"additional_forward_args": (mask,), "baselines": MASK}
    maps = da.attribute(ids, target=1, **options)
    assert maps.shape == (3, 3, 5)
    totals = da.exact_totals(ids, 1, **options)
    assert float((maps.sum(2) - totals).abs().max()) < 1e-5 * float(totals.abs().max())  # Captum: float32
    # Padding is a token as well, but the network does not look at it.
    assert float(maps[2, :, 3:].abs().max()) == 0


def test_all_inputs_of_a_layer_method_may_come_as_a_tuple() -> None:
    """As from a loader: ((ids, mask), label)."""
    model, (ids, mask) = encoder(), sentences()
    da = split(LayerGradientXActivation(model, model.words))
    expected = da.attribute(ids, target=1, additional_forward_args=(mask,))
    assert_same(da.attribute((ids, mask), target=1), expected)
    assert_same(da.explain((ids, mask), 1).maps, expected)


@pytest.mark.parametrize("method", [LayerIntegratedGradients, FeatureAblation, IntegratedGradients])
def test_fit_on_batches_with_masks(method: Any) -> None:
    model, (ids, mask) = encoder(), sentences()
    if method is LayerIntegratedGradients:
        da = DisentangledAttribution(method(model, model.words), "first", None, "gradient", channel_dim=-1)
    else:
        da = DisentangledAttribution(method(model), "first", None, "gradient", channel_dim=-1)
    inputs = ids
    if method is IntegratedGradients:  # embeddings are floating point, their masks are not
        embedding = configure_interpretable_embedding_layer(model, "words")
        inputs = embedding.indices_to_embeddings(ids).detach()
    da.fit([((inputs, mask), torch.tensor([0, 1, 2]))], "label", solver=DRSA(2, random_state=0), positions=2)
    assert da.subspaces is not None
    relevance = da.concept_relevance(inputs, [0, 1, 2], additional_forward_args=(mask,))
    a, c = da.context(inputs, [0, 1, 2], additional_forward_args=(mask,))
    assert_same(relevance.sum(1), (a * c).sum((1, 2)))


# ---------------------------------------------------------------------- mistakes


def test_layers_that_are_not_below_the_concept_layer() -> None:
    model, (ids, mask) = encoder(), sentences()
    with pytest.raises(ValueError, match="'first', which is the concept layer itself; give it a layer below"):
        split(LayerIntegratedGradients(model, model.first))
    before = model_state(model)
    for layer in (model.second, model):
        with pytest.raises(ValueError, match="runs after the concept layer 'first'"):
            split(LayerGradientXActivation(model, layer)).attribute(
                ids, target=1, additional_forward_args=(mask,)
            )
    with pytest.raises(ValueError, match="not a module of this Encoder"):
        split(LayerIntegratedGradients(model, encoder().words))
    with pytest.raises(TypeError, match="layer must be a module or its dotted name, got list"):
        split(LayerIntegratedGradients(model, [model.words, model.places]))
    assert model_state(model) == before


def test_a_layer_that_the_concept_layer_does_not_depend_on() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.other, self.first = nn.Embedding(20, D), nn.Embedding(20, D), nn.Linear(D, D)

        def forward(self, ids: Tensor) -> Tensor:
            aside, a = self.other(ids), self.first(self.words(ids))
            scores: Tensor = (a.relu() + aside).sum(1)
            return scores

    model = Aside().double()
    da = split(LayerGradientXActivation(model, model.other))
    with pytest.raises(ValueError, match="no gradient flows from layer 'first' to every input"):
        da.attribute(sentences()[0], target=1)


def test_options_that_have_no_meaning() -> None:
    model, (ids, _) = encoder(), sentences()
    da = split(LayerIntegratedGradients(model, model.words))
    with pytest.raises(ValueError, match="attribute_to_layer_input=True cannot be split"):
        da.attribute(ids, target=1, attribute_to_layer_input=True)
    assert da.attribute(ids, target=1, attribute_to_layer_input=False, n_steps=2).shape == (3, 3, 5, D)
    with pytest.raises(TypeError, match="takes layer_baselines, of the layer's output, not baselines"):
        split(LayerFeatureAblation(model, model.words)).attribute(ids, target=1, baselines=MASK)
    with pytest.raises(TypeError, match=r"needs floating-point inputs.* layer method on the embedding"):
        split(IntegratedGradients(model)).attribute(ids, target=1)
    with pytest.raises(TypeError, match="has no contexts for token numbers"):
        split(LayerIntegratedGradients(model, model.words), "lrp").attribute(ids, target=1)
