"""LRP rules as Zennit hooks, built for K backward passes from one forward pass.

There are two kinds of hooks. A `GraphRule` is a Zennit hook whose graph is made in the first backward pass;
it serves gradients of relevance (`create_graph=True`) too. A `ForwardRule` writes the rule into the graph of
the model itself, and has no hook left in the backward pass.

And there are two ways to keep a denominator d away from zero:

* `stabilizer`, ε: R / (d + ε·sign(d)), as Zennit and most programs do. A little relevance is lost everywhere.
* `threshold`, δ: R / d, and 0 where |d| ≤ δ, as the paper does for NFNets (Note K). Relevance is lost only
  there, but all of it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from inspect import signature
from typing import Any, Self, TypeAlias

import torch
from drsa_core.checks import warn_user
from drsa_core.lrp import (
    DropSmall,
    OverDenominator,
    OverGammaDenominator,
    TimesInput,
    exchanged,
    parameters_of,
)
from torch import Tensor, nn
from zennit.core import Hook

from ._zennit import is_active, keep, kept, register_positional, stabilized

Bound: TypeAlias = Tensor | float

STABILIZER = 1e-9
"""ε of `stabilizer`. Zennit's usual 1e-6 is visible in maps of small relevance."""
THRESHOLD = 1e-3
"""δ of `threshold` (Note K, numerical stability)."""


class _Rule(Hook):  # type: ignore[misc]
    def copy(self) -> Self:
        """A rule with the same parameters, for another module."""
        return type(self)(**{name: getattr(self, name) for name in signature(type(self)).parameters})


class GraphRule(_Rule, ABC):
    """A rule R_j = Σ_s x_s ⊙ ∂z/∂x_s · (R ⊘ z), whose graph of z serves every backward pass of one forward.

    Subclasses say which inputs x_s enter and what z is. K backward passes cost one modified forward pass and
    K vector-Jacobian products.
    """

    replaces_gradient = True  # see `_zennit.replaces_gradient`
    runs_with_input_alone = True  # see `_zennit.runs_with_input_alone`
    exchanges_parameters = True  # see `_zennit.exchanges_parameters`

    def __init__(self, stabilizer: float = STABILIZER) -> None:
        super().__init__()
        self.stabilizer = stabilizer
        self._graph: tuple[list[Tensor], Tensor, Tensor] | None = None

    @abstractmethod
    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """Inputs that require gradients, and the denominator z as a function of them."""

    def forward(self, module: nn.Module, input: Any, output: Any) -> None:
        """Remember the layer's input; the graph of the last forward pass is out of date."""
        keep(self, input=input)
        self._graph = None

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor | None, ...]:
        """Redistribute the relevance that arrives in `grad_output`."""
        relevance = grad_output[0]
        higher_order = relevance.requires_grad
        if higher_order or self._graph is None:
            input = kept(self, "input")[0]
            with torch.enable_grad():
                inputs, z = self.graph(module, input.clone() if higher_order else input.detach())
                denominator = stabilized(z, self.stabilizer)
            if not higher_order:
                self._graph = inputs, z, denominator.detach()
        else:
            inputs, z, denominator = self._graph
        gradients = torch.autograd.grad(
            z, inputs, relevance / denominator, retain_graph=True, create_graph=higher_order
        )
        products = [input * gradient for input, gradient in zip(inputs, gradients, strict=True)]
        result = products[0] if len(products) == 1 else torch.stack(products).sum(0)
        return (result if higher_order else result.detach(), *[None] * (len(grad_input) - 1))

    def remove(self) -> None:
        """Let go of all tensors."""
        super().remove()
        self._graph = None


