"""A check of what comes from the Hugging Face Hub."""

from typing import Any


def refuse_kernels(config: dict[str, Any]) -> None:
    """Raise a ValueError if a configuration of transformers names code of the Hub, which would then run."""
    if _names_kernels(config):
        raise ValueError("its config.json names a kernel of the Hub as attn_implementation, which is code: take it out")


def _names_kernels(values: Any) -> bool:
    """Return whether values of a configuration, nested ones too, name a kernel that would be fetched from the Hub."""
    if not isinstance(values, dict):
        return False
    names = (str(value) for name, value in values.items() if name.endswith("attn_implementation"))
    return any("/" in name for name in names) or any(_names_kernels(value) for value in values.values())
