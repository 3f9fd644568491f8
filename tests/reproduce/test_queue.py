"""The queue of `torchcaps reproduce`: it can be stopped and killed, and each result is written once."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchcaps.cli import main
from torchcaps.reproduce import results
from torchcaps.reproduce.plan import PlannedRun, plan
from torchcaps.reproduce.queue import _take, missing
from torchcaps.reproduce.results import Result, add_results, read_results
from torchcaps.reproduce.work import _parts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROW = "zhao2019/table1/fashion-mnist-max"  # 100 steps on sixteen images

DONE = Result(ROW, "", "", 1, 7.5, "test error", 9, "", "", "", "", "", "", 1.0)

QUEUE = """
import sys
from torchcaps.training.checkpoints import LastCheckpoints
LastCheckpoints.SECONDS = 0.3
if __name__ == "__main__":
    from torchcaps.cli import run
    run()
"""


@pytest.fixture(autouse=True)
def no_results_yet(monkeypatch, tmp_path):
    """As if the package had no result of the row."""
    monkeypatch.setattr(results, "IN_PACKAGE", tmp_path / "none.csv")


def start(root: Path, data: Path, *arguments: str) -> subprocess.Popen:
    root.mkdir(exist_ok=True)
    (root / "begin.py").write_text(QUEUE)
    options = ["reproduce", ROW, "--check_hashes", "false", "--threads", "1", "--runs", str(root / "runs"), *arguments]
    return subprocess.Popen(
        [sys.executable, str(root / "begin.py"), *options],
        env={**os.environ, "TORCHCAPS_DATA": str(data), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # because pytest may have been started with SIGINT ignored
    )


def weights(root: Path, seed: int) -> dict[str, torch.Tensor]:
    found = (root / "runs" / f"seed-{seed}" / f"{ROW}-no-hashes").glob("version_*/checkpoints/last.ckpt")
    state = torch.load(max(found, key=lambda path: path.stat().st_mtime_ns), weights_only=True)
    assert state["global_step"] == 100
    return state["state_dict"]


@pytest.mark.slow
def test_a_queue_killed_again_and_again_ends_in_the_same_weights(tmp_path, images_of_noise):
    """The queue gets SIGKILL, SIGTERM or SIGINT at ten random moments."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, images_of_noise).wait() == 0
    draw = random.Random(0)
    kills = 0
    while missing(killed / "runs", plan([ROW], check_hashes=False)):
        queue = start(killed, images_of_noise)
        assert queue.stdout.readline().split()[2].startswith(ROW)  # wait until the first row has started
        how = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        try:
            status = queue.wait(draw.uniform(1, 6) if kills < 10 else None)
            assert status == 0
        except subprocess.TimeoutExpired:
            queue.send_signal(how)
            kills += 1
            assert queue.wait() == (-how if how == signal.SIGKILL else 128 + how)
    assert kills == 10
    for seed in range(3):
        expected, found = weights(whole, seed), weights(killed, seed)
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    values = [
        {result.key: result.value for result in read_results(root / "runs" / "results.csv")} for root in (whole, killed)
    ]
    assert values[0] == values[1]
    assert len(values[0]) == 3


@pytest.mark.slow
def test_two_queues_share_the_rows(tmp_path, images_of_noise):
    """Each row is trained, tested and written down by one of them, and only this one speaks of it. Nothing is left of
    runs that had no data."""
    assert "runs without a result: 3" in start(tmp_path, tmp_path, "--hours", "1").communicate()[0]
    queues = [start(tmp_path, images_of_noise, "--hours", "1") for _ in range(2)]
    outputs = [queue.communicate()[0] for queue in queues]
    assert [queue.returncode for queue in queues] == [0, 0], outputs
    for text in (r"seed (\d): from step 0", r"seed (\d): \d+\.\d\d % test error \(published: 7.86 % test error\)"):
        assert sorted(re.findall(text, "".join(outputs))) == ["0", "1", "2"]
        assert all(re.findall(text, output) for output in outputs)
    results = read_results(tmp_path / "runs" / "results.csv")
    assert sorted(result.seed for result in results) == [0, 1, 2]
    first = results[0]
    assert first.overrides == "--data.check_hashes=false"
    given = f"--seed_everything={first.seed} {first.overrides} --trainer.devices=1 --trainer.precision=bf16-mixed"
    assert first.command == f"torchcaps train {ROW} {given}"
    assert first.precision == "bf16-mixed"
    assert "1 thread, torch" in first.hardware
    assert first.hours > 0
    assert not list((tmp_path / "runs").rglob("failed.txt"))
    assert len(list((tmp_path / "runs").rglob("version_*"))) == 3  # no row was trained twice


def test_a_run_is_taken_by_one_queue(tmp_path):
    (first, lock), (second, other) = _take(tmp_path, plan([ROW]), set()), _take(tmp_path, plan([ROW]), set())
    assert (first.seed, second.seed) == (0, 1)
    assert _take(tmp_path, plan([ROW]), {PlannedRun(ROW, 2)}) is None  # this one it has tried
    lock.release()
    add_results(tmp_path / "results.csv", [replace(DONE, seed=0)])
    (third, last) = _take(tmp_path, plan([ROW]), set())
    assert third.seed == 2
    for each in (other, last):
        each.release()


