"""Which classes and functions a recipe may name without `--allow_code`, so that a recipe from elsewhere runs no code.

The parser of recipes (jsonargparse) imports what a recipe or an override names, in `class_path` or as a text where an
argument is a class or a callable. All these imports go through one function, which is guarded here.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

PACKAGES = ("torchcaps", "torch", "lightning", "torchmetrics")
# The packages have classes that run commands, for example torch.distributed.elastic.multiprocessing.SubprocessHandler.
# These kinds do not.
PARTS = (nn.Module, Optimizer, LRScheduler, LightningDataModule)
PLUGINS = (Precision, ClusterEnvironment, CheckpointIO, LayerSync)
KINDS = (*PARTS, Callback, Logger, Profiler, Strategy, Accelerator, *PLUGINS)

_refused: ContextVar[set[str] | None] = ContextVar("_refused", default=None)  # None: any name is allowed


class NotAllowed(ValueError):
    """A recipe names a class or a function that it may name only with `--allow_code`."""


@contextmanager
def known_names_only() -> Iterator[None]:
    """Within this context the parser of recipes imports nothing that a recipe needs `--allow_code` for."""
    token = _refused.set(set())
    try:
        yield
    finally:
        _refused.reset(token)


def refused_names() -> list[str]:
    """Return the names that were refused in this context."""
    return sorted(_refused.get() or ())


def why_refused(value: Any) -> str | None:
    """Return a message if this is a name that was refused in this context, otherwise None."""
    if not isinstance(value, str) or value not in (_refused.get() or ()):
        return None
    packages = f"{', '.join(PACKAGES[:-1])} and {PACKAGES[-1]}"
    return (
        f"{value} is not among the classes of {packages} that every recipe may name: add --allow_code to run its code"
    )


def check_name(name: str, import_object: Callable[[str], Any]) -> Any:
    """Import what a recipe names.

    Args:
        name: dotted name.
        import_object: function that imports it.

    Raises:
        NotAllowed: the recipe may not name it without `--allow_code`. Unless it is in one of PACKAGES, nothing was
            imported.
    """
    refused = _refused.get()
    first, *others = name.split(".") if isinstance(name, str) else [""]
    if refused is None or not others or not all(part.isidentifier() for part in (first, *others)):
        return import_object(name)
    if first in PACKAGES and not any(part.startswith("_") for part in others):
        found = import_object(name)
        if _is_allowed(found):
            return found
    refused.add(name)
    raise NotAllowed(why_refused(name))


def _is_allowed(found: Any) -> bool:
    """Return whether a recipe may name a class or function. Where it was defined counts: `torch.os.system` is of os."""
    home = str(getattr(found, "__module__", "")).partition(".")[0]
    if inspect.isclass(found):
        return home in PACKAGES and issubclass(found, KINDS)
    if not inspect.isfunction(found) or home != PACKAGES[0]:
        return False
    try:
        returned = inspect.signature(found, eval_str=True).return_annotation
    except (TypeError, NameError):
        return False
    return inspect.isclass(returned) and issubclass(returned, (*PARTS, Tensor))


def _guard(module: str) -> None:
    """Let a module of jsonargparse import what values name with `check_name`."""
    parser: Any = importlib.import_module(f"jsonargparse.{module}")
    original = parser.import_object

    @functools.wraps(original)
    def import_object(name: Any, *options: Any, **more: Any) -> Any:
        if name == "jsonargparse.ArgumentParser":  # the parser itself looks it up; it cannot do harm
            return original(name, *options, **more)
        return check_name(name, lambda path: original(path, *options, **more))

    parser.import_object = import_object


try:
    for _module in ("_typehints", "_actions"):
        _guard(_module)
except AttributeError as error:  # without the guard, recipes are not safe
    version = importlib.import_module("jsonargparse").__version__
    raise ImportError(f'torchcaps cannot guard jsonargparse {version}: pip install "jsonargparse<5"') from error
