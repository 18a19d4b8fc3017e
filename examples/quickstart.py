"""Four concepts of one prediction: EfficientNet-Lite0 looks at a photograph, and its heatmap splits in four.

Everything comes with packages: ImageNet weights, photographs, methods. The concepts are learned from random
crops of the photograph, or from a folder with photographs of one class.

    python examples/quickstart.py                                # Zennit's LRP, a photograph of a cannon
    python examples/quickstart.py --photo cat bottlecap drum     # several, one row for each
    python examples/quickstart.py --images FOLDER                # concepts of a class, from your photographs
    python examples/quickstart.py --attribution ig               # Captum's Integrated Gradients instead
    python examples/quickstart.py --attribution shapley          # Captum's Shapley value sampling instead
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from captum.attr import IntegratedGradients, ShapleyValueSampling
from drsa_audit import Network, load_network, photo_files
from drsa_core import DRSA, Subspaces
from drsa_core.plot import concept_grid, concept_maps
from photographs import class_name, package_photos, random_crops
from torch import Tensor
from zennit.attribution import Gradient

from captum_drsa import DisentangledAttribution, IntegratedGradientsContext, patch_mask
from zennit_drsa import DisentangledAttributor

METHODS = {
    "lrp": "LRP-γ (Zennit)",
    "ig": "Integrated Gradients (Captum)",
    "shapley": "Shapley value sampling (Captum)",
}
#: Squares of so many pixels are drawn in one colour: Integrated Gradients are grainy.
POOL = {"lrp": 4, "ig": 8, "shapley": 16}


class Explained(NamedTuple):
    """One photograph (3, H, W), its K maps and standard map, R_k at the layer, and the concepts."""

    x: Tensor
    target: int
    logit: float
    probability: float
    maps: Tensor
    whole: Tensor
    concept_relevance: Tensor
    subspaces: Subspaces


def with_zennit(
    network: Network, layer: str, x: Tensor, train: Tensor, target: int, solver: DRSA
) -> tuple[Tensor, Tensor, Tensor]:
    """K maps (N, K, 3, H, W), standard maps and R_k with LRP."""
    wrapped = DisentangledAttributor(Gradient(network.model, network.composite(layer)), layer)
    found = wrapped.fit(train.split(8), target, solver, random_state=0).explain(x, target)
    assert found.whole is not None  # `explain` computes it unless told otherwise
    return found.maps, found.whole, found.concept_relevance


def with_captum(
    network: Network, layer: str, x: Tensor, train: Tensor, target: int, solver: DRSA, shapley: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with Integrated Gradients, or with Shapley values of 16 × 16 patches."""
    keywords: dict[str, Any] = {"n_steps": 50}
    method, pixels_per_feature = IntegratedGradients(network.model), 1
    if shapley:
        method = ShapleyValueSampling(network.model)
        # The paper takes 25 permutations; 10 are enough for a first look.
        keywords = {"feature_mask": patch_mask(x, 16), "n_samples": 10, "perturbations_per_eval": 28}
        pixels_per_feature = 3 * 16 * 16  # Captum writes the value of a patch to each of its pixels
    # Step 1, how the output responds to the activations, with 50 steps where the paper takes 100. The paper's
    # Shapley contexts divide by sums of activations, which may be near 0 at a layer with both signs.
    wrapped = DisentangledAttribution(method, layer, context_method=IntegratedGradientsContext(n_steps=50))
    wrapped.fit(train.split(8), target, solver, random_state=0)
    torch.manual_seed(0)  # Captum's samplers draw from the global generator
    found = wrapped.explain(x, target, whole=False, **keywords)
    torch.manual_seed(0)  # the same permutations as for the concepts
    whole = method.attribute(x, target=target, **keywords).detach()
    return found.maps / pixels_per_feature, whole / pixels_per_feature, found.concept_relevance


def explain(
    network: Network, x: Tensor, train: Tensor, attribution: str, layer: str, n_subspaces: int
) -> list[Explained]:
    """Learn the concepts of the class that is predicted for the first photograph, and explain all by them."""
    with torch.no_grad():
        output = network.model(x)
    target, solver = int(output[0].argmax()), DRSA(n_subspaces, random_state=0, progress=True)
    print(f"class {target}, {class_name(target)}: learning from {len(train)} images")
    if attribution == "lrp":
        maps, whole, relevance = with_zennit(network, layer, x, train, target, solver)
    else:
        is_shapley = attribution == "shapley"
        maps, whole, relevance = with_captum(network, layer, x, train, target, solver, is_shapley)
    logits, probabilities = output[:, target].tolist(), output.softmax(1)[:, target].tolist()
    subspaces = solver.subspaces_
    return [
        Explained(x[n], target, logits[n], probabilities[n], maps[n], whole[n], relevance[n], subspaces)
        for n in range(len(x))
    ]


