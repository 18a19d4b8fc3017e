"""What `carton_watermark.py` measures: the watermark's pixels, ranks after a mitigation, and two baselines.

Run by itself, it prints how many pixels the strokes of the Hanzi watermark cover.

    python examples/carton_measures.py
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import torch
from drsa_audit import Network, load_network
from drsa_core import Subspaces
from drsa_core.plot import concept_grid
from drsa_core.refine import ProjectedModel
from hanzi_watermark import CARTON, add_hanzi, median_rank
from PIL import Image
from study.clever_hans import SpRAy, auroc
from torch import Tensor, nn


def stroke_mask(network: Network) -> Tensor:
    """The pixels that the watermark touches, shape (H, W): the strokes themselves."""
    black = network.preprocessing.to_inputs(torch.zeros(1, 3, network.size, network.size))
    return network.to_picture(add_hanzi(network, black))[0].amax(0) > 0.02


def share_inside(maps: Tensor, mask: Tensor) -> float:
    """Share of the positive relevance of maps (N, H, W) inside a mask (H, W), mean over the maps."""
    positive = maps.clamp(min=0)
    total = positive.sum((1, 2))
    inside = (positive * mask).sum((1, 2))
    return float((inside / total.clamp(min=1e-30)).mean())


def watermark_grid(
    network: Network, marked: Tensor, whole: Tensor, parts: Tensor, mask: Tensor, n_drawn: int, file: Path
) -> None:
    """Print where the relevance lies, and draw photographs, their map, the concept and the rest.

    Parameters
    ----------
    marked : tensor, shape (N, 3, H, W)
        Photographs with the watermark.
    whole : tensor, shape (N, H, W)
        Their maps.
    parts : tensor, shape (N, 2, H, W)
        Maps of the watermark's concept and of the rest.
    mask : tensor of bool, shape (H, W)
        The strokes.
    n_drawn : int
        The first so many are drawn, all in one figure.
    """
    rows = mask.any(1).nonzero().flatten()
    band = torch.zeros_like(mask)
    band[int(rows[0]) : int(rows[-1]) + 1] = True
    print(f"share of the positive relevance, {len(marked)} photographs with watermark")
    for name, area in (("on the strokes", mask), ("in their rows", band)):
        shares = [share_inside(maps, area) for maps in (whole, parts[:, 0], parts[:, 1])]
        print(
            f"  {name:<15} {float(area.float().mean()):.3f} of the pixels: whole map {shares[0]:.2f}, "
            f"the concept {shares[1]:.2f}, the rest {shares[2]:.2f}"
        )
    if n_drawn:
        pictures = network.to_picture(marked[:n_drawn])
        halves = []
        for chosen in torch.arange(n_drawn).chunk(2):
            figure = concept_grid(
                pictures[chosen],
                parts[chosen],
                ["the watermark's concept", "all other concepts"],
                whole=whole[chosen],
                pool=4,
            )
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=60)
            halves.append(Image.open(drawn).convert("RGB"))
        side_by_side(halves).save(file, optimize=True)


def side_by_side(pictures: list[Image.Image], gap: int = 16) -> Image.Image:
    """Pictures in one row, on white."""
    width = sum(picture.width for picture in pictures) + gap * (len(pictures) - 1)
    row, left = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white"), 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width + gap
    return row.quantize(256)


class Mitigation:
    """Rows of a table: what a model makes of photographs without and with watermark, and of cartons."""

    def __init__(self, outputs: Tensor, cartons: Tensor) -> None:
        self.usual, self.n_cartons = outputs.chunk(2)[0].argmax(1), len(cartons)
        print(f"\n{'':<45} rank of carton   same top-1 as clean   cartons")
        print(f"{'':<45}  clean  marked     clean  marked       called so")

    def row(self, name: str, outputs: Tensor, cartons: Tensor) -> None:
        """Print a row from outputs (2N, n_classes), the marked ones last, and those of cartons."""
        clean, marked = outputs.chunk(2)
        rank = [median_rank(part) for part in (clean, marked)]
        same = [float((part.argmax(1) == self.usual).float().mean()) for part in (clean, marked)]
        called = int((cartons.argmax(1) == CARTON).sum()) if self.n_cartons else 0
        print(
            f"{name:<45} {rank[0]:6g} {rank[1]:7g}     {same[0]:.3f}   {same[1]:.3f}       "
            f"{called} of {self.n_cartons}",
            flush=True,
        )


def clarc_model(
    model: nn.Module,
    layer: str,
    activations: Tensor,
    maps: Tensor,
    marked: Tensor,
    reference: Tensor,
    quantile: float,
    options: argparse.Namespace,
) -> ProjectedModel:
    """Projection along a direction that SpRAy's clusters give, after the idea of class artifact compensation.

    The direction leads from the mean activation of the other images to that of a cluster of maps. The cluster
    that tells the marked images best counts, in SpRAy's favour.
    """
    spray = SpRAy(options.concepts, random_state=options.seed).fit(maps)
    distances = spray.distances(maps)
    cluster = max(range(options.concepts), key=lambda k: auroc(-distances[:, k], marked))
    members, pooled = spray.labels_ == cluster, activations.mean((2, 3))
    direction = pooled[members].mean(0) - pooled[~members].mean(0)
    subspace = Subspaces(direction[:, None] / direction.norm(), [1])
    return ProjectedModel(model, layer, subspace, [0], direction, reference, quantile)


def retrained_row(
    model: nn.Module, images: Tensor, sizes: list[int], is_carton: Tensor
) -> tuple[Tensor, ...]:
    """Outputs of all images but the first part, with the last layer's row of carton trained on that part.

    All other rows stay: 1000 classes cannot be learned from this few photographs. The row starts from its
    old weights and is drawn to them; how strongly is chosen by the loss on held-out fifths.
    """
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in images.split(16)])
    handle.remove()
    features = torch.cat([torch.cat(seen), torch.ones(len(images), 1)], dim=1)
    n = sizes[0]
    others = outputs.clone()
    others[:, CARTON] = -torch.inf
    # Cross-entropy with all other logits fixed is that of carton against the rest, with an offset.
    offset, target = (outputs[:, CARTON] - others.logsumexp(1))[:n].double(), is_carton.double()
    x, fold = features[:n].double(), torch.arange(n) % 5

    def trained(rows: Tensor, decay: float) -> Tensor:
        change = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([change], max_iter=200, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = loss_of(change, rows) + decay / 2 * change.square().sum()
            loss.backward()
            return loss

        optimiser.step(closure)
        return change.detach()

    def loss_of(change: Tensor, rows: Tensor) -> Tensor:
        logits = offset[rows] + x[rows] @ change
        return nn.functional.binary_cross_entropy_with_logits(logits, target[rows], reduction="sum")

    def held_out(decay: float) -> float:
        return sum(float(loss_of(trained(fold != f, decay), fold == f)) for f in range(5))

    decay = min((10.0**e for e in range(-2, 5)), key=held_out)
    outputs[:, CARTON] += (features.double() @ trained(fold >= 0, decay)).float()
    return outputs[n:].split(sizes[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    mask = stroke_mask(load_network("efficientnet_lite0"))
    print(f"the strokes cover {int(mask.sum())} of {mask.numel()} pixels")


if __name__ == "__main__":
    main()
