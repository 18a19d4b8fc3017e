"""Models, preprocessing, layers and methods from what a user names."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torchvision
from drsa_audit import BadInput, Network
from drsa_audit.folders import TargetClass, find_files
from drsa_audit.images import to_pixels
from drsa_audit.layers import LayerInfo, find_concept_layer, inspect_layers, suggested_layer
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


def test_the_transform_is_the_published_one(tmp_path) -> None:
    model = torchvision.models.resnet50(weights=None)
    torch.save(model.state_dict(), tmp_path / "resnet50.pt")
    found = load_network("resnet50", tmp_path / "resnet50.pt", crop=True)
    published = torchvision.models.ResNet50_Weights.DEFAULT.transforms()
    assert (found.size, found.resize, found.interpolation) == (224, 232, "bilinear")
    generator = torch.Generator().manual_seed(0)
    pixels = (torch.rand(3, 300, 400, generator=generator) * 255).byte()
    photo = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    # PIL rounds to 8 bits after resizing, before the normalisation; so does torchvision on PIL images.
    torch.testing.assert_close(found.to_input(photo), published(photo), atol=1e-5, rtol=0)


def test_models_that_squeeze_the_whole_photograph_get_it() -> None:
    """timm's `crop_mode="squash"`, as its own transforms do it."""
    import timm

    overlay = {"crop_mode": "squash", "crop_pct": 1.0}
    model = timm.create_model("test_vit", pretrained=False, pretrained_cfg_overlay=overlay)
    config = timm.data.resolve_model_data_config(model)
    found = network_of(network(), "", published_transform(model))
    assert (found.size, found.resize) == (config["input_size"][1], None)
    pixels = (torch.rand(300, 400, 3, generator=torch.Generator().manual_seed(0)) * 255).byte()
    photo = Image.fromarray(pixels.numpy())
    theirs = timm.data.create_transform(**config, is_training=False)(photo)
    # PIL rounds to 8 bits after resizing, before the normalisation; so does timm.
    torch.testing.assert_close(found.to_input(photo), theirs, atol=1e-5, rtol=0)


def test_other_classes_of_one_name_are_told_apart(tmp_path) -> None:
    folder = pictures(tmp_path / "test", 2, ("134_crane", "517_crane", "9_ostrich", "8_hen"))
    found = find_files(folder, TargetClass(9, 9, "ostrich"))
    assert {name: files[0].parent.name for name, files in found.others.items()} == {
        "134 crane": "134_crane",
        "517 crane": "517_crane",
        "hen": "8_hen",
    }
    assert list(find_files(folder, TargetClass(134, 134, "crane")).others) == ["517 crane", "hen", "ostrich"]


def test_the_library_of_a_name_can_be_said(tmp_path) -> None:
    import timm

    torch.save(timm.create_model("resnet18", pretrained=False).state_dict(), tmp_path / "weights.pt")
    assert type(load_network("timm/resnet18", tmp_path / "weights.pt").model).__module__.startswith("timm")
    assert type(load_network("torchvision/resnet18", tmp_path / "weights.pt").model).__module__.startswith(
        "torchvision"
    )


def test_channels_in_another_order() -> None:
    """Keras's models: BGR, 255 × pixels − the mean of ImageNet."""
    mean, std = (103.939 / 255, 116.779 / 255, 123.68 / 255), (1 / 255,) * 3
    pixels = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    preprocessing = Preprocessing.from_mean_std(mean, std, "BGR")
    expected = 255 * pixels.flip(1) - torch.tensor([103.939, 116.779, 123.68]).view(3, 1, 1)
    torch.testing.assert_close(preprocessing.to_inputs(pixels), expected, atol=1e-4, rtol=0)  # of 255
    torch.testing.assert_close(preprocessing.to_pixels(expected), pixels, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="channel_order must be 'RGB' or 'BGR', got 'GBR'"):
        Preprocessing.from_mean_std(mean, std, "GBR")


