"""Layer methods, for inputs that have no gradient: explaining a layer's output e in the place of the input.

A layer method asks what the output of a layer, such as an embedding, contributes. With everything else held
at the inputs, the network is a function of e alone, and the layer method is its counterpart for inputs:
`LayerIntegratedGradients` is `IntegratedGradients` from e′ to e, and so on. Step 2 of Note B then explains
R̂_k(e) = (U_kᵀφ(e))ᵀ(U_kᵀ[c]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from captum import attr
from drsa_core.layer import Request
from torch import Tensor, nn


class FromLayer(nn.Module):
    """A network as a function of the output e of a layer, its own inputs being further arguments.

    `request` has the network's own inputs. To be used inside `restored`, which takes the hook off the layer.
    """

    def __init__(self, request: Request, layer: nn.Module, layer_name: str) -> None:
        super().__init__()
        self.forward_func = request.forward  # a child module if it is one: DeepLift looks for its layers
        self.layer_name = layer_name
        self._parts = (request, layer)  # in a tuple, so that the layer does not become a child a second time
        self._is_forward, self._n_runs = False, 0
        layer.register_forward_hook(self._put)

    @property
    def original(self) -> Request:
        """The request with the network's own inputs."""
        return self._parts[0]

    def forward(self, output: Tensor, *args: Any) -> Any:
        """The network's output if its inputs are `args` and the layer gives `output`."""
        self._output, self._is_forward, self._n_runs = (output,), True, 0
        try:
            return self.forward_func(*args)
        finally:
            self._is_forward = False

    def _put(self, module: nn.Module, inputs: object, own: object) -> Tensor | None:
        # What is checkpointed runs again in the backward pass.
        if not self._is_forward and torch._C._current_graph_task_id() == -1:
            return None
        self._n_runs += self._is_forward
        if self._n_runs > 1:
            raise ValueError(
                f"layer {self.layer_name!r} of the layer method runs more than once in a forward pass, so "
                "that it has no single output; choose a layer that runs once, or explain one of the inputs "
                "that share it with the others held constant"
            )
        return self._output[0].clone()  # what follows may work in place

    def request(self) -> Request:
        """What is to be explained, with e as the only input."""
        given = self.original
        return replace(
            given, forward=self, inputs=(self.output_of(given.inputs),), args=(*given.inputs, *given.args)
        )

    def output_of(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """e for some inputs (N, …), shape (N, …)."""
        given, layer = self._parts

        def too_early(module: nn.Module, args: object, output: object) -> None:
            raise ValueError(
                f"the layer method explains layer {self.layer_name!r}, which runs after the concept layer "
                f"{given.layer_name!r}: give the layer method a layer below it, such as the embedding"
            )

        lower = replace(given, inputs=inputs, layer=layer, layer_name=self.layer_name, channel_dim=-1)
        handle = given.layer.register_forward_hook(too_early)
        try:
            with torch.no_grad():
                output = lower.activation().clone()
                lower.refuse_tokens_first(output)
                return output
        finally:
            handle.remove()


def own_inputs(request: Request) -> Request:
    """The request with the network's own inputs, for what takes these rather than a layer's output."""
    return request.forward.original if isinstance(request.forward, FromLayer) else request


def as_tensors(request: Request, baselines: Any) -> tuple[Tensor, ...]:
    """Baselines of each input as tensors (1, …), (N, …) or (n_baselines, …); 0 if there are none."""
    given = baselines if isinstance(baselines, tuple) else (baselines,) * len(request.inputs)
    return tuple(
        baseline.to(x) if isinstance(baseline, Tensor) else torch.full_like(x[:1], baseline or 0)
        for x, baseline in zip(request.inputs, given, strict=True)
    )


@dataclass(frozen=True)
class AtInput:
    """How a layer method becomes one for inputs: it and the network from its layer on ↦ its counterpart.

    Its baselines are given as inputs, or else as outputs of the layer, `layer_baselines`.
    """

    attributor: Callable[[Any, FromLayer], attr.Attribution]
    has_baselines_of_inputs: bool = False

    def options(self, network: FromLayer, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of the layer method as those of its counterpart."""
        names = {"layer_baselines": "baselines", "layer_mask": "feature_mask"}
        options = {names.get(name, name): value for name, value in given.items()}
        if options.pop("attribute_to_layer_input", False):
            raise ValueError(
                "attribute_to_layer_input=True cannot be split into concepts; name the layer before, whose "
                "output it is"
            )
        if self.has_baselines_of_inputs:
            options["baselines"] = self.baselines(network, given.get("baselines"))
        elif "baselines" in given:
            raise TypeError("this layer method takes layer_baselines, of the layer's output, not baselines")
        return options

    def baselines(self, network: FromLayer, given: Any) -> Any:
        """Baselines of the layer's output, from those that the layer method takes; of inputs 0 by default."""
        if not self.has_baselines_of_inputs:
            return given
        pairs = zip(as_tensors(network.original, given), network.original.inputs, strict=True)
        return network.output_of(tuple(reference.expand_as(x) for reference, x in pairs))


class _SignedGradient(attr.Saliency):  # type: ignore[misc]  # Captum is not typed for mypy here
    """The gradient with its sign: `LayerGradientXActivation(multiply_by_inputs=False)`."""

    def attribute(self, *args: Any, **options: Any) -> Any:
        return super().attribute(*args, abs=False, **options)


# By name, not lambdas, so that wrappers can be pickled.
def _path(method: Any, network: FromLayer) -> attr.Attribution:
    return attr.IntegratedGradients(network, method.multiplies_by_inputs)


def _gradient(method: Any, network: FromLayer) -> attr.Attribution:
    return attr.InputXGradient(network) if method.multiplies_by_inputs else _SignedGradient(network)


def _deep_lift(method: Any, network: FromLayer) -> attr.Attribution:
    return attr.DeepLift(network, method.multiplies_by_inputs, method.eps)


def _ablation(method: Any, network: FromLayer) -> attr.Attribution:
    return attr.FeatureAblation(network)


PATH = AtInput(_path, has_baselines_of_inputs=True)
DEEP_LIFT = AtInput(_deep_lift, has_baselines_of_inputs=True)
GRADIENT, ABLATION = AtInput(_gradient), AtInput(_ablation)
