"""Does it pay on my images? `try_` trains the tail of a network in several ways, in minutes, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recast.lab.plugins import public_names

if TYPE_CHECKING:
    from recast.lab.trial.answer import Answer as Answer
    from recast.lab.trial.run import try_ as try_

__getattr__ = public_names(__name__, {"Answer": "answer", "try_": "run"})
