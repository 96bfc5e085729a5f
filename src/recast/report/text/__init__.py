"""How numbers and arms are written, and the sentence that a run's numbers allow."""
