"""Models, preprocessing, layers and methods from what a user names."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from drsa_audit import Network
from drsa_audit.folders import TargetClass, find_files
from drsa_audit.layers import LayerInfo, inspect_layers, is_cut, suggested_layer
from drsa_audit.models import Transform, find_factory, published_transform
from drsa_audit.networks import load_network, network_of, open_network
from drsa_audit.settings import ModelSettings
from drsa_audit.wrappers import choose_method
from drsa_core.evaluation import Preprocessing
from PIL import Image
from torch import nn
from zennit.composites import EpsilonPlus

from tests.model_state import model_state

from .tiny import Gated, network, pictures


def photo() -> Image.Image:
    pixels = torch.rand(300, 400, 3, generator=torch.Generator().manual_seed(0)) * 255
    return Image.fromarray(pixels.byte().numpy())


def test_the_transform_is_the_published_one(tmp_path) -> None:
    torch.save(torchvision.models.resnet50(weights=None).state_dict(), tmp_path / "resnet50.pt")
    found = load_network("resnet50", tmp_path / "resnet50.pt", crop=True)
    published = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
    assert (found.size, found.resize, found.interpolation) == (224, 232, "bilinear")
    # PIL rounds to 8 bits after resizing, before the normalisation; so do torchvision and timm.
    torch.testing.assert_close(found.to_input(photo()), published(photo()), atol=1e-5, rtol=0)
    # A model that squeezes the whole photograph gets it.
    overlay = {"crop_mode": "squash", "crop_pct": 1.0}
    model = timm.create_model("test_vit", pretrained=False, pretrained_cfg_overlay=overlay)
    config = timm.data.resolve_model_data_config(model)
    found = network_of(network(), "", published_transform(model))
    assert (found.size, found.resize) == (config["input_size"][1], None)
    theirs = timm.data.create_transform(**config, is_training=False)(photo())
    torch.testing.assert_close(found.to_input(photo()), theirs, atol=1e-5, rtol=0)


def test_the_library_of_a_name_can_be_said(tmp_path) -> None:
    torch.save(timm.create_model("resnet18", pretrained=False).state_dict(), tmp_path / "weights.pt")
    for library in ("timm", "torchvision"):
        model = load_network(f"{library}/resnet18", tmp_path / "weights.pt").model
        assert type(model).__module__.startswith(library)


def test_other_classes_of_one_name_are_told_apart(tmp_path) -> None:
    folder = pictures(tmp_path / "test", 2, ("134_crane", "517_crane", "9_ostrich", "8_hen"))
    found = find_files(folder, TargetClass(9, 9, "ostrich"))
    expected = {"134 crane": "134_crane", "517 crane": "517_crane", "hen": "8_hen"}
    assert {name: files[0].parent.name for name, files in found.others.items()} == expected


def test_rules_follow_other_preprocessing() -> None:
    plain = open_network(ModelSettings(model=network()))
    other = plain.with_input(Transform(32, 32, (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)))
    assert float(other.preprocessing.to_inputs(torch.ones(1, 3, 2, 2)).max()) == 2.0
    for changed, high in ((plain, 2.64), (other, 2.0)):
        assert float(changed.composite(None)._first.high.max()) == pytest.approx(high, abs=0.01)
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        open_network(ModelSettings(model=network().train()))


def test_preprocessing_stays_where_nothing_else_is_said() -> None:
    preprocessing = Preprocessing.from_mean_std((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "BGR")
    own = Network(network(), 32, preprocessing, "4", lambda layer: EpsilonPlus())
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = own.preprocessing.to_inputs(x)
    for size, resize in ((48, None), (None, 64), (48, 64)):
        found = open_network(ModelSettings(model=own, size=size, resize=resize))
        assert torch.equal(found.preprocessing.to_inputs(x), expected)
        assert (found.size, found.resize) == (size or 32, resize)
    other = open_network(ModelSettings(model=own, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]))
    torch.testing.assert_close(other.preprocessing.to_inputs(x), (x.flip(1) - mean) / std)
    assert other.resize is None
    turned = open_network(ModelSettings(model=own, channel_order="RGB"))
    torch.testing.assert_close(turned.preprocessing.to_inputs(x.flip(1)), expected)
    assert own.describe_preprocessing()["channels"] == "BGR"
    assert turned.describe_preprocessing()["channels"] == "RGB"


class Skipping(nn.Module):
    """A branch around a convolution: only the sum is all that the head sees."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.sum = nn.ReLU()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        out: torch.Tensor = self.head(self.sum(stem + self.branch(stem)).mean((2, 3)))
        return out


