"""Showcase 3: manipulated explanations, and what PRCA sees in them (section 6.3, Note J.3).

An image is perturbed, hardly visibly, so that its map turns into a target map while the output of the network
stays. The functions take any differentiable map as a callable, so that every attribution library can feed
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

import torch
from drsa_core.checks import as_float, as_float_tensor, as_int, check_finite, unit_rows
from drsa_core.lrp import ModuleEdits
from torch import Tensor, nn
from tqdm.auto import tqdm

#: Images (N, C, H, W) to outputs (N, n_classes) and maps (N, H, W), both with their graph.
Explain: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


class SoftplusActivations:
    """While entered, ReLU and ReLU6 of a model run as softplus: ReLU(z) ≈ log(1 + exp(βz)) / β (section 6.3).

    The gradient of a ReLU network's map jumps; that of the smooth network leads somewhere. ReLU6 is the
    difference of two of them, at 0 and at 6. Enter it before rules are registered. `beta` may be changed on
    the way: the larger, the closer to the ReLU; None is the ReLU itself. The model comes back as it was.

    Parameters
    ----------
    model : module
        Its activations must be `nn.ReLU` or `nn.ReLU6` modules. If there is none, it can only be entered
        with β = None.
    beta : float or None
        Sharpness.
    """

    def __init__(self, model: nn.Module, beta: float | None = None) -> None:
        self.model, self.beta = model, beta
        self._edits = ModuleEdits()

    def __enter__(self) -> Self:
        found = False
        try:
            for module in self.model.modules():
                if isinstance(module, nn.ReLU | nn.ReLU6):
                    self._edits.attribute(module, "forward", self._forward(module))
                    found = True
        except BaseException:
            self._edits.remove()
            raise
        if not found and self.beta is not None:
            raise ValueError(
                f"{type(self.model).__name__} has no nn.ReLU or nn.ReLU6 module to smooth; if it calls "
                "torch.relu itself, write it with modules"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._edits.remove()

    def _forward(self, activation: nn.Module) -> Callable[[Tensor], Tensor]:
        original, is_relu6 = activation.forward, isinstance(activation, nn.ReLU6)

        def forward(z: Tensor) -> Tensor:
            if self.beta is None:
                # In-place activations would overwrite what the second derivative needs.
                return original(z.clone()) if getattr(activation, "inplace", False) else original(z)
            smooth = nn.functional.softplus(z, self.beta)
            return smooth - nn.functional.softplus(z - 6, self.beta) if is_relu6 else smooth

        return forward


def preserve_relevance(target: Tensor, original: Tensor) -> Tensor:
    """Target maps E_target · ΣE(x) / ΣE_target, whose totals are those of the original maps (Note J.3).

    Parameters
    ----------
    target, original : tensor, shape (N, H, W)
    """
    _check_maps(target, "target", original, "original")
    # In float64: sums over all pixels leave the range of half precision, and at times that of float32.
    sums, wanted = target.double().sum((1, 2)), original.double().sum((1, 2))
    ratio = wanted / torch.where(sums == 0, 1, sums)
    bad = ((sums == 0) | (ratio <= 0)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"the target maps of images {bad} add up to zero, or to another sign than the original ones: no "
            "factor gives them the same total. Take target maps of images that their class explains"
        )
    dtype = target.dtype if target.is_floating_point() else torch.float32
    return (target.double() * ratio[:, None, None]).to(dtype)


@dataclass(frozen=True)
class Manipulation:
    """Perturbed images, and maps before and after; all of the network as it is, not of the smooth one.

    Attributes
    ----------
    image : tensor, shape (N, C, H, W)
        The perturbed images x̂.
    original_map, target_map, map : tensor, shape (N, H, W)
        Maps of x, target maps rescaled to their totals, and maps of x̂.
    original_output, output : tensor, shape (N, n_classes)
        Outputs for x and x̂.
    history : tensor, shape (n_iter, 2)
        ‖E − E_target‖² / ‖E_target‖² and ‖Δ softmax‖² of the smooth network, means over images.
    """

    image: Tensor
    original_map: Tensor
    target_map: Tensor
    map: Tensor
    original_output: Tensor
    output: Tensor
    history: Tensor


def manipulate(
    model: nn.Module,
    explain: Explain,
    x: Tensor,
    target_map: Tensor,
    *,
    n_iter: int = 100,
    lr: float = 0.01,
    output_weight: float = 10.0,
    betas: tuple[float, float] | None = (10.0, 100.0),
    bounds: tuple[float | Tensor, float | Tensor] = (0.0, 1.0),
    max_change: float | Tensor | None = None,
    progress: bool = True,
) -> Manipulation:
    """Perturb images so that their maps become target maps while the outputs stay (Note J.3).

    Adam on ‖E(x′) − E_target‖² / ‖E_target‖² + λ ‖softmax f(x′) − softmax f(x)‖², from x′ = x. Division by
    ‖E_target‖² does no more than set the scale of λ. The network is smoothed meanwhile, see
    `SoftplusActivations`: β grows by a constant factor from iteration to iteration.

    Maps by gradients need that, as the second derivative of a ReLU network is zero. LRP does not: the shares
    by which a layer hands relevance down change with its activations. And a smoothed network may be another
    one, as softplus gives every idle neuron a small activation: on VGG16 its map reaches the target while
    that of the network itself does not follow. There `betas=None` is what works.

    Parameters
    ----------
    model : module
        The network that `explain` runs. Comes back as it was.
    explain : callable
        x (N, C, H, W) ↦ outputs (N, n_classes) and maps (N, H, W), with their graph. The gradient of the
        map must be the true one: with Zennit, start from relevance that depends on the output, and
        deactivate the rules for the second backward pass; see `examples/manipulation.py`.
    x : tensor, shape (N, C, H, W)
        Images as the network takes them.
    target_map : tensor, shape (N, H, W)
        Rescaled by `preserve_relevance` before use.
    n_iter, lr : int, float
        Steps, and step size in units of x.
    output_weight : float
        λ.
    betas : tuple of two floats, optional
        β of the first and of the last iteration; None: the network as it is.
    bounds : tuple of two floats or tensors
        Lowest and highest value of an image. Tensors of shape (C, 1, 1) if channels are normalised by a
        deviation of their own.
    max_change : float or tensor, optional
        Largest change of any value of the image; a tensor as in `bounds`.
    progress : bool
        Show a progress bar.
    """
    n_iter, lr = as_int(n_iter, "n_iter", 1), as_float(lr, "lr")
    output_weight = as_float(output_weight, "output_weight")
    if betas is not None:
        betas = as_float(betas[0], "betas[0]"), as_float(betas[1], "betas[1]")
        if not 0 < betas[0] <= betas[1]:
            raise ValueError(f"betas must be above 0 and ascending, got {betas}")
    x = x.detach()
    check_finite(x, "x")
    low, high = _like(x, bounds[0], "bounds[0]"), _like(x, bounds[1], "bounds[1]")
    if not lr > 0 or not output_weight >= 0 or not (low < high).all():
        raise ValueError(
            "lr must be above 0, output_weight at least 0, bounds ascending; "
            f"got {lr}, {output_weight}, {bounds}"
        )
    if (x < low).any() or (x > high).any():
        raise ValueError(f"x must lie within bounds = {bounds}, got [{float(x.min())}, {float(x.max())}]")
    if max_change is not None:
        change = _like(x, max_change, "max_change")
        if not (change > 0).all():
            raise ValueError(f"max_change must be above 0, got {max_change}")
        low, high = low.maximum(x - change), high.minimum(x + change)

    with SoftplusActivations(model, None if betas is None else betas[0]) as smooth:
        smooth.beta = None
        original_output, original_map = _values(explain, x)
        target = preserve_relevance(target_map.detach(), original_map)
        # Maps of any scale: their squares may leave the range of their dtype, their ratios do not.
        scale = target.double().square().sum((1, 2)).sqrt().to(target)[:, None, None]
        wanted = original_output.softmax(1)
        perturbed = x.clone().requires_grad_()
        optimiser = torch.optim.Adam([perturbed], lr=lr)
        history = []
        for step in tqdm(range(n_iter), desc="manipulate", disable=not progress):
            if betas is not None:
                smooth.beta = betas[0] * (betas[1] / betas[0]) ** (step / max(1, n_iter - 1))
            output, map = explain(perturbed)
            map_error = ((map - target) / scale).square().sum((1, 2))
            output_error = (output.softmax(1) - wanted).square().sum(1)
            loss = (map_error + output_weight * output_error).sum()
            (perturbed.grad,) = torch.autograd.grad(loss, perturbed)
            check_finite(perturbed.grad, "the gradient of the map")
            optimiser.step()
            with torch.no_grad():
                perturbed.copy_(perturbed.maximum(low).minimum(high))
            history.append([float(map_error.detach().mean()), float(output_error.detach().mean())])
        smooth.beta = None
        image = perturbed.detach()
        output, map = _values(explain, image)
    return Manipulation(image, original_map, target, map, original_output, output, torch.tensor(history))


@dataclass(frozen=True)
class MapErrors:
    """Mean squared errors of maps in float64, shapes (N,), and correlations, which ignore the scale."""

    to_original: Tensor
    to_target: Tensor
    correlation_to_original: Tensor
    correlation_to_target: Tensor


def map_errors(maps: Tensor, original: Tensor, target: Tensor) -> MapErrors:
    """How far maps (N, H, W) are from the original and from the (rescaled) target maps (section 6.3)."""
    _check_maps(maps, "maps", original, "original")
    _check_maps(maps, "maps", target, "target")

    def correlation(other: Tensor) -> Tensor:
        flat = (m.flatten(1).double() for m in (maps, other))
        first, second = (unit_rows(m - m.mean(1, keepdim=True)) for m in flat)
        return (first * second).sum(1).to(maps.dtype)

    return MapErrors(
        (maps.double() - original.double()).square().mean((1, 2)),
        (maps.double() - target.double()).square().mean((1, 2)),
        correlation(original),
        correlation(target),
    )


def manipulation_score(maps: Tensor, pool: int = 8) -> Tensor:
    """How much of a map is evidence that cancels between the most relevant direction and the rest, in [0, 1].

    In a manipulated map, the residual outside of the first PRCA component takes back what that component
    shows, and adds the target (section 6.3). The score is 1 − Σ_p|P_p + Q_p| / Σ_p(|P_p| + |Q_p|) for the
    map P of the component and Q of the residual: 0 if the two never contradict each other, 1 if they cancel
    out. What is usual depends on network and class: compare with scores of images that you trust, see
    `is_suspicious`.

    Parameters
    ----------
    maps : tensor, shape (N, 2, H, W) or (N, 2, C, H, W)
        Maps of the first PRCA component and of the residual, e.g. from `PRCA(1).fit(a, c).subspaces_`.
    pool : int
        Average over squares of so many pixels first: the grain of pixel-wise maps always cancels.

    Returns
    -------
    tensor, shape (N,)
        In float64 for maps in float64, else in float32.
    """
    # In float64: of a difference of two sums, half precision keeps two digits.
    dtype = torch.float64 if maps.dtype == torch.float64 else torch.float32
    maps = maps.detach().double()
    if maps.ndim == 5:
        maps = maps.sum(2)
    if maps.ndim != 4 or maps.shape[1] != 2:
        raise ValueError(
            "maps must have shape (N, 2, H, W) or (N, 2, C, H, W): first PRCA component and residual; "
            f"got {tuple(maps.shape)}"
        )
    check_finite(maps, "maps")
    pool = as_int(pool, "pool", 1)
    if pool > min(maps.shape[2:]):
        raise ValueError(f"pool must be at most the size of the maps, {tuple(maps.shape[2:])}, got {pool}")
    # Up to the edge, where squares may be smaller and count by what they hold.
    pooled = nn.functional.avg_pool2d(maps, pool, ceil_mode=True, divisor_override=pool**2).flatten(2)
    parts, whole = pooled.abs().sum((1, 2)), pooled.sum(1).abs().sum(1)
    return torch.where(parts > 0, 1 - whole / torch.where(parts > 0, parts, 1), 0).to(dtype)


def is_suspicious(scores: Tensor, trusted: Tensor, quantile: float = 0.95) -> Tensor:
    """Whether scores (N,) lie above a quantile of the scores (M,) of images known to be untouched."""
    quantile = as_float(quantile, "quantile")
    if not 0 < quantile < 1:
        raise ValueError(f"quantile must be between 0 and 1, got {quantile}")
    scores, trusted = as_float_tensor(scores, "scores"), as_float_tensor(trusted, "trusted")
    if scores.ndim != 1 or trusted.ndim != 1:
        raise ValueError(
            f"scores must have shape (N,) and trusted (M,), got {tuple(scores.shape)} and "
            f"{tuple(trusted.shape)}"
        )
    if not len(trusted):
        raise ValueError("trusted is empty: score some images that are known to be untouched first")
    check_finite(scores, "scores")  # NaN lies above nothing: an image with it would pass for untouched
    check_finite(trusted, "trusted")
    trusted = trusted.to(scores)
    return scores > trusted.quantile(quantile)


def _like(x: Tensor, value: float | Tensor, name: str) -> Tensor:
    """A number, or a tensor with fewer axes, in the shape of x (N, C, H, W)."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return torch.full_like(x, as_float(value, name))
    check_finite(value, name)
    try:
        return value.to(x).expand_as(x)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must be a number, or a tensor that fits x {tuple(x.shape)}, e.g. of shape (C, 1, 1), "
            f"got {tuple(value.shape)}"
        ) from error


def _values(explain: Explain, x: Tensor) -> tuple[Tensor, Tensor]:
    output, map = explain(x.clone().requires_grad_())
    if output.ndim != 2 or map.shape != (len(x), *x.shape[2:]):
        raise ValueError(
            f"explain must return outputs (N, n_classes) and maps (N, H, W) for x {tuple(x.shape)}, got "
            f"{tuple(output.shape)} and {tuple(map.shape)}; add up the channels of maps"
        )
    if not map.requires_grad:
        raise ValueError("explain must return maps with their graph (create_graph=True), not detached ones")
    check_finite(output, "the output")
    check_finite(map, "the map")
    return output.detach(), map.detach()


def _check_maps(first: Tensor, name: str, second: Tensor, other: str) -> None:
    if first.ndim != 3 or first.shape != second.shape:
        raise ValueError(
            f"{name} and {other} must both have shape (N, H, W), got {tuple(first.shape)} and "
            f"{tuple(second.shape)}"
        )
    check_finite(first, name)
    check_finite(second, other)
