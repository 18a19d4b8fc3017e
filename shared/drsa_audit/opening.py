"""Models and photographs from what a user names; every mistake gets one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drsa_core.evaluation import Preprocessing
from torch import Tensor, nn

from .errors import BadInput, one_line, printable
from .images import UnreadablePhoto, load_photo
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
    channel_order : {"RGB", "BGR"}, optional
        Default: the network's own.
    device : str
    """

    model: str | nn.Module | Network
    weights: str = "DEFAULT"
    size: int | None = None
    resize: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    channel_order: str | None = None
    device: str = "cpu"

    @property
    def name(self) -> str:
        """What the model is called."""
        if isinstance(self.model, str):
            return self.model
        module = self.model.model if isinstance(self.model, Network) else self.model
        return type(module).__name__


@dataclass(frozen=True, kw_only=True)
class RunSettings(ModelSettings):
    """How a model is explained, beside what `ModelSettings` holds.

    Attributes
    ----------
    backend : {"lrp", "ig", "gxi", "shapley"}
        LRP gives way to Integrated Gradients where it is not valid.
    samples : int, optional
        Permutations of "shapley" or steps of "ig".
    channel_dim : {1, -1}, optional
        Axis of the features in the layer's output: 1 for (N, D, H, W), −1 for (N, H, W, D) and tokens
        (N, T, D). Default: read from the shape, and refused where that does not say it.
    seed, batch_size : int
    force : bool
        Go on where the run would refuse.
    """

    backend: str = "lrp"
    samples: int | None = None
    channel_dim: int | None = None
    seed: int = 0
    batch_size: int = 4
    force: bool = False


def open_model(settings: ModelSettings) -> tuple[Network, int]:
    """`open_network`, and the number of the network's outputs."""
    network = open_network(settings)
    device = next(network.model.parameters()).device
    return network, count_outputs(network, torch.zeros(1, 3, network.size, network.size, device=device))


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
    pixels, names, unreadable = _readable(network, files)
    if unreadable:
        shown = ", ".join(unreadable[:5]) + (", …" if len(unreadable) > 5 else "")
        text = f"{len(unreadable)} of {len(files)} images cannot be read and were skipped: {shown}"
        progress.note(printable(text))
    inputs = network.preprocessing.to_inputs(pixels).contiguous(memory_format=torch.channels_last)
    return inputs.to(device), pixels, names


def read_first(network: Network, files: Sequence[Path], n_images: int) -> Tensor:
    """Inputs (n, 3, H, W) of the first files that can be read, at most `n_images`, on the network's device.

    Raises
    ------
    BadInput
        If none can be read.
    """
    pixels, _, _ = _readable(network, files, n_images)
    inputs = network.preprocessing.to_inputs(pixels).contiguous(memory_format=torch.channels_last)
    return inputs.to(next(network.model.parameters()).device)


def _readable(
    network: Network, files: Sequence[Path], limit: int | None = None
) -> tuple[Tensor, list[str], list[str]]:
    """Pixels (N, 3, H, W) and names of files that can be read, and the others with the reason."""
    pixels: list[Tensor] = []
    names, unreadable = [], []
    for file in files:
        try:
            pixels.append(load_photo(file, network.size, network.resize, network.interpolation))
        except UnreadablePhoto as error:
            unreadable.append(f"{file} ({one_line(error, 160)})")
        else:
            names.append(printable(file.name))
        if len(pixels) == limit:
            break
    if not pixels:
        example = f", e.g. {unreadable[0]}" if unreadable else ""
        raise BadInput(f"none of the {len(files)} photographs can be read{example}")
    return torch.stack(pixels), names, unreadable


def describe_preprocessing(network: Network) -> dict[str, Any]:
    """How photographs become inputs, as JSON; the same for the same inputs, up to rounding."""
    mean, std = _mean_and_std(network.preprocessing)
    colours = _colours(network.preprocessing)
    return {
        "size": network.size,
        "resize": network.resize,
        "interpolation": network.interpolation,
        "mean": _rounded(mean),
        "std": _rounded(std),
        "channels": _channel_order(network.preprocessing) or [_rounded(row) for row in colours.tolist()],
    }


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
    own, size = network.preprocessing, settings.size or network.size
    # A network that squeezes the whole photograph into the square goes on to do so.
    resize = settings.resize
    if resize is None and network.resize is not None:
        resize = max(size, network.resize * size // network.size)
    network = replace(network, size=size, resize=None if resize is None else max(resize, size))
    if settings.mean is None and settings.channel_order is None:
        return network
    if settings.mean is None and _channel_order(own) is None:
        raise BadInput(
            "the network mixes the channels of photographs, so that --channels alone does not say what its "
            "inputs are; give --mean and --std too"
        )
    mean, std = _mean_and_std(own)
    try:
        transform = Transform(
            network.size,
            network.resize or network.size,
            tuple(settings.mean or mean),
            tuple(settings.std or std),
            network.interpolation,
            settings.channel_order or _channel_order(own) or "RGB",
        )
        return replace(with_input(network, transform), resize=network.resize)
    except ValueError as error:
        raise BadInput(str(error)) from error


def _mean_and_std(preprocessing: Preprocessing) -> tuple[list[float], list[float]]:
    """Read from what black and white become."""
    black_and_white = torch.tensor([0.0, 1.0]).expand(3, 2)[None, :, None, :]
    low, high = preprocessing.to_inputs(black_and_white)[0, :, 0].double().T
    std = 1 / (high - low)
    return (-low * std).tolist(), std.tolist()


def _colours(preprocessing: Preprocessing) -> Tensor:
    """What red, green and blue have more than black, in each channel of the inputs, shape (3, 3)."""
    pixels = torch.cat([torch.zeros(3, 1), torch.eye(3)], dim=1)[None, :, None, :]
    inputs = preprocessing.to_inputs(pixels)[0, :, 0].double()
    return (inputs[:, 1:] - inputs[:, :1]).T


def _channel_order(preprocessing: Preprocessing) -> str | None:
    """ "RGB" or "BGR", read from what red, green and blue become; None if a channel mixes them."""
    changed = _colours(preprocessing).abs() > 1e-9
    for order, expected in (("RGB", torch.eye(3)), ("BGR", torch.eye(3).flip(1))):
        if torch.equal(changed, expected.bool()):
            return order
    return None


def _rounded(values: list[float]) -> list[float]:
    """To six digits, which other machines agree on."""
    return [float(f"{value:.6g}") + 0.0 for value in values]  # + 0.0: no −0
