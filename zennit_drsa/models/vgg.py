"""`VGGGamma`: the paper's LRP-γ for the VGG family (Notes A and D)."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from zennit.canonizers import Canonizer
from zennit.composites import layer_map_base, register_composite
from zennit.core import Composite, Hook, ParamMod, Stabilizer
from zennit.rules import ClampMod, GammaMod, NoMod
from zennit.torchvision import VGGCanonizer
from zennit.types import Convolution, MaxPool

# ImageNet's statistics, with which torchvision's weights expect their input to be normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


# Networks of torchvision and timm in which relevance crosses nothing but layers with a rule here.
_CHAINS = ("vgg", "alexnet", "squeezenet")


class GraphRule(Hook, ABC):  # type: ignore[misc]
    """A rule R_j = Σ_s x_s ⊙ ∂z/∂x_s · (R ⊘ z), whose graph of z serves every backward pass of one forward.

    Subclasses say which inputs x_s enter and what z is. K backward passes cost one modified forward pass and
    K vector-Jacobian products.
    """

    replaces_gradient = True  # see `sharing`

    def __init__(self, stabilizer: float = 1e-9) -> None:
        super().__init__()
        self.stabilizer = stabilizer
        self._graph: tuple[list[Tensor], Tensor, Tensor] | None = None

    @abstractmethod
    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """Inputs that require gradients, and the denominator z as a function of them."""

    def forward(self, module: nn.Module, input: Any, output: Any) -> None:
        """Remember the layer's input; the graph of the last forward pass is out of date."""
        self.stored_tensors["input"] = input
        self._graph = None

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor | None, ...]:
        """Redistribute the relevance that arrives in `grad_output`."""
        relevance = grad_output[0]
        higher_order = relevance.requires_grad
        graph = None if higher_order else self._graph
        if graph is None:
            input = self.stored_tensors["input"][0]
            with torch.enable_grad():
                inputs, z = self.graph(module, input.clone() if higher_order else input.detach())
                stabilized = Stabilizer.ensure(self.stabilizer)(z)
            graph = inputs, z, stabilized if higher_order else stabilized.detach()
        if not higher_order:
            self._graph = graph
        inputs, z, denominator = graph
        gradients = torch.autograd.grad(
            z, inputs, relevance / denominator, retain_graph=True, create_graph=higher_order
        )
        products = [input * gradient for input, gradient in zip(inputs, gradients, strict=True)]
        result = products[0] if len(products) == 1 else torch.stack(products).sum(0)
        if not higher_order:
            result = result.detach()
        return (result, *[None] * (len(grad_input) - 1))

    def remove(self) -> None:
        """Let go of all tensors."""
        super().remove()
        self._graph = None


class PositiveGamma(GraphRule):
    """LRP-γ for layers whose inputs are not negative: R_j = Σ_k a_j(w_jk + γw⁺_jk) / z_k · R_k (Note A).

    The bias is a neuron of weight b, under γ too. Zennit's `Gamma` also serves negative inputs, and takes
    five modified forward passes for that; behind a ReLU this one takes one.
    """

    def __init__(self, gamma: float = 0.25, stabilizer: float = 1e-9) -> None:
        super().__init__(stabilizer)
        self.gamma = gamma

    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """z_k = Σ_{0,j} a_j (w_jk + γ w⁺_jk)."""
        input.requires_grad_()
        return [input], _modified(module, GammaMod(self.gamma, min=0.0), input)

    def copy(self) -> PositiveGamma:
        """A rule with the same parameters."""
        return PositiveGamma(self.gamma, self.stabilizer)


class ZeroRule(Hook):  # type: ignore[misc]
    """LRP-0: R_j = Σ_k a_j w_jk / z_k · R_k (Note A), by the layer's own gradient: no forward pass more.

    R ⊘ z goes into the layer's backward pass, and what comes out is multiplied by a.
    """

    def __init__(self, stabilizer: float = 1e-9) -> None:
        super().__init__()
        self.stabilizer = stabilizer

    def forward(self, module: nn.Module, input: Any, output: Tensor) -> None:
        """Have the relevance divided by z before it reaches the layer."""
        self.stored_tensors["input"] = input
        if output.grad_fn is None:
            return
        # A tensor of its own, which in-place operations on the output leave alone. It is held by the hook,
        # not by the function: that hangs on the graph of z and would keep it alive for ever.
        self.stored_tensors["z"] = Stabilizer.ensure(self.stabilizer)(output)
        hook_ref = weakref.ref(self)

        def divide(relevance: tuple[Tensor]) -> tuple[Tensor] | None:
            hook = hook_ref()
            if hook is None or not hook.active:
                return None
            z = hook.stored_tensors["z"]
            return (relevance[0] / (z if relevance[0].requires_grad else z.detach()),)

        output.grad_fn.register_prehook(divide)

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor | None, ...]:
        """Multiply the layer's gradient of R ⊘ z by its input."""
        input = self.stored_tensors["input"][0]
        result = grad_input[0] * (input if grad_input[0].requires_grad else input.detach())
        return (result, *[None] * (len(grad_input) - 1))

    def copy(self) -> ZeroRule:
        """A rule with the same parameters."""
        return ZeroRule(self.stabilizer)


