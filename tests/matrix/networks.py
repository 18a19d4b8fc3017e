"""Tiny networks of every documented shape, each cut at a layer: x ↦ a = lower(x) ↦ y = upper(a).

The layer's output comes from what real networks have there: a convolution that an in-place ReLU follows,
batch norm, group norm, layer norm, max-pooling, a residual sum, an activation function.
"""

from __future__ import annotations

import copy

import torch
from drsa_core import Subspaces
from torch import Tensor, nn

N_FEATURES = 4
N_CLASSES = 3


class Residual(nn.Module):
    """z + branch(z): the sum is the module's output, so that nothing goes around the layer."""

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.branch(z)


class Cut(nn.Module):
    """`lower`, the layer as its last module, `upper` and a linear head. Flattens by a function: Captum's LRP
    has no rule for the module.
    """

    def __init__(self, lower: list[nn.Module], upper: list[nn.Module], n_head: int, channel_dim: int) -> None:
        super().__init__()
        self.lower, self.upper = nn.Sequential(*lower), nn.Sequential(*upper)
        self.head = nn.Linear(n_head, N_CLASSES)
        self.layer, self.channel_dim = f"lower.{len(lower) - 1}", channel_dim

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.upper(self.lower(x)).flatten(1))
        return output


class Affine(nn.Module):
    """Batch norm in evaluation mode as the formula that it is, without torch's own backward pass."""

    def __init__(self, norm: nn.Module, n_dim: int) -> None:
        super().__init__()
        assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        shape = (1, -1) + (1,) * (n_dim - 2)
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.scale = scale.reshape(shape)
        self.shift = (norm.bias.detach() - norm.running_mean * scale).reshape(shape)

    def forward(self, z: Tensor) -> Tensor:
        return z * self.scale + self.shift


def plain(module: nn.Module) -> nn.Module:
    """The same function for the reference: nothing in place, batch norm written out."""
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return Affine(module, 4 if isinstance(module, nn.BatchNorm2d) else 2)
    return nn.ReLU() if isinstance(module, nn.ReLU) else copy.deepcopy(module)


def _build(name: str) -> Cut:
    d = N_FEATURES
    pooled = d * 2 * 2
    match name:
        case "image_batch_norm":
            return Cut([nn.Conv2d(2, d, 3), nn.BatchNorm2d(d)], [nn.ReLU(), nn.AvgPool2d(2)], pooled, 1)
        case "image_in_place":
            return Cut([nn.Conv2d(2, d, 3)], [nn.ReLU(inplace=True), nn.MaxPool2d(2)], pooled, 1)
        case "image_max_pool":
            lower = [nn.Conv2d(2, d, 3), nn.ReLU(), nn.MaxPool2d(2)]
            return Cut(lower, [nn.Conv2d(d, 5, 2, padding=1), nn.ReLU()], 5 * 9, 1)
        case "image_group_norm":
            lower = [nn.Conv2d(2, d, 3), nn.ReLU(), nn.GroupNorm(2, d)]
            return Cut(lower, [nn.ReLU(), nn.AvgPool2d(2)], pooled, 1)
        case "image_residual":
            branch = Residual(nn.Conv2d(d, d, 3, padding=1), nn.ReLU())
            return Cut([nn.Conv2d(2, d, 3), branch], [nn.ReLU(), nn.AvgPool2d(2)], pooled, 1)
        case "tokens":
            return Cut([nn.Linear(3, d), nn.ReLU()], [nn.Linear(d, 5), nn.ReLU()], 5 * 3, -1)
        case "tokens_layer_norm":
            lower = [nn.Linear(3, d), nn.ReLU(), nn.LayerNorm(d)]
            return Cut(lower, [nn.Linear(d, 5), nn.ReLU()], 5 * 3, -1)
        case "tokens_residual":
            lower = [nn.Linear(3, d), Residual(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU())]
            return Cut(lower, [nn.Linear(d, 5), nn.ReLU()], 5 * 3, -1)
        case "ids":
            lower = [nn.Embedding(9, 3), nn.Linear(3, d), nn.ReLU()]
            return Cut(lower, [nn.Linear(d, 5), nn.ReLU()], 5 * 3, -1)
        case "ids_residual":
            lower = [nn.Embedding(9, d), Residual(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU())]
            return Cut(lower, [nn.Linear(d, 5), nn.ReLU()], 5 * 3, -1)
        case "vectors":
            return Cut([nn.Linear(5, d), nn.ReLU()], [nn.Linear(d, 6), nn.ReLU()], 6, 1)
        case "vectors_batch_norm":
            return Cut([nn.Linear(5, d), nn.BatchNorm1d(d)], [nn.ReLU()], d, 1)
    raise ValueError(f"no network is named {name!r}")


