"""Where does a network look for its classes? One call, without a page."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recast.analysis.grids import watched_grids
from recast.analysis.record import PoolMaps, watched_pools
from recast.analysis.tokens import SILENT, TokenMaps, token_names, watched_tokens
from recast.errors import RecastError
from recast.tracing.hooks import in_eval


@torch.no_grad()
def class_maps(model: nn.Module, x: Tensor) -> Tensor:
    """Maps (B, T, h, w) over the grid of features of images x (B, C, height, width), the mean over heads.

    T = K of a network that pools with one token a class (K classes), else 1: the single token of its pool, or the class
    token of its last attention (CaiT's second class attention, DeiT's last block). The weights of the patches alone:
    they sum to 1 less what the tokens before them kept. The network is run in eval mode and left as it was.
    Raises `RecastError` for a network that has neither, or whose attention cannot be seen.
    Touvron et al. 2021, arXiv:2112.13692 (pools), arXiv:2103.17239 (CaiT).
    """
    pools: list[Tensor] = []
    tokens: list[Tensor] = []
    silent: list[str] = []
    has_class_token = token_names(model, 1) == ("class token",)  # and it is read

    def keep_pool(name: str, maps: PoolMaps) -> None:
        if not maps.has_grid:
            raise RecastError(f"{name} of {type(model).__name__} pools tokens whose grid is not known: there is no map")
        pools[:] = [maps.weights.mean(1)]

    def keep_tokens(_name: str, maps: TokenMaps) -> None:
        if has_class_token and maps.prefix.shape[2]:
            tokens[:] = [maps.prefix[:, :, :1].mean(1)]

    def leave_out(name: str, reason: str) -> None:
        if reason == SILENT:
            silent.append(name)

    with watched_grids(model) as grids, watched_pools(model, grids, keep_pool), in_eval(model):
        with watched_tokens(model, grids, keep_tokens, leave_out):
            model(x)
    if pools:
        return pools[0]
    if silent:
        raise RecastError(f"the class token of {type(model).__name__} cannot be followed: {silent[0]} {SILENT}")
    if not tokens:
        raise RecastError(
            f"{type(model).__name__} has no class maps: expected attention pooling, or a class token; "
            "recast.surgery.pooling.swap.attention_pool_ gives a network attention pooling"
        )
    return tokens[0]
