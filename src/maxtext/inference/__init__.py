"""Inference: the modules that train also prefill and decode, for `maxtext decode`, `maxtext serve` and rollouts."""
