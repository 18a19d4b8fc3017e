"""Models of `transformers`: outputs that are objects, layers that return tuples, masks and token types.

Tiny models with random weights; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captum.attr import (
    LRP,
    InputXGradient,
    IntegratedGradients,
    LayerGradientXActivation,
    LayerIntegratedGradients,
)
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution
from tests.captum_adapter.networks import subspaces
from tests.closeness import assert_same
from tests.model_state import model_state

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Input Tensor", "ignore:the path integral above layer")

D, LAYER = 16, "bert.encoder.layer.0"


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        num_labels=3,
        initializer_range=0.3,
    )
    return transformers.BertForSequenceClassification(config).double().eval()


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers, attention mask and token types of two sentences, one of them padded."""
    ids = torch.randint(5, 40, (2, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    types = torch.zeros_like(ids)
    types[:, 3:] = 1
    return ids, mask, types


def split(method: Any, context: Any = "gradient") -> DisentangledAttribution:
    blocks = subspaces(D, 3, torch.float64)
    return DisentangledAttribution(method, LAYER, blocks, context, channel_dim=-1)


def second(output: Any) -> Tensor:
    """A target: the logits of an output of `transformers`."""
    logits: Tensor = output.logits[:, 1]
    return logits


class Logits(nn.Module):
    """The same model as a function that returns a tensor."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, *args: Tensor) -> Tensor:
        logits: Tensor = self.bert(*args).logits
        return logits


@pytest.mark.parametrize("context", ["gradient", None])
def test_a_target_may_be_a_function_of_an_output_object(context: Any) -> None:
    model, (ids, mask, types) = bert(), sentences()
    before = model_state(model)
    words = model.bert.embeddings.word_embeddings
    options: dict[str, Any] = {"additional_forward_args": (mask, types), "baselines": 3, "n_steps": 4}
    da = split(LayerIntegratedGradients(model, words), context)
    explanation = da.explain(ids, second, **options)
    assert explanation.maps.shape == (2, 3, 6, D)
    wrapped = Logits(model)
    of_tensor = DisentangledAttribution(
        LayerIntegratedGradients(wrapped, words),
        f"bert.{LAYER}",
        subspaces(D, 3, torch.float64),
        context,
        channel_dim=-1,
    )
    assert_same(explanation.maps, of_tensor.attribute(ids, target=1, **options))
    assert explanation.whole is not None
    assert_same(
        explanation.whole, LayerIntegratedGradients(wrapped, words).attribute(ids, target=1, **options)
    )
    assert_same(explanation.score, model(ids, mask, types).logits[:, 1])
    assert model_state(model) == before


def test_what_is_not_possible_gets_one_sentence() -> None:
    model, (ids, mask, types) = bert(), sentences()
    before = model_state(model)
    args = (mask, types)
    words = model.bert.embeddings.word_embeddings
    with pytest.raises(TypeError, match="got SequenceClassifierOutput; give the target as a function"):
        split(LayerGradientXActivation(model, words)).attribute(ids, target=1, additional_forward_args=args)
    wrong: Any
    for wrong in (lambda output: output.logits, lambda output: 3):
        with pytest.raises(ValueError, match=r"must select one score for each .*, a Sequence"):
            split(LayerGradientXActivation(model, words)).attribute(
                ids, target=wrong, additional_forward_args=args
            )
    inside = DisentangledAttribution(
        LayerGradientXActivation(model, words), f"{LAYER}.attention", subspaces(D, 2), channel_dim=-1
    )
    with pytest.raises(TypeError, match=r"must return one .*tensor .* got tuple; choose a layer"):
        inside.attribute(ids, target=second, additional_forward_args=args)
    with pytest.raises(TypeError, match="needs floating-point inputs"):
        split(IntegratedGradients(model)).attribute(ids, target=second, additional_forward_args=args)
    with pytest.raises(TypeError, match="needs floating-point inputs"):
        split(LRP(model), "gradient").attribute(ids, target=second, additional_forward_args=args)
    assert model_state(model) == before


class Similarity:
    """The score of each sentence is its likeness to another one of its own."""

    def __init__(self, others: Tensor) -> None:
        self.others = others

    def __call__(self, output: Any) -> Tensor:
        pooled = nn.functional.normalize(output.pooler_output, dim=1)
        return (pooled * self.others).sum(1)

    def of_example(self, i: int) -> Similarity:
        return Similarity(self.others[i : i + 1])


def test_the_similarity_of_two_sentences_is_a_target() -> None:
    """One sentence with the other one held constant, for each pair of a batch; also alone."""
    model, (ids, mask, _) = bert().bert, sentences()
    with torch.no_grad():
        others = nn.functional.normalize(model(ids.flip(1), mask).pooler_output, dim=1)
    method = LayerIntegratedGradients(model, model.embeddings.word_embeddings)
    da = DisentangledAttribution(method, "encoder.layer.0", subspaces(D, 2, torch.float64), channel_dim=-1)
    target = Similarity(others)
    options: dict[str, Any] = {"baselines": 3, "n_steps": 5}
    maps = da.attribute(ids, target=target, additional_forward_args=(mask,), **options)
    for i in range(2):
        alone = da.attribute(
            ids[i : i + 1],
            target=target.of_example(i),
            additional_forward_args=(mask[i : i + 1],),
            **options,
        )
        assert_same(alone, maps[i : i + 1])


def test_a_vision_transformer() -> None:
    """Images have gradients: no layer method is needed, and tokens become pictures."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=3,
        initializer_range=0.3,
    )
    model = transformers.ViTForImageClassification(config).double().eval()
    name = next(name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer")
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    da = DisentangledAttribution(InputXGradient(model), name, subspaces(D, 3, torch.float64), channel_dim=-1)
    explanation = da.explain(x, second)
    assert explanation.maps.shape == (2, 3, 3, 16, 16)
    assert explanation.certificate().maps_to_whole < 1e-10  # type: ignore[operator]
    assert explanation.token_maps.shape == (2, 3, 4, 4)
    assert explanation.tokens().n_prefix == 1
