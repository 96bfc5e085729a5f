"""What only the papers' experiments need: networks and settings."""
