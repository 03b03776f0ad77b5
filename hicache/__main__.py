"""`python -m hicache` is the `hicache` command."""

import sys

from hicache.cli import main

if __name__ == "__main__":
    sys.exit(main())
