"""Batch size and memory format of patch flipping: the fastest are found, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drsa_core.evaluation import (
    patch_flipping,
)
from drsa_core.evaluation.pace import Pace, probe
from torch import Tensor, nn

from .test_flipping import IDENTITY


class Layout(nn.Module):
    """A convolution, and then something that does not take channels-last as it takes other inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.kind = nn.Conv2d(3, 4, 3, padding=1), kind
        self.head = nn.Linear(4 * 16 * 16, 2)
        self.formats: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.formats.append(x.is_contiguous(memory_format=torch.channels_last))
        a = self.convolution(x)
        if self.kind == "strides":  # wrong in channels-last, and no error
            a = a.as_strided((len(a), 4 * 16 * 16), (4 * 16 * 16, 1))
        else:
            a = a.view(len(a), -1) if self.kind == "view" else a.flatten(1)
        output: Tensor = self.head(a) + 10
        return output


@pytest.mark.parametrize(("kind", "tries_both"), [("plain", True), ("view", False), ("strides", False)])
def test_batch_size_and_format_are_found_and_change_nothing(kind: str, tries_both: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(12, 3, 16, 16, generator=generator)
    maps = torch.rand(12, 2, 3, 16, 16, generator=generator)
    model = Layout(kind).eval()
    strides = [parameter.stride() for parameter in model.parameters()]
    options: dict[str, Any] = {"patch_size": 4, "schedule": "single", "fill": "mean"}
    expected = patch_flipping(model, inputs, maps, 1, IDENTITY, batch_size=5, **options)
    assert not any(model.formats)
    model.formats.clear()
    found = patch_flipping(model, inputs, maps, 1, IDENTITY, **options)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
    assert any(model.formats[2:]) == tries_both  # the first two compare the formats
    assert [parameter.stride() for parameter in model.parameters()] == strides


def run_probe(seconds_of, formats=(torch.contiguous_format, torch.channels_last)) -> tuple[Pace, int]:
    """What is chosen if a setting takes `seconds_of(size, format)`, and the batches until then."""
    tries = probe(formats)
    pace, n_batches = next(tries), 0
    while True:
        n_batches += 1
        try:
            pace = tries.send(seconds_of(pace.batch_size, pace.memory_format))
        except StopIteration as found:
            return found.value, n_batches


def test_probe_climbs_to_the_fastest() -> None:
    last = torch.channels_last
    assert run_probe(lambda size, form: (form != last) + abs(size - 32))[0] == Pace(32, last)
    assert run_probe(lambda size, form: (form == last) + size)[0] == Pace(1, torch.contiguous_format)
    assert run_probe(lambda size, form: 1.0)[0].batch_size == 4  # noise alone does not decide
    assert run_probe(lambda size, form: 1.0)[1] == 4 * 3  # two formats, one larger size, one smaller
    assert run_probe(lambda size, form: 1 / size, (torch.contiguous_format,))[0].batch_size == 64


def test_first_batches_warm_up_only() -> None:
    seen: set[object] = set()

    def seconds(size: int, form: object) -> float:
        first = (size, form) not in seen
        seen.add((size, form))
        return 100.0 if first else float(size != 8)

    assert run_probe(seconds)[0].batch_size == 8
