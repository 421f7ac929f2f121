"""What a run would do on hardware that is not here: the real step, compiled for the real topology."""
