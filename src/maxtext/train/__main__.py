"""`python -m maxtext.train [file.yml] key=value ...` is `maxtext train`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
  sys.exit(main(["train", *sys.argv[1:]]))
