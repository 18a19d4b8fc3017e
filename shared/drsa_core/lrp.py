"""Functions that carry relevance backwards, and edits of a model that can be taken back.

As in Zennit, relevance travels in the gradient slot: what a function here receives in its backward pass is
the relevance of its output, what it returns is the relevance of its input. Derivatives of relevance cannot
be had through these functions: their forward passes have no true derivative, hence `once_differentiable`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

SMALLEST = 1e-30
"""Denominators of at most this size drop out where there is no other stabiliser; 1 / d is finite above it."""

_MISSING = object()
_Canonizer = TypeVar("_Canonizer", bound=Any)

# ---------------------------------------------------------------------- edits


def registered_copy(canonizer: _Canonizer, root_module: nn.Module) -> _Canonizer:
    """A copy of the canonizer, registered on the model; after an error the model is as it was before."""
    instance = canonizer.copy()
    try:
        instance.register(root_module)
    except BaseException:
        instance.remove()
        raise
    return instance


class ModuleEdits:
    """Changes to the modules of a model, undone in reverse; parameters are replaced, never written to."""

    def __init__(self) -> None:
        self._undo: list[tuple[dict[str, Any], str, Any]] = []

    def attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set an instance attribute, `forward` for instance."""
        self._set(vars(module), name, value)

    def parameter(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Put a constant in the place of a parameter."""
        # Canonizers of Zennit 1 hide a parameter behind an attribute: then it is the attribute that counts.
        namespace: dict[str, Any] = vars(module) if name in vars(module) else module._parameters
        self._set(namespace, name, nn.Parameter(value.detach(), requires_grad=False))

    def child(self, module: nn.Module, name: str, value: nn.Module) -> None:
        """Add or replace a child module."""
        self._set(module._modules, name, value)

    def remove(self) -> None:
        """Take every change back; a second call does nothing."""
        while self._undo:
            namespace, name, value = self._undo.pop()
            if value is _MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = value

    def _set(self, namespace: dict[str, Any], name: str, value: object) -> None:
        # Noted before it is done, so that an interrupt in between is undone as well.
        self._undo.append((namespace, name, namespace.get(name, _MISSING)))
        namespace[name] = value


@contextmanager
def exchanged(module: nn.Module, parameters: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let a module's forward see other parameters for a while; the `nn.Parameter`s stay where they are."""
    edits = ModuleEdits()
    try:
        for name, value in parameters.items():
            edits.attribute(module, name, value)
        yield
    finally:
        edits.remove()


# ---------------------------------------------------------------------- backward passes


class PassRelevance(torch.autograd.Function):
    """`function(z)` forwards, identity backwards: R(z) = R(a) (Note K, Assumption 1)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        value = z.detach()
        a = function(value)
        return a.clone() if a is value else a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        return relevance[0], None


class TimesInput(torch.autograd.Function):
    """`value` forwards; backwards, the gradient for `value` becomes relevance, R(a) = value · gradient.

    The entry of a rule that is written as a graph of ordinary operations. `value` is a itself, or what stands
    in its place (the bounds of the z^B rule).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        (value,) = ctx.saved_tensors
        return value * gradient[0], None


class OverDenominator(torch.autograd.Function):
    """`output` forwards; backwards, relevance becomes a gradient, R / d, and 0 where |d| ≤ `threshold`.

    The exit of a rule that is written as a graph of ordinary operations, which ends in the denominator d.
    `stabilizer` is added to d with its sign. In half precision 1 / d would overflow: it is kept in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, denominator: Tensor, output: Tensor, threshold: float, stabilizer: float = 0.0
    ) -> Tensor:
        d = at_least_single(denominator)
        if stabilizer:
            d = d + stabilizer * torch.where(d >= 0, 1.0, -1.0).to(d.dtype)
        ctx.save_for_backward(d.reciprocal().masked_fill_(d.abs() <= threshold, 0))
        return output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return (relevance[0] * inverse).to(relevance[0].dtype), None, None, None


class OverGammaDenominator(torch.autograd.Function):
    """`z` forwards; backwards, relevance becomes the gradients of d = (1 + γ/2) z + s γ/2 m, divided by d.

    s is the sign of z (Note K, generalised LRP-γ). `magnitude`, m, is not negative, so that d has the sign of
    z and only |d| needs to be computed. Both factors of R are made once, in the forward pass, for all
    backward passes. `threshold` and `stabilizer` as in `OverDenominator`.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, magnitude: Tensor, gamma: float, threshold: float, stabilizer: float
    ) -> Tensor:
        size = at_least_single(z).abs().mul_(1 + gamma / 2).add_(magnitude, alpha=gamma / 2)
        if stabilizer:
            size += stabilizer
        inverse = size.reciprocal().masked_fill_(size <= threshold, 0)
        signed = torch.copysign(inverse, z + 0.0)  # −0 + 0 is +0: s = 1 where z = 0
        ctx.save_for_backward(signed.mul_(1 + gamma / 2), inverse.mul_(gamma / 2))
        return z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        (r,) = relevance
        of_z, of_magnitude = ctx.saved_tensors
        return (r * of_z).to(r.dtype), (r * of_magnitude).to(r.dtype), None, None, None


