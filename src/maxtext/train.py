"""`python -m maxtext.train`: the same as `maxtext train`.

This module is run and never imported: as a submodule it would replace the function `maxtext.train`.
"""

from maxtext.cli.forwarding import forward

if __name__ == "maxtext.train":
  raise ImportError("maxtext.train is a function: write `import maxtext`, then `maxtext.train(config)`.")
if __name__ == "__main__":
  forward("maxtext.train")
