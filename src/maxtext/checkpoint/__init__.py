"""Checkpoints: one state, the data's position and the metadata of both, saved in atomic steps and restored.

It knows pytrees, names and folders, and no trainer.
"""
