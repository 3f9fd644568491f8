"""A training that is interrupted and resumed ends in the same weights as one that is not, whatever interrupts it."""

import csv
import errno
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pooch
import pytest
import torch
from commands import call as run_command
from encoders import make_encoder
from interruptions import Killed, interrupt, newest
from pictures import draw_digits

from torchcaps.training import Classifier
from torchcaps.training.checkpoints import LastCheckpoints
from torchcaps.training.resident import USUAL, ResidentStep

RECIPES = {
    "digits.yaml": """
        extends: quickstart
        model: {network: {class_path: torchcaps.CapsNet, init_args: {
            image_size: 8, channels: 4, kernel_size: 3, primary_types: 2, primary_pose: 4, primary_kernel_size: 3,
            class_pose: 4, decoder: [8]}}}
        data: {init_args: {batch_size: 8, shift: 1}}
        trainer: {limit_train_batches: 4}
        """,
    "dropout.yaml": """
        extends: sabour2017/table1/cnn
        model: {network: {class_path: torchcaps.models.convnet_mnist, init_args: {
            channels: [2, 2, 2], hidden: [8, 8], dropout: 0.5}}}
        data: {init_args: {batch_size: 4}}
        """,
    "overlays.yaml": """
        extends: sabour2017/table1/multimnist
        model: {network: {class_path: torchcaps.CapsNet, init_args: {
            image_size: 36, channels: 4, primary_types: 2, class_pose: 4, decoder: [8]}}}
        data: {init_args: {batch_size: 4, epoch_size: 14, test_size: 4}}
        """,
    "batch-norm.yaml": """
        extends: tsai2020/figure5/cnn --small
        model: {network: {init_args: {channels: 4, hidden: 8}}}
        data: {init_args: {batch_size: 4, epoch_size: 14, test_size: 4}}
        """,
    "mean.yaml": """
        extends: heinsen2019/table3/mean --small
        model: {network: {init_args: {layers: 3, width: 8}}, mixup: 0.2}
        data: {init_args: {batch_size: 2, encoder: bert, phrases: true}}
        """,
    "capsules.yaml": """
        extends: heinsen2019/table3/heinsen --small
        model: {network: {init_args: {layers: 3, width: 8}}}
        data: {init_args: {batch_size: 2, encoder: bert, phrases: true}}
        """,
    "rare.yaml": """
        extends: own/images
        model: {network: {init_args: {depth: 8}}, class_weights: balanced}
        data: {init_args: {folder: pictures, balance: true, batch_size: 8, num_workers: 0}}
        trainer: {callbacks: []}
        """,
}
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
QUIET += ["--trainer.limit_test_batches=1"]
EPOCHS = ["--trainer.max_epochs=3"]
STEPS = ["--trainer.max_epochs=-1", "--trainer.max_steps=10"]