class PositiveGamma(GraphRule):
    """LRP-γ for layers whose inputs are not negative: R_j = Σ_k a_j(w_jk + γw⁺_jk) / z_k · R_k (Note A).

    The bias is a neuron of weight b, under γ too. Zennit's `Gamma` also serves negative inputs, and takes
    five modified forward passes for that; behind a ReLU this one takes one. Negative inputs are warned about.
    """

    def __init__(self, gamma: float = 0.25, stabilizer: float = STABILIZER) -> None:
        super().__init__(stabilizer)
        self.gamma = gamma

    def forward(self, module: nn.Module, input: Any, output: Any) -> None:
        """Remember the layer's input, with a warning if it is not what the rule is for."""
        super().forward(module, input, output)
        x = input[0]
        if x.requires_grad and bool((x.detach() < 0).any()):
            warn_user(
                f"a {type(module).__name__} has negative inputs, but PositiveGamma, the rule of VGGGamma, is "
                "for inputs behind a ReLU: what contradicts would count as evidence. Use ConvNetGamma, whose "
                "rule is for inputs of both signs",
            )

    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """z_k = Σ_{0,j} a_j (w_jk + γ w⁺_jk)."""
        input.requires_grad_()
        parameters = {
            name: None if p is None else p + self.gamma * p.clamp(min=0)
            for name, p in parameters_of(module).items()
        }
        with exchanged(module, parameters):
            return [input], module.forward(input)


class ZeroRule(_Rule):
    """LRP-0: R_j = Σ_k a_j w_jk / z_k · R_k (Note A), by the layer's own gradient: no forward pass more.

    R ⊘ z goes into the layer's backward pass, and what comes out is multiplied by a.
    """

    covers_module = True  # see `_zennit.check_uncovered`

    def __init__(self, stabilizer: float = STABILIZER) -> None:
        super().__init__()
        self.stabilizer = stabilizer

    def forward(self, module: nn.Module, input: Any, output: Tensor) -> None:
        """Have the relevance divided by z before it reaches the layer."""
        keep(self, input=input)
        if output.grad_fn is None:
            return
        # A tensor of its own, which in-place operations on the output leave alone. It is held by the hook,
        # not by the function: that hangs on the graph of z and would keep it alive for ever.
        keep(self, z=stabilized(output, self.stabilizer))
        hook_ref = weakref.ref(self)

        def divide(relevance: tuple[Tensor]) -> tuple[Tensor] | None:
            hook = hook_ref()
            if hook is None or not is_active(hook):
                return None
            z = kept(hook, "z")
            return (relevance[0] / (z if relevance[0].requires_grad else z.detach()),)

        output.grad_fn.register_prehook(divide)

    def backward(self, module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor | None, ...]:
        """Multiply the layer's gradient of R ⊘ z by its input."""
        input = kept(self, "input")[0]
        result = grad_input[0] * (input if grad_input[0].requires_grad else input.detach())
        return (result, *[None] * (len(grad_input) - 1))


class PixelBox(GraphRule):
    """The z^B-rule for pixels in [l, h]: z_j = Σ_i x_i w_ij − l_i w⁺_ij − h_i w⁻_ij (Note A). It has no bias.

    Parameters
    ----------
    low, high : tensor or float
        Lowest and highest pixel values, broadcast to the input, e.g. of shape (1, 3, 1, 1).
    """

    def __init__(self, low: Bound, high: Bound, stabilizer: float = STABILIZER) -> None:
        super().__init__(stabilizer)
        self.low, self.high = low, high

    def forward(self, module: nn.Module, input: Any, output: Any) -> None:
        """Remember the layer's input, with a warning if it is not in the box."""
        super().forward(module, input, output)
        if input[0].requires_grad:
            _checked_box(self.low, self.high, input[0])

    def graph(self, module: nn.Module, input: Tensor) -> tuple[list[Tensor], Tensor]:
        """The three terms of z; those of l and h carry their minus sign in the graph."""
        inputs = [input, *(_expanded(bound, input).clone() for bound in (self.low, self.high))]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        return inputs, _box_denominator(module, inputs)


