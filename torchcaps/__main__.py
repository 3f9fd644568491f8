"""`python -m torchcaps` is `torchcaps`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts the working folder first, and a file in it such as wandb.py would be imported. `torchcaps` does not.
    if Path(sys.path[0]).resolve() == Path.cwd() != Path(__file__).resolve().parents[1]:
        del sys.path[0]

    from torchcaps.cli import run

    run()
