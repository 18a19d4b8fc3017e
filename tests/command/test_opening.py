"""Models, preprocessing, layers and methods from what a user names."""

from __future__ import annotations

import pytest
import torch
import torchvision
from drsa_audit.choice import choose_backend
from drsa_audit.images import to_pixels
from drsa_audit.layers import inspect_layers, suggested_layer
from drsa_audit.networks import load_network, with_input
from drsa_audit.opening import ModelSettings, open_network
from drsa_audit.published import Transform
from drsa_core.evaluation import Preprocessing
from PIL import Image
from torch import nn

from tests.model_state import model_state

from .tiny import Gated, network


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
    other = with_input(plain, Transform(32, 32, (0.0, 0.0, 0.0), (0.5, 0.5, 0.5)))
    white = torch.ones(1, 3, 2, 2)
    assert float(other.preprocessing.to_inputs(white).max()) == 2.0
    for changed, high in ((plain, 2.64), (other, 2.0)):
        rules = changed.composite()
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
    choice = choose_backend("lrp", gated, x, 0)
    assert (choice.backend, choice.is_other) == ("ig", True)
    assert choose_backend("gxi", gated, x, 0).backend == "gxi"
    forced = choose_backend("lrp", gated, x, 0, force=True)
    assert forced.backend == "lrp"
    assert "by force" in forced.reason
    plain = open_network(ModelSettings(model=network()))
    assert choose_backend("lrp", plain, x, 0).backend == "lrp"