class ForwardRule(_Rule):
    """Zennit hook for a rule that is written as a graph of ordinary operations, built in the forward pass.

    Unlike Zennit's `BasicHook`, which computes its denominators anew in each backward pass, all backward
    passes share one forward graph: K maps cost K backward passes, and no forward pass more. While the hook is
    not active (`Composite.inactive`), forward passes are those of the module itself.
    """

    def register(self, module: nn.Module) -> Any:
        """Attach the rule to a module."""
        return register_positional(self, module)

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """What stands in the place of the input, if anything."""

    def forward(self, module: nn.Module, input: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """What stands in the place of the output, if anything."""


class GeneralizedGamma(ForwardRule):
    """Generalised LRP-γ for a linear module with inputs of both signs (Note K, cases 1, 2, 5 and 7).

    With contributions u_jk = a_j w_jk, the bias among them as a neuron of activation 1 (Note A), the rule is

        R_j = Σ_k (u_jk + γ u_jk^s) / d_k · R_k,   d_k = Σ_j u_jk + γ u_jk^s,   s = sign of z_k.

    As u^± = (u ± |u|)/2, this is d = (1 + γ/2) z + s γ/2 Σ_j |a_j||w_jk|: one more forward pass of the
    module, with absolute values, replaces the four of the formula with w⁺, w⁻, a⁺, a⁻. Zennit's `Gamma` is
    the same rule with a `stabilizer`.

    Parameters
    ----------
    gamma : float
        γ ≥ 0; 0 is LRP-0.
    threshold : float
        Neurons with |d| ≤ threshold hand no relevance down.
    bias : {"neuron", "authors"}
        "neuron": the paper. "authors": their program, where b enters d as it is, without γ.
    stabilizer : float
        Added to d with its sign.
    """

    runs_with_input_alone = True
    covers_module = True

    def __init__(
        self, gamma: float, threshold: float = THRESHOLD, bias: str = "neuron", stabilizer: float = 0.0
    ) -> None:
        super().__init__()
        self.gamma, self.threshold, self.bias, self.stabilizer = gamma, threshold, bias, stabilizer
        self._absolute: dict[str, Tensor | None] = {}
        self._version: list[tuple[int, int] | None] | None = None

    @property
    def exchanges_parameters(self) -> bool:
        """Whether absolute values take the place of the parameters."""
        return bool(self.gamma)

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """Mark where gradients turn into relevance."""
        (a,) = input
        return TimesInput.apply(a, a.detach()) if a.requires_grad and is_active(self) else None

    def forward(self, module: nn.Module, input: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Replace the output by one of the same value whose backward pass follows the rule."""
        (a,) = input
        if not (a.requires_grad and is_active(self)):
            return None
        z = output
        if not self.gamma:
            return OverDenominator.apply(z, z.detach(), self.threshold, self.stabilizer)
        parameters = parameters_of(module)
        # The weights may change while the rule is there, by an optimiser for instance.
        version = [None if p is None else (p.data_ptr(), p._version) for p in parameters.values()]
        if self._version != version:
            self._version = version
            self._absolute = {name: None if p is None else p.abs() for name, p in parameters.items()}
            if self.bias == "authors" and "bias" in self._absolute:
                self._absolute["bias"] = None
        with exchanged(module, self._absolute):
            magnitude = module.forward(a.abs())
        b = parameters.get("bias")
        if self.bias == "neuron" or b is None:
            return OverGammaDenominator.apply(z, magnitude, self.gamma, self.threshold, self.stabilizer)
        sign = torch.where(z.detach() >= 0, 1.0, -1.0).to(z.dtype)
        denominator = (1 + self.gamma / 2) * z + (self.gamma / 2 * sign) * magnitude
        denominator = denominator - self.gamma / 2 * b.view(-1, *(1,) * (z.ndim - 2))
        return OverDenominator.apply(denominator, z.detach(), self.threshold, self.stabilizer)

    def remove(self) -> None:
        """Forget the absolute parameters."""
        self._absolute, self._version = {}, None
        super().remove()


class BoundedInput(ForwardRule):
    """LRP-z^B for the first convolution (Note K, case 6); its denominator carries no bias.

    R_p = Σ_j (x_p w_pj − l_p w⁺_pj − h_p w⁻_pj) / d_j · R_j, with d_j the sum of these terms over p.

    Parameters
    ----------
    low, high : tensor or float
        Smallest and largest value of each input, broadcastable to the input.
    threshold : float
        Neurons with |d| ≤ threshold hand no relevance down.
    bias : {"neuron", "authors"}
        "neuron": the paper, no bias in d. "authors": their program, which subtracts b from d.
    """

    runs_with_input_alone = True
    covers_module = True
    exchanges_parameters = True

    def __init__(self, low: Bound, high: Bound, threshold: float = THRESHOLD, bias: str = "neuron") -> None:
        super().__init__()
        self.low, self.high, self.threshold, self.bias = low, high, threshold, bias

    def forward(self, module: nn.Module, input: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Replace the output by one of the same value whose backward pass follows the rule."""
        (x,) = input
        if not (x.requires_grad and is_active(self)):
            return None
        box = _checked_box(self.low, self.high, x)
        denominator = _box_denominator(module, [TimesInput.apply(x, value) for value in (x.detach(), *box)])
        if self.bias == "authors" and (b := parameters_of(module).get("bias")) is not None:
            denominator = denominator - b.view(-1, 1, 1)
        return OverDenominator.apply(denominator, output.detach(), self.threshold)


class PassLarge(ForwardRule):
    """R(z) = R(a) for an orphan activation or a gate, and 0 where |z| ≤ threshold (Note K, cases 3 and 4).

    The module itself passes relevance on, since `NFNetCanonizer` made it so.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        super().__init__()
        self.threshold = threshold

    def pre_forward(self, module: nn.Module, input: tuple[Tensor, ...]) -> Tensor | None:
        """Mark where relevance is dropped."""
        (z,) = input
        return DropSmall.apply(z, self.threshold) if z.requires_grad and is_active(self) else None


def _box_denominator(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    """The layer without its bias: of x with w, minus that of l with w⁺ and of h with w⁻."""
    parameters = parameters_of(module)
    weight = parameters.get("weight")
    if weight is None:
        raise ValueError(
            f"the z^B rule needs a layer with weights, got {type(module).__name__} without; give it to the "
            "first linear layer or convolution"
        )
    terms = []
    for input, part in zip(inputs, (weight, weight.clamp(min=0), weight.clamp(max=0)), strict=True):
        with exchanged(module, {"weight": part, **({"bias": None} if "bias" in parameters else {})}):
            terms.append(module.forward(input))
    result: Tensor = terms[0] - terms[1] - terms[2]
    return result


def _checked_box(low: Bound, high: Bound, x: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of each input, with a warning if it is not between them."""
    values, lowest, highest = x.detach(), _expanded(low, x), _expanded(high, x)
    # Pixels that were normalised in another precision than the bounds may miss them by rounding.
    slack = 16 * torch.finfo(values.dtype).eps * torch.maximum(lowest.abs(), highest.abs())
    if bool((values < lowest - slack).any()) or bool((values > highest + slack).any()):
        warn_user(
            f"the input ranges from {float(values.min()):.4g} to {float(values.max()):.4g} and leaves "
            "[low, high]: the z^B rule at the first convolution is made for inputs in that box. "
            "Normalise low and high as the input",
        )
    return lowest, highest


def _expanded(bound: Bound, x: Tensor) -> Tensor:
    value = torch.as_tensor(bound, dtype=x.dtype, device=x.device)
    if value.ndim == 4 and value.numel() == value.shape[1]:
        # One number per channel, as for images; for a clip it would else be one per frame.
        value = value.view(1, -1, *[1] * (x.ndim - 2))
    try:
        return value.expand_as(x)
    except RuntimeError as error:
        raise ValueError(
            f"low and high must be broadcastable to the input of shape {tuple(x.shape)}, got shape "
            f"{tuple(value.shape)}"
        ) from error
