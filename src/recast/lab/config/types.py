"""Ranges as types, and marks of fields, for the configs of the lab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator

from recast.config import Float, Int

Workers = Annotated[Int, Ge(0), Le(256)]
Threads = Annotated[Int, Ge(1), Le(2**10)]
Probability = Annotated[Float, Ge(0), Le(1)]
BelowOne = Annotated[Float, Ge(0), Lt(1)]
Share = Annotated[Float, Gt(0), Le(1)]
ProperShare = Annotated[Float, Gt(0), Lt(1)]
CropShare = Annotated[Float, Ge(0.05), Le(1)]
Words = Annotated[list[str], BeforeValidator(lambda words: [words] if isinstance(words, str) else words)]
"""Texts, one of which may stand alone."""


@dataclass(frozen=True)
class MayChange:
    """Marks what a run may be resumed with: how it is carried out, not what it computes."""
