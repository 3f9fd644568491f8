"""Search good values of a recipe, by many trainings, with Optuna."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.arguments import add_recipe, positive_int
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs
from torchcaps.utils.signals import Stopped

if TYPE_CHECKING:
    import optuna

    from torchcaps.search.plan import Plan

HEAD = "search: {metric: val/accuracy, values: {model.optimizer.lr: {low: 0.0001, high: 0.01, log: true}}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps search`."""
    add_recipe(parser)
    parser.add_argument(
        "--trials", type=positive_int, metavar="N", help="number of trainings (default: that of the recipe)"
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--resume", action="store_true", help="go on with the newest search, with the same overrides")
    ways.add_argument(
        "--storage",
        metavar="WHERE",
        help="a journal file or the URL of a database, for a search that many machines share: the same command on each "
        "of them begins the search, joins it or goes on with it",
    )


def run(options: argparse.Namespace) -> None:
    """Run the trials, and print the best values and where the results are."""
    from torchcaps.recipes import load_recipe

    recipe = load_recipe(options.recipe, options.small)
    if recipe.search is None:
        raise ValueError(f"{options.recipe} has no head `search`: write a recipe that extends it and add {HEAD}")
    with needs("search"):
        from optuna.exceptions import OptunaError
    from torchcaps.search.plan import read_plan
    from torchcaps.search.results import write_results
    from torchcaps.search.study import open_search, run_study

    trials = {"trials": options.trials} if options.trials else {}
    plan = read_plan(recipe, overrides=tuple(options.overrides), allow_code=options.allow_code, **trials)
    plan, study = open_search(plan, Path(options.runs) / recipe.folder, options.resume, options.storage)
    print(f"search: {plan.folder}", flush=True)
    try:
        for number in run_study(plan, study, options.signals):
            write_results(plan, study)
            _print_trial(plan, study, number)
        paths = write_results(plan, study)
    except Stopped as stop:
        stop.message += f"; to continue: {_resume_command(options)}"
        raise
    except BrokenPipeError:  # torchcaps.cli.main ends without a word
        raise
    except (OSError, OptunaError) as error:
        raise ValueError(f"{one_line(error)}; to continue: {_resume_command(options)}") from error
    _print_best(plan, study, paths)


def _print_trial(plan: "Plan", study: "optuna.Study", number: int) -> None:
    """Print a line about a trial that has ended."""
    from torchcaps.search.results import best_of

    trial, best = study.trials[number], best_of(study)
    values = " ".join(f"{name}={_short(value)}" for name, value in trial.params.items())
    metric = "" if trial.value is None else f" {plan.metric} {trial.value:.4f}"
    error = trial.user_attrs.get("error")
    end = f": {error}" if error else "; the best so far" if best and best.number == number else ""
    print(f"trial {number}: {values}:{metric} {trial.state.name.lower()}{end}", flush=True)


def _print_best(plan: "Plan", study: "optuna.Study", paths: list[Path]) -> None:
    from torchcaps.search.results import best_of

    trials, best = study.trials, best_of(study)
    if running := [str(trial.number) for trial in trials if not trial.state.is_finished()]:
        print(f"under way in other processes, or lost with them: {', '.join(f'trial {number}' for number in running)}")
    if best is None:
        errors = [f"; trial {trial.number}: {error}" for trial in trials if (error := trial.user_attrs.get("error"))]
        raise ValueError(f"no trial came to its end{''.join(errors[:1])}")
    print(f"best: trial {best.number}, {plan.metric} {best.value:.4f}")
    for name, value in best.params.items():
        print(f"  {name}: {_short(value)}")
    for path in paths:
        print(path)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _resume_command(options: argparse.Namespace) -> str:
    """Return the command that continues the search."""
    flags = [f"--{flag}" for flag in ("small", "allow_code") if getattr(options, flag)]
    command = ["torchcaps", "search", options.recipe, *flags]
    command += ["--storage", options.storage] if options.storage else ["--resume"]
    if options.trials is not None:
        command += ["--trials", str(options.trials)]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    return shlex.join([*command, *options.tokens])