class LinearNorm(torch.autograd.Function):
    """`y` forwards; backwards, LRP-0 of y = scale ⊙ (x − mean(x)) + b over an axis, `scale` held constant."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, scale: Tensor, dim: int, is_centred: bool, threshold: float
    ) -> Tensor:
        d = at_least_single(y)
        ctx.save_for_backward(x, (scale / d).masked_fill_(d.abs() <= threshold, 0))
        ctx.dim, ctx.is_centred = dim, is_centred
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        x, factor = ctx.saved_tensors
        gradient = relevance[0] * factor
        if ctx.is_centred:
            gradient = gradient - gradient.mean(ctx.dim, keepdim=True)
        return (x * gradient).to(x.dtype), None, None, None, None, None


class DropSmall(torch.autograd.Function):
    """Identity forwards; backwards, relevance is dropped where |z| ≤ `threshold` (end of Note K)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(z.abs() > threshold)
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return relevance[0] * keep, None


def at_least_single(x: Tensor) -> Tensor:
    """The tensor in float32 if it is in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---------------------------------------------------------------------- canonical forms


def linear_norm(
    norm: Any, is_centred: bool = True, threshold: float = SMALLEST
) -> Callable[[Tensor], Tensor]:
    """A `forward` for layer norm, or RMS norm if not centred: linear, with its deviation held constant."""
    original = norm.forward
    dim = 1 if type(norm).__name__ == "LayerNorm2d" else -1

    def forward(x: Tensor) -> Tensor:
        value = x.detach()
        y: Tensor = original(value)
        if not x.requires_grad:
            return y
        wide = at_least_single(value)
        eps = torch.finfo(value.dtype).eps if norm.eps is None else norm.eps
        if is_centred:
            variance = wide.var(dim, keepdim=True, unbiased=False)
        else:
            variance = wide.square().mean(dim, keepdim=True)
        scale = (variance + eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach().view(-1, *[1] * (x.ndim - 2) if dim == 1 else ())
        return LinearNorm.apply(x, y.detach(), scale, dim, is_centred, threshold)

    return forward


def by_contribution(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """z = `function(*inputs)`, linear in each input, under LRP-0: R_i = x_i ⊙ ∂z/∂x_i · (R ⊘ z) (Note A).

    Inputs that need no gradient are constants. Where `function` holds factors constant, or halves the
    gradients of two, relevance follows that gradient.
    """
    if not any(x.requires_grad for x in inputs):
        return function(*inputs)
    z = function(*(TimesInput.apply(x, x.detach()) if x.requires_grad else x for x in inputs))
    return OverDenominator.apply(z, z.detach(), SMALLEST)


def passing(z: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(z)`, through which relevance passes unchanged."""
    return PassRelevance.apply(z, function)


def scaled(x: Tensor, factor: Any) -> Tensor:
    """x · factor, or the other way round: relevance passes the scale, which is learned or a number."""
    if isinstance(x, nn.Parameter):
        x, factor = factor, x
    constant = factor.detach() if isinstance(factor, Tensor) else factor
    return passing(x, lambda value: value * constant)