def report(explained: Sequence[Explained]) -> None:
    """What a reader of the figure must know, in numbers."""
    for one in explained:
        total, parts = float(one.concept_relevance.sum()), one.concept_relevance.tolist()
        error = float((one.maps.sum(0) - one.whole).abs().max() / one.whole.abs().max())
        print(f"{class_name(one.target)}: logit {one.logit:.2f}, p = {one.probability:.2f}")
        print(
            f"  relevance at the layer {total:.3g}:",
            ", ".join(f"{name} {part:.3g}" for name, part in zip(one.subspaces.names, parts, strict=True)),
        )
        print(
            f"  the other {one.logit - total:.3g} of the logit is in biases above the layer or a baseline, "
            "for which no pixel answers"
        )
        print(
            f"  relevance at the pixels: standard map {float(one.whole.sum()):.3g}, "
            f"sum of the concepts' maps {float(one.maps.sum()):.3g}"
        )
        print(f"  at a pixel these two differ by at most {error:.1e} of the standard map's maximum")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--photo",
        nargs="+",
        default=["cannon"],
        help="photographs from packages, or 'all'; `photographs.py` prints their names (default: cannon)",
    )
    parser.add_argument("--images", type=Path, help="a folder with photographs of one class instead")
    parser.add_argument("--rows", type=int, default=4, help="photographs of --images to explain (default: 4)")
    parser.add_argument("--attribution", choices=METHODS, default="lrp", help="default: %(default)s")
    # γ is 0 above the layer. Behind the last block that is one convolution, so that biases keep little there.
    parser.add_argument("--layer", default="blocks.6", help="layer to split (default: %(default)s)")
    parser.add_argument("--concepts", type=int, default=4, help="number of concepts (default: %(default)s)")
    parser.add_argument("--crops", type=int, default=24, help="crops to learn from (default: %(default)s)")
    parser.add_argument("--overlay", action="store_true", help="draw the maps on the photograph")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="default: %(default)s")
    parser.add_argument("--dpi", type=int, default=90, help="resolution of the figure (default: %(default)s)")
    options = parser.parse_args()
    begin = time.perf_counter()

    network = load_network("efficientnet_lite0")
    settings = (options.attribution, options.layer, options.concepts)
    explained: list[Explained] = []
    if options.images:
        try:
            images = network.load(photo_files(options.images))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        explained = explain(network, images[: options.rows], images, *settings)
    else:
        photos = package_photos()
        names = list(photos) if options.photo == ["all"] else options.photo
        unknown = [name for name in names if name not in photos]
        if unknown:
            parser.error(f"no photograph is named {', '.join(unknown)}; the names are {', '.join(photos)}")
        for name in names:
            photo = photos[name]()
            crops = torch.stack([network.to_input(crop) for crop in random_crops(photo, options.crops)])
            explained += explain(network, network.to_input(photo)[None], crops, *settings)
    report(explained)

    method = f"EfficientNet-Lite0, {options.layer} · {METHODS[options.attribution]}, DRSA"
    pool = POOL[options.attribution]
    labels = [f"{class_name(one.target)}, p = {one.probability:.2f}" for one in explained]
    if len(explained) == 1:
        one = explained[0]
        about = (
            f"{class_name(one.target)} (class {one.target}, logit {one.logit:.1f}, p = {one.probability:.2f})"
        )
        figure = concept_maps(
            network.to_picture(one.x),
            one.maps,
            one.subspaces.names,
            whole=one.whole,
            title=f"{about} · {method}",
            pool=pool,
            overlay=options.overlay,
        )
    else:
        figure = concept_grid(
            torch.stack([network.to_picture(one.x) for one in explained]),
            torch.stack([one.maps for one in explained]),
            whole=torch.stack([one.whole for one in explained]),
            labels=labels,
            title=method,
            pool=pool,
            overlay=options.overlay,
        )
    figure.savefig(options.figure, dpi=options.dpi)
    print(f"wrote {options.figure} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
