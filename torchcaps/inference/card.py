"""The model card of a trained network: what the Hugging Face Hub shows of it, filled in from its training."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import yaml

import torchcaps
from torchcaps.data import ImageData
from torchcaps.inference.trained import Trained

BODY = """# {title}

A capsule network of [torchcaps](https://pypi.org/project/torchcaps/), trained on {data}.

```python
from torchcaps.inference import from_pretrained

trained = from_pretrained("FOLDER OR USER/NAME")
trained.probabilities(inputs)  # (batch, {classes})
```

| | |
|---|---|
{facts}

## Classes

{names}

## Training

    {command}

All values of the recipe are in `config.json`.

## Limits

It knows its {classes} classes only: an input of any other kind gets one of them too. Inputs must be prepared as in the
training; `trained.data` does this. Its accuracy on other data is not known.
"""


def model_card(trained: Trained, license: str = "unknown") -> str:
    """Return the model card: YAML that the Hub reads, then Markdown.

    Args:
        trained: the network.
        license: license of the weights, by its name on the Hub.
    """
    values, about = trained.values, trained.about
    network, data = (_class(part) for part in (values["model"]["network"], values["data"]))
    recipe = str(about.get("recipe") or "")
    facts = {
        "network": f"{network}, {sum(p.numel() for p in trained.network.parameters()):,} parameters",
        "data": data,
        "temperature of the softmax": trained.temperature,
        **{name: value for name, value in _flat(about) if name not in ("recipe", "temperature", "command")},
        "torchcaps, torch": f"{torchcaps.__version__}, {torch.__version__}" if "versions" not in about else None,
    }
    body = BODY.format(
        title=f"{network} on {data}",
        data=data,
        classes=len(trained.names),
        facts="\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items() if value is not None),
        names=", ".join(map(_cell, trained.names)),
        command=_cell(about.get("command") or (f"torchcaps train {recipe}" if recipe else "torchcaps train RECIPE")),
    )
    images = isinstance(trained.data, ImageData)
    head = {
        "library_name": "torchcaps",
        "pipeline_tag": "image-classification" if images else "text-classification",
        "tags": ["torchcaps", "capsule-network", "pytorch"],
        "license": license,
        "metrics": ["accuracy"],
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def _class(part: Mapping[str, Any]) -> str:
    return str(part["class_path"]).rpartition(".")[2]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Return the texts and numbers in nested values, by their names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name} ")
        elif isinstance(value, float):
            yield f"{before}{name}", f"{value:.4f}"
        elif isinstance(value, str | int):
            yield f"{before}{name}", value


def _cell(value: Any) -> str:
    """Return a value as a cell of a table: one line, without the table's own sign."""
    return " ".join(str(value).split()).replace("|", "\\|")