# An epoch has four batches, unless a case says otherwise.
CASES = {
    "in memory": ["digits.yaml", *EPOCHS],
    "in memory, ending within an epoch": ["digits.yaml", *STEPS],
    "in memory, validated": ["digits.yaml", *EPOCHS, "--data.val_size=100"],
    "in memory, validated within epochs": [
        *("digits.yaml", *STEPS, "--data.val_size=100", "--trainer.val_check_interval=2"),
    ],
    "in memory, all of it": ["digits.yaml", *EPOCHS, "--data.batch_size=400", "--trainer.limit_train_batches=1.0"],
    "in memory, compiled, the last batch smaller": [
        *("digits.yaml", *EPOCHS, "--data.batch_size=400", "--trainer.limit_train_batches=1.0", "--model.compile=true"),
    ],
    "in memory, workers": ["digits.yaml", *STEPS, "--data.num_workers=2"],
    "in memory, gradients of two of five": [
        *("digits.yaml", "--trainer.max_epochs=4", "--trainer.limit_train_batches=5"),
        "--trainer.accumulate_grad_batches=2",
    ],
    "dropout": ["dropout.yaml", *EPOCHS],
    "made on the fly": ["overlays.yaml", *EPOCHS],
    "made on the fly, workers": ["overlays.yaml", *STEPS, "--data.num_workers=2"],
    "batch normalization": ["batch-norm.yaml", *STEPS],
    "pictures, balanced and weighted": ["rare.yaml", *EPOCHS],
    "texts": ["mean.yaml", *EPOCHS, "--trainer.limit_train_batches=4", "--data.group_by_length=false"],
    "texts by length": ["mean.yaml", *STEPS, "--trainer.limit_train_batches=4", "--data.group_by_length=true"],
    "texts by length, workers": ["capsules.yaml", *STEPS, "--data.group_by_length=true", "--data.num_workers=2"],
}
# The fast tests have accumulated gradients with a shorter last step, texts by length with mixup and a one-cycle
# schedule, and samples and weights for rare classes.
QUICK = ("in memory, gradients of two of five", "texts by length", "pictures, balanced and weighted")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, images_of_noise):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    for name, text in RECIPES.items():
        Path(name).write_text(text)


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, ...]]:
    """A list that gets the epoch, the batch and the step of every training step."""
    steps = []
    training_step, take = Classifier.training_step, ResidentStep.take

    def resident(self, epoch, batch, indices):
        steps.append((epoch, batch, self.trainer.global_step))
        take(self, epoch, batch, indices)

    monkeypatch.setattr(ResidentStep, "take", resident)

    def step(self, batch, batch_idx):
        steps.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", step)
    return steps


def train(runs: str, *arguments: str) -> int:
    recipe, *options = arguments
    return run_command("train", recipe, *QUIET, *options, *uninterrupted(options), "--runs", runs)


def uninterrupted(options: Sequence[str]) -> list[str]:
    """Return the option by which a run that goes on has the callbacks of its recipe, without an `Interrupt`."""
    return ["--trainer.callbacks+=[]"] if "--ckpt_path" in options and not any("+=" in o for o in options) else []


