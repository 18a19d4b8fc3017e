"""`concept_text`, `concept_text_html`: one coloured sentence for each concept."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..checks import ArrayLike, as_int
from .maps import concept_names
from .style import number, share_label
from .words import Words, as_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Red and blue of the strongest words, light enough for black letters on them (contrast at least 5 : 1).
_FOR, _AGAINST = (0xF0, 0x78, 0x70), (0x7A, 0xA6, 0xF0)


def concept_text(
    tokens: Sequence[str],
    maps: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    title: str | None = None,
    whole: bool = True,
    join: bool = True,
    width: int = 76,
) -> Figure:
    """A sentence K times, coloured by the relevance of its words for each concept.

    Red counts for the score, blue against it; all sentences share one symmetric scale. Each is headed by its
    total relevance R_k and its share of the sum.

    Parameters
    ----------
    tokens : sequence of str, length T
        As a tokenizer gives them, e.g. `tokenizer.convert_ids_to_tokens(ids[0])`. Word pieces ("##ing",
        "▁the", "Ġthe") are joined to words, and their relevance is added up.
    maps : array or tensor, shape (K, T) or (K, T, E)
        Relevance of the tokens of one sentence, e.g. `attribute(ids)[0]` of a layer method on the embedding,
        whose features E are added up, or `explain(ids).position_relevance[0]`.
    names : sequence of str, length K, optional
        Names of the concepts. Default "S1" … "SK".
    title : str, optional
        What a reader must know to judge the figure: model, score, layer, method.
    whole : bool
        Whether to show the sum of the concepts first.
    join : bool
        Whether to join word pieces.
    width : int
        Characters in a line.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    words = as_words(tokens, maps, join)
    rows = _rows(words, names, whole)
    width = as_int(width, "width", 10)
    limit = _limit(rows)
    lines = _lines(words, width)
    size, cell, line_height = 10.0, 0.0836, 0.27  # points; inches of a character of that size, and of a line
    n_longest = max(sum(len(text) for _, text in line) for line in lines)
    row_height = line_height * len(lines) + 0.42
    head = 0.42 if title else 0.12
    title_width = 0.075 * len(title or "")
    figure_width = max(cell * n_longest + 0.5, title_width + 0.3, 4.5)
    figure_height = head + row_height * len(rows) + 0.35
    figure = Figure(figsize=(figure_width, figure_height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, figure_width)
    axis.set_ylim(figure_height, 0)
    axis.set_axis_off()
    # Texts are shown as they are: between two dollars, matplotlib would read formulas.
    as_is: dict[str, Any] = {"va": "center", "parse_math": False}
    letters: dict[str, Any] = {"family": "monospace", "fontsize": size, **as_is}
    if title:
        axis.text(0.2, 0.24, title, fontsize=11, **as_is)
    top = head
    for heading, values in rows:
        axis.text(0.2, top + 0.12, heading, fontsize=9.5, color="0.25", weight="bold", **as_is)
        for number_of_line, line in enumerate(lines):
            x, y = 0.2, top + 0.36 + line_height * number_of_line
            for w, text in line:
                if w is not None:
                    box = (x - 0.02, y - 0.45 * line_height)
                    colour = tuple(part / 255 for part in _colour(float(values[w]), limit))
                    axis.add_patch(
                        Rectangle(box, cell * len(text) + 0.04, 0.9 * line_height, color=colour, linewidth=0)
                    )
                    axis.text(x, y, text, **letters)
                x += cell * len(text)
        top += row_height
    _draw_scale(axis, limit, figure_height)
    return figure


def concept_text_html(
    tokens: Sequence[str],
    maps: ArrayLike,
    names: Sequence[str] | None = None,
    *,
    title: str | None = None,
    whole: bool = True,
    join: bool = True,
) -> str:
    """The same as a piece of HTML, for a notebook (`IPython.display.HTML`) or a report.

    Every word has its relevance as a title, which appears under the mouse, and as a text that screen readers
    read; colour is never the only sign. Tokens and names are escaped.

    Parameters
    ----------
    tokens, maps, names, title, whole, join
        As in `concept_text`.

    Returns
    -------
    str
        One `<section>`, with its styles in the elements themselves.
    """
    words = as_words(tokens, maps, join)
    rows = _rows(words, names, whole)
    limit = _limit(rows)
    parts = [
        '<section style="font-family:sans-serif;line-height:1.9;color:#111;background:#fff;padding:0.5em">'
    ]
    if title:
        parts.append(f'<p style="margin:0.2em 0;font-weight:bold">{html.escape(title)}</p>')
    for heading, values in rows:
        parts.append(f'<p style="margin:0.5em 0 0;font-size:85%;color:#333">{html.escape(heading)}</p>')
        parts.append('<p style="margin:0">' + "".join(_spans(words, values, limit)) + "</p>")
    parts.append(
        '<p style="margin:0.5em 0 0;font-size:80%;color:#333">'
        f'<span style="{_style(-limit, limit)}">−{number(limit)} against</span> 0 '
        f'<span style="{_style(limit, limit)}">+{number(limit)} for</span> relevance of a word</p>'
    )
    return "\n".join([*parts, "</section>"])


def _spans(words: Words, values: Tensor, limit: float) -> list[str]:
    spans = []
    for w, text in enumerate(words.texts):
        space = "" if words.follows[w] or not w else " "
        relevance = f"{float(values[w]):+.3g}"
        label = html.escape(f"{text}: relevance {relevance}", quote=True)
        spans.append(
            f'{space}<span role="text" title="{relevance}" aria-label="{label}" '
            f'style="{_style(float(values[w]), limit)}">{html.escape(text)}</span>'
        )
    return spans


def _style(value: float, limit: float) -> str:
    red, green, blue = _colour(value, limit)
    return f"background:#{red:02x}{green:02x}{blue:02x};color:#111;border-radius:3px;padding:1px 2px"


def _colour(value: float, limit: float) -> tuple[int, int, int]:
    """White for 0, red for `limit`, blue for −`limit`."""
    strength = min(abs(value) / limit, 1.0)
    strongest = _FOR if value > 0 else _AGAINST
    red, green, blue = (round(255 - strength * (255 - part)) for part in strongest)
    return red, green, blue


def _limit(rows: Sequence[tuple[str, Tensor]]) -> float:
    """The largest modulus in any sentence, that of the sum included: beyond it, words would look the same."""
    return max(float(values.abs().max()) for _, values in rows) or 1.0


def _rows(words: Words, names: Sequence[str] | None, whole: bool) -> list[tuple[str, Tensor]]:
    """Heading and relevance (W,) of every sentence to draw."""
    labels = concept_names(names, len(words.relevance))
    totals = words.relevance.sum(1).tolist()
    total, magnitude = sum(totals), sum(abs(part) for part in totals)
    rows = [
        (f"{label}   {share_label(part, total, magnitude)}", values)
        for label, part, values in zip(labels, totals, words.relevance, strict=True)
    ]
    if whole:
        rows.insert(0, (f"sum of concepts   R = {total:.3g}", words.relevance.sum(0)))
    return rows


def _lines(words: Words, width: int) -> list[list[tuple[int | None, str]]]:
    """Lines of words by number, with the spaces between them, for letters of one width."""
    lines: list[list[tuple[int | None, str]]] = [[]]
    used = 0
    for w, text in enumerate(words.texts):
        space = 0 if words.follows[w] or not lines[-1] else 1
        if lines[-1] and used + space + len(text) > width and not words.follows[w]:
            lines.append([])
            used, space = 0, 0
        if space:
            lines[-1].append((None, " "))
        lines[-1].append((w, text))
        used += space + len(text)
    return lines


def _draw_scale(axis: Any, limit: float, bottom: float) -> None:
    from matplotlib.patches import Rectangle

    steps, width = 41, 0.03
    y, x = bottom - 0.24, 1.2
    for step in range(steps):
        value = (2 * step / (steps - 1) - 1) * limit
        colour = tuple(part / 255 for part in _colour(value, limit))
        axis.add_patch(Rectangle((x + width * step, y - 0.06), width, 0.12, color=colour, linewidth=0))
    small: dict[str, Any] = {"fontsize": 8, "va": "center", "color": "0.35"}
    axis.text(x - 0.08, y, f"−{number(limit)} against", ha="right", **small)
    axis.text(x + width * steps + 0.08, y, f"{number(limit)} for, relevance of a word", **small)
