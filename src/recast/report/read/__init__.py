"""Files of a run folder as plain data: what is there must be whole, what is not there is None or empty."""
