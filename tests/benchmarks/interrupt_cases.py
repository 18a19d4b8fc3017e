"""What `interrupts` interrupts: methods of both adapters on tiny networks, with and without canonizers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import captum.attr
import timm
import torch
from captum.attr._utils.lrp_rules import Alpha1_Beta0_Rule, GammaRule
from drsa_core import PRCA, RandomSubspaces, Subspaces
from torch import Tensor, nn
from zennit.attribution import Gradient, IntegratedGradients, Occlusion, SmoothGrad
from zennit.canonizers import SequentialMergeBatchNorm
from zennit.composites import EpsilonPlus, GuidedBackprop
from zennit.core import Composite

from captum_drsa import DisentangledAttribution
from zennit_drsa import DisentangledAttributor, DisentangledComposite, NFNetGamma, TimmCanonizer, doctor

Result = tuple[Tensor, ...]
SOLVER: Any = PRCA(2)


class Case(ABC):
    """Something to interrupt, and the model and objects of a user's that it works with."""

    model: nn.Module

    @abstractmethod
    def prepare(self) -> None:
        """Build the model and the attributor anew."""

    @abstractmethod
    def run(self) -> Result:
        """Explain; always with the same result."""

    @abstractmethod
    def leftovers(self) -> Any:
        """What the user's objects other than the model hold on to; a value to compare."""


class Convolutional(nn.Module):
    """Two convolutions and a linear layer; input (N, 3, 4, 4), layer "relu" with 4 features."""

    def __init__(self, with_norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if with_norm else nn.Dropout()
        self.relu = nn.ReLU()
        self.top = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
        self.linear = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.top(self.relu(self.norm(self.conv(x)))).flatten(1))
        return logits


def convolutional(with_norm: bool = True) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return _with_statistics(Convolutional(with_norm))


def timm_resnet() -> nn.Module:
    """The smallest residual network of timm; input (N, 3, 16, 16), layer "layer1" with 4 features."""
    torch.manual_seed(0)
    resnet = timm.models.resnet
    return _with_statistics(
        resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=3, channels=(4, 4, 4, 4), stem_width=4)
    )


def nfnet() -> nn.Module:
    """timm's test network; layer "stages.0" with 32 features."""
    torch.manual_seed(0)
    return timm.create_model("test_nfnet", num_classes=3).eval()


def _with_statistics(model: nn.Module) -> nn.Module:
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            # Means near zero: with larger ones the ReLUs behind would be dead.
            nn.init.uniform_(buffer, *((-0.2, 0.2) if name.endswith("mean") else (0.5, 1.5)))
    return model.eval()


def _subspaces(n_features: int) -> Subspaces:
    return RandomSubspaces(2, random_state=0).fit(torch.zeros(1, n_features)).subspaces_


def _images(size: int, n: int = 1) -> Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------------------------------- Zennit


class ZennitCase(Case):
    """An attributor of Zennit, called alone, in its context, or caught and called again in its context."""

    def __init__(
        self,
        attributor: Callable[[nn.Module, Composite | None], Any],
        composite: Callable[[], Composite | None],
        form: str,
        network: Callable[[], nn.Module] = convolutional,
        layer: str = "relu",
        n_features: int = 4,
        size: int = 4,
    ) -> None:
        self.make, self.make_composite, self.form = attributor, composite, form
        self.network, self.layer, self.n_features = network, layer, n_features
        self.x = _images(size)

    def prepare(self) -> None:
        self.model, self.composite = self.network(), self.make_composite()
        self.attributor = DisentangledAttributor(
            self.make(self.model, self.composite), self.layer, _subspaces(self.n_features), context_steps=2
        )

    def run(self) -> Result:
        torch.manual_seed(0)
        target = torch.eye(3)[[1]]
        self.attributor.validated = self.form not in ("alone", "collect")  # these validate in each run
        if self.form == "alone":
            return self.attributor(self.x, target)
        if self.form == "collect":
            return _arrays(self.attributor.collect([self.x, self.x], 1, random_state=0, progress=False))
        if self.form == "fit":
            fitted = self.attributor.fit([self.x, self.x], 1, SOLVER, random_state=0, progress=False)
            return _basis(fitted.subspaces)
        with self.attributor as attributor:
            if self.form == "caught":
                with suppress(KeyboardInterrupt):
                    attributor(self.x, target)
                torch.manual_seed(0)
            return attributor(self.x, target)

    def leftovers(self) -> Any:
        own = self.attributor.composite
        theirs = [] if self.composite is None else [*self.composite.handles, *self.composite.hook_refs]
        return len(own.handles), len(own.hook_refs), len(theirs), self.attributor._registered


