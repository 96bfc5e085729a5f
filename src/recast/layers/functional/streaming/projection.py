"""Products that add to what is there; half precision is summed in fp32. W_out of one head, whatever the groups."""

from __future__ import annotations

import torch
from torch import Tensor


def project(gathered: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """out (T, O) += gathered (T, C) times W_out^h, `weight` (O, C/g)."""
    if groups == 1:
        add_mm(out, gathered, weight.T)
    elif weight.shape[0] == groups == gathered.shape[1]:
        out.addcmul_(gathered, weight[:, 0])
    else:
        per_group = gathered.unflatten(1, (groups, -1)).transpose(0, 1)
        product = torch.bmm(per_group, weight.unflatten(0, (groups, -1)).transpose(1, 2))
        out.unflatten(1, (groups, -1)).add_(product.transpose(0, 1))


def add_mm(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def add_bmm(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dtype == a.dtype:
        out.baddbmm_(a, b)
    else:
        out.add_(torch.bmm(a, b))


def project_backward(dy: Tensor, weight: Tensor, groups: int, out: Tensor) -> None:
    """out (T, C) = dy (T, O) times the transpose of W_out^h."""
    if groups == 1:
        torch.mm(dy, weight, out=out)
    elif weight.shape[0] == groups == out.shape[1]:
        torch.mul(dy, weight[:, 0], out=out)
    else:
        per_group = dy.unflatten(1, (groups, -1)).transpose(0, 1)
        product = torch.bmm(per_group, weight.unflatten(0, (groups, -1)))
        out.unflatten(1, (groups, -1)).copy_(product.transpose(0, 1))


def weight_gradient(dy: Tensor, gathered: Tensor, groups: int, out: Tensor) -> None:
    """out (O, C/g) += dyᵀ gathered, the groups' blocks alone."""
    if groups == 1:
        add_mm(out, dy.T, gathered)
    elif out.shape[0] == groups == gathered.shape[1]:
        out[:, 0].add_((dy * gathered).sum(0, dtype=out.dtype))
    else:
        per_group = dy.unflatten(1, (groups, -1)).permute(1, 2, 0)
        product = torch.bmm(per_group, gathered.unflatten(1, (groups, -1)).transpose(0, 1))
        out.add_(product.flatten(0, 1))
