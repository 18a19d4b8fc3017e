"""All settings with their defaults, once; the options of the command are made from these fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .networks import Network


def setting(text: str, default: Any = MISSING, **option: Any) -> Any:
    """A field, with what its option is.

    Parameters
    ----------
    text : str
        Its help.
    default
    **option
        `name` if it is called otherwise, `metavar`, `choices`, `least` (the smallest number), `within` (two
        bounds), `parse` ("numbers" or "count").
    """
    return field(default=default, metadata={"help": text, **option})


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how photographs become its inputs; `model` is a name, a module or a `Network`."""

    model: str | nn.Module | Network
    weights: str = setting(
        "published weights, or a state dict (.safetensors, .pt)", "DEFAULT", metavar="DEFAULT|PATH"
    )
    size: int | None = setting("side of the inputs  [default: as published]", None, least=8)
    resize: int | None = setting("shorter side before the middle is cut out", None, least=8)
    mean: Sequence[float] | None = setting(
        "of the inputs (pixels − mean) / std; one number or three", None, parse="numbers", metavar="NUMBERS"
    )
    std: Sequence[float] | None = setting("as --mean", None, parse="numbers", metavar="NUMBERS")
    channel_order: str | None = setting(
        "order of the model's channels; Caffe and Keras take BGR  [default: the model's own]",
        None,
        name="--channels",
        choices=("RGB", "BGR"),
    )
    device: str = setting("cpu, cuda, cuda:1, mps", "cpu")

    @property
    def model_name(self) -> str:
        """What the model is called."""
        if isinstance(self.model, str):
            return self.model
        return type(getattr(self.model, "model", self.model)).__name__


@dataclass(frozen=True, kw_only=True)
class RunSettings(ModelSettings):
    """How a model is explained."""

    backend: str = setting(
        "LRP gives way to ig where `drsa doctor` finds it not valid",
        "lrp",
        choices=("lrp", "ig", "gxi", "shapley"),
    )
    samples: int | None = setting("steps of ig [10], permutations of shapley [25]", None, least=1)
    channel_dim: int | None = setting(
        "axis of the layer's features: 1 for (N, D, H, W), -1 for (N, H, W, D) and tokens  "
        "[default: read from the shape]",
        None,
        metavar="1|-1",
    )
    seed: int = setting("of positions, starts and permutations", 0, least=0)
    batch_size: int = setting("images explained at a time", 4, least=1)
    force: bool = setting("go on where the command would refuse", False)


@dataclass(frozen=True, kw_only=True)
class FitSettings(RunSettings):
    """Which concepts are learned."""

    train: Path = setting("images to learn concepts from")
    target: str | int = setting("the class, by name or by number of the output", metavar="CLASS")
    out: Path = setting("the .safetensors file")
    work: Path | None = setting("folder for finished parts  [default: OUT ending in .drsa]", None)
    layer: str | None = setting("where concepts are found  [default: see `drsa layers`]", None)
    subspaces: int | str = setting(
        "how many concepts; auto: as many as are stable", 4, metavar="NUMBER|auto", parse="count"
    )
    balance: float = setting(
        "how far unequal evidence is levelled before the fit; 0 is the paper's objective", 1.0, within=(0, 1)
    )
    positions: int = setting("positions in an image that are learned from", 20, least=1)
    train_images: int = setting("at most", 500, least=1)
    stability: bool = setting("repeat the fit, to see which concepts come back", True)


@dataclass(frozen=True, kw_only=True)
class AuditSettings(FitSettings):
    """What decides an audit: the options of `drsa audit`, under the same names.

    Examples
    --------
    >>> settings = AuditSettings(model="resnet50", train="train", test="val", target=430, out="report.html")
    >>> settings.subspaces, settings.backend
    (4, 'lrp')
    """

    out: Path = setting("the HTML file")
    test: Path = setting("images to show concepts on")
    test_images: int = setting("at most", 40, least=1)
    flipping: bool = setting("evaluate by patch flipping", True)
    ablation: bool = setting("take concepts out of the network", True)
    names: Any = setting("JSON file with names of the concepts", None, metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class ExplainSettings(RunSettings):
    """Which concepts explain which images; by `force` also those of another model, layer, class or method."""

    concepts: Path = setting("file of `drsa fit`", name="--subspaces")
    images: Path = setting("folder of images")
    out: Path = setting("folder for maps and pictures")
    target: str | int | None = setting("another class than that of the subspaces", None, metavar="CLASS")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(ExplainSettings):
    """Which concepts are evaluated on which images."""

    images: Path = setting("folder of images", name="--test")
    out: Path = setting("the JSON file")
