"""Encoders of images and sound: keys to a tower, names of weights, entries of `config.json`."""
