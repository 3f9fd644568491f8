"""A search with Ray Tune: trials at the same time, on the processors of one machine or of a cluster.

The values of a trial follow from the seed and its number, so that they do not depend on which trial is faster. Ray ends
bad trials (ASHA, Li et al. 2020): of those that get as far as validation 1, 2, 4, 8, ..., the better half goes on.
"""

import logging
import math
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchcaps.recipes.search import Choices, Range
from torchcaps.search.plan import Plan
from torchcaps.search.trial import FAILED, PRUNED, RUNNING, Trial, read_trial, run_trial, write_trial
from torchcaps.utils.checks import one_line
from torchcaps.utils.extras import needs

# Ray reads these when it is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # its tables: the command prints a line for each trial
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # trials have logs of their own
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # the command handles signals

with needs("ray"):
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

LATER = 10**6  # more validations than any training has

START = "start one with `ray start --head`, or leave out --address and RAY_ADDRESS"
METRIC = "metric"  # the name in what a trial reports to Ray


def search_with_ray(plan: Plan, workers: int | None, address: str | None, after: Callable[[Trial], None]) -> None:
    """Run the trials that are left.

    Args:
        plan: the search. Its folder must be on a file system that all machines share.
        workers: number of trials at the same time; None for one on each GPU, or on each CPU core if there is no GPU.
        address: address of a cluster that runs ("auto" for that of this machine); None for $RAY_ADDRESS, or else for
            this machine alone.
        after: function that is called with every trial that has ended.

    Raises:
        ValueError: there is no cluster at the address.
        Stopped: a signal asked to stop.
    """
    left = [number for number in range(plan.trials) if not _is_finished(plan, number)]
    if not left:
        return
    for name in ("ray", "ray.tune"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors of trials are in their files
    own = plan.folder.absolute() / "ray"  # files of Ray's own, which nothing reads later
    shutil.rmtree(own, ignore_errors=True)
    alone = address is None and not os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {"num_cpus": _cores(workers), "include_dashboard": False} if alone else {}
    _check_address(address or os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL, **local)
    except ConnectionError as error:
        raise ValueError(f"there is no Ray cluster here ({one_line(error)}): {START}") from error
    try:
        resources, most = _share(workers)
        scheduler: Any = FIFOScheduler()
        if plan.search.prune:
            scheduler = ASHAScheduler(time_attr="training_iteration", max_t=LATER, grace_period=1, reduction_factor=2)
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(_run, plan=plan, folder=Path.cwd()), resources),
            param_space={"number": tune.grid_search(left)},
            tune_config=tune.TuneConfig(
                metric=METRIC, mode=plan.search.mode, scheduler=scheduler, max_concurrent_trials=most
            ),
            run_config=tune.RunConfig(
                name=own.name, storage_path=str(own.parent), verbose=0, callbacks=[_Watch(plan, after)]
            ),
        )
        tuner.fit()
    finally:
        ray.shutdown()
        shutil.rmtree(own, ignore_errors=True)


def _check_address(address: str) -> None:
    """Check that a machine answers at HOST:PORT. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ValueError(f"there is no Ray cluster at {address} ({error.strerror or error}): {START}") from None


def draw(plan: Plan, number: int) -> dict[str, Any]:
    """Draw the values of a trial. They depend on the seed of the search and on the number alone."""
    random = np.random.default_rng(plan.seed_of(number))
    return {name: _draw(space, random) for name, space in plan.search.values.items()}


def _draw(space: Range | Choices, random: np.random.Generator) -> Any:
    if isinstance(space, Choices):
        return space.values[int(random.integers(len(space.values)))]
    if space.log and space.is_whole:  # each integer stands for what rounds to it
        low, high = math.log(space.low - 0.5), math.log(space.high + 0.5)
        return int(min(max(round(math.exp(random.uniform(low, high))), space.low), space.high))
    if space.log:
        return float(math.exp(random.uniform(math.log(space.low), math.log(space.high))))
    if space.is_whole or space.step is not None:
        step = space.step or 1
        value = space.low + step * int(random.integers(round((space.high - space.low) / step) + 1))
        return int(value) if space.is_whole else float(f"{value:.12g}")
    return float(random.uniform(space.low, space.high))


def _run(config: dict[str, Any], plan: Plan, folder: Path) -> None:
    """Run a trial, in a process of Ray's."""
    from torchcaps.utils.quiet import quiet_lightning

    if folder.is_dir():
        os.chdir(folder)  # Ray has changed it; paths in recipes start from the folder of the command
    number = config["number"]

    def report(reported: list[float]) -> bool:
        tune.report({METRIC: reported[-1]})  # does not return where Ray ends the trial
        return False

    with quiet_lightning():
        trial = run_trial(plan, number, draw(plan, number), report)
    if trial.state == FAILED:
        raise RuntimeError(trial.error)  # Ray accepts no trial without a metric


class _Watch(tune.Callback):
    """Notes how trials end."""

    def __init__(self, plan: Plan, after: Callable[[Trial], None]) -> None:
        self.plan, self.after = plan, after

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._ended(trial.config["number"], PRUNED)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._ended(trial.config["number"], RUNNING)  # unless its file says that it failed: lost with its process

    def _ended(self, number: int, state: str) -> None:
        """Note the end of a trial, whose file has it as running if it did not come to an end of its own."""
        folder = self.plan.folder_of(number)
        trial = read_trial(folder) or Trial(number, draw(self.plan, number))
        if not trial.is_finished:
            trial = replace(trial, state=state)
            write_trial(folder, trial)
        self.after(trial)


def _is_finished(plan: Plan, number: int) -> bool:
    trial = read_trial(plan.folder_of(number))
    return trial is not None and trial.is_finished and trial.values == draw(plan, number)


def _cores(workers: int | None) -> int:
    """Return the number of processors that Ray may count on here."""
    return max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, workers or 1)


def _share(workers: int | None) -> tuple[dict[str, float], int | None]:
    """Return what a trial takes of the machines, and how many run at most at the same time."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (int(sum(machine.get(kind, 0) for machine in machines)) for kind in ("CPU", "GPU"))
    together = workers or gpus or cpus
    widest = int(max(machine.get("CPU", 0) for machine in machines))
    return {"cpu": min(max(cpus // together, 1), widest), "gpu": 1 if gpus else 0}, together
