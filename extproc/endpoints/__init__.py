"""What is known of engines, as columns of numbers."""
