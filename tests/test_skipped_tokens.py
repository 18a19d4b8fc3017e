"""Class and register tokens are left out of pairs, in both adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient
from drsa_core import PRCA, Pairs, PairStore, fit_many
from torch import Tensor, nn
from zennit.attribution import Gradient

import captum_drsa
import zennit_drsa
from tests.closeness import assert_same

N_TOKENS, N_FEATURES = 5, 4


class Tokens(nn.Module):
    """Tokens (N, T, D), or (N, D, T) if `features_first`, each with a value of its own."""

    def __init__(self, features_first: bool = False) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(N_FEATURES, N_FEATURES), nn.Linear(N_FEATURES, 3)
        self.turned = nn.Identity()
        self.features_first = features_first

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        z = self.turned(z.transpose(1, 2) if self.features_first else z).tanh()
        return self.head(z.mean(2 if self.features_first else 1))


def tokens(seed: int = 0, n: int = 2) -> Tensor:
    return torch.randn(n, N_TOKENS, N_FEATURES, generator=torch.Generator().manual_seed(seed))


def with_zennit(model: nn.Module, **keywords: Any) -> Pairs:
    return zennit_drsa.collect(model, None, "turned", [tokens(0), tokens(1)], 2, **keywords)


def with_captum(model: nn.Module, **keywords: Any) -> Pairs:
    return captum_drsa.collect(InputXGradient(model), "turned", [tokens(0), tokens(1)], 2, **keywords)


BACKENDS = pytest.mark.parametrize("gather", [with_zennit, with_captum])


@BACKENDS
@pytest.mark.parametrize("features_first", [False, True])
def test_the_first_tokens_are_in_no_pair(gather: Callable[..., Pairs], features_first: bool) -> None:
    torch.manual_seed(0)
    model = Tokens(features_first).eval()
    keywords = {"channel_dim": 1 if features_first else -1, "positions": None}
    every, some = gather(model, **keywords), gather(model, skip_tokens=2, **keywords)
    for found, all_tokens in ((some.a, every.a), (some.c, every.c)):
        expected = all_tokens.reshape(4, N_TOKENS, N_FEATURES)[:, 2:].flatten(0, 1)
        assert_same(found, expected)
    assert some.image.tolist() == [n for n in range(4) for _ in range(N_TOKENS - 2)]
    assert every.provenance is not None
    assert some.provenance == replace(every.provenance, skip_tokens=2)


@BACKENDS
def test_positions_are_drawn_from_the_rest(gather: Callable[..., Pairs]) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    rest = gather(model, channel_dim=-1, positions=None, skip_tokens=1)
    drawn = gather(model, channel_dim=-1, positions=3, skip_tokens=1, random_state=0)
    assert len(drawn) == 4 * 3
    for row, image in zip(drawn.a, drawn.image, strict=True):
        assert bool((rest.a[rest.image == image] == row).all(1).any())


@BACKENDS
def test_bad_numbers_are_refused(gather: Callable[..., Pairs]) -> None:
    model = Tokens().eval()
    with pytest.raises(ValueError, match="skip_tokens=5 is for layers with more tokens"):
        gather(model, channel_dim=-1, skip_tokens=5)
    with pytest.raises(ValueError, match="skip_tokens"):
        gather(model, channel_dim=-1, skip_tokens=-1)
    images = [torch.rand(1, 3, 6, 6)]
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)).eval()
    with pytest.raises(ValueError, match=r"tokens \(N, T, D\), got an activation of shape \(1, 4, 4, 4\)"):
        zennit_drsa.collect(network, None, "0", images, 0, skip_tokens=1)


@BACKENDS
def test_a_store_does_not_mix_collections(gather: Callable[..., Pairs], tmp_path: Any) -> None:
    model = Tokens().eval()
    gather(model, channel_dim=-1, skip_tokens=1, store=PairStore(tmp_path))
    with pytest.raises(ValueError, match="skip_tokens"):
        gather(model, channel_dim=-1, skip_tokens=2, store=PairStore(tmp_path))


def test_fit_leaves_them_out_too() -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    pairs = with_zennit(model, channel_dim=-1, positions=None, skip_tokens=1)
    expected = PRCA(2).fit(pairs).subspaces_.basis
    batches = [tokens(0), tokens(1)]
    for wrapper in (
        zennit_drsa.DisentangledAttributor(Gradient(model), "turned", channel_dim=-1),
        captum_drsa.DisentangledAttribution(InputXGradient(model), "turned", channel_dim=-1),
    ):
        wrapper.fit(batches, 2, PRCA(2), positions=None, skip_tokens=1)
        assert wrapper.subspaces is not None
        torch.testing.assert_close(wrapper.subspaces.basis, expected)


def test_parts_with_and_without_go_together() -> None:
    model = Tokens().eval()
    parts = [with_zennit(model, channel_dim=-1, positions=None, skip_tokens=n) for n in (0, 1)]
    joined = Pairs.concatenate(parts).provenance
    assert joined is not None
    assert joined.skip_tokens is None


@pytest.mark.parametrize("backend", ["zennit", "captum"])
def test_fits_of_all_classes_leave_them_out_too(backend: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    explainer: Any = (
        zennit_drsa.DisentangledAttributor(Gradient(model), "turned", channel_dim=-1)
        if backend == "zennit"
        else captum_drsa.DisentangledAttribution(InputXGradient(model), "turned", channel_dim=-1)
    )
    loader = [(tokens(seed), torch.tensor([seed % 2, 2])) for seed in range(4)]
    found = fit_many(explainer, loader, tmp_path, PRCA(1), positions=None, skip_tokens=2, progress=False)
    of_class = [(x[:1], 1) for x, labels in loader if labels[0] == 1]
    pairs = explainer.collect([x for x, _ in of_class], 1, positions=None, skip_tokens=2)
    # One eigenvector of the same pairs, in another order of the sums.
    expected, learned = PRCA(1).fit(pairs).subspaces_, found.subspaces(1)
    torch.testing.assert_close(learned.basis[:, :1], expected.basis[:, :1], atol=1e-5, rtol=0)
    assert learned.provenance is not None
    assert learned.provenance.skip_tokens == 2
    with pytest.raises(ValueError, match="begun with other settings"):
        fit_many(explainer, loader, tmp_path, PRCA(1), positions=None, progress=False)
