"""Models and photographs from what a user names; every mistake gets one sentence."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from drsa_core.evaluation import Preprocessing
from torch import Tensor, nn

from .errors import BadInput, one_line
from .images import load_images
from .networks import Network, SuitableRules, load_network, with_input
from .progress import Progress
from .published import Transform, is_torchvision_name, published_transform


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how photographs become its inputs.

    Attributes
    ----------
    model : str, module or Network
        As in `load_network`, or the model itself.
    weights : str
        "DEFAULT" for the published weights, or a file.
    size, resize : int, optional
        Side of the inputs; length of a photograph's shorter side before the central square is cut out.
    mean, std : sequence of float, optional
        Inputs are (pixels − mean) / std. Default: as published with the model.
    channel_order : {"RGB", "BGR"}
    device : str
    """

    model: str | nn.Module | Network
    weights: str = "DEFAULT"
    size: int | None = None
    resize: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    channel_order: str = "RGB"
    device: str = "cpu"

    @property
    def name(self) -> str:
        """What the model is called."""
        if isinstance(self.model, str):
            return self.model
        module = self.model.model if isinstance(self.model, Network) else self.model
        return type(module).__name__


def open_network(settings: ModelSettings) -> Network:
    """The network, in eval mode on its device, with the preprocessing that was asked for.

    Raises
    ------
    BadInput
        With one sentence about what cannot be used.
    """
    device = check_device(settings.device)
    network = _with_transform(_loaded(settings), settings)
    if isinstance(settings.model, str):
        network.model.eval().to(device)
    elif any(module.training for module in network.model.modules()):
        # A model that the user holds is explained as it is, where it is.
        raise BadInput("the model is in training mode; call model.eval() first")
    return network


def check_device(name: str) -> torch.device:
    """The device of that name, if a tensor can be put there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"the device {name!r} cannot be used: {one_line(error, 160)}") from error
    return device


def count_outputs(network: Network, inputs: Tensor) -> int:
    """Number of the network's outputs, from a forward pass of one input."""
    try:
        with torch.no_grad():
            output = network.model(inputs[:1].clone())
    except Exception as error:
        raise BadInput(
            f"the model does not run on an input of shape {tuple(inputs[:1].shape)}: {one_line(error, 240)}"
        ) from error
    if not isinstance(output, Tensor) or output.ndim != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise BadInput(f"the model must return scores of shape (N, classes), got {got}")
    return int(output.shape[1])


def read_images(
    network: Network, files: list[Path], progress: Progress, device: torch.device
) -> tuple[Tensor, Tensor, list[str]]:
    """Inputs and pixels (N, 3, H, W), and names; files that cannot be read are named in a note."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each unreadable file is in the note
        try:
            pixels, names, unreadable = load_images(
                files, network.size, network.resize, network.interpolation
            )
        except ValueError as error:
            raise BadInput(str(error)) from error
    if unreadable:
        shown = ", ".join(unreadable[:5]) + (", …" if len(unreadable) > 5 else "")
        progress.note(f"{len(unreadable)} of {len(files)} images cannot be read and were skipped: {shown}")
    inputs = network.preprocessing.to_inputs(pixels).contiguous(memory_format=torch.channels_last)
    return inputs.to(device), pixels, names


def _loaded(settings: ModelSettings) -> Network:
    model, weights = settings.model, None if settings.weights == "DEFAULT" else settings.weights
    if isinstance(model, Network):
        return model
    if isinstance(model, nn.Module):
        transform = published_transform(model)
        rules = SuitableRules(model, tuple(transform.mean), tuple(transform.std))
        bare = Network(model, transform.size, Preprocessing.from_mean_std(0.0, 1.0), "", rules)
        return with_input(bare, transform)
    if weights is not None and not Path(weights).is_file():
        raise BadInput(f"there is no file {weights} with weights; DEFAULT takes the published ones")
    if model.endswith(".safetensors") and not Path(model).is_file():
        raise BadInput(f"there is no file {model}")
    _check_name(model)
    try:
        return load_network(model, weights, crop=True)
    except BadInput:
        raise
    except Exception as error:
        if "do not fit" in str(error):
            raise BadInput(one_line(error, 400)) from error
        text = one_line(f"{type(error).__name__}: {error}", 300)
        if ":" in model:
            raise BadInput(f"the model {model} could not be made: {text}") from error
        raise BadInput(
            f"the model {model} could not be loaded: {text}; its weights may be given with --weights FILE"
        ) from error


def _check_name(name: str) -> None:
    """Refuse a name that neither library has, with close ones."""
    if ":" in name or name.endswith(".safetensors") or name == "efficientnet_lite0":
        return
    library, _, plain = name.rpartition("/")
    import timm
    import torchvision.models

    known = set(torchvision.models.list_models(module=torchvision.models)) | {"efficientnet_lite0"}
    if library == "torchvision" and plain in known:
        return
    if library != "torchvision" and (is_torchvision_name(name) or timm.is_model(plain)):
        return
    known |= set(timm.list_models())
    close = difflib.get_close_matches(plain, known, n=3, cutoff=0.6)
    near = f"did you mean {' or '.join(close)}?" if close else "see timm.list_models()"
    raise BadInput(
        f"neither torchvision nor timm has a model {name!r}; {near} A model of your own is module:factory"
    )


def _with_transform(network: Network, settings: ModelSettings) -> Network:
    """The network with what the user says about the preprocessing; what is not said stays."""
    if (settings.mean is None) != (settings.std is None):
        raise BadInput("give --mean and --std together: inputs are (pixels − mean) / std")
    said = (settings.size, settings.resize, settings.mean)
    if said == (None, None, None) and settings.channel_order == "RGB":
        return network
    mean, std = _mean_and_std(network.preprocessing)
    size = settings.size or network.size
    resize = settings.resize or (network.resize or network.size) * size // network.size
    try:
        transform = Transform(
            size,
            max(resize, size),
            tuple(settings.mean or mean),
            tuple(settings.std or std),
            network.interpolation,
            settings.channel_order,
        )
        return with_input(network, transform)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _mean_and_std(preprocessing: Preprocessing) -> tuple[list[float], list[float]]:
    """Read from what black and white become."""
    black_and_white = torch.tensor([0.0, 1.0]).expand(3, 2)[None, :, None, :]
    low, high = preprocessing.to_inputs(black_and_white)[0, :, 0].double().T
    std = 1 / (high - low)
    return (-low * std).tolist(), std.tolist()
