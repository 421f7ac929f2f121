"""`python -m maxtext.train_compile`: the same as `maxtext plan`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
  sys.exit(main(["plan", *sys.argv[1:]]))
