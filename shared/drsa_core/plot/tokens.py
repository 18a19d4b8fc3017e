"""`concept_text`, `concept_text_html`: one coloured sentence for each concept, word pieces joined."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, as_int, check_finite
from .style import concept_names, number, share_label

#: Red and blue of the strongest words, light enough for black letters on them (contrast at least 5 : 1).
_FOR, _AGAINST = (0xF0, 0x78, 0x70), (0x7A, 0xA6, 0xF0)
#: What stands before a piece that begins a word: SentencePiece's and GPT's sign for a space.
_BEGINS = ("▁", "Ġ")
#: What stands before a piece that goes on with a word: WordPiece's sign.
_GOES_ON = "##"
_CLOSING = frozenset(".,;:!?)]}’”%")


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
    """
    words = as_words(tokens, maps, join)
    rows, limit = _rows(words, names, whole)
    lines = _lines(words, as_int(width, "width", 10))
    size, cell, line_height = 10.0, 0.0836, 0.27  # points; inches of a character of that size, and of a line
    n_longest = max(sum(len(text) for _, text in line) for line in lines)
    row_height = line_height * len(lines) + 0.42
    top = 0.42 if title else 0.12
    figure_width = max(cell * n_longest + 0.5, 0.075 * len(title or "") + 0.3, 4.5)
    figure_height = top + row_height * len(rows) + 0.35
    figure = Figure(figsize=(figure_width, figure_height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, figure_width), ylim=(figure_height, 0))
    axis.set_axis_off()
    # Texts are shown as given: between two dollars, matplotlib would read formulas.
    plain: dict[str, Any] = {"va": "center", "parse_math": False}
    if title:
        axis.text(0.2, 0.24, title, fontsize=11, **plain)
    for heading, values in rows:
        axis.text(0.2, top + 0.12, heading, fontsize=9.5, color="0.25", weight="bold", **plain)
        for line_number, line in enumerate(lines):
            x, y = 0.2, top + 0.36 + line_height * line_number
            for w, text in line:
                if w is not None:
                    box, length = (x - 0.02, y - 0.45 * line_height), cell * len(text) + 0.04
                    axis.add_patch(
                        Rectangle(box, length, 0.9 * line_height, color=_colour(values[w], limit), lw=0)
                    )
                    axis.text(x, y, text, family="monospace", fontsize=size, **plain)
                x += cell * len(text)
        top += row_height
    _draw_scale(axis, limit, figure_height - 0.24)
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
    """The same as a `<section>` of HTML, for a notebook (`IPython.display.HTML`) or a report.

    Every word has its relevance as a title, which appears under the mouse, and as a text that screen readers
    read; colour is never the only sign. Tokens and names are escaped.

    Parameters
    ----------
    tokens, maps, names, title, whole, join
        As in `concept_text`.
    """
    words = as_words(tokens, maps, join)
    rows, limit = _rows(words, names, whole)
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


@dataclass(frozen=True)
class Words:
    """The words of a sentence with their relevance (K, W), and whether each comes without a space before."""

    texts: list[str]
    relevance: Tensor
    follows: list[bool]


def as_words(tokens: Sequence[str], maps: ArrayLike, join: bool = True) -> Words:
    """Words of a sentence from tokens and maps (K, T) or (K, T, E); relevance is added up over pieces and E.

    "##ing" goes on with the word before; if any token begins with "▁" or "Ġ", these begin words and the
    others go on. With `join=False` pieces stand by themselves.
    """
    relevance = as_float_tensor(maps, "maps").cpu().double()
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TypeError(f"tokens must be a sequence of strings, one for each token, got {tokens!r:.80}")
    if relevance.ndim not in (2, 3) or 0 in relevance.shape or relevance.shape[1] != len(tokens):
        raise ValueError(
            f"maps must have shape (K, T) or (K, T, E) with the T = {len(tokens)} tokens, got "
            f"{tuple(relevance.shape)}; those of one sentence are attribute(ids, …)[0]"
        )
    check_finite(relevance, "maps")
    relevance = relevance.sum(2) if relevance.ndim == 3 else relevance
    marks_beginnings = any(token.startswith(_BEGINS) for token in tokens)
    texts: list[str] = []
    follows: list[bool] = []
    columns: list[Tensor] = []
    for token, values in zip(tokens, relevance.T, strict=True):
        begins = token.startswith(_BEGINS)
        text = token.lstrip("".join(_BEGINS)) if begins else token
        # Where beginnings are marked, what has no mark goes on; special tokens stand by themselves.
        may_go_on = token.startswith(_GOES_ON) or (marks_beginnings and not begins)
        goes_on = may_go_on and bool(texts) and not _is_special(token) and not _is_special(texts[-1])
        text = text.removeprefix(_GOES_ON) if goes_on else text
        is_closing = bool(text) and set(text) <= _CLOSING
        if goes_on and join and not is_closing:
            texts[-1] += text
            columns[-1] = columns[-1] + values
            continue
        texts.append(text or "␣")
        follows.append(goes_on or is_closing)
        columns.append(values)
    return Words(texts, torch.stack(columns, dim=1), follows)


def _is_special(token: str) -> bool:
    """[CLS], <s>, <|endoftext|>, …"""
    return len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">"))


def _rows(
    words: Words, names: Sequence[str] | None, whole: bool
) -> tuple[list[tuple[str, list[float]]], float]:
    """Heading and relevance (W,) of every sentence to draw, and the largest modulus in any of them."""
    labels = concept_names(names, len(words.relevance))
    totals = words.relevance.sum(1).tolist()
    total, magnitude = sum(totals), sum(abs(part) for part in totals)
    rows = [
        (f"{label}   {share_label(part, total, magnitude)}", values)
        for label, part, values in zip(labels, totals, words.relevance.tolist(), strict=True)
    ]
    if whole:
        rows.insert(0, (f"sum of concepts   R = {total:.3g}", words.relevance.sum(0).tolist()))
    # That of the sum included: beyond the limit, words would look the same.
    return rows, max(abs(value) for _, values in rows for value in values) or 1.0


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


def _spans(words: Words, values: list[float], limit: float) -> list[str]:
    spans = []
    for w, (text, value) in enumerate(zip(words.texts, values, strict=True)):
        space = "" if words.follows[w] or not w else " "
        label = html.escape(f"{text}: relevance {value:+.3g}", quote=True)
        spans.append(
            f'{space}<span role="text" title="{value:+.3g}" aria-label="{label}" '
            f'style="{_style(value, limit)}">{html.escape(text)}</span>'
        )
    return spans


def _style(value: float, limit: float) -> str:
    return f"background:{_colour(value, limit)};color:#111;border-radius:3px;padding:1px 2px"


def _colour(value: float, limit: float) -> str:
    """White for 0, red for `limit`, blue for −`limit`."""
    strength = min(abs(value) / limit, 1.0)
    parts = (round(255 - strength * (255 - part)) for part in (_FOR if value > 0 else _AGAINST))
    return "#" + "".join(f"{part:02x}" for part in parts)


def _draw_scale(axis: Axes, limit: float, y: float) -> None:
    steps, width, x = 41, 0.03, 1.2
    for step in range(steps):
        colour = _colour((2 * step / (steps - 1) - 1) * limit, limit)
        axis.add_patch(Rectangle((x + width * step, y - 0.06), width, 0.12, color=colour, lw=0))
    small: dict[str, Any] = {"fontsize": 8, "va": "center", "color": "0.35"}
    axis.text(x - 0.08, y, f"−{number(limit)} against", ha="right", **small)
    axis.text(x + width * steps + 0.08, y, f"{number(limit)} for, relevance of a word", **small)
