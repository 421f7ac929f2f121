"""Benchmarks that come with the command: `maxtext bench serve` and `maxtext data bench`."""
