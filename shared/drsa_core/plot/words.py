"""From tokens to words: word pieces joined, their relevance added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import ArrayLike, as_float_tensor, check_finite

#: What stands before a piece that begins a word: SentencePiece's and GPT's sign for a space.
_BEGINS = ("▁", "Ġ")
#: What stands before a piece that goes on with a word: WordPiece's sign.
_GOES_ON = "##"
_CLOSING = frozenset(".,;:!?)]}’”%")


@dataclass(frozen=True)
class Words:
    """The words of a sentence with their relevance.

    Attributes
    ----------
    texts : list of str
        The words as people read them.
    relevance : tensor, shape (K, W)
        R_k of each word: the sum over its pieces.
    follows : list of bool
        Whether a word comes without a space before it, as a full stop does.
    """

    texts: list[str]
    relevance: Tensor
    follows: list[bool]


def as_words(tokens: Sequence[str], maps: ArrayLike, join: bool = True) -> Words:
    """Words of a sentence and their relevance, from tokens and maps (K, T) or (K, T, E).

    Parameters
    ----------
    tokens : sequence of str, length T
        As a tokenizer gives them: "##ing" goes on with the word before; if any token begins with "▁" or "Ġ",
        these begin words and the others go on.
    maps : array or tensor, shape (K, T) or (K, T, E)
        Relevance R_k of each token; the features E of an embedding are added up.
    join : bool
        Whether to join the pieces of a word.
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
        # Where beginnings are marked, what has no mark goes on; special tokens stand alone.
        may_go_on = token.startswith(_GOES_ON) or (marks_beginnings and not begins)
        goes_on = may_go_on and bool(texts) and not _is_special(token) and not _is_special(texts[-1])
        text = text.removeprefix(_GOES_ON) if goes_on else text
        if goes_on and join and not _is_closing(text):
            texts[-1] += text
            columns[-1] = columns[-1] + values
            continue
        texts.append(text or "␣")
        follows.append(goes_on or _is_closing(text))
        columns.append(values)
    return Words(texts, torch.stack(columns, dim=1), follows)


def _is_closing(text: str) -> bool:
    return bool(text) and set(text) <= _CLOSING


def _is_special(token: str) -> bool:
    """[CLS], <s>, <|endoftext|>, …"""
    return len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">"))
