"""The queue: rows in their order, trained, stopped, killed and gone on with, and their results written down once."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchcaps.cli import main
from torchcaps.reproduce import read_results

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROW = "zhao2019/fashion-mnist-cnn-max"  # 100 steps on sixteen images

# Checkpoints within seconds: a row of the tests takes no longer.
QUEUE = """
import sys
from torchcaps.training.checkpoints import LastCheckpoints
LastCheckpoints.SECONDS = 0.5
if __name__ == "__main__":
    from torchcaps.cli import run
    run()
"""


def start(root: Path, data: Path, *arguments: str) -> subprocess.Popen:
    script = root / "queue.py"
    script.write_text(QUEUE)
    command = [sys.executable, str(script), "reproduce", ROW, "--threads", "1", "--runs", str(root / "runs"), *arguments]
    return subprocess.Popen(
        command,
        env={**os.environ, "TORCHCAPS_DATA": str(data), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(root: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    found = (root / "runs" / f"seed-{seed}" / ROW).glob("version_*/checkpoints/last.ckpt")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    state = torch.load(newest, weights_only=True)
    assert state["global_step"] == 100
    return state["state_dict"]


@pytest.mark.slow
def test_a_queue_killed_ten_times_ends_in_the_same_weights(tmp_path, images_of_noise):
    draw = random.Random(0)
    roots = [tmp_path / "whole", tmp_path / "killed"]
    for root in roots:
        root.mkdir()
    assert main(["reproduce", "--runs", str(roots[0] / "runs"), "--list", ROW]) == 0
    whole = start(roots[0], images_of_noise, "--hours", "0.1")
    kills = 0
    while kills < 10:
        queue = start(roots[1], images_of_noise)
        time.sleep(draw.uniform(5, 20))
        assert queue.poll() is None or read_results(roots[1] / "runs" / "results.csv"), queue.stdout.read()
        queue.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        queue.wait()
        kills += 1
    last = start(roots[1], images_of_noise, "--hours", "0.1")
    for queue in (whole, last):
        queue.wait()
    assert all(torch.equal(value, weights(roots[1])[name]) for name, value in weights(roots[0]).items())
