"""What a run shows of itself. Nothing here decides what the run does."""
