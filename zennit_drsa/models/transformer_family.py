"""What a family of transformers says about itself, and the edits that it may use to become canonical."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from drsa_core.lrp import ModuleEdits, by_contribution, linear_norm, passing_forward
from torch import Tensor, nn

from ..canonizers import affine, kind
from ..kept import CanonicalPart


class Edits:
    """Changes that bring a network into canonical form; the canonizer takes them back.

    Attributes
    ----------
    reading : {"constant", "attnlrp"}
        How attention is read; for `AttentionProduct` and `GateProduct`.
    """

    def __init__(self, edits: ModuleEdits, reading: str) -> None:
        self._edits, self.reading = edits, reading

    def attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Another attribute or method for one module."""
        self._edits.attribute(module, name, value)

    def forward(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        """Another forward for one module."""
        self.attribute(module, "forward", forward)

    def part(self, module: nn.Module, name: str, part: CanonicalPart) -> None:
        """A canonical part as a child of a module, which is to call it as `module.canonical_<name>`."""
        self._edits.child(module, f"canonical_{name}", part.train(module.training))

    def linear_slices(self, module: nn.Module, linear: nn.Linear, **sizes: int) -> None:
        """A linear layer as several, by the rows of its weight: children `canonical_<name>` of a module.

        Queries, keys and values then have rules of their own, and none are computed for what gets no
        relevance. The weights are views, not copies.
        """
        self.weight_slices(module, linear.weight, linear.bias, **sizes)

    def weight_slices(self, module: nn.Module, weight: Tensor, bias: Tensor | None, **sizes: int) -> None:
        """As `linear_slices`, of a weight (rows, columns) and a bias (rows,)."""
        if sum(sizes.values()) != len(weight):
            raise ValueError(
                f"the projections {sizes} of a {type(module).__name__} do not fit its weight with "
                f"{len(weight)} rows"
            )
        first = 0
        for name, size in sizes.items():
            rows = slice(first, first + size)
            first += size
            with torch.device("meta"):
                part = nn.Linear(weight.shape[1], size, bias=bias is not None)
            part.weight = nn.Parameter(weight.detach()[rows], requires_grad=False)
            if bias is not None:
                part.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
            self._edits.child(module, f"canonical_{name}", part.train(module.training))

    def pass_relevance(self, module: nn.Module) -> None:
        """R(z) = R(a) for an activation, layer scale or another function of each neuron by itself."""
        self.forward(module, passing_forward(module))

    def norm(self, module: nn.Module, is_centred: bool = True) -> None:
        """Layer norm, or RMS norm if not centred, as a linear map with its deviation held constant."""
        shape = getattr(module, "normalized_shape", (1,))
        if not isinstance(shape, int) and len(shape) != 1:
            raise ValueError(
                f"a {type(module).__name__} over {len(shape)} axes has no canonical form here; supported are "
                "norms over the features of a token"
            )
        self.forward(module, linear_norm(module, is_centred))


_OWN = __name__.partition(".")[0]
Form: TypeAlias = Callable[[Edits, Any], None]


@dataclass(frozen=True)
class Family:
    """Transformers of one kind. A new family is one file `models/transformer_….py` that defines `FAMILY`.

    Attributes
    ----------
    name : str
        As it is named to users.
    library : str
        The package that the classes in `forms` and `as_they_are` come from. Those in `forms` may also be
        torch's or our own.
    is_network : function
        Whether a module is a network of this family.
    forms : mapping of str to function
        How a module becomes canonical, by the name of the class whose `forward` it runs: a function of
        `Edits` and the module. Those in `COMMON_FORMS` need no entry.
    as_they_are : frozenset of str
        Classes that only call their children or move values.
    """

    name: str
    library: str
    is_network: Callable[[nn.Module], bool]
    forms: Mapping[str, Form]
    as_they_are: frozenset[str]

    def canonize(self, network: nn.Module, edits: Edits) -> None:
        """Bring every module of a network into canonical form.

        Raises
        ------
        ValueError
            If a module has none.
        """
        for name, module in list(network.named_modules()):
            found = kind(module)
            form = self._form(found)
            if form is not None:
                form(edits, module)
            elif not self._stays(found):
                known = sorted({*self.forms, *self.as_they_are})
                raise ValueError(
                    f"{name or 'the model'} is a {type(module).__name__}, for which TransformerCanonizer "
                    f"knows no canonical form; of {self.name} it knows {', '.join(known)}, with "
                    f"{', '.join(sorted(COMMON_FORMS))}"
                )

    def _form(self, found: type[nn.Module]) -> Form | None:
        if _is_from(found, self.library, "torch", _OWN) and found.__name__ in self.forms:
            return self.forms[found.__name__]
        return _common_form(found, self.library)

    def _stays(self, found: type[nn.Module]) -> bool:
        is_torch = _is_from(found, "torch") and found.__name__ in _TORCH_LAYERS
        return is_torch or (_is_from(found, self.library) and found.__name__ in self.as_they_are)


def canonize_surroundings(edits: Edits, modules: Iterable[nn.Module]) -> None:
    """Norms and activations around a network, in a head of the user's own for instance, in canonical form.

    As they are, a layer norm would keep all relevance that reaches it, and a GELU multiply it by its slope.
    Other modules are left alone: not all of them may be part of the way.
    """
    for module in modules:
        form = _common_form(kind(module))
        if form is not None:
            form(edits, module)


def _common_form(found: type[nn.Module], *libraries: str) -> Form | None:
    return COMMON_FORMS.get(found.__name__) if _is_from(found, "torch", "timm", *libraries) else None


def _is_from(found: type[nn.Module], *libraries: str) -> bool:
    return found.__module__.partition(".")[0] in libraries


def inherits(module: nn.Module, package: str, *names: str) -> bool:
    """Whether a module is of one of these classes, defined in a package, or of one that inherits from it."""
    return any(cls.__module__ == package and cls.__name__ in names for cls in type(module).__mro__)


def unused(edits: Edits, module: nn.Module) -> None:
    """A form for what the canonical form of its parent does not call."""


def _norm(edits: Edits, module: nn.Module) -> None:
    edits.norm(module)


def _rms_norm(edits: Edits, module: nn.Module) -> None:
    edits.norm(module, is_centred=False)


def _batch_norm(edits: Edits, module: Any) -> None:
    """A scale and a shift of each feature (N, D, …), which LRP-0 crosses by contribution."""
    original = module.forward

    def forward(x: Tensor) -> Tensor:
        if not x.requires_grad:
            result: Tensor = original(x)
            return result
        scale, shift = (part.view(-1, *[1] * (x.ndim - 2)) for part in affine("of the model", module))
        return by_contribution(lambda x: x * scale + shift, x)

    edits.forward(module, forward)


def _pass(edits: Edits, module: nn.Module) -> None:
    edits.pass_relevance(module)


_ACTIVATIONS = (
    *(
        "GELU",
        "GELUTanh",
        "QuickGELU",
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "ELU",
        "SELU",
        "CELU",
        "PReLU",
        "Softplus",
    ),
    *("SiLU", "Swish", "Mish", "Hardswish", "HardSwish", "Hardsigmoid", "Tanh", "Sigmoid"),
)
COMMON_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("LayerNorm", "LayerNormFp32"), _norm),
    **dict.fromkeys(("RmsNorm", "RmsNormFp32", "RMSNorm"), _rms_norm),
    # `nn.BatchNorm1d` and its kin inherit their `forward`.
    **dict.fromkeys(("_BatchNorm", "SyncBatchNorm"), _batch_norm),
    **dict.fromkeys((*_ACTIVATIONS, "LayerScale", "DropPath"), _pass),
}
"""Modules whose canonical form is the same in every family."""

# Layers that composites have rules for, containers, and identities in evaluation mode.
_TORCH_LAYERS = (
    *("Linear", "Conv2d", "Embedding"),
    *("Identity", "Sequential", "ModuleList", "Module", "Dropout"),
)
