"""K concepts of a vision transformer: where each of them is in a photograph, and what keeps the rest.

Concepts are learned at a block from photographs of one class (or from crops of the photograph itself), and
LRP carries each of them down to the pixels. Of a transformer's score, a part never reaches the pixels:
position embeddings, class and register tokens and biases keep it. The certificate says how much.

    python examples/vit.py --model vit_small_patch16_224 --photo cat            # timm's weights, by name
    python examples/vit.py --weights vit.safetensors --train 281_tabby          # your own files
    python examples/vit.py --model models.py:factory --photo portrait.jpg       # any ViT of timm
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from drsa_audit import Network, load_network, photo_files
from drsa_core import DRSA, Explanation
from drsa_core.plot import concept_maps
from photographs import find_photo, random_crops
from torch import Tensor
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor, TransformerGamma


def concepts_of(
    network: Network, x: Tensor, train: Tensor, target: int, options: argparse.Namespace
) -> Explanation:
    """Learn concepts at a block and explain one photograph (1, 3, H, W) by them."""
    model: Any = network.model  # timm's attributes are not declared
    layer = options.layer or f"blocks.{(len(model.blocks) - 1) // 2}"
    given = {"gamma": options.gamma, "attention": options.attention}
    keywords: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    composite = TransformerGamma(**keywords, layer=layer)
    wrapped = DisentangledAttributor(Gradient(model, composite), layer, channel_dim=-1)
    wrapped.fit(
        train.split(4),
        target,
        DRSA(options.concepts, random_state=0),
        positions=options.positions,
        random_state=0,
        skip_tokens=model.num_prefix_tokens,  # the class token stands for no place of the photograph
    )
    return wrapped.explain(x, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="of timm, or file.py:factory (default: vit_small_patch16_224)")
    parser.add_argument("--weights", type=Path, help="a .safetensors file; without --model it names its own")
    parser.add_argument("--photo", default="cat", help="a file, or one of a package (default: %(default)s)")
    parser.add_argument("--train", type=Path, help="folder with photographs of the class to learn from")
    parser.add_argument("--crops", type=int, default=24, help="of the photograph, without --train")
    parser.add_argument("--target", type=int, help="output to explain (default: the largest)")
    parser.add_argument("--layer", help="block to split (default: the middle one)")
    parser.add_argument("--concepts", type=int, default=4, help="number K (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=50, help="per photograph (default: %(default)s)")
    parser.add_argument("--gamma", type=float, help="γ below the block (default: that of TransformerGamma)")
    parser.add_argument("--attention", choices=("constant", "attnlrp"), help="how LRP crosses attention")
    parser.add_argument("--figure", type=Path, default=Path("vit.png"), help="default: %(default)s")
    parser.add_argument("--dpi", type=int, default=90, help="of the figure (default: %(default)s)")
    options = parser.parse_args()
    begin = time.perf_counter()
    try:
        network = load_network(*_names(options))
        photo = find_photo(options.photo)
        if options.train is not None:
            train = network.load(photo_files(options.train))
        else:
            train = torch.stack([network.to_input(crop) for crop in random_crops(photo, options.crops)])
    except (OSError, ValueError) as error:
        parser.error(str(error))
    x = network.to_input(photo)[None]
    with torch.no_grad():
        output = network.model(x)[0]
    target = int(output.argmax()) if options.target is None else options.target
    explanation = concepts_of(network, x, train, target, options)
    layer = explanation.provenance.layer
    print(f"output {target}, {float(output[target]):.2f}; concepts of {layer} from {len(train)} images\n")
    print(explanation.certificate())

    model: Any = network.model
    figure = concept_maps(
        network.to_picture(x[0]),
        explanation.maps[0],
        explanation.subspaces.names,
        whole=explanation.whole[0] if explanation.whole is not None else None,
        title=f"output {target}: {float(output[target]):.2f} · {layer}",
        pool=model.patch_embed.patch_size[0],  # a transformer sees patches; inside of one, LRP is grain
        overlay=True,
        scale="concepts",
    )
    figure.savefig(options.figure, dpi=options.dpi)
    print(f"\nwrote {options.figure} after {time.perf_counter() - begin:.0f} s")


def _names(options: argparse.Namespace) -> tuple[str, Path | None]:
    if options.model is None and options.weights is not None:
        return str(options.weights), None
    return options.model or "vit_small_patch16_224", options.weights


if __name__ == "__main__":
    main()
