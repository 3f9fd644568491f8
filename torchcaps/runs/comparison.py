"""What a training that is built of a run may change of it, and what must be said about a change."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcaps.data.notes import say
from torchcaps.recipes.values import leaves, own_arguments, spelled
from torchcaps.runs.checkpoint import A_CHECKPOINT, Checkpoint, check_alike
from torchcaps.runs.places import warn
from torchcaps.training.build import Training
from torchcaps.training.one_cycle import OneCycle
from torchcaps.training.overrides import Override
from torchcaps.utils.checks import counted, one_line

EXACT = tuple(  # options of the trainer on which the weights depend
    f"trainer.{name}"
    for name in ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
)
LENGTHS = ("trainer.max_epochs", "trainer.max_steps")
IRRELEVANT = (".root", ".cache", ".num_workers")  # options of data that do not change the samples
ENCODER = ("data.init_args.encoder", "data.init_args.revision")


def compare(path: Path, training: Training, overrides: Sequence[Override]) -> None:
    """Check and say which values of a run a training has changed; shapes do not show iterations, for example.

    Args:
        path: the checkpoint of the run.
        training: the training that was built of it.
        overrides: the values that were given.

    Raises:
        ValueError: the network would compute something else or, in a training that goes on, the model would.
    """
    then, now = (_by_name(values) for values in (training.given.recipe.config, training.values))
    given = {override.path[-1] for override in overrides}
    resumed = training.resumed is not None
    part = "" if resumed else "network."
    cycles = any(isinstance(x, OneCycle) for x in training.trainer.callbacks)  # type: ignore[attr-defined]
    for name in {**then, **now}:
        if then.get(name) == now.get(name) or (name not in then and name.rpartition(".")[2] not in given):
            continue  # a name that the run lacks and nobody gave is that of a newer argument, with its default
        changed = f"{path} was trained with {name} = {then.get(name)}, and now it is {now.get(name)}"
        if name.startswith((f"model.{part}", "model.class_weights")):
            raise ValueError(f"{changed}: leave out what changes it")
        if name in ENCODER:  # it may be the same one under two names
            warn(f"{changed}: the network cannot read embeddings of another encoder")
        elif resumed and name == "seed_everything":
            warn(f"{changed}: the run keeps its seed")
        elif resumed and (name in EXACT or (name.startswith("data.") and not name.endswith(IRRELEVANT))):
            warn(f"{changed}: the run will not continue exactly")
        elif resumed and cycles and name in LENGTHS and _is_more(now.get(name), then.get(name)):
            warn(f"{changed}: the learning rate jumps, because OneCycle now goes once over the longer training")
    _compare_data(path, training, overrides)


def _is_more(now: Any, then: Any) -> bool:
    return isinstance(now, int) and isinstance(then, int) and now > then


def _compare_data(path: Path, training: Training, overrides: Sequence[Override]) -> None:
    """Say if own data are split or read otherwise than in the run."""
    then, now = (own_arguments(values["data"]) for values in (training.given.recipe.config, training.values))
    given = [override.path for override in overrides if override.path[0] == "data"]
    if "split" in now and any(names[-1] == "split" for names in given) and not path.is_dir():  # which has no split
        say(f"the split is not that of {path}: its network may have been trained on what is now tested")
    if then.get("window") != now.get("window"):
        say(f"data.window is {now['window']}, and the network was trained with {then['window']}")


def check_progress(checkpoint: Checkpoint, training: Training) -> None:
    """Check that a training does not end before the checkpoint that it goes on from."""
    path, step = checkpoint.path, checkpoint.step
    most, steps = training.trainer.max_epochs, training.trainer.max_steps
    try:
        loop = checkpoint.part("loops")["fit_loop"]
        finished = loop["epoch_progress"]["current"]["processed"]
        check_alike(loop, training.trainer.fit_loop.state_dict())
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say how far its training was ({one_line(error)}): {A_CHECKPOINT}") from None
    if most is not None and 0 <= most < finished:
        raise ValueError(
            f"{path} has finished {counted(finished, 'epoch')}, and this training ends after {most}: give "
            f"--trainer.max_epochs {finished} or more"
        )
    if 0 <= steps < step:
        raise ValueError(
            f"{path} has taken {counted(step, 'step')}, and this training ends after {steps}: give "
            f"--trainer.max_steps {step} or more"
        )


def _by_name(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested values by their dotted names."""
    return {spelled(path): value for path, value in leaves(values)}
