from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.lab.data import Loader
from recast.lab.data.datasets import LabelledImages


@pytest.fixture
def epoch_of() -> Callable[..., tuple[Tensor, list[int]]]:
    """All images and labels of an epoch in its order, put together again from the shares of all parts."""

    def whole_epoch(data: LabelledImages, batch_size: int, parts: int = 1, **options: Any) -> tuple[Tensor, list[int]]:
        sources = [iter(Loader(data, batch_size, part=part, parts=parts, **options)) for part in range(parts)]
        images, labels = [], []
        while shares := [share for source in sources if (share := next(source, None)) is not None]:
            count = sum(len(share[1]) for share in shares)
            whole = torch.empty(count, *shares[0][0].shape[1:]), torch.empty(count, dtype=torch.long)
            for part, share in enumerate(shares):
                for place, values in zip(whole, share, strict=True):
                    place[part::parts] = values
            images.append(whole[0])
            labels += whole[1].tolist()
        return torch.cat(images), labels

    return whole_epoch