def assert_same(one: Any, other: Any, place: str = "") -> None:
    """Assert that two checkpoints, or parts of them, are the same bit by bit."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place} {index}")
    else:
        assert one == other, place


Straight = tuple[dict[str, Any], list[tuple[int, ...]]]  # last checkpoint and steps of a training without interruption
STRAIGHT: dict[tuple[str, ...], Straight] = {}
METRICS: dict[tuple[str, ...], list[dict[str, str]]] = {}


def straight(options: list[str], seen: list[tuple[int, ...]]) -> Straight:
    """Train without interruption, once for all tests."""
    if tuple(options) not in STRAIGHT:
        assert train("straight", *options) == 0
        STRAIGHT[tuple(options)] = newest("straight"), list(seen)
        METRICS[tuple(options)] = metrics("straight")
        seen.clear()
    return STRAIGHT[tuple(options)]


def assert_ends_alike(runs: str, others: str | dict[str, Any]) -> None:
    one, other = newest(runs), newest(others) if isinstance(others, str) else others
    for part in ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(one[part], other[part], part)


def interrupted(monkeypatch, runs: str, case: list[str], step: int, by: str, seconds: float) -> None:
    """Train until an interruption at a step, with a checkpoint every `seconds`. Resume if there is a checkpoint."""
    last = ["--ckpt_path", "last"] if list(Path(runs).rglob("last.ckpt")) else []
    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoints, "SECONDS", seconds)
        if by == "SIGKILL":
            with pytest.raises(Killed):
                train(runs, *case, *last, *interrupt(step, by))
        elif by == "a full disk":
            fill_the_disk(patch, after=step)
            assert train(runs, *case, *last) == 2
        else:
            assert train(runs, *case, *last, *interrupt(step, by)) == 128 + getattr(signal, by)


def fill_the_disk(patch: pytest.MonkeyPatch, after: int) -> None:
    """Make the disk full for checkpoints of more than `after` steps."""
    save = torch.save

    def full(checkpoint, file):
        if checkpoint["global_step"] <= after:
            return save(checkpoint, file)
        file.write(b"PK")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(torch, "save", full)


def encoder_of(case: list[str]) -> None:
    if case[0] in ("mean.yaml", "capsules.yaml"):
        make_encoder(Path("bert"))
    if case[0] == "rare.yaml":
        draw_digits(Path("pictures"), 0, 30)
        for path in sorted(Path("pictures", "zero").iterdir())[4:]:
            path.unlink()


@pytest.mark.parametrize("case", [*QUICK, *(slow(case) for case in CASES if case.endswith("workers"))])
def test_a_run_of_many_pieces(case, monkeypatch, seen):
    """The training is stopped by a signal twice and killed once before it is resumed to its end."""
    options = CASES[case]
    encoder_of(options)
    end, all_steps = straight(options, seen)
    at = end["global_step"]
    assert at >= 7
    interrupted(monkeypatch, "pieces", options, 1, "SIGTERM", 120)
    interrupted(monkeypatch, "pieces", options, 3, "SIGTERM", 120)
    interrupted(monkeypatch, "pieces", options, at - 2, "SIGKILL", 0)
    seen.clear()
    assert train("pieces", *options, "--ckpt_path", "last") == 0
    assert 0 < len(seen) <= len(all_steps) // 2
    assert seen == all_steps[-len(seen) :]
    assert_ends_alike("pieces", end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "by", "seconds"),
    [
        *((case, by, seconds) for case in CASES for by, seconds in (("SIGTERM", 120), ("SIGKILL", 0))),
        *((case, "SIGKILL", 120) for case in ("in memory", *QUICK)),
    ],
)
def test_interrupted_at_every_step(case, by, seconds, monkeypatch, seen):
    options = CASES[case]
    encoder_of(options)
    end, all_steps = straight(options, seen)
    for step in range(end["global_step"]):
        runs = f"interrupted-{step}"
        interrupted(monkeypatch, runs, options, step, by, seconds)
        saved = list(Path(runs).rglob("last.ckpt"))
        assert saved or by == "SIGKILL"
        assert saved or seconds or step == 0
        seen.clear()
        assert train(runs, *options, *(["--ckpt_path", "last"] if saved else [])) == 0
        assert seen == all_steps[len(all_steps) - len(seen) :]
        assert_ends_alike(runs, end)


def test_a_full_disk_ends_a_run_that_then_goes_on(monkeypatch, seen, capfd):
    options = CASES["in memory"]
    end, all_steps = straight(options, seen)
    interrupted(monkeypatch, "pieces", options, 6, "a full disk", 0)
    said = capfd.readouterr().err.splitlines()[-1]
    checkpoints = Path("pieces/digits/version_0/checkpoints")
    assert said.startswith(
        f"torchcaps: cannot write {checkpoints / 'next.ckpt'}: No space left on device; to continue: "
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == ["last.ckpt", "previous.ckpt"]
    seen.clear()
    assert call(said.partition("to continue: ")[2]) == 0
    assert seen == all_steps[6:]
    assert_ends_alike("pieces", end)


def call(command: str) -> int:
    """Run a command line that `torchcaps` has printed, in this process."""
    program, *arguments = shlex.split(command)
    assert program == "torchcaps"
    return run_command(*arguments)


@pytest.mark.parametrize(
    ("by", "status", "step"),  # within an epoch and at the end of one
    [("SIGTERM", 143, 7), ("SIGINT", 130, 5), ("SIGUSR1", 138, 6)],
)
def test_a_signal_says_how_to_go_on(by, status, step, seen, capfd):
    options = CASES["in memory"]
    end, all_steps = straight(options, seen)
    capfd.readouterr()
    assert train("my runs", *options, *interrupt(step, by)) == status
    first, *_, last = capfd.readouterr().err.splitlines()
    assert first.startswith(f"torchcaps: {by}: stopping ")
    assert last.startswith(f"torchcaps: stopped by {by}; to continue: torchcaps train digits.yaml ")
    seen.clear()
    assert call(last.partition("to continue: ")[2]) == 0
    assert seen == all_steps[step + 1 :]
    assert_ends_alike("my runs", end)


@pytest.fixture
def slow_signals(monkeypatch):
    """Let more than a second pass between any two signals: signals closer together count as one."""
    monkeypatch.setattr("torchcaps.utils.signals.time", SimpleNamespace(monotonic=count(0, 5).__next__))


def test_a_signal_that_is_sent_twice_is_one():
    assert train("runs", *CASES["in memory"], *interrupt(5, "SIGTERM"), *interrupt(5, "SIGTERM")) == 143
    assert newest("runs")["global_step"] == 6


def test_a_second_signal_stops_at_once(slow_signals, seen, capfd):
    assert train("runs", *CASES["in memory"], *interrupt(5, "SIGTERM"), *interrupt(5, "SIGTERM")) == 143
    assert len(seen) == 6
    assert capfd.readouterr().err.splitlines()[-1].startswith("torchcaps: stopped by SIGTERM; to continue: ")
    assert newest("runs")["global_step"] == 4  # the checkpoint at the end of the first epoch


def test_nothing_to_go_on_with(slow_signals, capfd):
    options = CASES["in memory"]
    assert train("runs", *options, *interrupt(0, "SIGTERM"), *interrupt(0, "SIGTERM")) == 143
    said = capfd.readouterr().err.splitlines()[-1]
    assert "; nothing was saved; to start again: torchcaps train digits.yaml " in said
    assert "--ckpt_path" not in said


# Resident steps

RESIDENT = "--trainer.resident=true"
ALL_RESIDENT = [case for case in CASES if "of two" not in case]  # they have no worker processes
QUICK_RESIDENT = ("in memory, validated within epochs", "texts by length", "made on the fly")


def resident_cases() -> list[Any]:
    return [case if case in QUICK_RESIDENT else slow(case) for case in ALL_RESIDENT]


@pytest.mark.parametrize("case", resident_cases())
def test_resident_steps_end_in_the_same_weights(case, seen, monkeypatch, capfd):
    options = CASES[case]
    encoder_of(options)
    end, all_steps = straight(options, seen)
    usual = []
    step = Classifier.training_step
    monkeypatch.setattr(Classifier, "training_step", lambda *given: (usual.append(given), step(*given))[1])
    assert train("resident", *options, RESIDENT) == 0
    assert "trainer.resident" not in capfd.readouterr().err
    assert seen == all_steps
    assert len(usual) == USUAL
    assert_ends_alike("resident", end)
    assert_same(metrics("resident"), METRICS[tuple(options)])


def metrics(runs: str) -> list[dict[str, str]]:
    """Return the logged metrics of a run, rounded as sums in another order need it."""
    (path,) = Path(runs).rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    mean = "train/loss_step"  # in resident steps that of several, elsewhere the newest
    return [{name: f"{float(value):.5g}" for name, value in row.items() if name != mean} for row in rows]


@pytest.mark.parametrize("case", resident_cases())
def test_resident_runs_of_many_pieces(case, monkeypatch, seen):
    """A signal ends the run in its first resident step, and it is killed in a later one before it is resumed."""
    options = CASES[case]
    encoder_of(options)
    end, all_steps = straight(options, seen)
    monkeypatch.setattr(LastCheckpoints, "SECONDS", 0)
    with during_resident_step(monkeypatch, 3, lambda: signal.raise_signal(signal.SIGTERM)):
        assert train("pieces", *options, RESIDENT) == 143
    assert newest("pieces")["global_step"] == 4

    def kill() -> None:
        raise Killed

    with during_resident_step(monkeypatch, 8, kill), pytest.raises(Killed):
        train("pieces", *options, RESIDENT, "--ckpt_path", "last")
    assert newest("pieces")["global_step"] == 8
    seen.clear()
    assert train("pieces", *options, RESIDENT, "--ckpt_path", "last") == 0
    assert seen == all_steps[8:]
    assert_ends_alike("pieces", end)


@contextmanager
def during_resident_step(monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> Iterator[None]:
    """Within this context, act in a resident step, between its gradients and its update."""
    update = ResidentStep.update

    def acting(self):
        if self.trainer.global_step == at:
            act()
        update(self)

    with monkeypatch.context() as patch:
        patch.setattr(ResidentStep, "update", acting)
        yield


# Runs that are continued with more epochs or steps

MORE = ["made on the fly", "dropout", "in memory, all of it", "in memory, gradients of two of five"]


@pytest.mark.parametrize("case", ["in memory, validated", *map(slow, MORE)])
def test_three_epochs_and_three_are_six(case):
    options = [option for option in CASES[case] if "max_epochs" not in option]
    assert train("straight", *options, "--trainer.max_epochs=6") == 0
    assert train("pieces", *options, "--trainer.max_epochs=3") == 0
    assert train("pieces", *options, "--trainer.max_epochs=6", "--ckpt_path", "last") == 0
    assert_ends_alike("pieces", "straight")


# From the end of an epoch of four steps to within an epoch, the other way round, and others.
@pytest.mark.parametrize(("first", "then"), [(8, 13), slow(10, 12), slow(3, 4)])
@pytest.mark.parametrize("case", ["in memory, ending within an epoch", slow("in memory, validated within epochs")])
def test_steps_and_steps_are_their_sum(case, first, then):
    options = [option for option in CASES[case] if "max_steps" not in option]
    assert train("straight", *options, f"--trainer.max_steps={then}") == 0
    assert train("pieces", *options, f"--trainer.max_steps={first}") == 0
    assert train("pieces", *options, f"--trainer.max_steps={then}", "--ckpt_path", "last") == 0
    assert_ends_alike("pieces", "straight")


def test_a_run_that_is_complete_takes_no_step(seen, capfd):
    for options in (CASES["in memory"], CASES["in memory, ending within an epoch"]):
        assert train("runs", *options) == 0
        before = newest("runs")
        seen.clear()
        assert train("runs", *options, "--ckpt_path", "last") == 0
        assert seen == []
        assert_same(newest("runs")["state_dict"], before["state_dict"])


def test_a_run_that_stopped_early_takes_no_step(seen, capfd, monkeypatch):
    """Nothing is better than the first epoch, by 100, and the patience is one epoch."""
    stops = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    stops += ["--trainer.callbacks.min_delta=100", "--data.val_size=100", "--trainer.max_epochs=9"]
    impatient = [*stops, "--trainer.callbacks.patience=1"]
    assert train("runs", "digits.yaml", *impatient) == 0
    assert newest("runs")["epoch"] == 1
    seen.clear()
    assert train("runs", "digits.yaml", *impatient, "--ckpt_path", "last") == 0
    assert seen == []
    assert "the run has stopped early: nothing is left to train" in capfd.readouterr().out
    assert len(list(Path("runs").rglob("version_1/checkpoints/last.ckpt"))) == 1  # the folder is a run, too
    assert train("runs", "digits.yaml", *stops, "--trainer.callbacks.patience=3", "--ckpt_path", "last") == 0
    assert newest("runs")["epoch"] == 3
    saved = []
    monkeypatch.setattr(LastCheckpoints, "_save", lambda callback, trainer: saved.append(trainer.global_step))
    assert train("longer", "digits.yaml", *impatient, "--trainer.min_epochs=4") == 0
    assert saved == [4, 8, 12, 16]


def test_the_seed_of_a_resumed_run_is_that_of_the_first(seen):
    options = CASES["in memory"]
    assert train("straight", *options, "--seed_everything=5") == 0
    assert train("pieces", *options, "--seed_everything=5", *interrupt(5, "SIGTERM")) == 143
    assert train("pieces", *options, "--seed_everything=6", "--ckpt_path", "last") == 0
    assert_ends_alike("pieces", "straight")
    assert train("others", *options, "--seed_everything=6") == 0
    with pytest.raises(AssertionError):
        assert_ends_alike("others", "straight")


# Processes of their own

RUN = """
from torchcaps.cli import run
from torchcaps.data.files import CanonicalFile
from torchcaps.training.checkpoints import LastCheckpoints
LastCheckpoints.SECONDS = {}
CanonicalFile.check = lambda file, path: None  # files of noise
if __name__ == "__main__":
    run()
