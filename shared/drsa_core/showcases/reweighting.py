"""Deep feature reweighting: a last layer trained anew, where concepts are not known (Note J.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from ..checks import as_float, as_float_tensor, as_int, as_int_labels, check_matrix

#: Weight decays to choose from, as in Note J.1.
WEIGHT_DECAYS = tuple(10.0**exponent for exponent in range(-3, 5))


def train_last_layer(
    features: Tensor, labels: Tensor, n_classes: int, weight_decay: float = 1.0, max_iter: int = 1000
) -> nn.Linear:
    """The linear layer that minimises Σ_n cross-entropy + weight_decay/2 · ‖W‖², biases without decay.

    The problem is convex and solved from W = 0 by L-BFGS in float64, so that no seed matters.

    Parameters
    ----------
    features : tensor, shape (N, D)
        What the last layer of the model sees.
    labels : tensor of int, shape (N,)
        Classes from 0 to n_classes − 1.
    """
    n_classes, max_iter = as_int(n_classes, "n_classes", 1), as_int(max_iter, "max_iter", 1)
    data, labels = _checked(features, labels, n_classes)
    weight_decay = as_float(weight_decay, "weight_decay", 0)
    double = data.double().cpu()
    shape = (n_classes, double.shape[1] + 1)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = torch.as_tensor(flat).view(shape)
        log_probability = (double @ weights[:, :-1].T + weights[:, -1]).log_softmax(1)
        value = -log_probability[torch.arange(len(labels)), labels].sum()
        error = log_probability.exp()
        error[torch.arange(len(labels)), labels] -= 1
        gradient = torch.cat([error.T @ double + weight_decay * weights[:, :-1], error.sum(0)[:, None]], 1)
        value = value + weight_decay / 2 * weights[:, :-1].square().sum()
        return float(value), gradient.flatten().numpy()

    options = {"maxiter": max_iter, "maxfun": 2 * max_iter, "ftol": 1e-12, "gtol": 1e-6}
    found = torch.as_tensor(
        minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options=options).x
    )
    layer = nn.utils.skip_init(nn.Linear, shape[1] - 1, n_classes)  # without a draw from the global generator
    with torch.no_grad():
        layer.weight.copy_(found.view(shape)[:, :-1])
        layer.bias.copy_(found.view(shape)[:, -1])
    return layer.to(data)


def deep_feature_reweighting(
    features: Tensor,
    labels: Tensor,
    held_out_features: Tensor,
    held_out_labels: Tensor,
    n_classes: int,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
) -> tuple[nn.Linear, float]:
    """A last layer trained where the spurious feature is spread over the classes, and its weight decay.

    Parameters
    ----------
    features, labels : tensors, shapes (N, D) and (N,)
        Of poisoned training images (see `poison`), as the last layer sees them.
    held_out_features, held_out_labels
        Of other images, on which the weight decay is chosen by accuracy; the larger decay wins a tie.
    """
    n_classes = as_int(n_classes, "n_classes", 1)
    weight_decays = [as_float(decay, "every entry of weight_decays", 0) for decay in weight_decays]
    if not weight_decays:
        raise ValueError("weight_decays must hold at least one number")
    held_out, truth = _checked(held_out_features, held_out_labels, n_classes)
    layers = [train_last_layer(features, labels, n_classes, decay) for decay in sorted(weight_decays)]

    def accuracy(layer: nn.Linear) -> float:
        with torch.no_grad():
            return float((layer(held_out.to(layer.weight)).argmax(1).cpu() == truth).float().mean())

    best = max(reversed(range(len(layers))), key=lambda i: accuracy(layers[i]))
    return layers[best], sorted(weight_decays)[best]


def _checked(features: Tensor, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    data = check_matrix(as_float_tensor(features, "features"), "features")
    labels = as_int_labels(labels, len(data), "row of features")
    if not ((labels >= 0) & (labels < n_classes)).all():
        raise ValueError(
            f"labels must lie between 0 and n_classes − 1 = {n_classes - 1}, got {int(labels.min())} … "
            f"{int(labels.max())}"
        )
    return data, labels
