"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from recast.config import Config, Count
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.config import DataConfig, ImagesConfig
from recast.lab.config.evaluation import parse_size
from recast.layers.config import BesideGate, RecastConfig
from recast.layers.pool_config import NoPool, PoolConfig
from recast.models.config import ModelConfig
from recast.models.trust import trusting

if TYPE_CHECKING:
    from torch import nn

    from recast.lab.data import Data
    from recast.surgery.plan import Plan
    from recast.tracing.examples import Example

EXAMPLES = """  recast plan resnet50
  recast plan torchvision:resnet18 --img-size 320x256 --where 'layer3.*' 'layer4.*'
  recast plan resnetrs50 --gate sigmoid --stride remove        (the T-CNN paper's choice)
  recast plan resnet50 --where all --max-tokens 4096 --json > plan.json
  recast plan resnet50 --where none --pool single              (only attention pooling)

Layers (--where): last_of_blocks, last_stage, last, all, stage:N (stage:-1 is the last), a name, a glob (layer4.*);
none: no layer.
"""


class Network(Config):
    """A network, and its layers that become attention"""

    model: ModelConfig = ModelConfig(name="")
    where: list[str] | None = None
    """Layers to recast: last_of_blocks (each block's last convolution in the last stage; the default of gate beside),
    last_stage (the default of other gates), last, all, stage:N, names, globs; none: only the pooling."""
    max_tokens: Count | None = 1024
    """Layers with more tokens (padded pixels) stay convolutions; null: no limit."""
    recast: RecastConfig = BesideGate()
    pool: PoolConfig = NoPool()

    @classmethod
    def of(cls, typed: Typed[Self], name: str = "", **base: Any) -> Self:
        """Return the network of a name, with what was typed over `base`."""
        return typed.over({"model": {"name": name}, **base})

    @property
    def has_weights(self) -> bool:
        """True if the network is given trained weights."""
        return self.model.pretrained or self.model.checkpoint is not None

    def open(self, data: Data | None = None) -> nn.Module:
        """Return the network, with the classes of a data set."""
        from recast.models.build import build

        with trusting(self.model.name):
            return build(self.model, num_classes=len(data.classes) if data else None)

    def load(self, images: ImagesConfig) -> Data:
        """Return a data set, with images of the network's channels and size."""
        from recast.lab.data import load_data

        config = DataConfig(**dict(images) | {"img_size": images.img_size or self.model.input_size})
        return load_data(config, in_chans=self.model.in_chans)

    def plan_of(self, model: nn.Module, example: Example) -> Plan:
        """Return the plan of a model."""
        from recast.surgery.planning import plan

        return plan(model, example, self.recast, where=self.where, max_tokens=self.max_tokens, pool=self.pool)


def example_shape(model: nn.Module, img_size: str | None) -> tuple[int, int, int]:
    """Return channels, rows and columns of an image for `model`; the default size is the network's own, else 224."""
    from recast.models.build import input_defaults
    from recast.surgery.rules import is_convolution

    defaults = input_defaults(model)
    convolutions = [module for module in model.modules() if is_convolution(module)]
    channels = int(getattr(convolutions[0], "in_channels", 3)) if convolutions else 3
    return channels, *(defaults.size if defaults and img_size is None else parse_size(img_size or "224", "--img-size"))


def plan(model: str, /, *, img_size: str | None = None, network: Typed[Network], output: Compute) -> int:
    """Show which layers of a model become attention, at what cost, and why the others do not. Nothing is changed.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or
            pkg.module:function.
        img_size: Pixels, 224 or 224x160 (height x width). None: the network's own, or 224.
    """
    settings = Network.of(network, model)

    import torch

    with network.named():
        parent = settings.open()
    planned = settings.plan_of(parent, torch.zeros(1, *example_shape(parent, img_size)))
    if output.as_json:
        print_json(planned.to_json())
    else:
        print(planned)
    return 0


COMMAND = Command(plan, "MODEL [options]", EXAMPLES)
