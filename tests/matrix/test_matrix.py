"""Every public method over every documented shape, against the literal relevance model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("captum")
pytest.importorskip("zennit")

from captum.attr import InputXGradient, IntegratedGradients
from zennit.composites import EpsilonPlus

import captum_drsa
import zennit_drsa
from captum_drsa import IntegratedGradientsContext
from tests.matrix import lrp_rules, networks, reference
from tests.matrix.captum_methods import CAPTUM_METHODS
from tests.matrix.case import CONTEXT_STEPS, Case, lrp_context
from tests.matrix.reference import Problem
from tests.matrix.zennit_methods import ZENNIT_METHODS

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting forward, backward hooks",  # DeepLift, at every call
    "ignore:Input Tensor",
    "ignore:.*sits on zero activations",  # what is lost there is lost in the reference as well
    "ignore:.*positive and negative activations cancel",
    "ignore:the integral above layer",  # few steps are enough to compare
)

METHODS = {**CAPTUM_METHODS, **ZENNIT_METHODS}

# Both sides add the same terms in another order, so errors are relative to the largest value, not to each.
# float64 and float32: 10 to 100 times what the deepest of these networks loses; 1e-5 is the number of the
# design. bfloat16 has 8 significant bits, one rounding is up to 2⁻⁸, and 16 of them may meet in one sum.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 16 * 2.0**-8}

# N and subspaces: each N with complete, incomplete and dual blocks, K = 1, 2 and D.
FULL = [
    (1, "complete_1"),
    (1, "incomplete_2"),
    (1, "dual_D"),
    (2, "complete_D"),
    (2, "incomplete_1"),
    (2, "dual_2"),
    (5, "complete_2"),
    (5, "dual_1"),
]
SHORT = [(1, "complete_2"), (2, "dual_D"), (5, "incomplete_2")]
OTHER_PRECISION = [(1, "complete_2"), (2, "dual_2")]


def _cases() -> Iterator[Any]:
    """On one network of each shape everything; on the others each N once, as a full product is slow."""
    for name, method in METHODS.items():
        shapes_seen: set[str] = set()
        for network in method.networks:
            shape = network.split("_")[0]
            is_first = shape not in shapes_seen
            shapes_seen.add(shape)
            grid = [(torch.float64, n, kind) for n, kind in (FULL if is_first else SHORT)]
            if is_first:
                for dtype in (torch.float32, torch.bfloat16):
                    grid += [(dtype, n, kind) for n, kind in OTHER_PRECISION]
            for dtype, n, kind in grid:
                label = f"{name}-{network}-{str(dtype)[6:]}-N{n}-{kind}"
                yield pytest.param(name, network, dtype, n, kind, id=label)


def _case(network: str, dtype: torch.dtype, n: int, kind: str) -> Case:
    model = networks.network(network, dtype)
    x = networks.inputs(network, n, dtype)
    # Subspaces are learned in float32 or float64; a model in bfloat16 uses them as they are.
    blocks = networks.subspaces(kind, torch.float64 if dtype == torch.float64 else torch.float32)
    return Case(network, model, Problem.of(model, x, networks.targets(n), blocks))


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to `tolerance` times the largest expected value."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    scale = float(expected.double().abs().max())
    error = float((actual.double() - expected.double()).abs().max())
    assert error <= tolerance * scale, f"off by {error / scale if scale else error:.1e} of the largest value"


@pytest.mark.parametrize(("name", "network", "dtype", "n", "kind"), _cases())
def test_a_method_gives_what_the_literal_model_gives(
    name: str, network: str, dtype: torch.dtype, n: int, kind: str
) -> None:
    method, case = METHODS[name], _case(network, dtype, n, kind)
    try:
        expected = method.literal(case)
    except RuntimeError:
        # Captum draws the noise of these methods in float32 and cannot go on: nor can the library.
        if dtype != torch.bfloat16 or not name.startswith("captum"):
            raise
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            method.library(case)
        return
    try:
        actual = method.library(case)
    except (TypeError, ValueError) as error:
        # A precision that a method does not have may be refused, by a message that says so.
        if dtype != torch.bfloat16 or "bfloat16" not in str(error):
            raise
        return
    if method.in_single_precision:
        dtype = torch.float32 if dtype == torch.float64 else dtype
    elif dtype != torch.bfloat16:
        assert actual.dtype == dtype
    assert_equal(actual, expected, TOLERANCE[dtype])


# ---------------------------------------------------------------------- pairs (a, c)


def _rows(t: Tensor, channel_dim: int) -> Tensor:
    """(N · positions, D)."""
    return t.movedim(channel_dim, -1).reshape(-1, networks.N_FEATURES)


def _expected_pairs(case: Case, context: reference.Context) -> tuple[Tensor, Tensor]:
    p = case.problem
    a = torch.cat([p.phi(x).detach() for x, _ in p.examples()])
    c = torch.cat([context(p, x, target) for x, target in p.examples()])
    return _rows(a, p.channel_dim), _rows(c, p.channel_dim)


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("network", networks.NETWORKS)
@pytest.mark.parametrize("backend", ["captum_gradient", "captum_path", "zennit_gradient", "zennit_lrp"])
def test_pairs_are_activations_and_contexts(backend: str, network: str, n: int) -> None:
    if backend == "zennit_lrp" and "residual" in network:
        pytest.skip("a sum needs a canonizer")
    case = _case(network, torch.float64, n, "complete_2")
    p, model = case.problem, case.model
    p = Problem(p.lower, p.upper, p.x, torch.ones(n, dtype=torch.long), p.subspaces, p.channel_dim)
    case = Case(network, model, p)
    # Two batches, the second one smaller, so that a single example is met in either case.
    loader = [batch for batch in (p.x[:3], p.x[3:]) if len(batch)]
    if backend.startswith("captum"):
        of_path = backend == "captum_path"
        method = IntegratedGradients(model) if of_path else InputXGradient(model)
        wrapper = captum_drsa.DisentangledAttribution(
            method,
            model.layer,
            context_method=IntegratedGradientsContext(n_steps=CONTEXT_STEPS) if of_path else None,
            channel_dim=p.channel_dim,
        )
        pairs = wrapper.collect(loader, 1, positions=None)
        nodes = reference.exact_gauss_legendre(CONTEXT_STEPS)
        context = reference.path_context(nodes) if of_path else reference.gradient_context
        expected_a, expected_c = _expected_pairs(case, context)
    else:
        composite = EpsilonPlus() if backend == "zennit_lrp" else None
        pairs = zennit_drsa.collect(
            model,
            composite,
            model.layer,
            loader,
            1,
            positions=None,
            channel_dim=p.channel_dim,
            progress=False,
        )
        lrp = lrp_context(lrp_rules.epsilon_plus, True)
        expected_a, expected_c = _expected_pairs(case, lrp if composite else reference.gradient_context)
    assert_equal(pairs.a, expected_a, TOLERANCE[torch.float64])
    assert_equal(pairs.c, expected_c, TOLERANCE[torch.float64])
