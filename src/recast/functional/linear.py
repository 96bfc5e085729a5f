"""Content attention with a cost linear in the tokens: no map between queries and keys is ever made."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.functional.weights import Weights


def linear_content(values: Tensor, query: Tensor, key: Tensor, w: Weights, groups: int) -> Tensor:
    """Σ_h content_h · softmax_D(Q_h) [softmax_tokens(K_h)ᵀ V] W_out^h, (B, N, O), by the product's other order.

    `values` (B, M, C), `query` (B, N, H_c·D) and `key` (B, M, H_c·D) over the tokens that content attention sees. The
    heads share V, so that one product gives all of their D × C summaries; W_out is applied to these D rows instead of
    the N queries. Efficient attention (Shen et al. 2021, Eq. 3) with gates.
    """
    heads = w.with_content()
    query, key = query.unflatten(-1, (len(heads), -1)), torch.softmax(key, dim=-2)
    summaries = (key.transpose(1, 2) @ values).unflatten(1, (len(heads), -1))  # (B, H_c, D, C)
    taps = w.weight.flatten(2)[..., list(heads)].to(values.dtype).unflatten(0, (groups, -1))  # (g, O/g, C/g, H_c)
    per_group = summaries.unflatten(-1, (groups, -1))
    projected = torch.einsum("bhdgc,goch->bhdgo", per_group, taps).flatten(3)  # (B, H_c, D, O)
    projected = projected * w.gates.content.to(values.dtype)[:, None, None]
    return torch.softmax(query, dim=-1).flatten(2) @ projected.flatten(1, 2)