def test_photographs_are_cut_in_the_middle_and_turned_upright() -> None:
    photo = Image.new("RGB", (40, 20), (255, 0, 0))
    photo.paste((0, 0, 255), (0, 0, 10, 20))
    assert to_pixels(photo, 20)[2, 10, 2] > 0.9  # squeezed: the blue edge is there
    assert float(to_pixels(photo, 20, resize=20)[2].max()) < 0.1  # cut: it is gone
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = photo.copy()
    turned.getexif().update(exif)
    assert to_pixels(turned, 20)[2, 10, 17] > 0.9


def test_rules_follow_other_preprocessing() -> None:
    plain = open_network(ModelSettings(model=network()))
    other = plain.with_input(Transform(32, 32, (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)))
    white = torch.ones(1, 3, 2, 2)
    assert float(other.preprocessing.to_inputs(white).max()) == 2.0
    for changed, high in ((plain, 2.64), (other, 2.0)):
        rules = changed.composite(None)
        assert float(rules._first.high.max()) == pytest.approx(high, abs=0.01)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\)"):
        open_network(ModelSettings(model=network().train()))


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
    before = model_state(model)
    layers = inspect_layers(model, torch.rand(1, 3, 32, 32))
    best = suggested_layer(layers)
    assert best is not None
    assert best.name == expected
    assert best.channel_dim == (-1 if "blocks" in expected else 1)
    assert model_state(model) == before


def test_a_layer_with_a_path_around_it_is_known() -> None:
    from drsa_audit.layers import is_cut

    model, x = Skipping().eval(), torch.rand(1, 3, 32, 32)
    assert is_cut(model, "stem", x)
    assert not is_cut(model, "branch", x)


def test_lrp_by_force_and_other_methods_as_asked() -> None:
    gated = open_network(ModelSettings(model=Gated().eval()))
    x = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    choice = choose_method("lrp", gated, x, 0)
    assert (choice.backend, choice.is_other) == ("ig", True)
    assert choose_method("gxi", gated, x, 0).backend == "gxi"
    forced = choose_method("lrp", gated, x, 0, force=True)
    assert forced.backend == "lrp"
    assert "by force" in forced.reason
    plain = open_network(ModelSettings(model=network()))
    assert choose_method("lrp", plain, x, 0).backend == "lrp"


def test_the_doctor_examines_the_rules_for_the_layer() -> None:
    found = open_network(ModelSettings(model=torchvision.models.resnet18(weights=None).eval(), size=32))
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for layer, rules in ((None, "EpsilonPlus"), ("layer3", "ConvNetGamma")):
        choice = choose_method("lrp", found, x, 0, layer=layer)
        assert choice.examination is not None
        assert choice.examination["rules"] == rules
        assert rules in choice.reason


def bgr_network() -> Network:
    preprocessing = Preprocessing.from_mean_std((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), "BGR")
    return Network(network(), 32, preprocessing, "4", lambda layer: EpsilonPlus())