class FilterCase(Case):
    """`DisentangledComposite.context`, for a backward pass of the user's own."""

    def __init__(self, composite: Callable[[], Composite | None]) -> None:
        self.make_composite = composite
        self.x = _images(4)

    def prepare(self) -> None:
        self.model, self.users = convolutional(), self.make_composite()
        self.composite = DisentangledComposite(self.users, "relu", _subspaces(4), 0)

    def run(self) -> Result:
        x = self.x.clone().requires_grad_()
        self.composite.filter._validated.clear()
        with self.composite.context(self.model) as model:
            output = model(x)
            return torch.autograd.grad(output, x, torch.eye(3)[[1]])

    def leftovers(self) -> Any:
        theirs = 0 if self.users is None else len(self.users.handles)
        return len(self.composite.handles), theirs, self.composite._context


class DoctorCase(Case):
    """`doctor`, which also tries what could help."""

    def __init__(self, composite: Callable[[], Composite]) -> None:
        self.make_composite = composite
        self.x = _images(4)

    def prepare(self) -> None:
        self.model, self.composite = convolutional(), self.make_composite()

    def run(self) -> Result:
        diagnosis = doctor(self.model, self.composite, self.x, verbose=False)
        return (torch.tensor([layer.received for layer in diagnosis.layers]),)

    def leftovers(self) -> Any:
        return len(self.composite.handles), len(self.composite.hook_refs)


# ---------------------------------------------------------------------------------------------------- Captum


class CaptumCase(Case):
    """An attributor of Captum, on a model with rules of the user's or without."""

    def __init__(
        self,
        method: Callable[[nn.Module], Any],
        options: dict[str, Any],
        has_rules: bool,
        form: str = "attribute",
    ) -> None:
        self.make, self.options, self.has_rules, self.form = method, options, has_rules, form
        self.x = _images(4)

    def prepare(self) -> None:
        # Captum's LRP has no rule for batch norms.
        self.model = convolutional(with_norm=self.make is not captum.attr.LRP)
        self.rules: list[Any] = []
        if self.has_rules:
            self.rules = [GammaRule(0.5), Alpha1_Beta0_Rule()]
            for name, rule in zip(("conv", "linear"), self.rules, strict=True):
                self.model.get_submodule(name).rule = rule
        self.method = self.make(self.model)
        self.attributor = DisentangledAttribution(self.method, "relu", _subspaces(4))
        self.method_before = {key: id(value) for key, value in vars(self.method).items()}

    def run(self) -> Result:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Captum's, about hooks
            if self.form == "attribute":
                return (self.attributor.attribute(self.x, target=1, **self.options),)
            if self.form == "collect":
                return _arrays(self.attributor.collect([self.x], 1, random_state=0, progress=False))
            fitted = self.attributor.fit([self.x], 1, SOLVER, random_state=0, progress=False)
            return _basis(fitted.subspaces)

    def leftovers(self) -> Any:
        of_rules = [sorted(vars(rule)) for rule in self.rules]
        return of_rules, {key: id(value) for key, value in vars(self.method).items()} == self.method_before