IMAGES = ("image_batch_norm", "image_in_place", "image_max_pool", "image_group_norm", "image_residual")
TOKENS = ("tokens", "tokens_layer_norm", "tokens_residual")
VECTORS = ("vectors", "vectors_batch_norm")
NETWORKS = (*IMAGES, *TOKENS, *VECTORS)
# Token numbers, which have no gradient: for layer methods on the embedding, and for perturbations.
IDS = ("ids", "ids_residual")


def network(name: str, dtype: torch.dtype = torch.float64) -> Cut:
    """A network with random weights and norms whose statistics and gains are not trivial."""
    torch.manual_seed((*NETWORKS, *IDS).index(name))
    model = _build(name)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
    return model.to(dtype).eval()


def inputs(name: str, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """`n` examples; the first ones are the same for every n. None of them has a map that is all zero."""
    shape = (2, 6, 6) if name in IMAGES else (3, 3) if name in TOKENS else (5,)
    generator = torch.Generator().manual_seed(32)
    if name in IDS:  # 0 and 1 are left for padding and a mask token
        return torch.stack([torch.randint(2, 9, (3,), generator=generator) for _ in range(n)])
    return torch.stack([torch.randn(shape, generator=generator) for _ in range(n)]).to(dtype)


def targets(n: int) -> Tensor:
    """A class for each example, not the same for all."""
    return torch.arange(n) % N_CLASSES


def feature_mask(name: str) -> Tensor:
    """Few players for methods that perturb: four patches of an image, the tokens, the entries of a vector."""
    if name in IMAGES:
        rows = torch.arange(6) // 3
        mask = (2 * rows[:, None] + rows[None, :]).expand(1, 2, 6, 6)
    elif name in TOKENS:
        mask = torch.arange(3)[None, :, None].expand(1, 3, 3)
    else:
        mask = torch.arange(3 if name in IDS else 5)[None]
    return mask.contiguous()  # Captum's samplers look at it with `view`


_SIZES: dict[str, tuple[int, ...]] = {
    "complete_1": (4,),
    "complete_2": (3, 1),
    "complete_D": (1, 1, 1, 1),
    "incomplete_1": (2,),
    "incomplete_2": (1, 2),
    "dual_1": (2,),
    "dual_2": (2, 1),
    "dual_D": (1, 1, 1, 1),
}
SUBSPACES = tuple(_SIZES)


def subspaces(name: str, dtype: torch.dtype = torch.float64) -> Subspaces:
    """Orthonormal blocks that span all or part of the space, or oblique ones with their dual (Note I)."""
    sizes = _SIZES[name]
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(N_FEATURES, N_FEATURES, generator=generator, dtype=torch.float64)
    if not name.startswith("dual"):
        return Subspaces(torch.linalg.qr(matrix).Q[:, : sum(sizes)].to(dtype), sizes)
    # Well conditioned: a random rotation and an eighth of a random matrix.
    oblique = (torch.linalg.qr(matrix).Q + 0.125 * matrix.flip(0))[:, : sum(sizes)]
    return Subspaces(oblique.to(dtype), sizes, dual=torch.linalg.pinv(oblique).T.to(dtype))