def test_rows_that_are_done_are_not_missing(tmp_path, capfd):
    """They are listed with their result, and rows that failed come last, with their error."""
    add_results(tmp_path / "results.csv", [DONE])
    (tmp_path / "seed-0" / ROW).mkdir(parents=True)
    (tmp_path / "seed-0" / ROW / "failed.txt").write_text("DataError: no data")
    assert [run.seed for run in missing(tmp_path, plan([ROW]))] == [2, 0]
    assert main(["reproduce", ROW, "--list", "--runs", str(tmp_path), "--threads", "1"]) == 0
    line = capfd.readouterr().out.splitlines()[1]
    assert re.match(rf"{ROW} +7.86 % test error +7.50 % \(1 seed\) +seeds 2, 0 +failed: DataError: no data", line)
    assert main(["recipes", "--runs", str(tmp_path)]) == 0
    assert re.search(rf"{ROW} .*7.86 % test error +7.50 % \(1 seed\)", capfd.readouterr().out)


def test_the_list_of_all_rows_fits_a_terminal(tmp_path, capfd):
    assert main(["reproduce", "--list", "--runs", str(tmp_path)]) == 0
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 120


def test_files_of_others_in_the_folder_of_a_run(tmp_path, capfd):
    folder = tmp_path / "seed-0" / ROW
    folder.mkdir(parents=True)
    os.mkfifo(folder / "failed.txt")  # nobody writes to it
    command = ["reproduce", ROW, "--list", "--runs", str(tmp_path), "--threads", "1"]
    assert main(command) == 0
    last = folder / "version_0" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    for content in ([1], {"global_step": "many"}, {"global_step": Path()}, {}):
        torch.save(content, last)
        assert main(command) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"torchcaps: {last} is not a checkpoint ")
    last.unlink()
    os.mkfifo(tmp_path / "results.csv")
    assert main(command) == 2
    assert "results.csv cannot be read: it is not a regular file" in capfd.readouterr().err


def test_runs_with_files_of_other_hashes_are_kept_apart(tmp_path):
    run, other = plan([ROW])[0], plan([ROW], check_hashes=False)[0]
    assert other.folder(tmp_path) != run.folder(tmp_path)
    add_results(tmp_path / "results.csv", [replace(DONE, seed=0, overrides="--data.check_hashes=false")])
    assert [left.seed for left in missing(tmp_path, plan([ROW]))] == [0, 1, 2]
    assert [left.seed for left in missing(tmp_path, plan([ROW], check_hashes=False))] == [1, 2]


def test_again_trains_rows_whose_results_come_with_the_package(tmp_path, monkeypatch, capfd):
    packaged = tmp_path / "packaged.csv"
    add_results(packaged, [replace(DONE, seed=seed) for seed in range(3)])
    monkeypatch.setattr(results, "IN_PACKAGE", packaged)
    assert main(["reproduce", ROW, "--runs", str(tmp_path)]) == 0
    assert "--again trains" in capfd.readouterr().out
    assert [run.seed for run in missing(tmp_path, plan([ROW]), again=True)] == [0, 1, 2]
    add_results(tmp_path / "results.csv", [replace(DONE, value=9.0)])
    assert [run.seed for run in missing(tmp_path, plan([ROW]), again=True)] == [0, 2]
    assert main(["reproduce", ROW, "--again", "--list", "--runs", str(tmp_path)]) == 0
    assert re.search(r"9.00 % \(1 seed\) +seeds 0, 2", capfd.readouterr().out)


@pytest.mark.parametrize(("way", "value"), [("compiled", "model.compile"), ("resident", "trainer.resident")])
def test_other_ways_to_train_have_the_same_keys(way, value):
    plain, other = plan([ROW])[0], plan([ROW], **{way: True})[0]
    assert other.keys == plain.keys
    assert other.changes == {**plain.changes, value: True}


def test_the_parts_of_a_run(tmp_path):
    """A part ends when it says so, or, if it was killed, with its newest file; copies of the files have other times."""
    for number, about in enumerate(({"commit": "b", "began": 20.0}, {"commit": "a", "began": 10.0, "ended": 12.0})):
        folder = tmp_path / f"version_{number}"
        folder.mkdir()
        (folder / "part.json").write_text(json.dumps(about))
    os.utime(tmp_path / "version_0" / "part.json", (25, 25))
    assert [(part["commit"], part["ended"]) for part in _parts(tmp_path)] == [("a", 12.0), ("b", 25.0)]


def test_bad_arguments(tmp_path, capfd):
    for arguments, said in (
        (["zhoa2019"], "did you mean zhao2019"),
        (["--threads", "0"], "argument --threads: expected an integer of at least 1, got 0"),
        (["--hours", "nan"], r"--hours .* nan\b"),
        (["--hours", "720"], r"--hours .* 720"),
    ):
        assert main(["reproduce", *arguments, "--runs", str(tmp_path)]) == 2
        assert re.search(said, capfd.readouterr().err)
