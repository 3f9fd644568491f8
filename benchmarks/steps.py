"""How long a training step takes: the usual loop beside resident steps, on noise in place of the data.

    python benchmarks/steps.py                                        # three recipes of the papers, on this device
    python benchmarks/steps.py zhao2019/table1/cifar10-routing --steps 40 --small
    python benchmarks/steps.py quickstart --together 2                # two trainings at once, or one after another

A training runs in each way, in turns; the time of a step is the median over the rounds of the mean after the first
steps. With `--together N`, N resident trainings also run at once, each in a process with its part of the threads. On
CUDA "graph" is the graph alone, replayed without anything in between: less is not possible. Absolute times are for a
GPU alone; elsewhere only the ratio counts.
"""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning import Callback

from torchcaps.data import ImageData, LabeledData
from torchcaps.recipes import load_recipe
from torchcaps.training.build import Training
from torchcaps.training.resident import ResidentEpochLoop
from torchcaps.training.values import Values
from torchcaps.utils.files import write_text_whole
from torchcaps.utils.machine import commit, hardware

RECIPES = ("zhao2019/table1/cifar10-routing", "sabour2017/table1/capsnet", "tsai2020/table1/cifar10-attention")
FIRST = 10  # steps that are not timed


class Clock(Callback):
    """Time the steps of a training after the first ones, and on CUDA the graph of a step alone."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.graph: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == FIRST:
            wait()
            self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        wait()
        self.ended = time.perf_counter()
        loop = trainer.fit_loop.epoch_loop
        graph = getattr(loop._step, "graph", None) if isinstance(loop, ResidentEpochLoop) else None
        if graph is not None and graph.graph is not None:
            began = time.perf_counter()
            for _ in range(100):
                graph.graph.replay()
            wait()
            self.graph = (time.perf_counter() - began) / 100


# A callback of this module may look at each step, and of the resident steps only where they are looked at.
Clock.__module__ = "torchcaps.benchmarks"


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(recipe: str, small: bool, steps: int, resident: bool, batch: int | None) -> tuple[float, float | None]:
    """Return the seconds of a step, and of its graph alone."""
    changes: dict[str, Any] = {
        "seed_everything": 0,
        "trainer.max_steps": FIRST + steps,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": False,
        "trainer.callbacks": [],
        "trainer.resident": resident,
    }
    if torch.cuda.is_available():
        changes["trainer.precision"] = "bf16-mixed"
    if batch:
        changes["data.batch_size"] = batch
    training = Training(Values.of(load_recipe(recipe, small), changes))
    give_noise(training.datamodule)
    clock = Clock()
    training.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    training.fit()
    return (clock.ended - clock.began) / steps, clock.graph


def seconds_together(processes: int, *case: Any) -> float:
    """Return the seconds of a step of trainings that run at once, each in a process with its part of the threads."""
    threads = max(1, torch.get_num_threads() // processes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        trainings = [pool.submit(seconds_of, *case) for _ in range(processes)]
        return max(training.result()[0] for training in trainings)


def give_noise(data: LabeledData) -> None:
    """Give images of noise to data that would read theirs from files."""
    if not isinstance(data, ImageData):
        raise ValueError(f"{type(data).__name__} has no images: choose a recipe of images")
    shape, classes = data.stored_shape or data.shape, data.classes

    def load(train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(12_800) % classes
        return torch.randint(0, 256, (len(labels), *shape), dtype=torch.uint8), labels

    vars(data).update(load=load, prepare_data=lambda: None)  # no file is read, so that no hash is checked


def main() -> None:
    """Print a line for each recipe, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--small", action="store_true", help="the small versions of the recipes")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings in each way (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="batch size (default: the recipe's)")
    parser.add_argument("--together", type=int, metavar="N", help="also N trainings at once")
    parser.add_argument("--out", type=Path, help="folder for steps.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of processes that share cores: this one has read it already
    rows = []
    for recipe in options.recipes:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        graph = None
        at_once: list[float] = []
        for _ in range(options.rounds):
            for resident in (False, True):
                one, alone = seconds_of(recipe, options.small, options.steps, resident, options.batch)
                seconds[resident].append(one)
                graph = alone or graph
            if options.together:
                case = recipe, options.small, options.steps, True, options.batch
                at_once.append(seconds_together(options.together, *case))
        usual, ours = median(seconds[False]), median(seconds[True])
        together = median(at_once) if at_once else None
        row = {"recipe": recipe, "usual": usual, "resident": ours, "graph": graph, "together": together}
        rows.append(row)
        of_graph = "" if graph is None else f", graph alone {graph * 1e3:.2f} ms ({ours / graph:.2f}x)"
        print(
            f"{recipe}: usual {usual * 1e3:.2f} ms, resident {ours * 1e3:.2f} ms ({usual / ours:.2f}x){of_graph}",
            flush=True,
        )
        if together is not None:
            part = together / (options.together * ours)
            print(f"  {options.together} at once take {part:.2f} of the time of one after another", flush=True)
    if options.out is not None:
        about = {"commit": commit(), "hardware": hardware(), "torch": str(torch.__version__), "small": options.small}
        options.out.mkdir(parents=True, exist_ok=True)
        write_text_whole(options.out / "steps.json", json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
