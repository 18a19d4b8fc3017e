"""`TransformerCanonizer`: transformers in a form on which LRP rules act."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from torch import nn

from ..canonizers import NetworkCanonizer
from .transformer_family import Edits, Family, canonize_surroundings
from .transformer_parts import checked_reading

#: The reading of attention that patch flipping on a real ViT-S/14 chose (see `TransformerGamma`).
ATTENTION = "attnlrp"

_WITHOUT_RULES = ("crossattention", "decoder", "causallm", "gpt2", "llamamodel")


class TransformerCanonizer(NetworkCanonizer):
    """Bring a transformer into a form that LRP rules understand, and back.

    The logits stay as they are. In the canonical form

    * attention is written out, fused or not: queries, keys and values are linear layers of their own,
      `canonical_query`, `canonical_key`, `canonical_value`, and their products are in one module,
      `canonical_attention`;
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
        self.attention = checked_reading(attention)

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
        edits = Edits(self._edits, self.attention)
        for family, network in networks:
            family.canonize(network, edits)
        inside = {module for _, network in networks for module in network.modules()}
        canonize_surroundings(edits, [m for m in root_module.modules() if m not in inside])


def transformer_families() -> list[Family]:
    """The families that are known: `FAMILY` of each file `transformer_….py` in this folder."""
    package = import_module(__package__ or "zennit_drsa.models")
    names = sorted(
        m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("transformer_")
    )
    modules = [import_module(f"{package.__name__}.{name}") for name in names]
    return [module.FAMILY for module in modules if hasattr(module, "FAMILY")]


def _networks(root_module: nn.Module) -> list[tuple[Family, nn.Module]]:
    """Networks of a known family, the outermost where one holds another."""
    families = transformer_families()
    found: list[tuple[Family, nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in root_module.modules():  # what holds a module comes before it
        family = next((f for f in families if f.is_network(module)), None)
        if family is not None and module not in inside:
            found.append((family, module))
            inside.update(module.modules())
    return found


def _refusal(root: nn.Module) -> str:
    supported = "; ".join(family.name for family in transformer_families())
    text = (
        f"there is no transformer in this {type(root).__name__} that TransformerCanonizer knows; supported "
        f"are {supported}"
    )
    for name, module in root.named_modules():
        found = type(module).__name__.lower().replace("_", "")
        if any(word in found for word in _WITHOUT_RULES):
            return (
                f"{text}. {name or 'The model'} is a {type(module).__name__}: cross-attention and causal "
                "decoders are not supported, use Integrated Gradients or another method without rules there"
            )
    return text
