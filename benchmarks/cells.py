"""Dice coefficients of SegCaps, its controls and a U-Net on made cells, upright and turned: the rows of compare/cells.

    OMP_NUM_THREADS=1 python benchmarks/cells.py [--rows segcaps unet] [--seeds 0 1 2]
    OMP_NUM_THREADS=1 python benchmarks/cells.py --rates 0.001 0.003 0.01

Each row is trained by its recipe and tested on the same scenes at several angles, of which the training has seen none
but 0. With `--rates` each row is trained with each learning rate, and the Dice coefficients are those of the validation
images, to choose by; nothing is tested. A line is printed for each training; with `--out` it is added to a file, too.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from torchcaps.recipes import load_recipe
from torchcaps.training import Training, Values

ROWS = ("segcaps", "r1", "uniform", "unet")
ANGLES = (0, 45, 90)


def training_of(row: str, changes: dict[str, Any]) -> Training:
    quiet = {"trainer.enable_progress_bar": False, "trainer.accelerator": "cpu"}
    return Training(Values.of(load_recipe(f"compare/cells/{row}"), quiet | changes))


def dice(metrics: dict[str, float]) -> dict[str, float]:
    return {name.partition("/")[2]: round(100 * x, 2) for name, x in metrics.items() if "dice" in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates to choose from, on validation images")
    parser.add_argument("--steps", type=int, help="steps of each training (default: those of the recipe)")
    parser.add_argument("--out", type=Path, help="file of lines in JSON")
    options = parser.parse_args()
    steps = {}
    if options.steps:
        steps = {"trainer.max_steps": options.steps, "model.scheduler.init_args.total_steps": options.steps}
    for row in options.rows:
        for seed in options.seeds:
            for rate in options.rates or [None]:
                begun = time.process_time()
                chosen = {} if rate is None else {"model.scheduler.init_args.max_lr": rate}
                held_out = {} if rate is None else {"data.val_size": 200}
                trained = training_of(row, {"seed_everything": seed, **steps, **chosen, **held_out})
                trained.fit()
                result: dict[str, Any] = {"row": row, "seed": seed, "rate": rate}
                result["parameters"] = sum(p.numel() for p in trained.model.network.parameters())
                if rate is None:
                    for angle in ANGLES:
                        tested = training_of(row, {"data.test_angle": angle})
                        tested.model.load_state_dict(trained.model.state_dict())
                        metrics = tested.trainer.test(tested.model, tested.datamodule, verbose=False)[0]
                        result[f"turned by {angle}"] = dice(metrics)
                else:
                    (metrics,) = trained.trainer.validate(trained.model, trained.datamodule, verbose=False)
                    result["validation"] = dice(metrics)
                result["seconds"] = round(time.process_time() - begun)
                line = json.dumps(result)
                print(line, flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
