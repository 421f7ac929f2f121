"""Building blocks of models. They take a small spec (what) and a `How` (how this run executes it), never a config."""