def passing_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A `forward` for an activation or a gate, through which relevance passes unchanged to its input.

    A gate a = z ⊙ ξ(z) hands all relevance to z (Note K, attention layers): what computes ξ gets none.
    """
    forward = module.forward
    copies = any(getattr(part, "inplace", False) for part in module.modules())
    return lambda z: passing(z, (lambda value: forward(value.clone())) if copies else forward)


_NAMES: dict[Any, str] = {
    F.scaled_dot_product_attention: "attention",
    **dict.fromkeys((Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, torch.add), "add"),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), "mul"),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, torch.matmul), "matmul"),
    **dict.fromkeys((Tensor.mean, torch.mean), "mean"),
    **dict.fromkeys((Tensor.sum, torch.sum), "sum"),
    **dict.fromkeys((Tensor.sigmoid, torch.sigmoid), "sigmoid"),
    **dict.fromkeys((Tensor.tanh, torch.tanh), "tanh"),
    torch.cat: "cat",
}


class _Replacing(TorchFunctionMode):
    """Other functions for operations in the code of one function; attention also where that calls it."""

    def __init__(self, code: CodeType, replacements: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.code, self.replacements = code, replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(_NAMES.get(func, ""))
        if replacement is not None:
            operands = args[0] if isinstance(args[0], list | tuple) else args[:2]
            carries = any(isinstance(x, Tensor) and x.requires_grad for x in operands)
            is_own = carries and sys._getframe(1).f_code is self.code
            if is_own or func is F.scaled_dot_product_attention:
                return replacement(*args, **kwargs)
        return func(*args, **kwargs)


def with_operations(method: Callable[..., Any], **replacements: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module, `forward` for instance, in whose own code operations are made by other functions.

    Those in the code of other modules that it calls are not.

    Parameters
    ----------
    method : bound method
    **replacements : function
        By the name of the operation: add, mul, matmul, mean, sum, sigmoid, tanh, cat, and attention for
        `scaled_dot_product_attention`. They take its arguments.
    """
    code = inspect.unwrap(method).__code__

    def replaced(*args: Any, **kwargs: Any) -> Any:
        with _Replacing(code, replacements):
            return method(*args, **kwargs)

    return replaced


# ---------------------------------------------------------------------- parameters


def check_exchangeable(module: nn.Module, name: str = "") -> None:
    """Raise if a weight or bias is no parameter, so that a rule could not put another in its place."""
    for part in ("weight", "bias"):
        if part in module._parameters:
            continue
        # A parametrised one is not looked at: that may be a step of its power iteration.
        value = vars(module).get(part, module._buffers.get(part))
        if is_parametrized(module, part) or isinstance(value, Tensor):
            where = f"layer {name!r} ({type(module).__name__})" if name else f"a {type(module).__name__}"
            raise ValueError(
                f"the {part} of {where} is no parameter: it is computed from others (weight norm, spectral "
                "norm, pruning) or a buffer, so that LRP rules cannot put another in its place. Explain a "
                "copy of the model with plain weights: torch.nn.utils.parametrize.remove_parametrizations, "
                "torch.nn.utils.remove_weight_norm or torch.nn.utils.prune.remove make them; or use a method "
                "without rules"
            )


def is_additive(module: nn.Module, x: Tensor) -> bool:
    """Whether z(x; θ) = z(x; θ⁺) + z(x; θ⁻), on which rules stand that put parts of the parameters θ there.

    A layer that standardises its weight makes another one of each part.
    """
    parameters = parameters_of(module)
    terms = []
    with torch.no_grad():
        whole = module.forward(x.clone())
        for side in ({"min": 0.0}, {"max": 0.0}):
            part = {key: None if p is None else p.clamp(**side) for key, p in parameters.items()}
            with exchanged(module, part):
                terms.append(module.forward(x.clone()))
    scale = torch.maximum(terms[0].abs(), terms[1].abs()).max()
    tolerance = 1e-3 if whole.dtype in (torch.float32, torch.float64) else 0.05
    return not bool((whole - terms[0] - terms[1]).abs().max() > tolerance * scale)  # NaN is not its fault


def parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own parameters as its forward sees them, detached."""
    check_exchangeable(module)
    return {name: None if (p := getattr(module, name)) is None else p.detach() for name in module._parameters}
