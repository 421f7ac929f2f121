"""Weights of other frameworks, through each family's table of names."""
