"""Networks by name, from files and from factories, with weights, classes, preprocessing and rules."""

from __future__ import annotations

import warnings

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("captum")
pytest.importorskip("zennit")
pytest.importorskip("timm")
pytest.importorskip("torchvision")
import timm
import torchvision
from drsa_audit import Network, load_network
from drsa_audit.networks import SuitableRules
from drsa_audit.wrappers import make_wrapper
from drsa_core import PRCA, ProvenanceWarning, Subspaces
from drsa_core.evaluation import Preprocessing
from safetensors.torch import save_file
from study.backends import Backend, relevance_at, with_gamma, with_upper_gamma
from zennit.attribution import Gradient

from tests.closeness import assert_same
from zennit_drsa import ConvNetGamma, TransformerGamma, VGGGamma


class SmallVGG(nn.Module):
    """Two convolutions, pooling and a head; a factory without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


def shaken(model: nn.Module) -> nn.Module:
    """The model with noise on every parameter: gains and heads that begin at 0 would hide everything."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def image(size: int = 64) -> Tensor:
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["resnet18", "test_nfnet"])
def test_networks_take_weights_from_a_file_and_bring_their_rules(tmp_path, name: str) -> None:
    library = torchvision.models if name == "resnet18" else timm
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = shaken(getattr(library, "resnet18", lambda: timm.create_model(name))())
    torch.save(original.state_dict(), tmp_path / "weights.pt")
    network = load_network(name, tmp_path / "weights.pt")
    x = image()
    assert_same(network.model(x).detach(), original(x).detach())
    context, _ = make_wrapper("lrp", network, network.layer).context(x, 0)
    subspaces = Subspaces(torch.eye(context.shape[1]), [1, context.shape[1] - 1])
    found = make_wrapper("lrp", network, network.layer, subspaces).explain(x, 0)
    assert found.maps.shape == (1, 2, 3, 64, 64)
    assert found.whole is not None
    assert float((found.maps.sum(1) - found.whole).abs().max()) <= 1e-5 * float(found.whole.abs().max()) > 0


def test_a_file_that_names_its_architecture_is_a_network(tmp_path) -> None:
    original = shaken(timm.create_model("test_vit", pretrained=False, img_size=96, num_classes=2))
    file = tmp_path / "pets.safetensors"
    state = {name: value.half() for name, value in original.state_dict().items()}
    about = {"architecture": "timm test_vit, img_size=96, num_classes=2", "classes": "[281, 208]"}
    save_file(state, file, metadata=about)
    network = load_network(str(file))
    assert network.size == 96
    assert {value.dtype for value in network.model.state_dict().values()} == {torch.float32}
    original.load_state_dict({name: value.float() for name, value in state.items()})
    assert_same(network.model(image(96)).detach(), original(image(96)).detach())
    assert (network.output_of(281), network.output_of(208)) == (0, 1)
    with pytest.raises(ValueError, match=r"knows the classes \(281, 208\), got 7"):
        network.output_of(7)
    with pytest.raises(ValueError, match=r"no default layer: name one, e\.g\. one of patch_embed"):
        network.layer_or(None)
    assert isinstance(network.composite("blocks.1"), TransformerGamma)
    for wrong in ({}, {"architecture": "torchvision resnet18, stride in conv1"}):
        save_file({"weight": torch.zeros(1)}, file, metadata=wrong)
        with pytest.raises(ValueError, match=r"must say its architecture as 'timm NAME, key=value, …'"):
            load_network(str(file))


def mixer() -> nn.Module:
    return timm.models.MlpMixer(num_classes=2, img_size=32, patch_size=16, num_blocks=1, embed_dim=8)


def test_a_family_without_rules_is_named() -> None:
    with pytest.raises(ValueError, match=r"no LRP rules are known for MlpMixer"):
        load_network(f"{__name__}:mixer").composite(None)


