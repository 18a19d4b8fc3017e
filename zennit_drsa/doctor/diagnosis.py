"""What `doctor` found, as a value and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..kept import BIASES


@dataclass(frozen=True)
class LayerRelevance:
    """Relevance that a module received at its output and handed to its input, over the batch."""

    name: str
    kind: str
    rule: str | None
    received: float
    handed_down: float
    magnitude: float
    has_bias: bool
    keeps: str = BIASES

    @property
    def lost(self) -> float:
        """Relevance that did not pass (negative if the module made some)."""
        return self.received - self.handed_down


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found; `ok` says whether an LRP map of this model and composite can be trusted.

    Attributes
    ----------
    relevance : float
        Relevance that was started with: the explained logits, summed over the batch.
    layers : list of LayerRelevance
        All modules that relevance crossed, in the order of the forward pass.
    unmerged_norms, functional, without_rule, non_finite : list of str
        Batch norms left as they were; operations in a module's code that relevance crosses without a rule
        and that do more than move, copy or select values; modules without a rule; modules with a non-finite
        output or relevance.
    drift : dict
        Relevance that a module lost (or made, if negative) in a way that none of its rules explains.
    lost_in_layers_with_bias, lost_in_other_layers : float
        Share of the relevance that stayed in layers under a rule: in biases (and stabilisers); in stabilisers
        alone.
    kept : dict
        Share of the relevance that stayed in parts of a canonical form, by what they are: position
        embeddings, prefix tokens, softmax.
    logit_change : float
        Largest change of an output by canonization, relative to the largest output.
    training : list of str
        The outermost modules that are in training mode; the examination itself runs in evaluation mode.
    reused : list of str
        Modules that run more than once in a forward pass under a rule that remembers one run alone.
    derived : list of str
        Layers that make other weights of their parameters (standardised convolutions, for instance), under a
        rule that exchanges the parameters.
    suggestion : str or None
        What makes LRP valid, tried on this model and input; or, if nothing does, what to use instead.
    """

    relevance: float
    layers: list[LayerRelevance]
    unmerged_norms: list[str]
    functional: list[str]
    without_rule: list[str]
    non_finite: list[str]
    drift: dict[str, float]
    lost_in_layers_with_bias: float
    lost_in_other_layers: float
    logit_change: float
    training: list[str]
    suggestion: str | None = field(default=None)
    kept: dict[str, float] = field(default_factory=dict)
    reused: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)

    @property
    def in_training(self) -> bool:
        """Whether a part of the model is in training mode, where dropout and norms act differently."""
        return bool(self.training)

    @property
    def findings(self) -> list[str]:
        """What is wrong under this composite, one string each; the mode of the model is not counted."""
        found = [f"{name} (batch norm) is not merged" for name in self.unmerged_norms]
        found += [f"{name} has no rule" for name in (*self.functional, *self.without_rule)]
        found += [f"{name} runs more than once" for name in self.reused]
        found += [f"{name} makes other weights of its parameters" for name in self.derived]
        found += [f"{name} has values that are not finite" for name in self.non_finite]
        found += [f"{name} loses or makes relevance ({change:+.3g})" for name, change in self.drift.items()]
        if not self.logit_change <= 1e-3:  # NaN counts
            found.append(f"the logits change by {self.logit_change:.1e}")
        return found

    @property
    def ok(self) -> bool:
        """Whether nothing was found that makes a map wrong. Relevance in biases is part of the method."""
        return not self.findings and not self.in_training

    def table(self, layers: Sequence[LayerRelevance] | None = None) -> str:
        """Relevance per layer, as a Markdown table."""
        lines = ["| layer | module | rule | received | handed down |", "|---|---|---|---|---|"]
        for layer in self.layers if layers is None else layers:
            numbers = f"{layer.received:.4g} | {layer.handed_down:.4g}"
            lines.append(f"| {layer.name or '(model)'} | {layer.kind} | {layer.rule or '–'} | {numbers} |")
        return "\n".join(lines)

    def __str__(self) -> str:
        findings = [
            ("batch norms left unmerged", self.unmerged_norms),
            ("operations without a rule", self.functional),
            ("modules without a rule", self.without_rule),
            ("modules that run more than once", self.reused),
            ("layers that make other weights of their parameters", self.derived),
            ("non-finite values", self.non_finite),
            ("relevance lost or made without a rule", [f"{k} ({v:+.3g})" for k, v in self.drift.items()]),
        ]
        lines = [
            f"LRP on this model: {'valid' if self.ok else 'NOT valid'}",
            "",
            "| what | found |",
            "|---|---|",
        ]
        lines += [f"| {what} | {_shorten(names)} |" for what, names in findings]
        mode = f"{_shorten(self.training)}: call model.eval()" if self.in_training else "none"
        lines.append(f"| modules in training mode | {mode} |")
        lines.append(f"| change of the logits by canonization | {self.logit_change:.1e} |")
        lines.append(f"| share lost in layers with a bias | {self.lost_in_layers_with_bias:.2%} |")
        lines.append(f"| share lost to stabilisers elsewhere | {self.lost_in_other_layers:.2%} |")
        lines += [f"| share kept by {name} | {share:.2%} |" for name, share in self.kept.items()]
        if self.suggestion:
            lines += ["", f"Suggestion: {self.suggestion}"]
        own = [layer for layer in self.layers if layer.rule or (layer.name or "(model)") in self.drift]
        worst = sorted(own, key=lambda layer: -abs(layer.lost))[:8]
        shown = [layer for layer in own if layer in worst]
        return "\n".join(
            [*lines, "", "Where relevance changes most (all layers: `.table()`):", "", self.table(shown)]
        )


def _shorten(names: Sequence[str], limit: int = 4) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)}: {', '.join(names[:limit])}{rest}"
