"""The bench: train, evaluate, explain, report, the command line."""
