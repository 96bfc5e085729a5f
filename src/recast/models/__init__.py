"""Networks by name: where they come from, and `build`, a network from a name and a checkpoint."""
