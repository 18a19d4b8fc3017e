"""`TransformerGamma` on transformers of torchvision, transformers, open_clip and timm's Swin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.model_state import model_state

from .families import CASES, OTHERS, huggingface, sentences
from .test_timm_vit import READINGS, close, subspaces

from zennit.attribution import Gradient, SmoothGrad  # isort: skip
from zennit.composites import EpsilonPlus  # isort: skip
from zennit_drsa import (  # isort: skip
    DisentangledAttributor,
    TransformerCanonizer,
    TransformerGamma,
    TransformersModel,
    doctor,
)

ALL = CASES | OTHERS


def attributor(name: str, model: Any, reading: str, gamma: float = 0.1) -> DisentangledAttributor:
    case, dtype = ALL[name], next(model.parameters()).dtype
    concepts = subspaces(case.width, dtype=dtype)
    return DisentangledAttributor(
        Gradient(model, TransformerGamma(gamma, reading)), case.layer, concepts, channel_dim=-1
    )


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("gamma", [0.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_every_formula_written_out(name, gamma, reading):
    case = CASES[name]
    model = case.model()
    x = case.inputs(model)
    assert case.explain is not None
    with torch.no_grad():
        expected = case.explain(model, x, 3, reading, gamma)
        assert close(model(x), expected["output"])
    explainer = attributor(name, model, reading, gamma)
    found = explainer.explain(x, 3)
    assert found.whole is not None
    assert close(found.whole, expected["input"])
    a, c = explainer.context(x, 3)
    assert close(a * c, expected["layer"])
    assert found.absorbed is not None
    score = expected["output"][:, 3].abs().max()
    for share in ("position embeddings", "prefix tokens", "type embeddings"):
        kept = found.absorbed.get(share, torch.zeros(len(x), dtype=torch.float64))
        error = (kept - expected.get(share, torch.zeros_like(kept))).abs().max()
        assert float(error) <= 1e-9 * float(score)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", ALL)
def test_all_shares_are_the_score_and_the_model_comes_back(name, reading):
    model = ALL[name].model()
    x = ALL[name].inputs(model)
    before, output = model_state(model), model(x).detach()
    explainer = attributor(name, model, reading)
    found = explainer.explain(x, 3)
    certificate = found.certificate()
    # An example alone is the same example in a batch.
    assert close(found.maps[1:], explainer.explain(x[1:], 3, whole=False).maps)
    assert model_state(model) == before
    assert torch.equal(model(x).detach(), output)
    assert certificate.unaccounted is not None
    assert certificate.unaccounted <= 1e-10
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole <= 1e-10
    assert certificate.around_the_layer == 0
    diagnosis = doctor(model, TransformerGamma(0.1, reading), x, verbose=False)
    assert diagnosis.ok, str(diagnosis)
    assert model_state(model) == before


@pytest.mark.parametrize("name", ALL)
def test_maps_add_up_in_float32(name):
    model = ALL[name].model().float()
    x = ALL[name].inputs(model, 3).float()
    certificate = attributor(name, model, "attnlrp").explain(x, 3).certificate()
    assert certificate.maps_to_whole is not None
    assert certificate.maps_to_whole <= 1e-5
    assert certificate.unaccounted is not None
    assert certificate.unaccounted <= 1e-4


@pytest.mark.parametrize("name", ALL)
def test_an_error_in_between_leaves_the_model_as_it_was(name):
    model = ALL[name].model()
    x = ALL[name].inputs(model)
    handle = model.get_submodule(ALL[name].layer).register_forward_hook(lambda *call: 1 / 0)
    before = model_state(model)
    with pytest.raises(ZeroDivisionError), TransformerGamma(0.1).context(model):
        model(x)
    assert model_state(model) == before
    handle.remove()


@pytest.mark.parametrize(
    "name", ["torchvision ViT", "open_clip", "torchvision Swin", "timm Swin", "Bert mean"]
)
def test_zennits_own_rules_on_the_canonical_form(name):
    model = CASES[name].model()
    x, case = CASES[name].inputs(model), CASES[name]
    composite = EpsilonPlus(epsilon=1e-12, canonizers=[TransformerCanonizer()])
    epsilon = DisentangledAttributor(
        Gradient(model, composite), case.layer, subspaces(case.width), channel_dim=-1
    )
    ours = attributor(name, model, "attnlrp", 0.0)
    # Linear layers under ε → 0 are LRP-0; a convolution has another rule, so compare above it.
    assert close(epsilon.concept_relevance(x, 3), ours.concept_relevance(x, 3), 1e-6)


# ---------------------------------------------------------------------- models of `transformers`


@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta", "DistilBert"])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_word_embeddings_with_zeros_are_token_ids_with_a_mask(name, how):
    model = huggingface(f"{name}ForSequenceClassification", attn_implementation=how)
    ids, mask = sentences(3)
    assert torch.allclose(
        model(model.embed(ids, mask)), model.model(input_ids=ids, attention_mask=mask).logits, rtol=1e-12
    )
    assert model(torch.zeros(1, 5, 12, dtype=torch.float64)).isfinite().all()
    # Padding on the left, where positions are counted from the first token or from the first that is there.
    model = huggingface(f"{name}Model", "mean", attn_implementation=how)
    ids, mask = torch.flip(ids, (1,)), torch.flip(mask, (1,))
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert torch.allclose(model(model.embed(ids, mask)), mean, rtol=1e-12)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ViTForImageClassification"])
def test_fused_and_eager_attention_have_the_same_maps(name):
    case = CASES["Bert logits" if "Bert" in name else "transformers ViT"]
    maps = []
    for how in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = huggingface(name, attn_implementation=how)
        explainer = DisentangledAttributor(
            Gradient(model, TransformerGamma(0.1)), case.layer, subspaces(), channel_dim=-1
        )
        maps.append(explainer.explain(case.inputs(model), 3, whole=False).maps)
        assert model.model.config._attn_implementation == how
    assert close(maps[0], maps[1])


def test_padding_has_no_relevance_and_changes_nothing():
    model = CASES["Bert mean"].model()
    x = CASES["Bert mean"].inputs(model)
    maps = attributor("Bert mean", model, "attnlrp").explain(x, 3, whole=False).maps
    assert not maps[1, :, 3:].any()
    alone = attributor("Bert mean", model, "attnlrp").explain(x[1:, :3], 3, whole=False).maps
    assert close(maps[1:, :, :3], alone)


@pytest.mark.parametrize("output", ["first", "pooler_output"])
def test_a_first_token_that_is_padding_is_refused(output):
    """The score of the second sentence would be that of its padding."""
    inner = CASES["Bert mean"].model().model
    ids, mask = (part.flip(1) for part in sentences())
    with pytest.raises(ValueError, match="padding_side = 'right'"):
        TransformersModel(inner, output).embed(ids, mask)
    assert TransformersModel(inner, "mean").embed(ids, mask).shape == (2, 5, 12)


@pytest.mark.parametrize("backend", ["captum", "zennit"])
def test_noise_on_padding_is_refused(backend):
    """Noise of a thousandth would make words of the padding, and other maps of the sentence."""
    case = CASES["Bert mean"]
    model = case.model()
    x = case.inputs(model)
    if backend == "zennit":
        smooth = SmoothGrad(model, noise_level=1e-3, n_iter=2)
        run: Any = DisentangledAttributor(smooth, case.layer, subspaces(), channel_dim=-1)
    else:
        attr = pytest.importorskip("captum.attr")
        from captum_drsa import DisentangledAttribution

        tunnel = attr.NoiseTunnel(attr.InputXGradient(model))
        run = DisentangledAttribution(tunnel, case.layer, subspaces(), channel_dim=-1)
    with pytest.raises(ValueError, match="noise would make words of it"):
        run.explain(x, 3)
    assert run.explain(x[1:, :3], 3).maps.shape == (1, 4, 3, 12)  # alone, it has no padding


def test_noise_of_gradient_shap_on_padding_is_refused():
    attr = pytest.importorskip("captum.attr")
    from captum_drsa import DisentangledAttribution

    case = CASES["Bert mean"]
    model = case.model()
    x = case.inputs(model)
    run = DisentangledAttribution(attr.GradientShap(model), case.layer, subspaces(), channel_dim=-1)
    options: dict[str, Any] = {"baselines": torch.zeros_like(x[:1]), "n_samples": 2}
    with pytest.raises(ValueError, match="noise would make words of it"):
        run.attribute(x, target=3, stdevs=(1e-3,), **options)
    assert not run.attribute(x, target=3, **options)[1, :, 3:].any()  # by default it has none


def test_sentence_types_are_part_of_the_input():
    inner = CASES["Bert logits"].model().model
    ids, _ = sentences(1)
    types = torch.tensor([0, 0, 0, 1, 1])
    model = TransformersModel(inner, token_type_ids=types)
    x = model.embed(ids)
    expected = inner(input_ids=ids, token_type_ids=types[None]).logits
    assert torch.allclose(model(x), expected, rtol=1e-12)
    certificate = attributor("Bert logits", model, "constant").explain(x, 3).certificate()
    assert certificate.unaccounted is not None
    assert certificate.unaccounted <= 1e-10


def refused(model: Any, message: str) -> None:
    before = model_state(model)
    with pytest.raises(ValueError, match=message):
        TransformerCanonizer().apply(model)
    assert model_state(model) == before


def test_what_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=30, **small)
    refused(transformers.BertForMaskedLM(config), "the model is a BertForMaskedLM, for which")
    decoder = transformers.BertConfig(vocab_size=30, is_decoder=True, **small)
    refused(transformers.BertModel(decoder), "decoder .*causal decoders are not supported")
    decoder.add_cross_attention = True
    refused(transformers.BertModel(decoder), "causal decoders are not supported")
    gpt = transformers.GPT2Config(vocab_size=30, n_embd=12, n_layer=1, n_head=2)
    refused(transformers.GPT2Model(gpt), "GPT2Model: cross-attention and causal decoders are not supported")
    flash = transformers.BertModel(config)
    flash.config._attn_implementation_internal = "flash_attention_2"
    refused(flash, r"attends by 'flash_attention_2', which cannot be opened.*attn_implementation='sdpa'")


def test_wrong_use_of_a_model_of_transformers():
    model = huggingface("BertModel", "mean")
    with pytest.raises(ValueError, match="output must be one of logits"):
        TransformersModel(model.model, "classes")
    with pytest.raises(TypeError, match="must be a model of transformers, got Linear"):
        TransformersModel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="BertModel returns no logits; pass output="):
        TransformersModel(model.model)(model.embed(sentences()[0]))
    with pytest.raises(ValueError, match=r"word embeddings \(N, T, E\), got \(2, 5\)"):
        model(torch.zeros(2, 5))
    with torch.no_grad():
        model.model.embeddings.word_embeddings.weight[1] = 0
    with pytest.raises(ValueError, match="pass attention_mask"):
        model.embed(sentences()[0])
    with pytest.raises(ValueError, match="takes pixels and has no word embeddings"):
        huggingface("ViTModel", "first").embed(sentences()[0])
    with pytest.raises(ValueError, match=r"token_type_ids must be of shape \(T,\)"):
        TransformersModel(model.model, "mean", torch.zeros(2, 5, dtype=torch.long))


def test_what_an_image_tower_returns_must_be_one_tensor():
    tower = CASES["open_clip"].model()
    tower.output_tokens = True
    refused(tower, "set output_tokens to False")
    tower.output_tokens, tower.transformer.batch_first = False, False
    refused(tower, "batch_first=True")
