"""`python -m maxtext.train_compile`: the same as `maxtext plan`."""

from maxtext.cli.forwarding import forward

if __name__ == "__main__":
  forward("maxtext.train_compile")
