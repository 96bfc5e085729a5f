"""From which measured values on a head counts as awake, and a map as uniform. Imports no torch."""

AWAKE = 0.01
"""Share of a layer's output that a head's content must make, beyond what a global mean would, to count as awake."""
UNIFORM = 0.98
"""Mean entropy of the content maps, in shares of its maximum, from which on they are called uniform."""
