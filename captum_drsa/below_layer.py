"""Layer methods, for inputs that have no gradient: explaining a layer's output e in the place of the input.

A layer method asks what the output of a layer, such as an embedding, contributes. With everything else held
at the inputs, the network is a function of e alone, and the layer method is its counterpart for inputs:
`LayerIntegratedGradients` is `IntegratedGradients` from e′ to e, and so on. Step 2 of Note B then explains
R̂_k(e) = (U_kᵀφ(e))ᵀ(U_kᵀ[c]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from captum.attr import (
    Attribution,
    DeepLift,
    FeatureAblation,
    InputXGradient,
    IntegratedGradients,
    Saliency,
)
from drsa_core.layer import Request, copies, is_backward
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .relevance_model import as_tensors


class FromLayer(nn.Module):
    """A network as a function of the output e of a layer, its own inputs being further arguments.

    Parameters
    ----------
    request : Request
        What is to be explained, with the network's own inputs.
    layer, layer_name
        The layer of the layer method.
    """

    def __init__(self, request: Request, layer: nn.Module, layer_name: str) -> None:
        super().__init__()
        self.forward_func = request.forward  # a child module if it is one: DeepLift looks for its layers
        self.layer_name = layer_name
        self._parts = (request, layer)  # in a tuple, so that the layer does not become a child a second time
        self._handle: RemovableHandle | None = None

    @property
    def original(self) -> Request:
        """The request with the network's own inputs."""
        return self._parts[0]

    def forward(self, output: Tensor, *args: Any) -> Any:
        """The network's output if its inputs are `args` and the layer gives `output`.

        Parts that are checkpointed run again in the backward pass, and get `output` there as well.
        """
        layer = self._parts[1]
        n_runs, is_forward = 0, True

        def put(module: nn.Module, inputs: object, own: object) -> Tensor | None:
            nonlocal n_runs
            if not is_forward and not is_backward():
                return None
            n_runs += is_forward
            if n_runs > 1:
                raise ValueError(
                    f"layer {self.layer_name!r} of the layer method runs more than once in a forward pass, "
                    "so that it has no single output; choose a layer that runs once, or explain one of the "
                    "inputs that share it with the others held constant"
                )
            return output.clone()  # what follows may work in place

        self.release()
        self._handle = layer.register_forward_hook(put)
        try:
            return self.forward_func(*copies(args))
        finally:
            is_forward = False

    def release(self) -> None:
        """Take the hook of the last forward pass off the layer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def request(self) -> Request:
        """What is to be explained, with e as the only input."""
        original = self.original
        with torch.no_grad():
            output = self.output_of(original.inputs)
        return replace(
            original,
            forward=self,
            inputs=(output,),
            args=(*original.inputs, *original.args),
            has_batch_axis=((True,) * len(original.inputs)) + original.has_batch_axis,
        )

    def output_of(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """e for some inputs (N, …), shape (N, …); an error if the concept layer does not come after it."""
        original, layer = self._parts

        def too_early(module: nn.Module, args: object, output: object) -> None:
            raise ValueError(
                f"the layer method explains layer {self.layer_name!r}, which runs after the concept layer "
                f"{original.layer_name!r}: nothing of the concepts is left to pass on to it. Give the layer "
                "method a layer below the concept layer, such as the embedding"
            )

        handle = original.layer.register_forward_hook(too_early)
        try:
            lower = replace(original, inputs=inputs, layer=layer, layer_name=self.layer_name, channel_dim=-1)
            return lower.activation().detach().clone()
        finally:
            handle.remove()

    def baseline(self, baselines: Any) -> Tensor:
        """e′, the layer's output for baselines of the inputs as Captum takes them, shape (N, …)."""
        references = as_tensors(self.original, baselines)
        for x, reference in zip(self.original.inputs, references, strict=True):
            if reference.shape[1:] != x.shape[1:] or len(reference) not in (1, len(x)):
                raise ValueError(
                    f"baselines must have the shape of the inputs, {tuple(x.shape)}, or that of one example, "
                    f"{(1, *x.shape[1:])}, got {tuple(reference.shape)}; what "
                    "TokenReferenceBase.generate_reference gives needs .unsqueeze(0)"
                )
        pairs = zip(references, self.original.inputs, strict=True)
        with torch.no_grad():
            return self.output_of(tuple(reference.expand_as(x) for reference, x in pairs))


@dataclass(frozen=True)
class AtInput:
    """How a layer method becomes one for inputs.

    Attributes
    ----------
    attributor : function
        The layer method and the network from the layer on ↦ its counterpart.
    has_baselines_of_inputs : bool
        Whether its baselines are given as inputs, rather than as outputs of the layer.
    names : mapping
        Keywords that the counterpart knows by another name.
    """

    attributor: Callable[[Attribution, FromLayer], Attribution]
    has_baselines_of_inputs: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    def options(self, network: FromLayer, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of the layer method as those of its counterpart."""
        options = dict(given)
        if options.pop("attribute_to_layer_input", False):
            raise ValueError(
                "attribute_to_layer_input=True cannot be split into concepts; name the layer before, whose "
                "output it is"
            )
        if options.pop("grad_kwargs", None):
            raise ValueError("grad_kwargs has no meaning here: all concepts are differentiated together")
        for theirs, ours in self.names.items():
            if ours in options:
                raise TypeError(f"this layer method takes {theirs}, of the layer's output, not {ours}")
            if theirs in options:
                options[ours] = options.pop(theirs)
        if self.has_baselines_of_inputs:
            options["baselines"] = self.baselines(network, options.get("baselines"))
        return options

    def baselines(self, network: FromLayer, given: Any) -> Any:
        """Baselines of the layer's output, from those that the layer method takes."""
        return network.baseline(given) if self.has_baselines_of_inputs else given


class _Gradient(Saliency):  # type: ignore[misc]  # Captum is not typed for mypy here
    """The gradient with its sign: `LayerGradientXActivation(multiply_by_inputs=False)`."""

    def attribute(self, *args: Any, **options: Any) -> Any:
        return super().attribute(*args, abs=False, **options)


INTEGRATED_GRADIENTS = AtInput(
    lambda method, network: IntegratedGradients(network, method.multiplies_by_inputs), True
)
GRADIENT_X_ACTIVATION = AtInput(
    lambda method, network: InputXGradient(network) if method.multiplies_by_inputs else _Gradient(network)
)
DEEP_LIFT = AtInput(lambda method, network: DeepLift(network, method.multiplies_by_inputs, method.eps), True)
FEATURE_ABLATION = AtInput(
    lambda method, network: FeatureAblation(network),
    names={"layer_baselines": "baselines", "layer_mask": "feature_mask"},
)


def original(request: Request) -> Request:
    """The request with the network's own inputs, for what takes these rather than a layer's output."""
    return request.forward.original if isinstance(request.forward, FromLayer) else request
