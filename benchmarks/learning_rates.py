"""A learning rate for each row of a table that compares, by the same search for all rows.

    python benchmarks/learning_rates.py compare/affine [--rates 0.001 0.003 0.01 0.03] [--rows em] [--held-out 5000]

Each row is trained with each rate, by one seed, for a quarter of its steps, without the held-out images of its training
set. The accuracy on these images is printed and added to `learning_rates/TABLE.csv`; what stands there is not trained
again. The test set is not used. The best rate of each row goes by hand into its recipe, as `max_lr` of its one cycle.
"""

import argparse
import csv
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.training.build import Training
from torchcaps.training.values import Values


def accuracy(recipe: str, rate: float, held_out: int) -> float:
    """Train a row, and return its accuracy on the images that were held out."""
    torch.set_num_threads(1)
    steps = load_recipe(recipe).config["trainer"]["max_steps"] // 4
    changes = {
        "data.val_size": held_out,
        "trainer.max_steps": steps,
        "model.scheduler.total_steps": steps,
        "model.scheduler.max_lr": rate,
        "trainer.enable_progress_bar": False,
    }
    training = Training(Values.of(load_recipe(recipe), changes))
    training.trainer.fit(training.model, training.datamodule)
    (metrics,) = training.trainer.validate(training.model, training.datamodule, verbose=False)
    return metrics["val/accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.001, 0.003, 0.01, 0.03])
    parser.add_argument("--rows", nargs="+", default=None)
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    rows = [name for name in list_recipes() if name.startswith(f"{args.table}/")]
    rows = [row for row in rows if args.rows is None or row.rpartition("/")[2] in args.rows]
    if not rows:
        parser.error(f"there is no such row of {args.table}: `torchcaps recipes {args.table}` lists them")
    path = Path("learning_rates") / f"{args.table.replace('/', '-')}.csv"
    path.parent.mkdir(exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    known = {(row, float(rate)) for row, rate, _ in csv.reader(lines)}
    wanted = [(row, rate) for row in rows for rate in args.rates if (row, rate) not in known]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        trainings = {pool.submit(accuracy, *each, args.held_out): each for each in wanted}
        for done in as_completed(trainings):
            row, rate = trainings[done]
            print(f"{row}, {rate:g}: {100 * done.result():.2f} %", flush=True)
            with path.open("a", newline="") as file:
                csv.writer(file).writerow((row, rate, round(100 * done.result(), 2)))


if __name__ == "__main__":
    main()
