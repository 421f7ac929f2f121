"""`python -m maxtext.sft_trainer`: the same as `maxtext sft`."""

from maxtext.cli.forwarding import forward

if __name__ == "__main__":
  forward("maxtext.sft_trainer")
