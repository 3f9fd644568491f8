"""Search good values of a recipe, by many trainings, with Optuna or Ray."""

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.errors import BadInput, bad_data
from torchcaps.cli.recipe_commands import add_recipe, load_requested, runs_of
from torchcaps.utils.extras import needs
from torchcaps.utils.signals import Stopped

if TYPE_CHECKING:
    from torchcaps.search.plan import Plan
    from torchcaps.search.trial import Trial

HEAD = "search: {metric: val/accuracy, values: {model.optimizer.lr: {low: 0.0001, high: 0.01, log: true}}}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps search`."""
    add_recipe(parser)
    parser.add_argument("--trials", type=int, metavar="N", help="number of trainings (default: that of the recipe)")
    parser.add_argument(
        "--with",
        dest="engine",
        choices=("optuna", "ray"),
        help="what runs the trials: optuna, one after the other (the default), or ray, at the same time",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the newest search of this recipe")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="with ray: trials at the same time (default: one on each GPU or core)"
    )
    parser.add_argument("--address", help="with ray: address of a running cluster, or auto (default: $RAY_ADDRESS)")


def run(options: argparse.Namespace, overrides: list[str]) -> None:
    """Run the trials, and print the best values and where the results are."""
    with needs("train"):
        from torchcaps.search import plan as plans
        from torchcaps.search.results import write_results

    recipe = load_requested(options)
    if recipe.search is None:
        raise BadInput(f"{options.recipe} has no head `search`: write a recipe that extends it and add {HEAD}")
    for name in ("trials", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise BadInput(f"--{name} must be at least 1, got {getattr(options, name)}")
    runs = runs_of(options, recipe)
    plan = plans.Plan(
        recipe,
        overrides,
        options.engine or "optuna",
        options.trials or recipe.search.trials,
        runs,
        options.allow_code,
    )
    with bad_data():
        if options.resume:
            plan = _resumed(options, plan, runs)
        if plan.engine == "optuna" and (options.workers or options.address):
            raise BadInput("--workers and --address are for --with ray: Optuna runs one trial after the other here")
        _import(plan.engine)
        plan = replace(plan, seed=plans.check(plan))
        plan = plan if options.resume else plans.begin(plan, runs)
    try:
        with bad_data(), plans.alone(plan):
            _run(options, plan)
            paths = write_results(plan)
    except Stopped as stop:
        stop.said += f"; to continue: {_resume_command(options, plan)}"
        raise
    except OSError as error:
        raise BadInput(f"{error}; to continue: {_resume_command(options, plan)}") from error
    finally:
        plans.give_back(plan)
    _print_best(options, plan, paths)


def _resumed(options: argparse.Namespace, plan: "Plan", runs: Path) -> "Plan":
    """Return the plan of the newest search, with what it began with where nothing else is given."""
    from torchcaps.search import plan as plans

    folder = plans.newest(runs)
    if folder is None:
        raise BadInput(f"no search under {runs}: leave out --resume to begin one")
    about = plans.begun(folder)
    plan = replace(
        plan,
        folder=folder,
        engine=options.engine or about["with"],
        overrides=plan.overrides or about["overrides"],
    )
    plans.check_same(plan)
    return plan


def _import(engine: str) -> None:
    """Import what runs the trials, so that an error names the extra before anything is done."""
    if engine == "ray":
        import torchcaps.search.with_ray
    else:
        import torchcaps.search.with_optuna  # noqa: F401


def _run(options: argparse.Namespace, plan: "Plan") -> None:
    from torchcaps.search.results import write_results
    from torchcaps.search.trial import best_of, read_trials

    def after(trial: "Trial") -> None:
        write_results(plan)
        values = " ".join(f"{name}={_short(value)}" for name, value in trial.values.items())
        metric = "" if trial.metric is None else f" {plan.search.metric} {trial.metric:.4f}"
        said = "stopped" if not trial.is_finished else trial.state
        best = best_of(plan, read_trials(plan))
        end = f": {trial.error}" if trial.error else "; the best so far" if best == trial else ""
        print(f"trial {trial.number}: {values}:{metric} {said}{end}", flush=True)

    print(f"search: {plan.folder}", flush=True)
    if plan.engine == "ray":
        from torchcaps.search.with_ray import search_with_ray

        search_with_ray(plan, options.workers, options.address, after)
    else:
        from torchcaps.search.with_optuna import search_with_optuna

        search_with_optuna(plan, options.signals, after)


def _print_best(options: argparse.Namespace, plan: "Plan", paths: list[Path]) -> None:
    from torchcaps.search.trial import best_of, read_trials

    trials = read_trials(plan)
    best = best_of(plan, trials)
    if best is None:
        failed = next((trial for trial in reversed(trials) if trial.error), None)
        why = f"; trial {failed.number} said: {failed.error}" if failed else ""
        raise BadInput(f"none of {len(trials)} trials came to its end{why}")
    print(f"best: trial {best.number}, {plan.search.metric} {best.metric:.4f}")
    for name, value in best.values.items():
        print(f"  {name}: {_short(value)}")
    for path in paths:
        print(path)
    finished = {trial.number for trial in trials if trial.is_finished}
    if lost := sorted(set(range(plan.trials)) - finished):
        numbers = ", ".join(map(str, lost))
        raise BadInput(f"the processes of trials {numbers} were lost; to go on: {_resume_command(options, plan)}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _resume_command(options: argparse.Namespace, plan: "Plan") -> str:
    """Return the command that continues the search."""
    flags = [f"--{flag}" for flag in ("small", "allow_code") if getattr(options, flag)]
    command = ["torchcaps", "search", options.recipe, "--resume", *flags]
    for name in ("trials", "workers", "address"):
        if getattr(options, name) is not None:
            command += [f"--{name}", str(getattr(options, name))]
    if options.runs != os.environ.get("TORCHCAPS_RUNS", "runs"):
        command += ["--runs", options.runs]
    return shlex.join(command)
