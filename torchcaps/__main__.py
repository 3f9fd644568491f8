"""`python -m torchcaps` is `torchcaps`."""

import sys

from torchcaps.cli import main

if __name__ == "__main__":
    sys.exit(main())
