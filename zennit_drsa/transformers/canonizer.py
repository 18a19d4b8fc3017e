"""`TransformerCanonizer`: transformers in a form on which LRP rules act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from ..canonizers import NetworkCanonizer, kind
from .parts import COMMON_FORMS, Edits, Form

#: The reading of attention that patch flipping on a real ViT-S/14 chose (see `TransformerGamma`).
ATTENTION = "attnlrp"

# Layers that composites have rules for, containers, and identities in evaluation mode.
_TORCH_LAYERS = (
    *("Linear", "Conv2d", "Embedding"),
    *("Identity", "Sequential", "ModuleList", "Module", "Dropout"),
)
_WITHOUT_RULES = ("crossattention", "decoder", "causallm", "gpt2", "llamamodel")


@dataclass(frozen=True)
class Family:
    """Transformers of one kind. A new family is one entry of `FAMILIES`.

    Attributes
    ----------
    name : str
        As it is named to users.
    library : str
        The package that the classes in `forms` and `unchanged` come from. Those in `forms` may also be
        torch's or our own.
    is_network : function
        Whether a module is a network of this family.
    forms : mapping of str to function
        How a module becomes canonical, by the name of the class whose `forward` it runs: a function of
        `Edits` and the module. Those in `COMMON_FORMS` need no entry.
    unchanged : tuple of str
        Classes that only call their children or move values.
    """

    name: str
    library: str
    is_network: Callable[[nn.Module], bool]
    forms: Mapping[str, Form]
    unchanged: tuple[str, ...] = ()

    def canonize(self, network: nn.Module, edits: Edits) -> None:
        """Bring every module of a network into canonical form, or raise if one has none."""
        for name, module in list(network.named_modules()):
            known = kind(module)
            library = known.__module__.partition(".")[0]
            form = common_form(known, self.library)
            if library in (self.library, "torch", __name__.partition(".")[0]):
                form = self.forms.get(known.__name__, form)
            if form is not None:
                form(edits, module)
                continue
            is_unchanged = library == self.library and known.__name__ in self.unchanged
            if not is_unchanged and not (library == "torch" and known.__name__ in _TORCH_LAYERS):
                raise ValueError(
                    f"{name or 'the model'} is a {type(module).__name__}, for which TransformerCanonizer "
                    f"knows no canonical form; of {self.name} it knows "
                    f"{', '.join(sorted({*self.forms, *self.unchanged}))}, with "
                    f"{', '.join(sorted(COMMON_FORMS))}"
                )


def common_form(known: type[nn.Module], *libraries: str) -> Form | None:
    """The form of a norm or an activation of torch, timm or these libraries."""
    is_from = known.__module__.partition(".")[0] in ("torch", "timm", *libraries)
    return COMMON_FORMS.get(known.__name__) if is_from else None


FAMILIES: list[Family] = []
"""The families that are known."""


class TransformerCanonizer(NetworkCanonizer):
    """Bring a transformer into a form that LRP rules understand, and back.

    The logits stay the same. In the canonical form

    * attention is written out, fused or not, in one module, `canonical_attention`;
    * sums, of a block's input and its branches, of tokens and position embeddings, and pooling hand relevance
      down by contribution;
    * layer norm is linear, with its deviation held constant;
    * activations, layer scale, dropout and drop-path pass relevance on; gates are read as attention is.

    Norms and activations of torch and timm around the transformer, in a head of your own, are treated alike.

    The linear layers are left for the rules of a composite: `TransformerGamma` has those for transformers.

    While the canonizer is applied, the backward pass of the model carries relevance: it is not its gradient.

    Parameters
    ----------
    attention : {"constant", "attnlrp"}
        "constant": attention weights are constants, and relevance goes through the values alone (CP-LRP).
        "attnlrp": both products of attention hand half of the relevance to each factor, and softmax follows
        its own derivative.
    """

    carries_relevance = True

    def __init__(self, attention: str = ATTENTION) -> None:
        super().__init__()
        if attention not in ("constant", "attnlrp"):
            raise ValueError(
                "attention must be 'constant' (attention weights are constants) or 'attnlrp' (both products "
                f"of attention hand half of the relevance to each factor), got {attention!r}"
            )
        self.attention = attention
        self._edits: Edits = Edits(attention)

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether there is a transformer in the model that this canonizer is made for."""
        return bool(_networks(model))

    def copy(self) -> TransformerCanonizer:
        """A canonizer with the same parameters, not applied to anything."""
        return type(self)(self.attention)

    def register(self, root_module: nn.Module) -> None:
        """Apply the changes; `remove` takes them back."""
        networks = _networks(root_module)
        if not networks:
            raise ValueError(_refusal(root_module))
        for family, network in networks:
            family.canonize(network, self._edits)
        # In a head of the user's own, a layer norm would keep all relevance, and a GELU multiply it.
        inside = {module for _, network in networks for module in network.modules()}
        for module in list(root_module.modules()):
            form = None if module in inside else common_form(kind(module))
            if form is not None:
                form(self._edits, module)


def _networks(root_module: nn.Module) -> list[tuple[Family, nn.Module]]:
    """Networks of a known family, the outermost where one holds another."""
    found: list[tuple[Family, nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in root_module.modules():  # what holds a module comes before it
        family = next((f for f in FAMILIES if f.is_network(module)), None)
        if family is not None and module not in inside:
            found.append((family, module))
            inside.update(module.modules())
    return found


def _refusal(root: nn.Module) -> str:
    text = (
        f"there is no transformer in this {type(root).__name__} that TransformerCanonizer knows; supported "
        f"are {'; '.join(family.name for family in FAMILIES)}"
    )
    for name, module in root.named_modules():
        found = type(module).__name__.lower().replace("_", "")
        if any(word in found for word in _WITHOUT_RULES):
            return (
                f"{text}. {name or 'The model'} is a {type(module).__name__}: cross-attention and causal "
                "decoders are not supported, use Integrated Gradients or another method without rules there"
            )
    return text


def inherits(package: str, *names: str) -> Callable[[nn.Module], bool]:
    """Whether a module is of one of these classes of a package, or of one that inherits from it."""
    return lambda module: any(
        cls.__module__ == package and cls.__name__ in names for cls in type(module).__mro__
    )
