"""What signatures say about the arguments of classes and functions: their names, and what each of them takes."""

import functools
import inspect
import types
import typing
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

UNKNOWN = inspect.Parameter.empty  # annotation of an argument that has none
# Kinds of objects in a recipe. The packages also have classes that run commands, for example
# torch.distributed.elastic.multiprocessing.SubprocessHandler; these kinds do not.
PARTS = (nn.Module, Optimizer, LRScheduler, LightningDataModule)
PLUGINS = (Precision, ClusterEnvironment, CheckpointIO, LayerSync)
NAMEABLE_CLASSES = (*PARTS, Callback, Logger, Profiler, Strategy, Accelerator, *PLUGINS)
PLAIN = (int, float, bool, str, type(None), Path, timedelta)


def parameters(owner: Any) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a class or function, or None if they are unknown.

    A class whose constructor takes `**options` also has the parameters of its bases.
    """
    try:
        known = dict(inspect.signature(owner, eval_str=True).parameters)
        for base in getattr(owner, "__mro__", ())[1:]:
            if not is_open(known):
                break
            known = {name: p for name, p in known.items() if p.kind is not p.VAR_KEYWORD}
            known = {**inspect.signature(base, eval_str=True).parameters, **known}
    except (TypeError, ValueError, NameError):
        return None
    return known


@functools.cache
def handed_on(owner: Any) -> list[str]:
    """Return the arguments that the parser finds for a class, also those of functions that its `**options` go to: it
    writes their defaults into the values of a run."""
    if not inspect.isclass(owner):
        return []
    return ArgumentParser(exit_on_error=False).add_class_arguments(owner, fail_untyped=False)


def is_open(known: dict[str, inspect.Parameter]) -> bool:
    """Return whether parameters take arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in known.values())


def choices(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return [choice for part in arguments for choice in choices(part)]
    return choices(arguments[0]) if origin is Annotated else [annotation]


def classes(annotation: Any) -> list[type]:
    """Return the classes whose subclasses can be named for an annotation: itself, its items, or what a callable
    returns. There are none if it takes no objects."""
    kinds: list[type] = []
    for choice in choices(annotation):
        if inspect.isclass(choice) and issubclass(choice, NAMEABLE_CLASSES):
            kinds.append(choice)
        for part in typing.get_args(choice):
            kinds += classes(part)
    return list(dict.fromkeys(kinds))


def is_plain(annotation: Any) -> bool:
    """Return whether an annotation takes numbers, texts, paths, None, and collections of these, and nothing else."""
    for choice in choices(annotation):
        origin, parts = typing.get_origin(choice), typing.get_args(choice)
        known = origin is typing.Literal or choice in PLAIN or choice is Ellipsis
        if not known and (origin is type or not parts or not all(map(is_plain, parts))):
            return False
    return True


def family(base: type) -> set[type]:
    """Return a class and all its subclasses, which can be named without their modules."""
    return {base}.union(*map(family, type.__subclasses__(base)))
