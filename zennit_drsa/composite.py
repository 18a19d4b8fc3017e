"""`DisentangledComposite`: any Zennit composite, followed by a `SubspaceFilter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from drsa_core import Subspaces, model_fingerprint
from drsa_core.layer import TOLERANCE, Guard, uninterrupted
from drsa_core.lrp import check_exchangeable
from torch import nn
from zennit.canonizers import Canonizer
from zennit.core import Composite, CompositeContext

from ._zennit import (
    check_norms,
    describe_canonizers,
    exact_norms,
    exchanges_parameters,
    holds_relevance,
    hooks_by_module,
    running_statistics,
)
from .arguments import checked_arguments, refuse_derived
from .filter import Concept, SubspaceFilter

_T = TypeVar("_T")


class GuardedComposite(Composite):  # type: ignore[misc]
    """A Zennit composite that gives the model back as it was, whatever its canonizers do.

    After an error or Ctrl-C while it is being registered, nothing is left behind; what a canonizer does not
    undo is undone all the same.

    Parameters
    ----------
    composite : zennit.core.Composite or None
        The rules and canonizers to use; None stands for plain gradients.
    canonizers : sequence of Canonizer
        Further ones, applied last.
    derived : function
        What is done about layers that make other weights of their parameters, see `checked_arguments`.
    """

    def __init__(
        self,
        composite: Composite | None,
        canonizers: Sequence[Canonizer] = (),
        derived: Callable[[str, nn.Module], None] = refuse_derived,
    ) -> None:
        if composite is not None and not isinstance(composite, Composite):
            raise TypeError(f"composite must be a Zennit composite or None, got {type(composite).__name__}")
        if composite is not None:
            _check_own_methods(composite)
        self.composite = composite
        self._derived = derived
        self._guard: Guard | None = None
        module_map = None if composite is None else composite.module_map
        own = [] if composite is None else composite.canonizers
        super().__init__(module_map=module_map, canonizers=[*own, *canonizers])

    @property
    def may_change_output(self) -> bool:
        """Whether there is a canonizer whose class does not say `keeps_output = True`.

        Rules alone leave the output as it is. `NFNetCanonizer` knows the type of everything that it changes.
        """
        return not all(
            getattr(type(canonizer), "keeps_output", False) is True for canonizer in self.canonizers
        )

    def canonizers_described(self) -> str:
        """The canonizers but for filters, for a `Provenance`."""
        return describe_canonizers([c for c in self.canonizers if not isinstance(c, SubspaceFilter)])

    def check_slot(self, module: nn.Module, slot: str | None) -> None:
        """Refuse gradients of a model in which a canonizer has modules hand relevance on in their place."""
        carrier = next((h for h in self.handles if getattr(h, "carries_relevance", False)), None)
        if carrier is not None and slot is None and not holds_relevance(module):
            raise ValueError(
                f"{type(carrier).__name__} makes modules of this {type(module).__name__} hand relevance on, "
                "but no rule that carries relevance is active: what comes out would be neither that nor a "
                "gradient. Leave the canonizer out, as gradients need none, or use LRP rules"
            )

    @uninterrupted
    def register(self, module: nn.Module) -> None:
        """Apply the canonizers and the rules to a model."""
        self.remove()
        if self.composite is not None and self.composite.handles:
            raise ValueError(
                f"the {type(self.composite).__name__} is registered to a model already; leave its context "
                "(or call its remove()) and pass it unregistered"
            )
        if next(hooks_by_module(module), None) is not None:
            raise ValueError(
                f"another Zennit composite is registered to this {type(module).__name__}, and the rules of "
                "both would apply; leave its context first"
            )
        guard = Guard(module)
        try:
            guard.begin()
            statistics = running_statistics(module)
            super().register(module)  # which begins with a `remove` of its own
            self.handles.append(_Registered())
            self.handles.extend(exact_norms(module, statistics))
            _check_parameters(module)
            if holds_relevance(module):
                check_norms(module)
            self.handles.extend(checked_arguments(module, self._derived))
        except BaseException:
            self._guard = guard
            self.remove()
            raise
        self._guard = guard
        if guard.was_interrupted:
            self.remove()

    @uninterrupted
    def remove(self) -> None:
        """Take everything off the model, last things first: canonizers may have changed the same weights."""
        try:
            self.handles.reverse()
            super().remove()
        finally:
            # Also if a canonizer failed to undo what it did: the guard does.
            self.handles.clear()
            self.hook_refs.clear()
            guard, self._guard = self._guard, None
            if guard is not None:
                guard.end()

    def registered(self, module: nn.Module, work: Callable[[], _T]) -> _T:
        """`work()` with the composite registered to a model; two `finally` clauses, as in `guarded`."""
        try:
            try:
                self.register(module)
                return work()
            finally:
                self.remove()
        finally:
            self.remove()

    def context(self, module: nn.Module) -> CompositeContext:
        """A context in which the composite is registered to a model."""
        return _Context(module, self)


class DisentangledComposite(GuardedComposite):
    """A Zennit composite whose backward pass keeps one concept at a layer.

    Parameters
    ----------
    composite : zennit.core.Composite or None
        The rules and canonizers to use; None stands for plain gradients.
    layer, subspaces, concept, channel_dim, slot, tolerance, strict
        As in `SubspaceFilter`. The activation is that of the canonized model.

    Notes
    -----
    Unlike with Zennit's own, an error while it is being registered leaves nothing behind, and canonizers that
    changed the same weights are undone in reverse order.
    """

    def __init__(
        self,
        composite: Composite | None,
        layer: str | nn.Module,
        subspaces: Subspaces | None,
        concept: Concept = None,
        channel_dim: int = 1,
        *,
        slot: str | None = None,
        tolerance: float = TOLERANCE,
        strict: bool = False,
    ) -> None:
        self.filter = SubspaceFilter(
            layer, subspaces, concept, channel_dim, slot=slot, tolerance=tolerance, strict=strict
        )
        super().__init__(composite, [self.filter])

    @uninterrupted
    def register(self, module: nn.Module) -> None:
        """Apply the canonizers, the filter and the rules to a model."""
        subspaces = self.filter.subspaces
        if subspaces is not None and subspaces.provenance is not None:
            self.filter.fingerprint = model_fingerprint(module)  # before canonizers change weights
            self.filter.canonizers = self.canonizers_described()
        super().register(module)
        try:
            self.check_slot(module, self.filter.slot)
        except ValueError:
            self.remove()
            raise


def _check_own_methods(composite: Composite) -> None:
    """Refuse a composite that does something beyond its rules and canonizers, which alone are used."""
    for name in ("register", "remove", "context"):
        owner = next(parent for parent in type(composite).__mro__ if name in vars(parent))
        library = owner.__module__.partition(".")[0]
        if name in vars(composite) or library not in ("zennit", __name__.partition(".")[0]):
            raise TypeError(
                f"{type(composite).__name__} has a method {name!r} of its own, which would be ignored here: "
                "only the rules (module_map) and canonizers of a composite are used. Write what it does as a "
                "canonizer, with apply and remove, or as a rule, a zennit.core.Hook"
            )


def _check_parameters(root: nn.Module) -> None:
    """Refuse rules that exchange parameters on layers whose parameters cannot be exchanged."""
    names = {module: name for name, module in root.named_modules()}
    for module, hook in hooks_by_module(root):
        if exchanges_parameters(hook):
            check_exchangeable(module, names[module])


class _Context(CompositeContext):  # type: ignore[misc]
    """Zennit's, with Ctrl-C held back on the way in and out."""

    @uninterrupted
    def __enter__(self) -> nn.Module:
        module: nn.Module = super().__enter__()
        return module

    @uninterrupted
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)


class _Registered:
    """A handle that does nothing: attributors read from the handles whether a composite is registered."""

    def remove(self) -> None:
        """Do nothing."""
