"""A queue that trains the rows of the papers, and what came of it."""

from torchcaps.extras import needs

with needs("train"):
    from torchcaps.reproduce.plan import Run, plan
    from torchcaps.reproduce.queue import measure, missing, reproduce, table
    from torchcaps.reproduce.results import Result, add_results, known_results, read_results, summary

__all__ = [
    "Result",
    "Run",
    "add_results",
    "known_results",
    "measure",
    "missing",
    "plan",
    "read_results",
    "reproduce",
    "summary",
    "table",
]
