"""Small models of every family, with weights that exercise the rules: timm's initial ones shut branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")
pytest.importorskip("zennit")

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)
LOW, HIGH = (0 - MEAN) / STD, (1 - MEAN) / STD

_WIDE = {"depths": (1, 2, 1, 1), "channels": (32, 48, 64, 64), "num_classes": 10}
_NFNET: dict[str, Any] = {**_WIDE, "stem_chs": 16, "group_size": 8, "num_features": 48}
# One model of every family that the NFNet canonizer supports, in reduced depth and width.
NFNETS: dict[str, dict[str, Any]] = {
    "dm_nfnet_f0": _NFNET,
    "dm_nfnet_f3": _NFNET,
    "nfnet_f0": _NFNET,
    "nfnet_f7": _NFNET,
    "nfnet_l0": _NFNET,
    "eca_nfnet_l0": _NFNET,
    "eca_nfnet_l3": _NFNET,
    "nf_resnet26": {**_WIDE, "stem_chs": 16},
    "nf_resnet50": {**_WIDE, "stem_chs": 16},
    "nf_seresnet26": {**_WIDE, "stem_chs": 16},
    "nf_ecaresnet26": {**_WIDE, "stem_chs": 16},
    "nf_regnet_b0": {**_WIDE, "num_features": 48},
    "nf_regnet_b5": {**_WIDE, "num_features": 48},
    "test_nfnet": {"num_classes": 10},
}


def perturb(model: nn.Module, seed: int = 7, negative_gains: bool = False) -> nn.Module:
    """Gains, skip gains and biases that are not trivial (in place); the recipe of the golden data."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("skipinit_gain"):
                parameter.copy_(0.5 + torch.rand((), generator=generator))
            elif name.endswith(".gain"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_((1 + 0.2 * noise).clamp(min=0.2))
                if negative_gains:
                    flip = torch.rand(parameter.shape, generator=generator) < 0.1
                    parameter.copy_(torch.where(flip, -parameter, parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.get_submodule("head.fc").weight.mul_(10)  # type: ignore[operator]
    return model


def nfnet(name: str = "dm_nfnet_f0", **kwargs: Any) -> nn.Module:
    """A perturbed NFNet in evaluation mode."""
    torch.manual_seed(0)
    return perturb(timm.create_model(name, pretrained=False, **{**NFNETS[name], **kwargs}).eval())


def without_biases(model: nn.Module) -> nn.Module:
    """Set everything to zero that acts as a bias (in place)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.zero_()
    return model


def normed(name: str, **kwargs: Any) -> Any:
    """A batch-normalised timm model in evaluation mode, with statistics and weights that are not trivial."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **{"num_classes": 10, **kwargs}).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif key.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def image(size: int = 64, seed: int = 1, n: int = 1) -> Tensor:
    """Normalised noise images, shape (n, 3, size, size)."""
    torch.manual_seed(seed)
    return (torch.rand(n, 3, size, size) - MEAN) / STD


def explain(model: nn.Module, composite: Any, x: Tensor, target: int = 3) -> tuple[Tensor, Tensor]:
    """Logits and the relevance of the input, started at the target's logit."""
    from zennit.attribution import Gradient

    def start(output: Tensor) -> Tensor:
        return output * nn.functional.one_hot(torch.tensor(target), output.shape[1])

    with Gradient(model, composite) as attributor:
        output, relevance = attributor(x, start)
    return output.detach(), relevance.detach()
