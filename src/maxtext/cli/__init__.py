"""The `maxtext` command: thin, and quick to start."""
