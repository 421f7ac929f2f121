"""Pre-training, by the names of the specification."""
