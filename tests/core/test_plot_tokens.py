"""Coloured sentences: joined word pieces, one scale, totals, escaping, a text for every word."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("matplotlib")

from drsa_core import plot
from drsa_core.plot.tokens import as_words
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

TOKENS = ["[CLS]", "un", "##believ", "##able", "cats", ",", "again", "[SEP]"]


def maps(n_concepts: int = 2, n_tokens: int = len(TOKENS)) -> torch.Tensor:
    return torch.randn(n_concepts, n_tokens, generator=torch.Generator().manual_seed(0)).double()


# ---------------------------------------------------------------------- words


def test_word_pieces_are_joined_and_their_relevance_is_added_up() -> None:
    values = maps()
    words = as_words(TOKENS, values)
    assert words.texts == ["[CLS]", "unbelievable", "cats", ",", "again", "[SEP]"]
    assert words.follows == [False, False, False, True, False, False]
    torch.testing.assert_close(words.relevance[:, 1], values[:, 1:4].sum(1))
    torch.testing.assert_close(words.relevance.sum(1), values.sum(1))
    embedded = as_words(TOKENS, values[..., None] * torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(embedded.relevance, words.relevance)
    apart = as_words(TOKENS, values, join=False)
    assert apart.texts == ["[CLS]", "un", "believ", "able", "cats", ",", "again", "[SEP]"]
    assert apart.follows[2:4] == [True, True]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<s>", "▁Hell", "o", "▁world", ".", "</s>"], ["<s>", "Hello", "world", ".", "</s>"]),
        (["Hell", "o", "Ġworld", "!"], ["Hello", "world", "!"]),
        (["Ġ", "x"], ["␣x"]),
        (["just", "words"], ["just", "words"]),
        (["##ing", "on"], ["##ing", "on"]),  # nothing to go on with
    ],
)
def test_other_tokenizers(tokens: list[str], expected: list[str]) -> None:
    assert as_words(tokens, maps(1, len(tokens))).texts == expected


@pytest.mark.parametrize(
    ("error", "message", "tokens", "values"),
    [
        (ValueError, r"T = 8 tokens, got \(2, 7\)", TOKENS, maps(2, 7)),
        (ValueError, r"attribute\(ids, …\)\[0\]", TOKENS, maps()[0]),
        (TypeError, "tokens must be a sequence of strings", "a sentence", maps(2, 10)),
        (ValueError, "NaN or Inf", TOKENS, maps() * torch.nan),
    ],
)
def test_tokens_and_maps_that_do_not_fit(error, message: str, tokens, values: torch.Tensor) -> None:
    with pytest.raises(error, match=message):
        plot.concept_text(tokens, values)


# ---------------------------------------------------------------------- the figure


def test_a_sentence_for_each_concept_and_one_for_the_sum() -> None:
    values = maps(3)
    figure = plot.concept_text(TOKENS, values, ["a", "b", "c"], title="a title")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[0] == "a title"
    assert texts.count("unbelievable") == 4
    assert f"sum of concepts   R = {float(values.sum()):.3g}" in texts
    headings = [text for text in texts if text.startswith("b ")]
    assert f"R = {float(values[1].sum()):.3g}" in headings[0]
    assert plot.concept_text(TOKENS, values, whole=False).axes[0].texts[0].get_text().startswith("S1")


def test_dollars_are_no_formulas() -> None:
    tokens = ["pay", "$$", "or", "$x_$"]
    figure = plot.concept_text(tokens, torch.ones(1, 4), ["5 $ or 6 $"], title="$\\oops$")
    figure.savefig(io.BytesIO())  # formulas are read when they are drawn
    shown = [text for text in figure.axes[0].texts if "$" in text.get_text()]
    assert len(shown) == 1 + 2 * 2 + 1  # the title, both tokens for the sum and the concept, its heading
    assert not any(text.get_parse_math() for text in shown)


def test_one_symmetric_scale_for_all_concepts() -> None:
    """The strongest word has the full colour, one of the same strength against it the other, 0 is white."""
    values = torch.tensor([[2.0, -2.0, 0.0], [0.5, 0.0, 0.0]])
    figure = plot.concept_text(["up", "down", "none"], values, whole=False)
    boxes = [
        to_hex(patch.get_facecolor())
        for patch in figure.axes[0].patches
        if isinstance(patch, Rectangle) and patch.get_height() > 0.2
    ]
    assert boxes == ["#f07870", "#7aa6f0", "#ffffff", "#fbdddb", "#ffffff", "#ffffff"]


def test_the_scale_holds_the_sum_of_concepts() -> None:
    """A word that three concepts speak for is stronger in the sum than one with a single concept."""
    values = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    page = plot.concept_text_html(["three", "one"], values)
    strong, weak = (word["style"] for word in Spans(page).words[:2])
    assert "#f07870" in strong
    assert "#fad2cf" in weak  # a third of the way from white
    assert "+3 for" in page
    assert "+1 for" in plot.concept_text_html(["three", "one"], values, whole=False)
    figure = plot.concept_text(["three", "one"], values)
    assert any("3 for" in text.get_text() for text in figure.axes[0].texts)


def test_long_sentences_are_broken_and_every_word_stays_inside() -> None:
    tokens = [f"word{i}" for i in range(40)]
    figure = plot.concept_text(tokens, maps(2, 40), width=30)
    axis = figure.axes[0]
    width, height = figure.get_size_inches()
    words = [text for text in axis.texts if text.get_text().startswith("word")]
    assert len(words) == 3 * 40
    # Five words of five or six letters and their spaces fit into 30 characters.
    rows = {round(text.get_position()[1], 3) for text in words}
    assert len(rows) >= 3 * 8
    renderer = FigureCanvasAgg(figure).get_renderer()
    for text in axis.texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.x1 <= width * figure.dpi
        assert 0 <= box.y0 <= height * figure.dpi


# ---------------------------------------------------------------------- the page


class Spans(HTMLParser):
    """The words of a page: their texts, titles, labels and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[dict[str, str]] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        entries = {name: value or "" for name, value in attrs}
        if "aria-label" in entries:
            self.words.append({**entries, "text": ""})
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.words[-1]["text"] += data


def test_every_word_of_the_page_says_its_number() -> None:
    values = maps(2)
    page = plot.concept_text_html(TOKENS, values, ["a", "b"])
    words = Spans(page).words
    assert [word["text"] for word in words] == as_words(TOKENS, values).texts * 3
    expected = as_words(TOKENS, values).relevance
    for word, value in zip(words[6:], expected.flatten().tolist(), strict=True):
        assert word["title"] == f"{value:+.3g}"
        assert word["aria-label"] == f"{word['text']}: relevance {value:+.3g}"
    sentences = re.sub(r"<[^>]+>", "", page).splitlines()
    assert "[CLS] unbelievable cats, again [SEP]" in sentences
    colours = {word["style"] for word in words}
    assert len(colours) > 3


def test_tokens_titles_and_names_are_escaped() -> None:
    evil = '<script>alert("1")</script>'
    page = plot.concept_text_html([evil, '"quoted"'], maps(1, 2), [evil], title=evil)
    assert "<script" not in page
    found = Spans(page)
    assert set(found.tags) == {"section", "p", "span"}
    assert found.words[0]["text"] == evil
    assert found.words[1]["aria-label"].startswith('"quoted": relevance')
