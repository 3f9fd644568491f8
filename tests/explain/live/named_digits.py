"""A live page of a network of digits whose classes have other names, in a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import live


def trained(kind: str, given: str) -> Any:
    """Return a network of digits with these names, a list as JSON."""
    from torchcaps.data import Digits
    from torchcaps.deploy import Trained
    from torchcaps.models import create_model

    class Named(Digits):
        names = json.loads(given)

    return Trained(create_model("capsnet_digits", pretrained="digits").eval(), Named(), {})


if __name__ == "__main__":
    live.trained = trained
    live.main(*sys.argv[1:])
