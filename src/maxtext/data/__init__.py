"""What a run is fed: batches as a function of (seed, step, row), so that nothing depends on the number of hosts."""
