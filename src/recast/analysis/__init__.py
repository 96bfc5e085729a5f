"""Analyses of heads and features, for any network and images."""
