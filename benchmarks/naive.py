"""GPSA as the papers write it, on the padded tokens, as fast as that form allows: the baseline of the fast forms.

    A = σ(λ)·softmax(v_pos·r) + (1 − σ(λ))·softmax(Q Kᵀ / √D)        y = b + Σ_h A_h X W_val W_out^h

`r` holds ‖δ‖² and δ of every pair of tokens (d'Ascoli et al. 2021, Eq. 4), `v_pos` −α and 2αΔ of every head. The
positional map is computed once per batch. All heads share one product with the values, and W_out is one product.
`interior=False`: every padded token is a query and the result is cropped, the usual form on padded tokens.
`interior=True`: only the output's pixels are queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NaiveGPSA(nn.Module):
    """3×3 GPSA with zero padding 1, `channels` in and out, and 9 heads."""

    def __init__(self, channels: int, interior: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.interior = 9, channels // 9, interior
        self.value = nn.Linear(channels, channels, bias=False)
        self.query = nn.Linear(channels, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(channels, self.heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * channels, channels)
        offsets = [(a - 1.0, c - 1.0) for a in range(3) for c in range(3)]
        self.center, self.alpha = nn.Parameter(torch.tensor(offsets)), nn.Parameter(torch.ones(9))
        self.lam = nn.Parameter(torch.ones(9))

    def positional(self, rows: int, columns: int) -> Tensor:
        """Return softmax(v_pos · r) over the tokens of a padded grid, (heads, queries, tokens)."""
        axes = (torch.arange(float(length), device=self.alpha.device) for length in (rows, columns))
        tokens = torch.cartesian_prod(*axes)
        queries = tokens.view(rows, columns, 2)[1:-1, 1:-1].reshape(-1, 2) if self.interior else tokens
        delta = tokens - queries[:, None]
        r = torch.cat([delta.square().sum(-1, keepdim=True), delta], -1)
        v_pos = torch.cat([-self.alpha[:, None], 2 * self.alpha[:, None] * self.center], -1)
        return torch.softmax((r @ v_pos.T).permute(2, 0, 1), -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = F.pad(x, (1, 1, 1, 1)).flatten(2).transpose(1, 2)
        queries = x.flatten(2).transpose(1, 2) if self.interior else tokens
        query, key = self.query(queries * self.head_dim**-0.5), self.key(tokens)
        query, key = (t.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for t in (query, key))
        content = torch.softmax(query @ key.transpose(-1, -2), -1)
        share = torch.sigmoid(self.lam)[:, None, None]
        attention = share * self.positional(height + 2, width + 2) + (1 - share) * content
        gathered = (attention.flatten(1, 2) @ self.value(tokens)).unflatten(1, (self.heads, -1))
        y = self.out(gathered.transpose(1, 2).flatten(2))
        if not self.interior:
            y = y.unflatten(1, (height + 2, width + 2))[:, 1:-1, 1:-1].flatten(1, 2)
        return y.transpose(1, 2).view(batch, channels, height, width)


def map_bytes(batch: int, side: int) -> int:
    """Return the bytes of maps that a training step of the naive form keeps: content and mix per image, in fp32."""
    tokens = (side + 2) ** 2
    return 2 * 4 * batch * 9 * tokens * tokens
