"""Subspaces: the mathematics of the virtual layer, the value's operations, and its file format."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from drsa_core import (
    Subspaces,
    context_from_relevance,
    filter_context,
    filter_relevance,
    ibd_subspaces,
    lost_relevance,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from .test_provenance import made


def orthogonal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.as_tensor(ortho_group.rvs(n, random_state=seed))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Subspaces, torch.Tensor, torch.Tensor]:
    """Complete subspaces with unequal blocks, and activations and contexts of wild magnitudes."""
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda d: sum(d) >= 2))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** draw(st.integers(-6, 6))
    a = scale * torch.randn(7, sum(dims), generator=generator, dtype=torch.float64)
    c = torch.randn(7, sum(dims), generator=generator, dtype=torch.float64)
    return Subspaces(orthogonal(sum(dims), seed), dims), a, c


@settings(max_examples=60, deadline=None)
@given(partitions())
def test_relevance_is_conserved(case: tuple[Subspaces, torch.Tensor, torch.Tensor]) -> None:
    """Proposition 1: Σ_k R_k = Σ_j R_j, up to rounding of sums of this size."""
    subspaces, a, c = case
    total = (a * c).sum(1)
    size = a.norm(dim=1) * c.norm(dim=1)
    assert ((subspaces.relevance(a, c).sum(1) - total).abs() <= 1e-13 * size).all()


@settings(max_examples=60, deadline=None)
@given(partitions(), st.floats(0, 1e3))
def test_relevance_is_positive_without_contradiction(
    case: tuple[Subspaces, torch.Tensor, torch.Tensor], xi: float
) -> None:
    """Proposition 1: c = ξa with ξ ≥ 0 gives R_k ≥ 0, exactly: it is a sum of squares."""
    subspaces, a, _ = case
    assert (subspaces.relevance(a, xi * a) >= 0).all()


def test_relevance_is_the_formula_at_each_position() -> None:
    subspaces = Subspaces(orthogonal(6)[:, :5], [2, 3])
    a, c = torch.randn(2, 6, 3, 4, dtype=torch.float64), torch.randn(2, 6, 3, 4, dtype=torch.float64)
    relevance = subspaces.relevance(a, c)
    assert relevance.shape == (2, 2, 3, 4)
    for k, block in enumerate(subspaces.blocks):
        h, g = block.T @ a[1, :, 2, 3], block.T @ c[1, :, 2, 3]
        assert relevance[1, k, 2, 3].item() == pytest.approx(float(h @ g), rel=1e-12)
    tokens = subspaces.relevance(a.movedim(1, -1), c.movedim(1, -1), dim=-1)
    torch.testing.assert_close(tokens.movedim(-1, 1), relevance)


def test_filtered_relevance_is_the_lrp_rule_of_the_virtual_layer() -> None:
    """R⁽ᵏ⁾ in two steps of LRP-0, as in section 3.2: onto h_k, then through h_k onto a."""
    subspaces = Subspaces(orthogonal(4), [1, 3])
    a = torch.tensor([[1.0, 0.0, 2.0, -1.0]], dtype=torch.float64)
    relevance = torch.tensor([[0.5, 0.0, -1.0, 2.0]], dtype=torch.float64)
    c = context_from_relevance(a, relevance)
    assert c.tolist() == [[0.5, 0.0, -0.5, -2.0]]
    filtered = filter_relevance(a, relevance, subspaces)
    for k, block in enumerate(subspaces.blocks):
        h = a[0] @ block
        # Relevance of unit i of h_k from all a'_j, then from unit i to the activations a_m.
        unit = torch.tensor(
            [sum(float(h[i] * block[j, i] * c[0, j]) for j in range(4)) for i in range(len(h))],
            dtype=torch.float64,
        )
        back = [sum(float(a[0, m] * block[m, i] / h[i] * unit[i]) for i in range(len(h))) for m in range(4)]
        assert filtered[k, 0].tolist() == pytest.approx(back, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(filtered.sum(0), relevance)
    torch.testing.assert_close(filtered.sum(-1)[:, 0], subspaces.relevance(a, c)[0])


def test_relevance_on_zero_activations_is_measured() -> None:
    a = torch.tensor([[1.0, 0.0, 0.0]])
    assert lost_relevance(a, torch.tensor([[3.0, -1.0, 0.0]])) == pytest.approx(0.25)
    assert lost_relevance(a, torch.zeros(1, 3)) == 0


def test_projections_add_up_to_the_identity() -> None:
    subspaces = Subspaces(orthogonal(6)[:, :4], [3, 1]).completed()
    assert subspaces.is_complete
    assert subspaces.names == ("S1", "S2", "residual")
    t = torch.randn(2, 6, 3, dtype=torch.float64)
    parts = torch.stack([subspaces.project(t, k) for k in range(3)])
    torch.testing.assert_close(parts.sum(0), t)
    torch.testing.assert_close(filter_context(t, subspaces).sum(0), t)
    torch.testing.assert_close(subspaces.project(parts[1], 1), parts[1])  # a projection, twice is once
    assert subspaces.completed() is subspaces


def test_non_orthogonal_concepts_use_the_dual() -> None:
    """Note I, literally: R_k = (u_kᵀa)(u⁺_k c), and a′ = UU⁺a + a⊥."""
    vectors = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    subspaces = ibd_subspaces(vectors, ["x", "y", "z"])
    a, c = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    pseudo_inverse = torch.linalg.inv(vectors @ vectors.T) @ vectors
    expected = (a @ vectors.T) * (c @ pseudo_inverse.T)
    torch.testing.assert_close(subspaces.relevance(a, c)[:, :3], expected)
    assert subspaces.names == ("x", "y", "z", "residual")
    torch.testing.assert_close(subspaces.relevance(a, c).sum(1), (a * c).sum(1))
    parts = torch.stack([subspaces.project(a, k) for k in range(4)])
    torch.testing.assert_close(parts[:3].sum(0), a @ (vectors.T @ pseudo_inverse).T)
    torch.testing.assert_close(parts.sum(0), a)
    # The context projection is the transpose of the activation's.
    for k in range(4):
        left, right = (subspaces.project(a, k) * c).sum(), (a * subspaces.project_context(c, k)).sum()
        torch.testing.assert_close(left, right)


def test_any_dual_basis_can_be_completed() -> None:
    """Also one that spans another space than the basis: the residual is then an oblique projection."""
    basis = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    other = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dual = other @ torch.linalg.inv(basis.T @ other)
    subspaces = Subspaces(basis, [1, 1], dual=dual).completed()
    a = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([subspaces.project(a, k) for k in range(3)]).sum(0), a)


def test_selection_reorders_blocks() -> None:
    subspaces = Subspaces(orthogonal(6), [1, 2, 3], names=["a", "b", "c"], metadata={"layer": "x"})
    chosen = subspaces.select(["c", 0])
    assert (chosen.dims, chosen.names, chosen.metadata) == ((3, 1), ("c", "a"), {"layer": "x"})
    torch.testing.assert_close(chosen.blocks[0], subspaces.blocks[2])
    torch.testing.assert_close(chosen.blocks[1], subspaces.blocks[0])
    # What `stability` notes of the blocks goes with them; a residual that was added later has nothing.
    about = {"stability": {"index": [0.9, 0.2], "n_runs": 3}}
    noted = Subspaces(orthogonal(6)[:, :3], [1, 2], metadata=about)
    reordered = noted.completed().select([2, 1, 0]).metadata["stability"]
    assert reordered == {"index": [None, 0.2, 0.9], "n_runs": 3}
    assert noted.with_metadata(stability="high").select([1]).metadata["stability"] == "high"
    with pytest.raises(ValueError, match="the names are a, b, c"):
        subspaces.select(["d"])
    with pytest.raises(IndexError, match="there are 3"):
        subspaces.select([3])


def test_blocks_by_index_name_slice_and_iteration() -> None:
    subspaces = Subspaces(orthogonal(6), [1, 2, 3], names=["a", "b", "c"], metadata={"layer": "x"})
    assert len(subspaces) == 3
    for block in (subspaces["b"], subspaces[1], subspaces[-2], subspaces[1:2], list(subspaces)[1]):
        assert (block.dims, block.names, block.metadata) == ((2,), ("b",), {"layer": "x"})
        assert torch.equal(block.basis, subspaces.blocks[1])
    assert subspaces[::-1].names == ("c", "b", "a")
    assert [block.names for block in subspaces] == [("a",), ("b",), ("c",)]
    with pytest.raises(IndexError):
        _ = subspaces[3]
    with pytest.raises(ValueError, match="no block is named 'd'"):
        _ = subspaces["d"]
    with pytest.raises(TypeError):
        subspaces[0] = subspaces[1]  # type: ignore[index]


def test_principal_angles() -> None:
    angle = 0.3
    turned = torch.tensor([[math.cos(angle), 0], [math.sin(angle), 0], [0, 1]], dtype=torch.float64)
    first = Subspaces(torch.eye(3, dtype=torch.float64)[:, [0, 2]], [1, 1])
    second = Subspaces(turned, [1, 1])
    assert first.principal_angles(second).tolist() == pytest.approx([angle, 0], abs=1e-12)
    assert first.principal_angles(second, 0, 1).item() == pytest.approx(math.pi / 2)
    with pytest.raises(ValueError, match="self has 3 features, other 2"):
        first.principal_angles(Subspaces(torch.eye(2), [2]))


def test_precision_and_device() -> None:
    subspaces = Subspaces(orthogonal(4), [2, 2])
    assert subspaces.dtype == torch.float64
    single = subspaces.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    assert single.orthogonality_error < 1e-6
    assert single.to(dtype=torch.float64).dtype == torch.float64  # and back, with the rounding of float32
    # Relevance has the precision of the data, whatever that of the basis.
    assert single.relevance(torch.ones(1, 4).double(), torch.ones(1, 4).double()).dtype == torch.float64
    assert subspaces.device.type == "cpu"
    assert "S1: 2" in repr(subspaces)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subspaces(torch.eye(3), [1, 1]), r"dims must add up to its columns.*sum 2"),
        (lambda: Subspaces(torch.eye(3), []), "dims must add up"),
        (lambda: Subspaces(torch.eye(3), [3, 0]), "at least 1, got 0"),
        (lambda: Subspaces(torch.ones(3, 3), [3]), "pass dual="),
        (lambda: Subspaces(torch.eye(3)[:2], [3]), "must be the identity"),
        (lambda: Subspaces(torch.ones(3), [3]), "basis must have shape"),
        (lambda: Subspaces(torch.eye(2), [1, 1], names=["x", "x"]), "2 different strings"),
        (lambda: Subspaces(torch.eye(2) * float("nan"), [2]), r"NaN or Inf values, .* \(0, 0\)"),
        (lambda: Subspaces(torch.tensor([[1e30, 1e30], [1e30, -1e30]]), [1, 1]), "but is off by nan"),
        (lambda: Subspaces(torch.eye(2), [2], dual=torch.eye(3)), r"basis' shape \(2, 2\), got \(3, 3\)"),
        (lambda: Subspaces(torch.eye(2), [2], dual=torch.ones(2, 2)), "must be a dual basis"),
        (lambda: Subspaces(torch.eye(2), [2]).project(torch.ones(1, 3), 0), "expected 2 features"),
        (lambda: Subspaces(torch.eye(2), [2]).relevance(torch.ones(1, 2), torch.ones(2, 2)), "same shape"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="basis must be a torch tensor, got list"):
        Subspaces([[1.0]], [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"floating point, got torch\.int64"):
        Subspaces(torch.eye(2, dtype=torch.long), [2])
    array: Any = np.ones((1, 2), dtype=np.float32)
    with pytest.raises(TypeError, match=r"a \(activations\) must be a torch tensor, got ndarray"):
        Subspaces(torch.eye(2), [2]).relevance(array, array)
    with pytest.raises(TypeError, match="t must be a torch tensor, got ndarray"):
        Subspaces(torch.eye(2), [2]).project(array, 0)
    with pytest.raises(TypeError, match="JSON"):
        Subspaces(torch.eye(2), [2], metadata={"layer": object()})


@pytest.mark.parametrize("with_dual", [False, True])
def test_a_saved_file_comes_back_whole(tmp_path, with_dual: bool) -> None:
    metadata = {
        "layer": "features.22",
        "model": "0a1b",
        "target": 430,
        "backend": "zennit",
        "seed": 1,
        "solver": {"name": "DRSA"},
    }
    if with_dual:
        subspaces = ibd_subspaces(np.random.default_rng(0).normal(size=(2, 4))).with_metadata(**metadata)
    else:
        subspaces = Subspaces(orthogonal(4), [1, 3], names=["ball", "rest"], metadata=metadata)
    subspaces.save(tmp_path / "s.safetensors")
    loaded = Subspaces.load(tmp_path / "s.safetensors")
    assert torch.equal(loaded.basis, subspaces.basis)
    assert (loaded.dual is None) == (not with_dual)
    assert (loaded.dims, loaded.names, loaded.metadata) == (
        subspaces.dims,
        subspaces.names,
        subspaces.metadata,
    )
    assert [file.name for file in tmp_path.iterdir()] == ["s.safetensors"]  # no temporary file left


def test_subspaces_are_values() -> None:
    basis, dual = torch.eye(3), np.eye(3, dtype=np.float32)
    metadata = {"solver": {"name": "x"}}
    subspaces = Subspaces(basis, [1, 2], dual=dual, metadata=metadata)
    basis.zero_()
    dual[:] = 0
    metadata["solver"]["name"] = "y"
    subspaces.metadata["solver"]["name"] = "z"
    assert torch.equal(subspaces.basis, torch.eye(3))
    assert subspaces.dual is not None
    assert torch.equal(subspaces.dual, torch.eye(3))
    assert subspaces.metadata == {"solver": {"name": "x"}}
    for name in ("basis", "dual", "dims", "names", "metadata", "provenance"):
        with pytest.raises(AttributeError):
            setattr(subspaces, name, None)
    assert subspaces.to("cpu").basis.data_ptr() != subspaces.basis.data_ptr()


def test_blocks_get_other_names() -> None:
    subspaces = Subspaces(torch.eye(3), [1, 2], metadata={"layer": "x"})
    assert subspaces.renamed(["ear", "nose"]).names == ("ear", "nose")
    swapped = subspaces.renamed({"S1": "S2", "S2": "S1"})
    assert (swapped.names, swapped.dims, swapped.metadata) == (("S2", "S1"), (1, 2), {"layer": "x"})
    assert subspaces.renamed({"S2": "nose"}).names == ("S1", "nose")
    assert subspaces.names == ("S1", "S2")
    with pytest.raises(ValueError, match="no block is named 'x'; the names are S1, S2"):
        subspaces.renamed({"x": "y"})
    for names in (["a"], ["a", "a"], "ab", ["a", 1], {"S1": "S2"}):
        with pytest.raises(ValueError, match="2 different strings"):
            subspaces.renamed(names)  # type: ignore[arg-type]


def test_provenance_is_kept_by_all_that_is_derived(tmp_path) -> None:
    subspaces = Subspaces(torch.eye(3)[:, :2], [1, 1], metadata={"seed": 1})
    assert subspaces.provenance is None
    known = subspaces.with_provenance(made(target=[1, 2]))
    known.save(tmp_path / "s.safetensors")
    for derived in (
        known.select([1]),
        known.completed(),
        known.to(dtype=torch.float64),
        known.renamed(["a", "b"]),
        known.with_metadata(seed=2),
        Subspaces.load(tmp_path / "s.safetensors"),
    ):
        assert derived.provenance == made(target=[1, 2])
    assert known.with_provenance(None).metadata == {"seed": 1}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((6,), -1), ((6, 1, 1), 1), ((6, 5, 4), -3), ((5, 6), -1), ((5, 6, 4), 2), ((6, 2, 3, 4), 1)],
)
def test_projections_are_contiguous(shape: tuple[int, ...], dim: int, n: int, channels_last: bool) -> None:
    """Torch's BatchNorm misreads cotangents with other strides."""
    vectors = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    subspaces = Subspaces(vectors, [1, 2], dual=torch.linalg.pinv(vectors).T)
    t = torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))
    if channels_last:  # features last in memory, as torch.channels_last has them
        t = t.movedim(dim, -1).contiguous().movedim(-1, dim)
    for k in range(2):
        inward, outward = subspaces.blocks[k], subspaces.dual_blocks[k]
        for project, matrix in (
            (subspaces.project, inward @ outward.T),
            (subspaces.project_context, outward @ inward.T),
        ):
            found = project(t, k, dim)
            assert found.stride() == torch.empty(t.shape).stride()
            assert found.is_contiguous()
            expected = (t.movedim(dim, -1) @ matrix).movedim(-1, dim)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_single_vector_is_projected() -> None:
    subspaces = Subspaces(torch.eye(3), [1, 2])
    assert subspaces.project(torch.tensor([1.0, 2.0, 3.0]), 1, dim=0).tolist() == [0, 2, 3]
    assert subspaces.project(torch.tensor([1.0, 2.0, 3.0]), "S1", dim=-1).tolist() == [1, 0, 0]


def test_blocks_are_chosen_by_whole_numbers_and_names() -> None:
    subspaces = Subspaces(torch.eye(4), [1, 1, 2])
    for blocks in ([2, 0], np.array([2, 0]), torch.tensor([2, 0])):
        assert subspaces.select(blocks).names == ("S3", "S1")  # type: ignore[arg-type]
    for block in (0.9, True, None):
        with pytest.raises(ValueError, match="a block, if not a name, must be an integer"):
            subspaces.project(torch.ones(1, 4), block)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sequence of blocks"):
        subspaces.select("S1")
    for twice in ([], [0, "S1"]):
        with pytest.raises(ValueError, match="at most once, and one at least"):
            subspaces.select(twice)  # type: ignore[arg-type]
