"""The planner: memory and speed of a run on hardware that is not here, from the train step compiled for its
topology."""
