"""Coloured sentences and bars per feature: joined word pieces, one scale, totals, escaping, accessibility."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("matplotlib")

from drsa_core import plot
from drsa_core.plot.style import AGAINST, FOR
from drsa_core.plot.words import as_words
from matplotlib.axes import Axes
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


def test_the_features_of_an_embedding_are_added_up() -> None:
    values = torch.randn(2, len(TOKENS), 5, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(as_words(TOKENS, values).relevance, as_words(TOKENS, values.sum(2)).relevance)


def test_tokens_and_maps_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"T = 8 tokens, got \(2, 7\)"):
        plot.concept_text(TOKENS, maps(2, 7))
    with pytest.raises(ValueError, match=r"attribute\(ids, …\)\[0\]"):
        plot.concept_text_html(TOKENS, maps()[0])
    with pytest.raises(TypeError, match="tokens must be a sequence of strings"):
        plot.concept_text("a sentence", maps(2, 10))
    with pytest.raises(TypeError, match="tokens must be a sequence of strings"):
        plot.concept_text([1, 2], maps(2, 2))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="NaN or Inf"):
        plot.concept_text(TOKENS, maps() * float("nan"))
    with pytest.raises(ValueError, match="names must be 2 strings"):
        plot.concept_text(TOKENS, maps(), ["one"])


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


def test_letters_can_be_read_on_every_colour() -> None:
    """Contrast of at least 4.5 : 1 (WCAG 2, level AA) between letters and the strongest colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    page = plot.concept_text_html(["up", "down"], torch.tensor([[1.0, -1.0]]))
    backgrounds = {word["style"].split("#")[1][:6] for word in Spans(page).words}
    assert len(backgrounds) == 2
    for background in backgrounds:
        assert (luminance(background) + 0.05) / (luminance("111111") + 0.05) > 4.5


# ---------------------------------------------------------------------- tables


def widths(axis: Axes) -> list[float]:
    return [bar.get_width() for bar in axis.patches if isinstance(bar, Rectangle)]


def test_bars_of_features() -> None:
    values = torch.tensor([[3.0, -1.0, 0.0, 0.5], [0.0, 2.0, -4.0, 0.5]])
    figure = plot.concept_bars(
        values, ["a", "b", "c", "d"], ["one", "two"], values=torch.tensor([1, 2, 3, 4.5]), n_features=3
    )
    first, second = figure.axes
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["c = 3", "a = 1", "b = 2", "1 others"]
    assert widths(first) == pytest.approx([0, 3, -1, 0.5])
    assert widths(second) == pytest.approx([-4, 0, 2, 0.5])
    assert to_hex(first.patches[1].get_facecolor()) == FOR
    assert to_hex(second.patches[0].get_facecolor()) == AGAINST
    assert first.get_xlim() == second.get_xlim()
    assert "R = 2.5" in first.get_title()
    assert "R = -1.5" in second.get_title()


def test_bars_of_many_examples_are_means() -> None:
    values = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    axes = plot.concept_bars(values, n_features=None).axes
    order = values.mean(0).abs().amax(0).argsort(descending=True)
    for k in range(2):
        expected = values.mean(0)[k, order].tolist()
        assert widths(axes[k]) == pytest.approx(expected)
    with pytest.raises(ValueError, match="features must be 3 strings"):
        plot.concept_bars(values, ["a"])
    with pytest.raises(ValueError, match="values must be 3"):
        plot.concept_bars(values, values=["1"])
    with pytest.raises(ValueError, match=r"\(K, F\) or \(N, K, F\)"):
        plot.concept_bars(values[0, 0])