class PixelBox(GraphRule):
    """The z^B-rule for pixels in [l, h]: z_j = Σ_i x_i w_ij − l_i w⁺_ij − h_i w⁻_ij (Note A). It has no bias.

    Parameters
    ----------
    low, high : tensor
        Lowest and highest pixel values, broadcast to the input, e.g. of shape (1, 3, 1, 1).
    """

    def __init__(self, low: Tensor, high: Tensor, stabilizer: float = 1e-9) -> None:
        super().__init__(stabilizer)
        self.low, self.high = low, high

    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """The three terms of z; those of l and h carry their minus sign in the graph."""
        low, high = (bound.to(input).expand_as(input).clone() for bound in (self.low, self.high))
        inputs = [tensor.requires_grad_() for tensor in (input, low, high)]
        no_bias = {"zero_params": ["bias"]}
        z = (
            _modified(module, NoMod(**no_bias), input)
            - _modified(module, ClampMod(min=0.0, **no_bias), low)
            - _modified(module, ClampMod(max=0.0, **no_bias), high)
        )
        return inputs, z

    def copy(self) -> PixelBox:
        """A rule with the same parameters."""
        return PixelBox(self.low, self.high, self.stabilizer)


@register_composite("vgg_gamma")
class VGGGamma(Composite):  # type: ignore[misc]
    """LRP-γ as the paper sets it for VGG: γ = 0.5, 0.5, 0.25, 0.1, 0 by block and 0 in the head (Note D).

    z^B at the input, winner-take-all pooling, batch norm merged into the convolution before it. For
    torchvision's VGG family; blocks are told apart by their max-pooling.

    Parameters
    ----------
    gammas : sequence of float
        γ of each convolutional block; further blocks have the last one. Dense layers have γ = 0.
    mean, std : sequence of float, one per input channel
        Normalisation of the input, which gives the bounds (0 − mean)/std and (1 − mean)/std of z^B.
    stabilizer : float
        Added to denominators with their sign. Zennit's usual 1e-6 is visible in maps of small relevance.
    canonizers : sequence of Canonizer, optional
        Applied after that which merges batch norm.
    """

    def __init__(
        self,
        gammas: Sequence[float] = (0.5, 0.5, 0.25, 0.1, 0.0),
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        stabilizer: float = 1e-9,
        canonizers: Sequence[Canonizer] | None = None,
    ) -> None:
        if not len(gammas) or any(gamma < 0 for gamma in gammas):
            raise ValueError(f"gammas must be one number of at least 0 per block, got {tuple(gammas)}")
        if len(mean) != len(std) or any(s <= 0 for s in std):
            raise ValueError(
                f"mean and std must have one entry per input channel and std be positive, got mean "
                f"{tuple(mean)} and std {tuple(std)}"
            )
        low, high = (
            torch.tensor([(pixel - m) / s for m, s in zip(mean, std, strict=True)], dtype=torch.float64)
            for pixel in (0.0, 1.0)
        )
        shape = (1, -1, 1, 1)
        self._first = PixelBox(low.view(shape), high.view(shape), stabilizer)
        self._blocks = [PositiveGamma(g, stabilizer) if g else ZeroRule(stabilizer) for g in gammas]
        self._head = ZeroRule(stabilizer)
        self._others = layer_map_base(stabilizer)
        super().__init__(self._mapping, [VGGCanonizer(), *(canonizers or ())])

    @classmethod
    def suits(cls, model: nn.Module) -> bool:
        """Whether nothing in the model is known to be of another family."""
        return next(_other_families(model), None) is None

    def register(self, module: nn.Module) -> None:
        """Merge batch norms and attach the rules.

        Raises
        ------
        ValueError
            If there is a network of another family in the model: its sums have no rule here, and its blocks
            are not told apart by max-pooling.
        """
        other = next(_other_families(module), None)
        if other is not None:
            raise ValueError(
                f"VGGGamma is for VGG and other plain chains of layers, but {other[0] or 'the model'} is a "
                f"{other[1]}: its relevance would be wrong. Use another composite with a canonizer for this "
                "network, as in EpsilonPlus(canonizers=[zennit.torchvision.ResNetCanonizer()]) for "
                "torchvision's ResNet; zennit_drsa.doctor(model, EpsilonPlus(), input) says which"
            )
        super().register(module)

    def _mapping(self, ctx: dict[str, int], name: str, module: nn.Module) -> Hook | None:
        if isinstance(module, MaxPool):
            ctx["pools"] = ctx.get("pools", 0) + 1
            return None  # the gradient of max-pooling is winner-take-all
        if isinstance(module, Convolution):
            ctx["convolutions"] = ctx.get("convolutions", 0) + 1
            if ctx["convolutions"] == 1:
                return self._first
            return self._blocks[min(ctx.get("pools", 0), len(self._blocks) - 1)]
        if isinstance(module, nn.Linear):
            return self._head
        return next((hook for types, hook in self._others if isinstance(module, types)), None)


def _other_families(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of what torchvision or timm define for networks that are not plain chains."""
    for name, module in model.named_modules():
        for parent in type(module).__mro__:
            library, _, rest = parent.__module__.partition(".models.")
            family = rest.partition(".")[0]
            if library in ("torchvision", "timm") and family not in _CHAINS and not family.startswith("_"):
                yield name, type(module).__name__
                break


def _modified(module: nn.Module, modifier: ParamMod, input: Tensor) -> Tensor:
    with modifier(module) as modified:
        output: Tensor = modified.forward(input)
    return output
