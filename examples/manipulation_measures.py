"""What `manipulation.py` measures: errors of maps to the original and the target, outputs kept, scores.

Run by itself, it shows by an example of two pixels what a row of its table says.

    python examples/manipulation_measures.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from study.clever_hans import auroc
from study.manipulation import Manipulation, is_suspicious, manipulation_score, map_errors
from torch import Tensor

COLUMNS = "error to original | to target | correlation to original | to target | closer to original"


@dataclass(frozen=True)
class Outcome:
    """Manipulated images of one class.

    Attributes
    ----------
    target : int
        The class.
    photos, others : tensor, shape (N, C, H, W)
        Images before the manipulation, and those whose maps were the targets.
    span : tensor, shape (C, 1, 1)
        What a pixel's way from 0 to 1 is in units of the inputs.
    result : Manipulation
    before, after : tensor, shape (N, 2, H, W)
        Maps of the first PRCA component and of the residual.
    after_larger : dict of tensor, shape (N, 1, H, W)
        Maps of the first d components, by d.
    trusted : tensor, shape (M,)
        `manipulation_score` of images that are known to be untouched.
    """

    target: int
    photos: Tensor
    others: Tensor
    span: Tensor
    result: Manipulation
    before: Tensor
    after: Tensor
    after_larger: dict[int, Tensor]
    trusted: Tensor


def summary(name: str, maps: Tensor, results: list[Manipulation]) -> None:
    """One row: errors relative to the mean square of the original map, and correlations."""
    original, target = (torch.cat([getattr(r, n) for r in results]) for n in ("original_map", "target_map"))
    errors = map_errors(maps, original, target)
    scale = original.square().mean((1, 2))
    cells = []
    for values in (errors.to_original / scale, errors.to_target / scale):
        # One image has no standard error.
        spread = f" ± {float(values.std() / len(values) ** 0.5):.2f}" if len(values) > 1 else ""
        cells.append(f"{float(values.mean()):.2f}{spread}")
    cells += [
        f"{float(v.mean()):.2f}" for v in (errors.correlation_to_original, errors.correlation_to_target)
    ]
    closer = int((errors.to_original < errors.to_target).sum())
    print(f"| {name} | " + " | ".join(cells) + f" | {closer} of {len(maps)} |")


def report(outcomes: list[Outcome], pool: int) -> None:
    """What the maps are closer to, whether the output was kept, and what the score tells."""
    results = [o.result for o in outcomes]
    before, after = (torch.cat([getattr(o, name) for o in outcomes]) for name in ("before", "after"))
    print(f"\n| map | {COLUMNS} |")
    print("|---|---|---|---|---|---|")
    summary("untouched, whole", torch.cat([r.original_map for r in results]), results)
    summary("untouched, PRCA-1", before[:, 0], results)
    summary("manipulated, whole", torch.cat([r.map for r in results]), results)
    summary("manipulated, PRCA-1", after[:, 0], results)
    summary("manipulated, residual of PRCA-1", after[:, 1], results)
    for d in outcomes[0].after_larger:
        summary(f"manipulated, PRCA-{d}", torch.cat([o.after_larger[d][:, 0] for o in outcomes]), results)
    spread = "; ± one standard error" if len(before) > 1 else ""
    print(f"(errors are relative to the mean square of the original map{spread})\n")

    change = max(float(((o.result.image - o.photos).abs() / o.span).amax((1, 2, 3)).max()) for o in outcomes)
    probability = [
        torch.cat([getattr(o.result, name).softmax(1)[:, o.target] for o in outcomes]).mean()
        for name in ("original_output", "output")
    ]
    totals = [torch.cat([getattr(r, name).sum((1, 2)) for r in results]) for name in ("original_map", "map")]
    print(f"largest change of a pixel: {change:.3f} of the range")
    print(f"mean probability of the class: {float(probability[0]):.3f} → {float(probability[1]):.3f}")
    print(f"mean total relevance: {float(totals[0].mean()):.3f} → {float(totals[1].mean()):.3f}")
    scores = [[manipulation_score(o.before, pool), manipulation_score(o.after, pool)] for o in outcomes]
    for name, values in zip(("untouched", "manipulated"), zip(*scores, strict=True), strict=True):
        together = torch.cat(values)
        print(f"manipulation_score, {name}: {float(together.mean()):.2g} (up to {float(together.max()):.2g})")
    # Within each class: what is usual differs from class to class.
    if all(len(untouched) > 1 for untouched, _ in scores):
        areas = [auroc(torch.cat(pair), torch.arange(2).repeat_interleave(len(pair[0]))) for pair in scores]
        print(f"AUROC of manipulation_score, mean over classes: {sum(areas) / len(areas):.2f}")
    flagged = [
        sum(int(is_suspicious(pair[i], o.trusted).sum()) for pair, o in zip(scores, outcomes, strict=True))
        for i in (0, 1)
    ]
    print(f"flagged of {len(before)}: {flagged[0]} untouched, {flagged[1]} manipulated images")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    original, target = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    image, output = torch.zeros(1, 1, 1, 2), torch.zeros(1, 2)
    result = Manipulation(image, original, target, target, output, output, torch.zeros(0, 2))
    print(f"| map | {COLUMNS} |")
    summary("original", original, [result])
    summary("target", target, [result])


if __name__ == "__main__":
    main()
