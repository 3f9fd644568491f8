"""`python -m torchcaps` is `torchcaps`."""

from torchcaps.cli import run

if __name__ == "__main__":
    run()
