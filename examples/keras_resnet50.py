"""ResNet50 with the weights of Keras: a network of one's own for `drsa`, as a factory.

Keras's weights differ from torchvision's in three ways. The strides lie in the first convolution of a stage's
first block, the batch norms have another ε, and inputs are BGR, 255 × pixels minus a mean, as in Caffe. A
factory that returns a `Network` says all of it in one place:

    drsa audit examples/keras_resnet50.py:network --weights resnet50.safetensors \\
        --train train --test test --target 235 --out report.html

For a factory that returns a bare module, the same inputs are --channels BGR --mean 0.4076,0.458,0.485 and
--std 0.00392157.
"""

from __future__ import annotations

import argparse

import torchvision.models
from drsa_audit import Network
from drsa_audit.networks import SuitableRules
from drsa_core.evaluation import Preprocessing
from torch import nn

# In the order of the network's channels: blue, green, red.
MEAN, STD = (103.939 / 255, 116.779 / 255, 123.68 / 255), (1 / 255,) * 3


def network() -> Network:
    """The architecture and its inputs; the weights come from --weights."""
    model = torchvision.models.resnet50(weights=None)
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    return Network(
        model.eval(),
        size=224,
        preprocessing=Preprocessing.from_mean_std(MEAN, STD, "BGR"),
        layer="layer3",
        composite=SuitableRules(model, MEAN, STD),
        resize=256,
        interpolation="bilinear",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
