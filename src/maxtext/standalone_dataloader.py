"""`python -m maxtext.standalone_dataloader`: the same as `maxtext data bench`."""

from maxtext.cli.forwarding import forward

if __name__ == "__main__":
  forward("maxtext.standalone_dataloader")
