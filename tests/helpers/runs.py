"""Runs of networks that no command has trained."""

from pathlib import Path
from typing import Any

from torch import nn

from torchcaps.data import LabeledData
from torchcaps.recipes import Recipe
from torchcaps.runs import Checkpoint, Run


def run_of(
    network: nn.Module, data: LabeledData, temperature: float | None = None, facts: dict[str, Any] | None = None
) -> Run:
    """Return a run whose network and data are these."""
    name = getattr(network, "name", None) or type(network).__name__
    values = {"model": {"network": f"torchcaps.models.{name}"}, "data": {"class_path": type(data).__name__}}
    run = Run(
        Checkpoint(Path("memory"), values, network.state_dict(), facts or {}, temperature),
        Recipe("own", (), {}),
        which="memory",
    )
    run.__dict__["_parts"] = (network.eval(), data)  # what a run builds once
    return run
