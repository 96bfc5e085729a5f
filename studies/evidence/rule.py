"""When a run says something about attention, and a network about converged networks: one rule for every study."""

AWAKE_SHARE, TRAINED = 0.5, 95.0
"""Of the heads; and percent of the training images classified correctly."""
UNDECIDED = "not decidable"
ASLEEP, TOO_SHORT = f"{UNDECIDED}: attention slept", f"{UNDECIDED}: too short"


def is_awake(awake: float, heads: float) -> bool:
    """Return True if a run with so many heads awake says something about attention."""
    return awake >= AWAKE_SHARE * heads
