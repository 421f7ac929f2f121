"""Optimizers and learning rates, on Optax."""
