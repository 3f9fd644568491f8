"""A network with routing and two without, among clutter: does routing help to find what belongs together?

    python examples/demo.py

The commands of `make demo`, one after the other; each could be typed alone. They run in one process, which imports
everything once. The networks differ in one layer: routing, uniform coefficients, and an average in place of capsules.
"""

import shlex
import sys

from torchcaps.cli import main

ROWS = [f"compare/clutter/{name}" for name in ("variational-bayes", "uniform", "average")]
COMMANDS = [
    *(f"train {row}" for row in ROWS),
    f"evaluate {' '.join(ROWS)} --protocols affine overlap",
    f"explain {ROWS[0]}",
]


if __name__ == "__main__":
    for command in COMMANDS:
        print(f"\n$ torchcaps {command}", flush=True)
        status = main(shlex.split(command))
        if status:
            sys.exit(status)
