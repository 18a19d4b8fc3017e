"""The parts that every transformer is made of in canonical form, and the forms that bring one there.

Parts are modules without children that carry relevance, so that what each keeps can be measured. Forms are
functions of `Edits` and a module; the files beside this one are tables of them, by the name of a class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from drsa_core.lrp import (
    ModuleEdits,
    by_contribution,
    linear_norm,
    passing,
    passing_forward,
    with_operations,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..canonizers import affine
from ..kept import BIASES, CanonicalPart


class PositionSum(CanonicalPart):
    """Tokens plus position embeddings, or other learned ones, which keep their part of the relevance."""

    def __init__(self, keeps: str = "position embeddings") -> None:
        super().__init__()
        self.keeps = keeps

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """The sum of tokens (N, T, D) and what does not depend on the input, broadcast to it."""
        return by_contribution(operator.add, x, position.detach())


class PrefixTokens(CanonicalPart):
    """Class and register tokens before those of the patches. They keep what reaches them."""

    keeps = "prefix tokens"

    def forward(self, tokens: list[Tensor] | tuple[Tensor, ...], dim: int = 1) -> Tensor:
        """Learned tokens (N, t, D) before tokens (N, T, D), the last."""
        return torch.cat([*(token.detach() for token in tokens[:-1]), tokens[-1]], dim=dim)


class Pool(CanonicalPart):
    """Tokens (N, T, D) pooled to (N, D) by a linear function or a maximum: relevance by contribution."""

    def __init__(self, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self._pool = pool

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The pooled tokens."""
        return by_contribution(lambda tokens: self._pool(tokens, *args, **kwargs), x)


