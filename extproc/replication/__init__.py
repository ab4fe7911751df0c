"""What extproc processes tell each other; knows the core."""
