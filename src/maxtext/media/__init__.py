"""Images, sound and video as a model's towers take them: NumPy, without JAX, configuration or families."""