def _basis(subspaces: Subspaces | None) -> Result:
    return () if subspaces is None else (torch.as_tensor(subspaces.basis),)


def _arrays(pairs: Any) -> Result:
    return torch.as_tensor(pairs.a), torch.as_tensor(pairs.c)


# ---------------------------------------------------------------------------------------------------- all


def _merged(composite: Callable[..., Composite]) -> Callable[[], Composite]:
    return lambda: composite(canonizers=[SequentialMergeBatchNorm()])


def _nothing() -> None:
    return None


COMPOSITES: dict[str, Callable[[], Composite | None]] = {
    "no composite": _nothing,
    "LRP": EpsilonPlus,
    "LRP, merged norms": _merged(EpsilonPlus),
    "GuidedBackprop": GuidedBackprop,
    "GuidedBackprop, merged norms": _merged(GuidedBackprop),
}
ATTRIBUTORS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "Gradient": (Gradient, list(COMPOSITES)),
    "SmoothGrad": (partial(SmoothGrad, n_iter=2), ["no composite", "LRP, merged norms"]),
    "IntegratedGradients": (partial(IntegratedGradients, n_iter=2), ["no composite", "LRP, merged norms"]),
    "Occlusion": (partial(Occlusion, window=2, stride=2), ["no composite", "LRP, merged norms"]),
}
METHODS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "InputXGradient": (captum.attr.InputXGradient, {}),
    "IntegratedGradients": (captum.attr.IntegratedGradients, {"n_steps": 2}),
    "DeepLift": (captum.attr.DeepLift, {}),
    "LRP": (captum.attr.LRP, {}),
    "ShapleyValueSampling": (
        captum.attr.ShapleyValueSampling,
        {"n_samples": 1, "feature_mask": torch.arange(4).repeat_interleave(4).view(1, 1, 4, 4)},
    ),
}


def _zennit_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    for method, (attributor, composites) in ATTRIBUTORS.items():
        for composite in composites:
            for form in ("alone", "with", "caught"):
                make = partial(ZennitCase, attributor, COMPOSITES[composite], form)
                yield f"Zennit {method}, {composite}, {form}", make
    resnet = partial(ZennitCase, network=timm_resnet, layer="layer1", size=16)
    nfnets = partial(ZennitCase, network=nfnet, layer="stages.0", n_features=32, size=32)
    for form in ("alone", "with", "collect"):
        canonized, gamma = partial(EpsilonPlus, canonizers=[TimmCanonizer()]), partial(NFNetGamma, -2, 2)
        yield f"Zennit Gradient, TimmCanonizer, {form}", partial(resnet, Gradient, canonized, form)
        yield (
            f"Zennit Gradient, NFNetGamma, {form}",
            partial(nfnets, Gradient, gamma, form),
        )
    for composite, make_composite in COMPOSITES.items():
        yield f"Zennit DisentangledComposite, {composite}", partial(FilterCase, make_composite)
    for composite in ("no composite", "LRP, merged norms"):
        for form in ("collect", "fit"):
            yield f"Zennit {form}, {composite}", partial(ZennitCase, Gradient, COMPOSITES[composite], form)
    yield "Zennit doctor, LRP", partial(DoctorCase, EpsilonPlus)
    yield "Zennit doctor, LRP, merged norms", partial(DoctorCase, _merged(EpsilonPlus))


def _captum_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    for rules in (False, True):
        suffix = ", rules on modules" if rules else ""
        for name, (method, options) in METHODS.items():
            yield f"Captum {name}{suffix}", partial(CaptumCase, method, options, rules)
        for form in ("collect", "fit"):
            for name in ("InputXGradient", "LRP"):
                yield f"Captum {form}, {name}{suffix}", partial(CaptumCase, METHODS[name][0], {}, rules, form)


CASES: dict[str, Callable[[], Case]] = dict([*_zennit_cases(), *_captum_cases()])
