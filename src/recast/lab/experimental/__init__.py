"""What is not shown to help yet."""
