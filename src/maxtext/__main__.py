"""`python -m maxtext` is `maxtext`."""

import sys

from maxtext.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
