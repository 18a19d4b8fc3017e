"""How often does a report point at a planted watermark, and how often at one that is not there?

For each seed a network of `examples/planted_watermark.py` is trained with a watermark on a share of the boxes
and audited on pictures of boxes, half of them with the watermark. It is found if one of the findings on the
first screen names the watermarked pictures (at least 0.7 of the union of both sets). With the share 0 neither
network nor pictures have a watermark, and every finding is a false alarm; with --unused the pictures have one
that the network has not learned.

How far apart the groups of `drsa_audit.findings` must be was chosen on seed 0, and how clear the split must
be on numbers at random; seed 1 was looked at.

    python tests/benchmarks/bench_shortcut.py --seeds 2 3 4 5 6 --shares 0.9 0.5 0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import audit as audit_example
import planted_watermark as planted
from drsa_audit import Audit
from PIL import Image


def write_boxes(folder: Path, n_images: int, seed: int, watermarked: float) -> None:
    """Pictures of boxes, a share of them watermarked, which their names say."""
    images, labels, marked = planted.shapes(n_images, seed, watermarked)
    folder.mkdir(parents=True)
    for n in (labels == planted.BOX).nonzero()[:, 0].tolist():
        pixels = (images[n] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{n:04d}_{'marked' if marked[n] else 'plain'}.png")


def audited(seed: int, share: float, in_pictures: float, options: argparse.Namespace) -> Audit:
    """The audit of a network that has seen a share of the boxes with the watermark."""
    images, labels, _ = planted.shapes(options.images, 1000 * seed, share)
    model = planted.train(images, labels, seed, options.epochs, progress=False)
    with tempfile.TemporaryDirectory() as name:
        for part, n_images, number in (("train", 300, 1), ("test", 120, 2)):
            write_boxes(Path(name) / part, n_images, 1000 * seed + number, in_pictures)
        quick = {"flipping": False, "ablation": False, "stability": False, "progress": False}
        return audit_example.audit_boxes(model, Path(name), seed=seed, **quick)


def agreement(found: Audit) -> float:
    """Common part of the pictures of the best finding and the watermarked ones, out of their union."""
    marked = {n for n, name in enumerate(found.explained.names) if "marked" in name}
    parts = [len(marked & set(g.images)) / len(marked | set(g.images)) for g in found.verdict.groups]
    return max(parts, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4, 5, 6], help="default: 2 to 6")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.9, 0.5, 0.0], help="of the boxes (default: 0.9 0.5 0)"
    )
    parser.add_argument("--unused", action="store_true", help="watermark the pictures of the share 0 as well")
    parser.add_argument("--images", type=int, default=1500, help="training images (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    options = parser.parse_args()

    results: dict[float, list[bool]] = {share: [] for share in options.shares}
    for seed in options.seeds:
        for share in options.shares:
            begin = time.perf_counter()
            found = audited(seed, share, 0.5 if share or options.unused else 0.0, options)
            groups = found.verdict.groups
            best = agreement(found)
            results[share].append(best >= 0.7 if share else bool(groups))
            shares = ", ".join(f"{g.share_there:.2f} against {g.share_elsewhere:.2f}" for g in groups)
            print(
                f"seed {seed}, watermark on {share:.0%} of the boxes: {len(groups)} findings ({shares}); "
                f"agreement with the watermarked pictures {best:.2f}; {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    print("\n| watermark on | what counts | how often |\n|---|---|---|")
    for share, hits in results.items():
        what = "found" if share else "false alarm"
        print(f"| {share:.0%} of the boxes | {what} | {sum(hits)} of {len(hits)} |")


if __name__ == "__main__":
    main()
