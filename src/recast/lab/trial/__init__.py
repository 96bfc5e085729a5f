"""Does it pay on my images? `try_` trains the tail of a network in several ways, in minutes, and says so."""

from __future__ import annotations

from recast.lab.trial.answer import Answer
from recast.lab.trial.run import try_

__all__ = ["Answer", "try_"]
