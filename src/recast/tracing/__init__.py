"""Observation of running networks: hooks, shapes, costs."""
