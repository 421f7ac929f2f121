"""`python -m maxtext.train`: the same as `maxtext train`."""

from maxtext.cli.forwarding import forward

if __name__ == "__main__":
  forward("maxtext.train")
