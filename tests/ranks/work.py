"""What each rank does in the tests: everything in one launch, with the results in files.

Run as `python -m tests.ranks.work FOLDER` with the variables that torchrun sets.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from drsa_core import DRSA, DSA, PRCA, Pairs, PairShards, PairStore, fit_many, joined_ranks
from drsa_core.distributed import Ranks
from drsa_core.explainer import Explainer
from drsa_core.layer import Inputs, Request
from drsa_core.targets import Target
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class GradientTimesInput(Explainer):
    """A small explainer of its own: c = ∂y/∂a at a convolution of 6 features, in float64."""

    def __init__(self) -> None:
        self.layer_name, self.channel_dim, self.strict, self.subspaces = "0", 1, False, None
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)).double()
        self.layer = self.model[0]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        self.images = 0

    def context(self, inputs: Inputs, target: Target) -> tuple[Tensor, Tensor]:
        """As in `Explainer`."""
        assert isinstance(inputs, Tensor)
        self.images += len(inputs)
        a = self.layer(inputs).detach().requires_grad_()
        y = self.model[1:](a)
        labels = torch.as_tensor(target).expand(len(y))
        return a.detach(), torch.autograd.grad(y.gather(1, labels[:, None]).sum(), a)[0]

    def concept_relevance(self, inputs: Inputs, target: Target) -> Any:
        """Not needed here."""
        raise ValueError("this explainer only collects")

    def explain(self, inputs: Inputs, target: Target) -> Any:
        """Not needed here."""
        raise ValueError("this explainer only collects")

    def _origin(self) -> dict[str, Any]:
        return {"backend": "test", "method": "gradient", "layer": "0", "model": None}

    def _request(self, inputs: Inputs, target: Target) -> Request:
        assert isinstance(inputs, Tensor)
        return Request(self.model, self.layer, self.layer_name, (inputs,), target, self.channel_dim)

    def _known_model(self) -> nn.Module:
        return self.model


def photographs(n_images: int = 23, n_classes: int = 4, batch_size: int = 3) -> DataLoader[Any]:
    """Random images with labels out of order; the last batch is smaller."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_images, 3, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, n_classes, (n_images,), generator=generator)
    return DataLoader(TensorDataset(x, labels), batch_size=batch_size)


def pairs(n_samples: int, n_features: int, dtype: torch.dtype = torch.float64) -> Pairs:
    """Four concepts in directions of unequal energy, as in activations."""
    generator = torch.Generator().manual_seed(n_samples)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(n_features, n_features)).Q
    concept = torch.randint(0, 4, (n_samples,), generator=generator)
    mask = torch.full((n_samples, n_features), 0.1, dtype=torch.float64)
    for k in range(4):
        mask[concept == k, k::4] = 1
    code = normal(n_samples, n_features).abs() * torch.linspace(1, 0.02, n_features) * mask
    a, c = code @ basis, (code + 0.1 * normal(n_samples, n_features)) @ basis
    return Pairs(a.to(dtype), c.to(dtype))


def shard(whole: Pairs, ranks: Ranks) -> PairShards:
    """Unequal parts: the first rank has least."""
    ends = [len(whole) * (r + 1) ** 2 // ranks.size**2 for r in range(ranks.size)]
    begin = ends[ranks.rank - 1] if ranks.rank else 0
    rows = slice(begin, ends[ranks.rank])
    return PairShards(Pairs(whole.a[rows], whole.c[rows]), ranks)


#: Fits that are compared with those of one process; sizes (N, D) with and without a reduced problem, and few
#: pairs in many dimensions.
FITS = {
    "coarse": (lambda: DRSA(4, random_state=0, n_init=2), (1200, 130)),
    "balanced": (lambda: DRSA(3, random_state=1, balance=0.5, n_init=2), (400, 24)),
    "residual": (lambda: DRSA(dims=[4, 4], random_state=2, n_init=1, solver="quasi-newton"), (300, 20)),
    "paper": (lambda: DRSA(4, random_state=0, n_init=1, solver="paper", max_iter=30), (300, 20)),
    "span": (lambda: DRSA(2, random_state=0, n_init=1), (9, 40)),
    "dsa": (lambda: DSA(2, random_state=0, n_init=1), (200, 12)),
    "prca": (lambda: PRCA(3), (300, 20)),
}


def main(folder: Path) -> None:
    """Run everything, and write what this rank found."""
    torch.set_num_threads(1)
    with joined_ranks(timedelta(seconds=300)) as ranks:
        here = folder / f"rank{ranks.rank}"
        here.mkdir()
        for name, (make, size) in FITS.items():
            whole = pairs(*size)
            solver: Any = make().fit(shard(whole, ranks))
            solver.subspaces_.save(here / f"{name}.safetensors")
        # From files that all ranks see, in chunks.
        make, size = FITS["coarse"]
        files = sorted((folder / "files").glob("*.safetensors"))
        memory = 256 * 12 * size[1] * 8
        streamed: Any = make().fit(PairShards.from_files(files, ranks, memory=memory))
        streamed.subspaces_.save(here / "streamed.safetensors")

        explainer = GradientTimesInput()
        mine = explainer.collect(photographs(), "label", 5, 7, store=PairStore(folder / "store"), ranks=ranks)
        mine.save(here / "pairs.safetensors")
        explainer.collect([x for x, _ in photographs()], 2, 5, 7, ranks=ranks).save(
            here / "listed.safetensors"
        )
        explainer.fit(photographs(), 1, DRSA(2, random_state=0, n_init=2), 5, 7, ranks=ranks)
        assert explainer.subspaces is not None
        explainer.subspaces.save(here / "fitted.safetensors")

        counted = GradientTimesInput()
        solver = DRSA(2, random_state=0, n_init=2)
        index = fit_many(counted, photographs(), folder / "many", solver, positions=5, ranks=ranks)
        again = fit_many(counted, photographs(), folder / "many", solver, positions=5, ranks=ranks)
        said = {"images": counted.images, "index": index == again, "classes": sorted(index.classes)}
        (here / "many.json").write_text(json.dumps(said))

        # A block that fails on one rank fails on all.
        errors = {}
        for culprit in range(ranks.size):
            try:
                with ranks.all_or_none("a test"):
                    if ranks.rank == culprit:
                        raise ValueError(f"by {culprit}")
            except Exception as error:
                errors[culprit] = f"{type(error).__name__}: {error}"
        try:
            explainer.collect(DataLoader(photographs().dataset, 3, shuffle=True), "label", ranks=ranks)
        except ValueError as error:
            errors[99] = str(error)
        (here / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    assert int(os.environ["WORLD_SIZE"]) > 1
    main(Path(sys.argv[1]))