def test_what_is_not_said_of_the_preprocessing_stays() -> None:
    own = bgr_network()
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = own.preprocessing.to_inputs(x)
    for size, resize in ((48, None), (None, 64), (48, 64)):
        found = open_network(ModelSettings(model=own, size=size, resize=resize))
        assert torch.equal(found.preprocessing.to_inputs(x), expected)
        assert (found.size, found.resize) == (size or 32, resize)
    other = open_network(ModelSettings(model=own, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]))
    literal = (x.flip(1) - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(
        3, 1, 1
    )
    torch.testing.assert_close(other.preprocessing.to_inputs(x), literal)
    assert other.resize is None
    turned = open_network(ModelSettings(model=own, channel_order="RGB"))
    torch.testing.assert_close(turned.preprocessing.to_inputs(x.flip(1)), expected)
    assert own.describe_preprocessing()["channels"] == "BGR"
    assert turned.describe_preprocessing()["channels"] == "RGB"


@pytest.mark.parametrize(
    ("shape", "channel_dim", "is_ambiguous"),
    [
        ((8, 16, 16), 1, False),
        ((64, 7, 7), 1, False),
        ((16, 16, 8), -1, False),  # fewer features than rows
        ((7, 7, 64), -1, False),
        ((8, 8, 8), 1, True),
        ((8, 4, 6), 1, True),
        ((8, 4, 8), 1, True),
        ((16, 1, 1), 1, False),
        ((50, 64), -1, False),
        ((64,), 1, False),
    ],
)
def test_the_axis_of_the_features(shape: tuple[int, ...], channel_dim: int, is_ambiguous: bool) -> None:
    info = LayerInfo("layer", "Module", shape, 1, 0)
    assert (info.channel_dim, info.is_ambiguous) == (channel_dim, is_ambiguous)
    assert info.n_features == shape[0 if channel_dim == 1 else -1]
    said = replace(info, given_dim=-1)
    assert (said.channel_dim, said.is_ambiguous, said.n_features) == (-1, False, shape[-1])


def test_a_factory_in_a_file_has_its_neighbours_and_may_define_dataclasses(tmp_path) -> None:
    (tmp_path / "neighbour_of_entry.py").write_text("WIDTH = 5\n")
    (tmp_path / "late_neighbour.py").write_text("HEIGHT = 7\n")
    (tmp_path / "entry_of_test.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from colorsys import hls_to_rgb\n"
        "from neighbour_of_entry import WIDTH\n"
        "@dataclass\n"
        "class Sizes:\n"
        "    width: int = WIDTH\n"
        "def make():\n"
        "    import late_neighbour\n"
        "    return Sizes(), late_neighbour.HEIGHT\n"
    )
    (tmp_path / "colorsys").mkdir()  # a folder of that name is no module
    before = list(sys.path), list(sys.meta_path)
    sizes, height = find_factory(f"{tmp_path / 'entry_of_test.py'}:make")()
    assert (sizes.width, height) == (5, 7)
    assert (sys.path, sys.meta_path) == before


def test_a_module_of_the_current_folder_is_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_test.py").write_text("def make():\n    return 5\n")
    with pytest.raises(ValueError, match="cannot import 'module_of_test'"):
        find_factory("module_of_test:make")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path), list(sys.meta_path)
    assert find_factory("module_of_test:make")() == 5
    assert (list(sys.path), list(sys.meta_path)) == before
    sys.modules.pop("module_of_test")


def test_a_factory_does_not_take_the_place_of_a_module(tmp_path) -> None:
    (tmp_path / "json.py").write_text("def make():\n    return 3\n")
    (tmp_path / "failing_file.py").write_text("raise RuntimeError('no')\n")
    known = sys.modules["json"]
    assert find_factory(f"{tmp_path / 'json.py'}:make")() == 3
    assert sys.modules["json"] is known
    with pytest.raises(RuntimeError, match="no"):
        find_factory(f"{tmp_path / 'failing_file.py'}:make")
    assert "failing_file" not in sys.modules


class Last(nn.Module):
    """Features on the last axis, as many as there are rows and columns of inputs (32, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8 * 64, 2)  # of one size of inputs alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.patches(x).movedim(1, -1)).flatten(1))
        return out


@pytest.mark.parametrize(("name", "expected"), [("patches", 1), ("block", -1)])
def test_larger_inputs_tell_the_axis_of_the_features(name: str, expected: int) -> None:
    model, x = Last().eval(), torch.rand(1, 3, 32, 32)
    before = model_state(model)
    own = Network(model, 32, Preprocessing.from_mean_std(0.0, 1.0), name, lambda layer: EpsilonPlus())
    info = find_concept_layer(own, None, x)
    assert info.shape == (8, 8, 8)
    assert info.channel_dim == expected
    assert model_state(model) == before
    with pytest.raises(BadInput, match="--channel-dim must be 1 or -1, got 2"):
        find_concept_layer(own, None, x, 2)
