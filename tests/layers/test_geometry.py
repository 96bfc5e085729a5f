"""Geometry: what is impossible, what is too small, round trips. `surgery/rules` compares it with the convolutions."""

import json
from typing import Any

import pytest

from recast import Geometry, RecastError


@pytest.mark.parametrize(
    "fields",
    [
        *[{"kernel": (0, 3)}, {"stride": (0, 1)}, {"dilation": (1, 0)}, {"padding": (0, -1, 0, 0)}],
        *[{"upsample": (2, 0), "is_transposed": True}, {"padding_mode": "mirror"}],
        *[{"padding_mode": "reflect", "same": True}, {"padding_mode": "circular", "is_transposed": True}],
    ],
)
def test_impossible_geometries_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecastError):
        Geometry(**{"kernel": (3, 3)} | fields)


def test_an_input_smaller_than_the_kernel_is_refused() -> None:
    with pytest.raises(RecastError, match="4×9"):
        Geometry((5, 5)).output_size(4, 9)
    assert Geometry((5, 5)).output_size(5, 5) == (1, 1)


def test_fields_that_say_where_queries_are_tell_geometries_apart_and_come_back() -> None:
    kinds = [Geometry((2, 2)), Geometry((2, 2), same=True), Geometry((2, 2), is_transposed=True)]
    kinds += [Geometry((2, 2), upsample=(2, 1)), Geometry((2, 2), upsample=(1, 2))]
    kinds += [Geometry((3, 2), (2, 1), (1, 0, 2, 3), "reflect", (1, 3))]
    assert len(set(kinds)) == len(kinds)
    for geometry in kinds:
        assert Geometry(**json.loads(json.dumps(geometry.to_dict()))) == geometry
