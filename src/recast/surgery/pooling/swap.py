"""`attention_pool_`: replace a network's own pooling by attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn

from recast.config import typed
from recast.errors import RecastError
from recast.layers.attention_pool import attention_pools
from recast.layers.config import RecastConfig
from recast.layers.pool_config import AttentionPooling, PoolConfig
from recast.modes import computes_as
from recast.surgery.plan import NOTHING, Plan, plan_of, set_plan_
from recast.surgery.pooling.adapters import PooledLayer, class_head, hold_pool_
from recast.surgery.pooling.find import averages, find_place
from recast.surgery.records import Place
from recast.surgery.stride import replace_module_
from recast.surgery.wrappers import changeable
from recast.tracing.examples import Example, check_not_lazy

SIDE = 128
"""Side of the images for a network that does not say what it takes."""
NOT_COUNTED = "costs were not counted: recast.plan(model, images, where='none', pool=PoolConfig(...)) counts them"


@typed("model", "per_class", "config", "allow_change")
def attention_pool_(
    model: nn.Module,
    per_class: bool = False,
    *,
    config: PoolConfig | None = None,
    example: Example | None = None,
    allow_change: bool = False,
) -> nn.Module:
    """Replace the global pooling of `model` by attention (`AttentionPool`), in place.

    The classifier and the layers before it keep their weights. With the default start, an average, the network computes
    what it did. With `start="paper"` pooled features and logits are new: that start is for training.

    Args:
        model: a network with one global pooling.
        per_class: one token, and one map, per class. Row j of the classifier then reads the vector of class j
            (`ClassHead`), and timm's `forward_head(x, pre_logits=True)` returns these vectors as rows (B·K, C).
        config: all settings (`PoolConfig`), instead of `per_class`.
        example: an example as `plan` takes it. Default: noise of a size that the network takes.
        allow_change: accept other logits from a network that does not average over its last map (class token, maximum).

    Returns:
        The model.

    Raises:
        RecastError: with the model unchanged, for kind="none", a network that pools by attention already, one whose
            pooling cannot be found or replaced, and per class for logits that are not those of one linear layer.

    Source: Touvron et al. 2021, arXiv:2112.13692, section 3.1.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
        >>> images = torch.randn(2, 3, 8, 8)
        >>> before = model(images)
        >>> model = recast.attention_pool_(model, example=images)
        >>> torch.allclose(model(images), before, atol=1e-5)
        True
    """
    if (network := changeable(model)) is not model:
        attention_pool_(network, per_class, config=config, example=example, allow_change=allow_change)
        return model
    config = config or PoolConfig("per_class" if per_class else "single")
    if not isinstance(config, AttentionPooling):
        raise RecastError("pool.kind is none: use single or per_class")
    config = config.replace(allow_change=config.allow_change or allow_change)
    _check_own_pool(model)
    check_not_lazy(model)
    place = find_place(model, noise(model) if example is None else example)
    check_change(model, config, place)
    put_pool_(model, config, place)
    plan = plan_of(model) or Plan(type(model).__name__, RecastConfig(), (), (), (), NOTHING, NOTHING, NOT_COUNTED)
    set_plan_(model, replace(plan, pool=config, pool_cost=None, place=place))
    return model


def check_change(model: nn.Module, config: AttentionPooling, place: Place) -> None:
    """Raise RecastError if a pooling that starts as the average would change the logits without `allow_change`."""
    if config.start == "average" and not (place.averages or config.allow_change):
        raise RecastError(
            f"{type(model).__name__} does not average over its last map (class token, maximum): attention "
            "pooling changes its logits; to accept that pass allow_change=True"
        )


def put_pool_(model: nn.Module, config: AttentionPooling, place: Place) -> None:
    """Put attention pooling into a place that is known: the network does not run.

    Raises RecastError, and changes nothing, where it has been put in already, the place is that of another network, or
    one token per class is requested for a network without a single classifier.
    """
    _check_own_pool(model)
    at = _module_at(model, place.name)
    _check_place(model, at, place)
    classifier = _classifier(model, place) if config.kind == "per_class" else None
    head = None if classifier is None else class_head(classifier)
    pool = PooledLayer(place, None if head is None else head.out_features, config).to(next(model.parameters()))
    pool.train(model.training)
    if place.how == "module":
        pool.replaced = (at,)
        replace_module_(model, at, pool)
    elif place.how == "append":
        for layer in [nn.ReLU().train(model.training), pool] if place.relu else [pool]:
            # not append(): the number that comes next may be another layer's name
            at.add_module(next(str(i) for i in count(len(at._modules)) if not hasattr(at, str(i))), layer)
    else:
        model.attention_pool = pool
    hold_pool_(model, before_head=place.how == "head")
    if classifier is not None and head is not None:
        replace_module_(model, classifier, head)


def _check_place(model: nn.Module, at: nn.Module, place: Place) -> None:
    """Raise `RecastError` if the module `at` a place is not what it was when the place was found."""
    kind, problem = type(model).__name__, ""
    if place.how == "head" and not hasattr(model, "forward_head"):
        problem = f"{kind} has no forward_head"
    elif place.how == "head" and hasattr(model, "attention_pool"):
        problem = f"{kind} has an attention_pool of its own"
    elif place.how == "append" and not computes_as(at, nn.Sequential):
        problem = f"{place.name} is {type(at).__name__}, no nn.Sequential"
    elif place.how == "module" and averages(at, place) != place.averages:
        problem = f"{place.name} is {at}, planned as {'an average' if place.averages else 'no average'}: plan again"
    if problem:
        raise RecastError(f"the plan is for another model: {problem}")


def _classifier(model: nn.Module, place: Place) -> nn.Module:
    if place.classifier is None:
        problem = f"the logits of {type(model).__name__} are not those of one linear layer after its pooling"
        raise RecastError(f"{problem}, whose rows could go to the classes: take a single token (per_class=False)")
    return _module_at(model, place.classifier)


def _check_own_pool(model: nn.Module) -> None:
    if pools := attention_pools(model):
        raise RecastError(f"{next(iter(pools)) or type(model).__name__} is attention pooling already")


def _module_at(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise RecastError(f"the plan is for another model: {type(model).__name__} has no layer {name!r}") from None


def noise(model: nn.Module) -> Tensor:
    """Return two images of noise, of the size that the network says it takes."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise RecastError(f"{type(model).__name__} has no parameters, so nothing to pool")
    read = [module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)] or [3]
    stated, *sides = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (read[0], SIDE, SIDE))
    channels = stated if stated in read else read[0]  # timm states three channels whatever `in_chans` was
    shape = (channels, *(getattr(getattr(model, "patch_embed", None), "img_size", None) or sides))
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(parameter)