class Tokens(nn.Module):
    """Patches, then eight blocks of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        out: torch.Tensor = self.head(self.blocks(tokens).mean(1))
        return out


@pytest.mark.parametrize(("model", "expected"), [(Skipping(), "sum"), (Tokens(), "blocks.6")])
def test_the_suggested_layer_is_one_that_nothing_goes_around(model: nn.Module, expected: str) -> None:
    model.eval()
    before, x = model_state(model), torch.rand(1, 3, 32, 32)
    best = suggested_layer(inspect_layers(model, x))
    assert best is not None
    assert best.name == expected
    assert best.channel_dim == (-1 if "blocks" in expected else 1)
    assert is_cut(model, expected, x)
    assert expected != "sum" or not is_cut(model, "branch", x)
    assert model_state(model) == before


@pytest.mark.parametrize(
    ("shape", "channel_dim", "is_ambiguous", "n_prefix"),
    [
        ((8, 16, 16), 1, False, 0),
        ((16, 16, 8), -1, False, 0),  # fewer features than rows
        ((7, 7, 64), -1, False, 0),
        ((8, 8, 8), 1, True, 0),
        ((8, 4, 6), 1, True, 0),
        ((16, 1, 1), 1, False, 0),
        ((197, 64), -1, False, 1),
        ((201, 64), -1, False, 5),  # a class token and four registers
        ((64,), 1, False, 0),
    ],
)
def test_the_axis_of_the_features(
    shape: tuple[int, ...], channel_dim: int, is_ambiguous: bool, n_prefix: int
) -> None:
    info = LayerInfo("layer", "Module", shape, 1, 0)
    assert (info.channel_dim, info.is_ambiguous, info.n_prefix) == (channel_dim, is_ambiguous, n_prefix)
    assert info.n_features == shape[0 if channel_dim == 1 else -1]
    said = replace(info, given_dim=-1)
    assert (said.channel_dim, said.is_ambiguous, said.n_features) == (-1, False, shape[-1])


def test_lrp_by_force_and_other_methods_as_asked() -> None:
    gated = open_network(ModelSettings(model=Gated().eval()))
    x = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    choice = choose_method("lrp", gated, x, 0)
    assert (choice.backend, choice.is_other) == ("ig", True)
    assert choose_method("gxi", gated, x, 0).backend == "gxi"
    forced = choose_method("lrp", gated, x, 0, force=True)
    assert forced.backend == "lrp"
    assert "by force" in forced.reason
    assert choose_method("lrp", open_network(ModelSettings(model=network())), x, 0).backend == "lrp"


def test_the_doctor_examines_the_rules_for_the_layer() -> None:
    found = open_network(ModelSettings(model=torchvision.models.resnet18(weights=None).eval(), size=32))
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for layer, rules in ((None, "EpsilonPlus"), ("layer3", "ConvNetGamma")):
        choice = choose_method("lrp", found, x, 0, layer=layer)
        assert choice.examination is not None
        assert choice.examination["rules"] == rules
        assert rules in choice.reason


def test_a_factory_in_a_file_has_its_neighbours_and_takes_no_place(tmp_path, monkeypatch) -> None:
    (tmp_path / "neighbour_of_entry.py").write_text("WIDTH = 5\n")
    (tmp_path / "late_neighbour.py").write_text("HEIGHT = 7\n")
    entry = """
from __future__ import annotations
from dataclasses import dataclass
from colorsys import hls_to_rgb
from neighbour_of_entry import WIDTH
@dataclass
class Sizes:
    width: int = WIDTH
def make():
    import late_neighbour
    return Sizes(), late_neighbour.HEIGHT
"""
    (tmp_path / "entry_of_test.py").write_text(entry)
    (tmp_path / "colorsys").mkdir()  # a folder of that name is no module
    before, json = list(sys.path), sys.modules["json"]
    sizes, height = find_factory(f"{tmp_path / 'entry_of_test.py'}:make")()
    assert (sizes.width, height) == (5, 7)
    (tmp_path / "json.py").write_text("def make():\n    return 3\n")
    assert find_factory(f"{tmp_path / 'json.py'}:make")() == 3
    assert sys.modules["json"] is json
    (tmp_path / "failing_file.py").write_text("raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError, match="no"):
        find_factory(f"{tmp_path / 'failing_file.py'}:make")
    assert "failing_file" not in sys.modules
    with pytest.raises(ValueError, match="cannot import 'late_neighbour_of_test'"):
        find_factory("late_neighbour_of_test:make")
    (tmp_path / "late_neighbour_of_test.py").write_text("def make():\n    return 5\n")
    monkeypatch.chdir(tmp_path)
    assert find_factory("late_neighbour_of_test:make")() == 5
    assert sys.path == before
