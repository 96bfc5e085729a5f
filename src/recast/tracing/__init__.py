"""What a network does when it runs: shapes, costs, blocks."""
