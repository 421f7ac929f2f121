"""`python -m maxtext.decode`: the same as `maxtext decode`."""

from maxtext.cli.forwarding import forward

if __name__ == "__main__":
  forward("maxtext.decode")
