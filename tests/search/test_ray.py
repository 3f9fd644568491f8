"""`torchcaps search --with ray`. The test that starts Ray takes a minute; the others need no process of Ray's."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import error_of
from searches import FOLDER, RECIPE, table, write_recipe

from torchcaps.recipes import load_recipe
from torchcaps.recipes.search import Choices, Range
from torchcaps.search.plan import Plan

pytest.importorskip("ray")
with_ray = pytest.importorskip("torchcaps.search.with_ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def drawn(space: Range | Choices, count: int = 2000) -> list:
    random = np.random.default_rng(0)
    return [with_ray._draw(space, random) for _ in range(count)]


def test_values_are_drawn_evenly():
    assert set(drawn(Range(16, 64, step=16))) == {16, 32, 48, 64}
    assert set(drawn(Range(1, 3))) == {1, 2, 3}
    assert set(drawn(Range(0.1, 0.7, step=0.2))) == {0.1, 0.3, 0.5, 0.7}
    assert set(drawn(Choices((None, "a", 2.0)))) == {None, "a", 2.0}
    floats = drawn(Range(1.0, 3.0))
    assert 1 <= min(floats) < 1.01
    assert 2.99 < max(floats) <= 3
    logs = np.log10(drawn(Range(1e-4, 1e-2, log=True)))
    assert (logs.min() > -4, logs.max() < -2) == (True, True)
    assert np.mean(logs < -3) == pytest.approx(0.5, abs=0.04)
    wholes = Counter(drawn(Range(1, 8, log=True)))
    assert set(wholes) == set(range(1, 9))
    assert wholes[1] / wholes[8] == pytest.approx(np.log(1.5 / 0.5) / np.log(8.5 / 7.5), rel=0.2)


def test_the_values_of_a_trial_follow_from_the_seed_and_its_number():
    write_recipe()
    plan = Plan(load_recipe("mine.yaml"), [], "ray", 3, FOLDER, seed=7)
    values = [with_ray.draw(plan, number) for number in range(3)]
    assert values == [with_ray.draw(plan, number) for number in range(3)]
    assert len({value["model.optimizer.lr"] for value in values}) == 3
    other = Plan(load_recipe("mine.yaml"), [], "ray", 3, FOLDER, seed=8)
    assert with_ray.draw(other, 0) != values[0]


def test_a_cluster_that_is_not_there(capfd):
    write_recipe()
    said = error_of(capfd, "search", "mine.yaml", "--with", "ray", "--address", "127.0.0.1:1")
    assert said.startswith(
        "torchcaps: there is no Ray cluster at 127.0.0.1:1 (Connection refused): start one with `ray"
    )
    said = error_of(capfd, "search", "mine.yaml", "--with", "ray", "--address", "auto")
    assert said.startswith("torchcaps: there is no Ray cluster here (Could not find any running Ray instance")
    assert not Path("runs/mine/search_0").exists()


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchcaps", "search", "mine.yaml", "--with", "ray", "--workers", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_search_with_ray_that_is_killed_and_stopped(monkeypatch):
    write_recipe(
        RECIPE.replace("trials: 3", "trials: 6").replace(
            "{low: 1e-3, high: 1e-2, log: true}", "{choices: [0.002, 1e30]}"
        )
    )
    for how, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        process = start("--resume") if FOLDER.exists() else start()
        before = len(table()) if FOLDER.exists() else 0
        limit = time.monotonic() + 300
        while not ((FOLDER / "trials.csv").exists() and len(table()) > before) and time.monotonic() < limit:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        assert process.returncode == status, err
        assert how == signal.SIGKILL or re.fullmatch(
            r"torchcaps: stopped by SIGINT; to continue: torchcaps search mine.yaml --resume --workers 2\n", err
        )
        finished = {row["number"]: row for row in table() if row["state"] != "running"}
    process = start("--resume")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    rows = table()
    assert [row["number"] for row in rows] == [str(number) for number in range(6)]
    assert {row["state"] for row in rows} - {"pruned"} == {"complete", "failed"}
    for row in rows:
        assert (row["state"] == "failed") == (row["model.optimizer.lr"] == "1e30")
        assert row == finished.get(row["number"], row)
    assert re.search(r"^best: trial \d, val/accuracy 0\.\d+$", out, re.MULTILINE)
    assert all(
        line.startswith(("search: ", "trial ", "best: ", "  ", "runs/mine/search_0/")) for line in out.splitlines()
    )
    assert (FOLDER / "best.yaml").exists()
    assert not (FOLDER / "ray").exists()
