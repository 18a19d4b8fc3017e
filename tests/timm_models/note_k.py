"""Note K once more, as slow and as literal as its formulas: w⁺, w⁻, a⁺, a⁻, both branches, layer by layer.

Nothing here is shared with the library: weights are standardised and padded by hand, and relevance is handed
down by closures instead of a modified gradient. Each layer returns its output and a function from the
relevance of that output to the relevance of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Down = Callable[[Tensor], Tensor]


class NoteK:
    """LRP of a timm `NormFreeNet` by the seven cases of Note K."""

    def __init__(self, net: Any, low: Tensor, high: Tensor, gamma: float, threshold: float = 1e-3) -> None:
        self.net, self.low, self.high, self.gamma, self.threshold = net, low, high, gamma, threshold

    def __call__(self, x: Tensor, target: int) -> tuple[Tensor, Tensor]:
        """Logits, and the relevance of the input for one of them."""
        net = self.net
        down: list[Down] = []

        def step(result: tuple[Tensor, Down]) -> Tensor:
            down.append(result[1])
            return result[0]

        for i, (name, layer) in enumerate(net.stem.named_children()):
            if name.startswith("conv"):
                x = step(self.first_conv(layer, x) if i == 0 else self.conv(layer, x))
            elif name == "pool":
                x = step(self.max_pool(layer, x))
            else:
                x = step((layer(x.clone()), lambda relevance: relevance))
        for stage in net.stages:
            for block in stage:
                x = step(self.block(block, x))
        if isinstance(net.final_conv, nn.Conv2d):
            x = step(self.conv(net.final_conv, x))
            x = step((net.final_act(x.clone()), lambda relevance: relevance))
        else:
            x = step(self.orphan(net.final_act, x))
        shape = x.shape
        x = step(self.linear(lambda a, w, b: a.mean((2, 3)), x, torch.ones((), dtype=x.dtype), None))
        assert shape[:2] == x.shape
        x = step(self.linear(F.linear, x, net.head.fc.weight, net.head.fc.bias))
        relevance = torch.zeros_like(x)
        relevance[:, target] = x[:, target]
        for function in reversed(down):
            relevance = function(relevance)
        return x, relevance

    # Cases 1, 2 and 7: both branches of the generalised γ rule, with the bias as a neuron of weight b.
    def linear(self, f: Any, a: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Down]:
        a, w = a.detach(), w.detach()
        b = None if b is None else b.detach()
        gamma, w_pos, w_neg = self.gamma, w.clamp(min=0), w.clamp(max=0)

        def branch(
            favoured: Callable[[Tensor], Tensor], w_for_pos: Tensor, w_for_neg: Tensor
        ) -> tuple[Tensor, Down]:
            a_pos, a_neg = a.clamp(min=0).requires_grad_(), a.clamp(max=0).requires_grad_()
            # The weight of a pooling layer is 1/n > 0 and not in `w`: scale its result instead.
            d = f(a_pos, w_for_pos, None) * _scalar(w, w_for_pos) + f(a_neg, w_for_neg, None) * _scalar(
                w, w_for_neg
            )
            if b is not None:
                d = d + (b + gamma * favoured(b)).view(-1, *(1,) * (d.ndim - 2))

            def down(relevance: Tensor) -> Tensor:
                ratio = torch.where(d.abs() > self.threshold, relevance / d, 0).detach()
                g_pos, g_neg = torch.autograd.grad(d, (a_pos, a_neg), ratio, retain_graph=True)
                return a.clamp(min=0) * g_pos + a.clamp(max=0) * g_neg

            return d, down

        z = f(a, w, b)
        _, positive = branch(lambda t: t.clamp(min=0), w + gamma * w_pos, w + gamma * w_neg)
        _, negative = branch(lambda t: t.clamp(max=0), w + gamma * w_neg, w + gamma * w_pos)
        return z, lambda relevance: positive(relevance * (z >= 0)) + negative(relevance * (z < 0))

    def conv(self, conv: Any, a: Tensor) -> tuple[Tensor, Down]:
        return self.linear(_convolution(conv), a, _standardised(conv), conv.bias)

    # Cases 3 and 4.
    def orphan(self, layer: Any, z: Tensor) -> tuple[Tensor, Down]:
        return layer(z.clone()), lambda relevance: relevance * (z.abs() > self.threshold)

    # Case 5.
    def shortcut(self, z: Tensor, s: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        g = 1 + self.gamma
        z_pos, z_neg, s_pos, s_neg = z.clamp(min=0), z.clamp(max=0), s.clamp(min=0), s.clamp(max=0)
        d_pos = (z_pos + s_pos) * g + (z_neg + s_neg)
        d_neg = (z_pos + s_pos) + (z_neg + s_neg) * g
        a = z + s

        def down(relevance: Tensor) -> tuple[Tensor, Tensor]:
            up = torch.where((a >= 0) & (d_pos.abs() > self.threshold), relevance / d_pos, 0)
            lo = torch.where((a < 0) & (d_neg.abs() > self.threshold), relevance / d_neg, 0)
            return (
                (z_pos * g + z_neg) * up + (z_pos + z_neg * g) * lo,
                (s_pos * g + s_neg) * up + (s_pos + s_neg * g) * lo,
            )

        return a, down

    # Case 6.
    def first_conv(self, conv: Any, x: Tensor) -> tuple[Tensor, Down]:
        f, w = _convolution(conv), _standardised(conv).detach()
        parts = [t.to(x).expand_as(x).clone().requires_grad_() for t in (x, self.low, self.high)]
        d = f(parts[0], w, None) - f(parts[1], w.clamp(min=0), None) - f(parts[2], w.clamp(max=0), None)

        def down(relevance: Tensor) -> Tensor:
            ratio = torch.where(d.abs() > self.threshold, relevance / d, 0).detach()
            gradients = torch.autograd.grad(d, parts, ratio, retain_graph=True)
            return sum((p * g for p, g in zip(parts, gradients, strict=True)), torch.zeros_like(x)).detach()

        return f(x, w, conv.bias).detach(), down

    # Not in Note K: the stem of the NF-ResNets pools by maximum; the winner takes all.
    def max_pool(self, pool: Any, a: Tensor) -> tuple[Tensor, Down]:
        a = a.detach().requires_grad_()
        z = pool(a)
        return z.detach(), lambda relevance: torch.autograd.grad(z, a, relevance, retain_graph=True)[0]

    def block(self, b: Any, x: Tensor) -> tuple[Tensor, Down]:
        a, down_act1 = self.orphan(b.act1, x)
        a = a * b.beta
        downs_short: list[Down] = []
        shortcut = x
        if b.downsample is not None:
            shortcut = a
            if not isinstance(b.downsample.pool, nn.Identity):
                pool = b.downsample.pool
                shortcut, down = self.linear(
                    lambda t, w, _: pool(t), shortcut, torch.ones((), dtype=x.dtype), None
                )
                downs_short.append(down)
            shortcut, down = self.conv(b.downsample.conv, shortcut)
            downs_short.append(down)
        downs: list[Down] = []

        def step(result: tuple[Tensor, Down]) -> Tensor:
            downs.append(result[1])
            return result[0]

        z = step(self.conv(b.conv1, a))
        z = step(self.conv(b.conv2, b.act2(z.clone())))
        if b.conv2b is not None:
            z = step(self.conv(b.conv2b, b.act2b(z.clone())))
        if b.attn is not None:
            z = b.attn_gain * step(self.orphan(b.attn, z))
            z = step(self.orphan(b.act3, z))
        else:
            z = b.act3(z.clone())
        z = step(self.conv(b.conv3, z))
        if b.attn_last is not None:
            z = b.attn_gain * step(self.orphan(b.attn_last, z))
        if b.skipinit_gain is not None:
            z = z * b.skipinit_gain
        out, down_sum = self.shortcut(z * b.alpha, shortcut)

        def down_block(relevance: Tensor) -> Tensor:
            residual, short = down_sum(relevance)
            for function in reversed(downs):
                residual = function(residual)
            for function in reversed(downs_short):
                short = function(short)
            if b.downsample is not None:
                return down_act1(residual + short)
            return down_act1(residual) + short

        return out, down_block


def _scalar(w: Tensor, modified: Tensor) -> Tensor | float:
    return modified if w.ndim == 0 else 1.0


def _standardised(conv: Any) -> Tensor:
    w = conv.weight
    mean = w.mean((1, 2, 3), keepdim=True)
    variance = ((w - mean) ** 2).mean((1, 2, 3), keepdim=True)
    result: Tensor = conv.gain * conv.scale * (w - mean) / torch.sqrt(variance + conv.eps)
    return result


def _convolution(conv: Any) -> Any:
    def same(size: int, k: int, s: int, d: int) -> tuple[int, int]:
        total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        return total // 2, total - total // 2

    def f(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if getattr(conv, "same_pad", False):
            (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
            a = F.pad(a, (*same(a.shape[3], kw, sw, dw), *same(a.shape[2], kh, sh, dh)))
        return F.conv2d(a, w, b, conv.stride, conv.padding, conv.dilation, conv.groups)

    return f