"""
HELPERS = Path(__file__).parents[1] / "helpers"


def start(runs: str, *arguments: str, seconds: float = 120.0) -> subprocess.Popen[str]:
    recipe, *options = arguments
    Path("run.py").write_text(RUN.format(seconds))  # a file, because with two processes both run it
    options += uninterrupted(options)
    command = [sys.executable, "run.py", "train", recipe, *QUIET, *options, "--runs", runs]
    path = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, said = process.communicate(timeout=1500)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.slow
def test_a_process_that_gets_a_signal(seen):
    options = CASES["made on the fly"]
    end, all_steps = straight(options, seen)
    status, said = ended(start("pieces", *options, *interrupt(5, "SIGUSR1")))
    assert status == 138
    said = said.splitlines()[-1]
    assert said.startswith("torchcaps: stopped by SIGUSR1; to continue: torchcaps train overlays.yaml ")
    seen.clear()
    assert call(said.partition("to continue: ")[2]) == 0
    assert seen == all_steps[6:]
    assert_ends_alike("pieces", end)


@pytest.mark.slow
def test_a_process_that_is_killed_twenty_times_at_random_times():
    options = ["digits.yaml", "--trainer.max_epochs=-1", "--trainer.max_steps=4010", "--data.val_size=100"]
    options += ["--trainer.limit_train_batches=150"]
    taken = Path("straight/digits/version_0")

    def wait_for(folder: Path, process: subprocess.Popen[str]) -> float:
        while not folder.is_dir() and process.poll() is None:
            time.sleep(0.01)
        return time.monotonic()

    process = start("straight", *options, seconds=0.3)
    begun = wait_for(taken, process)
    assert ended(process)[0] == 0
    whole = time.monotonic() - begun
    times, kills, saved = random.Random(0), 0, []
    while True:
        last = ["--ckpt_path", "last"] if list(Path("pieces").rglob("*.ckpt")) else []
        process = start("pieces", *options, *last, seconds=0.3)
        begun = wait_for(Path(f"pieces/digits/version_{kills}"), process)
        if kills < 20:
            left = begun + times.uniform(0, whole / 12) - time.monotonic()
            try:
                process.wait(max(left, 0))
            except subprocess.TimeoutExpired:
                process.kill()
        status, said = ended(process)
        if status == 0:
            break
        assert status == -signal.SIGKILL, said
        kills += 1
        saved += [newest("pieces")["global_step"]] if list(Path("pieces").rglob("last.ckpt")) else []
    assert kills >= 5  # fewer than twenty if the first training was held up by other processes
    assert len(set(saved)) >= 3, saved
    assert sorted(saved) == saved
    assert_ends_alike("pieces", "straight")


DDP = ["--trainer.devices=2", "--trainer.strategy=ddp"]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "who"), [("in memory", "0"), ("made on the fly", "1"), ("texts by length", "null")])
def test_two_processes_that_get_a_signal(case, who):
    options = [*CASES[case], *DDP]
    encoder_of(options)
    status, said = ended(start("straight", *options))
    assert status == 0, said
    status, said = ended(start("pieces", *options, *interrupt(5, "SIGTERM", rank=who)))
    assert status == 143, said
    assert newest("pieces")["global_step"] == 6
    assert len(list(Path("pieces").rglob("version_*"))) == 1
    (command,) = re.findall(
        "torchcaps: stopped by SIGTERM; to continue: (torchcaps train .* --ckpt_path .*last.ckpt)", said
    )
    assert ended(start("pieces", *shlex.split(command)[2:-4], "--ckpt_path", "last"))[0] == 0
    assert_ends_alike("pieces", "straight")
    assert said.count("torchcaps: stopped by") == 1  # one process speaks for both


@pytest.mark.slow
def test_two_processes_that_are_killed():
    options = [*CASES["in memory, validated"], *DDP]
    status, said = ended(start("straight", *options))
    assert status == 0, said
    status, _ = ended(start("pieces", *options, *interrupt(6, "SIGKILL", real="true"), seconds=0))
    assert status == -signal.SIGKILL
    assert newest("pieces")["global_step"] == 6
    assert ended(start("pieces", *options, "--ckpt_path", "last"))[0] == 0
    assert_ends_alike("pieces", "straight")
