"""`OverGammaDenominator` against the formula of generalised LRP-γ, at zeros and small denominators too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("zennit")  # what `drsa_core.lrp` is made for

from drsa_core.lrp import OverDenominator, OverGammaDenominator


@pytest.mark.parametrize(("threshold", "stabilizer"), [(1e-3, 0.0), (0.0, 1e-6), (0.3, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_is_the_formula(dtype: torch.dtype, threshold: float, stabilizer: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gamma = 0.25
    z = torch.randn(400, generator=generator, dtype=torch.float64).to(dtype)
    z[:4] = torch.tensor([0.0, -0.0, 1e-4, -1e-4], dtype=dtype)
    magnitude = (z.abs() + torch.rand(400, generator=generator, dtype=torch.float64)).to(dtype)
    magnitude[2:4] = z[2:4].abs()
    relevance = torch.randn(400, generator=generator, dtype=torch.float64).to(dtype)

    def gradients(rule: object) -> tuple[torch.Tensor, ...]:
        inputs = z.clone().requires_grad_(), magnitude.clone().requires_grad_()
        output = rule(*inputs)  # type: ignore[operator]
        assert torch.equal(output, z)
        return torch.autograd.grad(output, inputs, relevance)

    def literal(z: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
        s = torch.where(z.detach() >= 0, 1.0, -1.0).to(dtype)
        d = (1 + gamma / 2) * z + s * gamma / 2 * magnitude
        return OverDenominator.apply(d, z.detach(), threshold, stabilizer)

    found = gradients(lambda *given: OverGammaDenominator.apply(*given, gamma, threshold, stabilizer))
    expected = gradients(literal)
    dropped = int((found[0] == 0).sum())
    assert dropped > 20 if threshold == 0.3 else dropped <= 4
    for ours, theirs in zip(found, expected, strict=True):
        assert bool(ours.isfinite().all())
        # Half precision rounds d in the literal formula, and not in ours.
        keep = slice(None) if dtype == torch.float64 else (z.abs() > 0.4).nonzero()[:, 0]
        rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (5e-3, 1e-3)
        torch.testing.assert_close(ours[keep], theirs[keep], rtol=rtol, atol=atol)