class AttentionProduct(CanonicalPart):
    """softmax(scale · q kᵀ + bias) v, written out: of fused attention, the weights could not be read.

    Parameters
    ----------
    reading : {"constant", "attnlrp"}
        "constant": the weights are constants, and o = A v is linear in v. "attnlrp": both products hand half
        of the relevance to each factor, and softmax follows its own derivative, which keeps some. A factor
        that is learned, as the query of attention pooling, is a weight and takes none.
    """

    def __init__(self, reading: str) -> None:
        super().__init__()
        self.reading = reading
        self.keeps = BIASES if reading == "constant" else "softmax"

    def rule(self) -> str:
        """The reading."""
        return f"attention={self.reading}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Queries (…, T, d), keys (…, S, d) and values (…, S, e) to outputs (…, T, e).

        The arguments are those of `torch.nn.functional.scaled_dot_product_attention`.
        """
        if is_causal:
            raise ValueError(
                "is_causal=True makes a causal decoder of this model; TransformerCanonizer is for "
                "encoders, in which each token sees all others. Leave is_causal at False"
            )
        if self.reading == "constant":
            query, key = query.detach(), key.detach()
        bias = None if attn_mask is None else attn_mask.detach()
        if bias is not None and not bias.is_floating_point():
            bias = query.new_zeros(bias.shape).masked_fill_(~bias, float("-inf"))
        factor = query.shape[-1] ** -0.5 if scale is None else scale

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            logits = _product(q * factor, k.transpose(-2, -1))
            return _product((logits if bias is None else logits + bias).softmax(-1), v)

        return by_contribution(attend, query, key, value)


class GateProduct(CanonicalPart):
    """signal ⊙ gate. "constant": the signal takes all relevance (Note K); "attnlrp": each takes half."""

    def __init__(self, reading: str) -> None:
        super().__init__()
        self.reading = reading

    def rule(self) -> str:
        """The reading of attention, which is that of gates as well."""
        return f"attention={self.reading}"

    def forward(self, signal: Tensor, gate: Tensor) -> Tensor:
        """The product of two tensors of one shape."""
        if self.reading == "constant":
            factor = gate.detach()
            return passing(signal, lambda value: value * factor)
        return by_contribution(lambda a, b: _HalfGradient.apply(a * b), signal, gate)


class _HalfGradient(torch.autograd.Function):
    """Identity forwards, half of the gradient backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return 0.5 * gradient[0]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; if both carry relevance, each takes half of it."""
    return _HalfGradient.apply(a @ b) if a.requires_grad and b.requires_grad else a @ b


# ---------------------------------------------------------------------- forms


class Edits(ModuleEdits):
    """Changes that bring a network into canonical form; `reading` says how attention is read."""

    def __init__(self, reading: str) -> None:
        super().__init__()
        self.reading = reading

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Another forward for one module."""
        self.attribute(module, "forward", forward)

    def operations(self, module: nn.Module, method: str = "forward", **replacements: Any) -> None:
        """Other functions for operations in a module's own code, see `drsa_core.lrp.with_operations`."""
        self.attribute(module, method, with_operations(getattr(module, method), **replacements))

    def part(self, module: nn.Module, name: str, part: nn.Module) -> Any:
        """A part as a child of a module, `canonical_<name>`."""
        self.child(module, f"canonical_{name}", part.train(module.training))
        return part

    def linear(self, module: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """A linear layer with some of a module's weights, views of them, as a child `canonical_<name>`."""
        with torch.device("meta"):
            layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.part(module, name, layer)


Form: TypeAlias = Callable[[Edits, Any], None]


def add(x: Tensor, y: Any) -> Tensor:
    """x + y by contribution."""
    return by_contribution(operator.add, x, y) if isinstance(y, Tensor) else x + y


def sums(edits: Edits, m: nn.Module) -> None:
    """The sums in a block's own code, of its input and its branches, by contribution."""
    edits.operations(m, add=add, sum=lambda x, *a, **k: by_contribution(lambda x: x.sum(*a, **k), x))


def pass_relevance(edits: Edits, m: nn.Module) -> None:
    """R(z) = R(a) for an activation, layer scale or another function of each neuron by itself."""
    edits.forward(m, passing_forward(m))


def norm(edits: Edits, m: Any, is_centred: bool = True) -> None:
    """Layer norm, or RMS norm if not centred, as a linear map with its deviation held constant."""
    shape = getattr(m, "normalized_shape", (1,))
    if not isinstance(shape, int) and len(shape) != 1:
        raise ValueError(
            f"a {type(m).__name__} over {len(shape)} axes has no canonical form here; supported are norms "
            "over the features of a token"
        )
    edits.forward(m, linear_norm(m, is_centred))


def _rms_norm(edits: Edits, m: nn.Module) -> None:
    norm(edits, m, is_centred=False)


def _batch_norm(edits: Edits, m: Any) -> None:
    """A scale and a shift of each feature (N, D, …), which LRP-0 crosses by contribution."""
    original = m.forward

    def forward(x: Tensor) -> Tensor:
        if not x.requires_grad:
            result: Tensor = original(x)
            return result
        scale, shift = (part.view(-1, *[1] * (x.ndim - 2)) for part in affine("of the model", m))
        return by_contribution(lambda x: x * scale + shift, x)

    edits.forward(m, forward)


def unused(edits: Edits, m: nn.Module) -> None:
    """A form for what the canonical form of its parent does not call."""


def positions(edits: Edits, m: Any, method: str = "forward") -> None:
    """Learned tokens that a method concatenates, and position embeddings that it adds."""
    prefix, position = edits.part(m, "prefix", PrefixTokens()), edits.part(m, "position", PositionSum())
    edits.operations(m, method, cat=prefix, add=position)


def attention(edits: Edits, m: Any) -> None:
    """Attention that calls `scaled_dot_product_attention`, with a gate on its output if it has one."""
    if hasattr(m, "fused_attn"):
        edits.attribute(m, "fused_attn", True)
    replacements: dict[str, Any] = {"attention": edits.part(m, "attention", AttentionProduct(edits.reading))}
    if getattr(m, "gate", None) is not None:
        replacements["mul"] = edits.part(m, "gate", GateProduct(edits.reading))
        replacements["sigmoid"] = lambda z: passing(z, torch.sigmoid)
    edits.operations(m, **replacements)


def multihead_attention(edits: Edits, m: Any) -> None:
    """`nn.MultiheadAttention`, to be called by `attend`: Zennit counts the module among the activations, and
    their rule fails on several inputs."""
    if not m.batch_first or m.bias_k is not None or m.bias_v is not None or m.add_zero_attn:
        raise ValueError(
            "torch's MultiheadAttention has a canonical form here with batch_first=True, and without "
            "add_bias_kv and add_zero_attn; create it so"
        )
    for i, name in enumerate(("query", "key", "value")):
        rows = slice(i * m.embed_dim, (i + 1) * m.embed_dim)
        # Keys and values of another width have weights of their own.
        weight = getattr(m, f"{name[0]}_proj_weight") if m.in_proj_weight is None else m.in_proj_weight[rows]
        edits.linear(m, name, weight, None if m.in_proj_bias is None else m.in_proj_bias[rows])
    edits.part(m, "attention", AttentionProduct(edits.reading))

    def forward(query: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not mask.is_floating_point():
            mask = ~mask  # true says here that a token is not seen
        if mask is not None and mask.ndim == 3:  # (N · heads, T, S)
            mask = mask.unflatten(0, (-1, m.num_heads))
        source = context.detach() if edits.reading == "constant" else context
        q = split_heads(
            m.canonical_query(query.detach() if edits.reading == "constant" else query), m.num_heads
        )
        k = split_heads(m.canonical_key(source), m.num_heads)
        v = split_heads(m.canonical_value(context), m.num_heads)
        result: Tensor = m.out_proj(m.canonical_attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return result

    edits.forward(m, forward)


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(N, T, D) to (N, heads, T, D / heads)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


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
COMMON_FORMS: dict[str, Form] = {
    **dict.fromkeys(("LayerNorm", "LayerNormFp32"), norm),
    **dict.fromkeys(("RmsNorm", "RmsNormFp32", "RMSNorm"), _rms_norm),
    # `nn.BatchNorm1d` and its kin inherit their `forward`.
    **dict.fromkeys(("_BatchNorm", "SyncBatchNorm"), _batch_norm),
    **dict.fromkeys((*_ACTIVATIONS, "LayerScale", "DropPath"), pass_relevance),
}
"""Modules of torch and timm whose canonical form is the same in every family."""
