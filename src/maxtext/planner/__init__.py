"""The planner: estimates memory and speed of a run on hardware that is not attached, from the train step compiled for
its topology."""
