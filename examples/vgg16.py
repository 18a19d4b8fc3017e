"""The paper's own setting: K concepts of VGG16 at Conv4_3, by DRSA and LRP-γ, shown on a photograph.

Concepts are learned from a folder with photographs of one class, 10 000 vectors in all as in the paper, and
then looked for in another photograph.

    python examples/vgg16.py --train photographs/281_tabby --target 281    # torchvision's weights
    python examples/vgg16.py --model models.py:factory --weights vgg.safetensors --train photographs/281_tabby
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from drsa_audit import load_network, photo_files
from drsa_core import DRSA
from drsa_core.plot import concept_maps
from photographs import find_photo
from zennit.attribution import Gradient

from zennit_drsa import DisentangledAttributor

CONV4_3 = "features.22"  # after its ReLU
PAIRS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, required=True, help="folder with photographs of the class")
    parser.add_argument("--model", default="vgg16", help="or file.py:factory (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="a state dict (default: the published weights)")
    parser.add_argument("--photo", default="cat", help="a file, or one of a package (default: %(default)s)")
    parser.add_argument("--target", type=int, help="output to explain (default: the photograph's largest)")
    parser.add_argument("--layer", default=CONV4_3, help="default: %(default)s")
    parser.add_argument("--concepts", type=int, default=4, help="number K (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="vectors to learn from (default: %(default)s)"
    )
    parser.add_argument("--figure", type=Path, default=Path("vgg16.png"), help="default: %(default)s")
    parser.add_argument("--dpi", type=int, default=90, help="of the figure (default: %(default)s)")
    options = parser.parse_args()
    begin = time.perf_counter()
    try:
        network = load_network(options.model, options.weights)
        photo = find_photo(options.photo)
        train = network.load(photo_files(options.train))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    x = network.to_input(photo)[None]
    with torch.no_grad():
        output = network.model(x)[0]
    target = int(output.argmax()) if options.target is None else options.target

    composite = network.composite(options.layer)  # γ falls with depth and is 0 above the layer
    attributor = DisentangledAttributor(Gradient(network.model, composite), options.layer)
    solver = DRSA(options.concepts, random_state=0)
    positions = max(1, options.pairs // len(train))
    attributor.fit(train.split(4), target, solver, positions=positions, random_state=0)
    explanation = attributor.explain(x, target)
    print(
        f"output {target}, {float(output[target]):.2f}; {options.layer}, {len(train)} images to learn from\n"
    )
    print(explanation.certificate())

    figure = concept_maps(
        network.to_picture(x[0]),
        explanation.maps[0],
        explanation.subspaces.names,
        whole=explanation.whole[0] if explanation.whole is not None else None,
        pool=3,  # single pixels cannot be seen in a small figure
        overlay=True,
        scale="concepts",
    )
    figure.savefig(options.figure, dpi=options.dpi)
    print(f"\nwrote {options.figure} after {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