def test_factories_of_a_module_and_of_a_file(tmp_path) -> None:
    original = shaken(SmallVGG())
    weights = tmp_path / "small.safetensors"
    save_file(original.state_dict(), weights, metadata={"classes": "[208, 235, 281, 283]"})
    network = load_network(f"{__name__}:SmallVGG", weights)
    assert_same(network.model(image()).detach(), original(image()).detach())
    assert network.output_of(283) == 3
    assert isinstance(network.composite("features.4"), VGGGamma)
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from drsa_audit import load_network\n"
        "def factory():\n"
        f"    return replace(load_network('{__name__}:SmallVGG'), size=48, layer='features.1')\n"
        "def wrong():\n    return 3\n"
    )
    network = load_network(f"{file}:factory", weights)
    assert (network.size, network.layer, network.output_of(208)) == (48, "features.1", 0)
    with pytest.raises(TypeError, match="must return a torch module or a Network, got int"):
        load_network(f"{file}:wrong")
    with pytest.raises(ValueError, match="there is no Python file"):
        load_network(f"{tmp_path}/other.py:factory")


@pytest.mark.parametrize("name", [f"{__name__}:SmallVGG", "test_nfnet"])
def test_rules_are_the_same_when_pairs_are_collected_and_when_they_are_explained(tmp_path, name: str) -> None:
    """What a rule remembers of a backward pass, such as a graph, is no part of the method."""
    weights = tmp_path / "weights.pt"
    model = SmallVGG() if "VGG" in name else timm.create_model(name, pretrained=False)
    torch.save(shaken(model).state_dict(), weights)
    network = load_network(name, weights)
    layer = network.layer or "features.4"
    pairs = make_wrapper("lrp", network, layer).collect([image(), image(48)], 1, 20, 0)
    subspaces = PRCA(1).fit(pairs).subspaces_
    assert subspaces.provenance is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProvenanceWarning)
        make_wrapper("lrp", network, layer, subspaces).explain(image(), 1)


def test_photographs_become_inputs_and_pictures() -> None:
    network = load_network(f"{__name__}:SmallVGG")
    x = network.to_input(Image.new("RGB", (40, 30), (51, 102, 204)), 16)
    colour = torch.tensor([0.2, 0.4, 0.8])  # 8-bit colours are exact here; float32 leaves 1e-6
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    assert x.shape == (3, 16, 16)
    torch.testing.assert_close(x[:, 3, 5], (colour - mean) / std, atol=1e-6, rtol=0)
    torch.testing.assert_close(network.to_picture(x)[:, 0, 0], colour, atol=1e-6, rtol=0)
    assert network.to_picture(x[None]).shape == (1, 3, 16, 16)


def maps_of(network: Network, layer: str) -> Tensor:
    return Backend("lrp", network, layer).attribute(image(), 1)


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        (lambda: torchvision.models.resnet18(weights=None), "layer2"),
        (lambda: timm.create_model("test_efficientnet"), "blocks.1"),
    ],
)
def test_gamma_below_the_concept_layer_and_above_it(build, layer: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = shaken(build())
    rules = SuitableRules(model, (0.5,) * 3, (0.25,) * 3)
    network = Network(model, 64, Preprocessing.from_mean_std(0.5, 0.25), "", rules)
    low, high = torch.full((1, 3, 1, 1), -2.0), torch.full((1, 3, 1, 1), 2.0)

    def by_hand(gamma: float) -> Tensor:
        composite = ConvNetGamma(gamma, low=low, high=high, layer=layer, gamma_above=0.0)
        with Gradient(model, composite) as gradient:
            relevance: Tensor = gradient(image(), relevance_at(1))[1]
        return relevance.detach()

    assert_same(maps_of(network, layer), by_hand(0.25))
    for gamma in (0.1, 1.0):
        below = with_gamma(network, gamma)
        assert_same(maps_of(below, layer), by_hand(gamma))
        # γ is 0 above the layer by itself.
        assert_same(maps_of(with_upper_gamma(below, layer, 0.0), layer), by_hand(gamma))
    other = maps_of(with_upper_gamma(network, layer, 5.0), layer)
    assert float((other - by_hand(0.25)).abs().max()) > 1e-2 * float(other.abs().max())


def test_gammas_that_cannot_be_chosen_are_refused() -> None:
    network = load_network(f"{__name__}:SmallVGG")
    with pytest.raises(ValueError, match="rules of its own"):
        with_gamma(network, 0.1)
    with pytest.raises(ValueError, match=r"there is no layer 'features\.9'"):
        with_upper_gamma(network, "features.9", 0.0)
    with pytest.raises(ValueError, match=r"no convolution above 'features\.4'"):
        with_upper_gamma(network, "features.4", 1.0)
