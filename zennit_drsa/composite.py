"""`DisentangledComposite`: any Zennit composite, followed by a `SubspaceFilter`."""

from __future__ import annotations

from drsa_core import Subspaces
from torch import nn
from zennit.core import Composite

from .filter import Concept, SubspaceFilter, VirtualLayer, hooks_of


class DisentangledComposite(Composite):  # type: ignore[misc]
    """A Zennit composite whose backward pass keeps one concept at a layer.

    Parameters
    ----------
    composite : zennit.core.Composite or None
        The rules and canonizers to use; None stands for plain gradients.
    layer, subspaces, concept, channel_dim, slot, tolerance
        As in `SubspaceFilter`. The activation is that of the canonized model.

    Notes
    -----
    Unlike Zennit's own, an error while it is being registered leaves nothing behind.
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
        tolerance: float = 1e-3,
    ) -> None:
        if composite is not None and not isinstance(composite, Composite):
            raise TypeError(f"composite must be a Zennit composite or None, got {type(composite).__name__}")
        self.composite = composite
        self.filter = SubspaceFilter(layer, subspaces, concept, channel_dim, slot=slot, tolerance=tolerance)
        module_map = None if composite is None else composite.module_map
        canonizers = [] if composite is None else composite.canonizers
        super().__init__(module_map=module_map, canonizers=[*canonizers, self.filter])

    def register(self, module: nn.Module) -> None:
        """Apply the canonizers, the filter and the rules to a model."""
        self.remove()
        if self.composite is not None and self.composite.handles:
            raise ValueError(
                f"the {type(self.composite).__name__} is registered to a model already; leave its context (or call "
                "its remove()) and pass it unregistered"
            )
        if any(True for _ in hooks_of(module)):
            raise ValueError(
                f"another Zennit composite is registered to this {type(module).__name__}, and the rules of both "
                "would apply; leave its context first"
            )
        try:
            super().register(module)
        except BaseException:
            self.remove()
            raise

    @property
    def virtual_layer(self) -> VirtualLayer:
        """The virtual layer in the model to which the composite is registered."""
        for handle in self.handles:
            if isinstance(handle, SubspaceFilter) and handle.virtual_layer is not None:
                if handle.layer is self.filter.layer and handle.subspaces is self.filter.subspaces:
                    return handle.virtual_layer
        raise RuntimeError("the composite is not registered to a model; use `with composite.context(model):`")
