"""The model card of a trained network: what the Hugging Face Hub shows of it, filled in from its training."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import torchcaps
from torchcaps.data import ImageData, TextData
from torchcaps.data.labeled import TERMS
from torchcaps.recipes.values import name_of
from torchcaps.runs import Run
from torchcaps.utils.extras import needs

BODY = """# {title}

A capsule network of [torchcaps](https://pypi.org/project/torchcaps/), trained on {data}.

```python
from torchcaps.deploy import from_pretrained

run = from_pretrained({place!r})
{call}
```

| | |
|---|---|
{facts}

## {heading}

{names}

## Training

    {command}

All values of the recipe are in `config.json`.

## Limits

{limits} Inputs must be prepared as in the training;
`run.data()` does this. Its accuracy on other data is not known.
"""
# By what is predicted: how to use the network, what it cannot do, and metrics of the test by their names on the Hub.
CALLS = {
    "class": "run.probabilities(inputs)  # (batch, {})",
    "labels": "run.probabilities(inputs) > run.thresholds  # (batch, {}), which labels are predicted",
    "numbers": "run.scores(inputs)  # (batch, {}), in the units of the training",
    "masks": "run.probabilities(inputs)  # (batch, {}, height, width)",
}
LIMITS = {
    "class": "It knows its {} classes only: an input of any other kind gets one of them too.",
    "labels": "It knows its {} labels only: an input of any other kind may get some of them too.",
    "numbers": "It gives {} numbers for every input, also for one of any other kind.",
    "masks": "It knows its {} classes only: a pixel of anything else gets one of them too.",
}
METRICS = {
    "class": {"accuracy": "accuracy"},
    "labels": {"exact_match": "exact_match", "f1": "macro_f1"},
    "numbers": {"r_squared": "r2"},
    "masks": {"dice": "dice", "mean_iou": "iou"},
}


def model_card(run: Run, place: str, license: str) -> str:
    """Return the model card: YAML that the Hub reads, then Markdown.

    Args:
        run: the run of the network.
        place: its folder or its repository on the Hub, for the example.
        license: license of the weights, by its name on the Hub.
    """
    with needs("hub"):
        from huggingface_hub import EvalResult, ModelCardData

    values, about = run.values, run.facts
    network, data = run.network_name, name_of(values["data"])
    title = f"{network} on {data}"
    kinds = ((TextData, "text-classification"), (ImageData, "image-classification"))
    classifies = [task for kind, task in kinds if isinstance(run.data(), kind) and run.target in ("class", "labels")]
    task = "image-segmentation" if run.target == "masks" else next(iter(classifies), "other")
    metrics = about.get("metrics")
    values_of: Mapping[str, Any] = metrics if isinstance(metrics, Mapping) else {}
    results = [
        EvalResult(task, data.lower(), data, kind, value, metric_name=f"test {name.replace('_', ' ')}")
        for kind, name in METRICS[run.target].items()
        if isinstance(value := values_of.get(f"test/{name}"), float)
    ]
    head = ModelCardData(
        library_name="torchcaps",
        license=license,
        metrics=list(METRICS[run.target]),
        model_name=title,
        pipeline_tag=task,
        tags=["torchcaps", "capsule-network", "pytorch"],
        eval_results=results or None,
    )
    names = run.names
    if run.target == "labels":
        names = [f"{name} (above {x:.4f})" for name, x in zip(names, run.thresholds.tolist(), strict=True)]
    facts = {
        "network": f"{network}, {sum(p.numel() for p in run.network().parameters()):,} parameters",
        "data": data,
        "temperature of the softmax": run.temperature,
        **{name: value for name, value in _flat(about) if name not in ("recipe", "temperature", "command")},
        "saved by": f"torchcaps {torchcaps.__version__}, torch {torch.__version__}",
    }
    body = BODY.format(
        place=place,
        title=title,
        data=data,
        call=CALLS[run.target].format(len(run.names)),
        limits=LIMITS[run.target].format(len(run.names)),
        heading=TERMS[run.target][1].capitalize(),
        facts="\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items() if value is not None),
        names=", ".join(map(_cell, names)),
        command=_cell(about.get("command") or f"torchcaps train {about.get('recipe') or 'RECIPE'}"),
    )
    return f"---\n{head.to_yaml()}\n---\n\n{body}"


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Return the texts and numbers in nested values, by their names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name} ")
        elif isinstance(value, str | int | float):
            yield f"{before}{name}", f"{value:.4f}" if isinstance(value, float) else value


def _cell(value: Any) -> str:
    """Return a value as a cell of a table: one line, without the table's own sign."""
    return " ".join(str(value).split()).replace("|", "\\|")
