"""Training: the step, the loop, what it starts from and saves, objectives and callbacks."""
