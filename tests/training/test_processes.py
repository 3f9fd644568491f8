"""Several processes train and test as one process does: the same batches, losses, weights and numbers."""

import csv
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import pytest
import torch
from commands import call
from encoders import make_encoder
from interruptions import interrupt, newest
from processes import together

from torchcaps.data.encoder import Encoder

RECIPES = {
    "digits.yaml": """
        extends: quickstart
        model: {network: {class_path: torchcaps.CapsNet, init_args: {
            image_size: 8, channels: 4, kernel_size: 3, primary_types: 2, primary_pose: 4, primary_kernel_size: 3,
            class_pose: 4, decoder: [8]}}}
        trainer: {max_epochs: 2}
        """,
    "texts.yaml": """
        extends: heinsen2019/table3/mean --small
        model: {network: {init_args: {layers: 3, width: 8}}, mixup: 0}
        data: {init_args: {encoder: bert, phrases: true, group_by_length: true}}
        trainer: {max_epochs: 2}
        """,
}
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
QUIET += ["--trainer.log_every_n_steps=1"]
DDP = ["--trainer.devices=2", "--trainer.strategy=ddp"]
ALONE = ["--trainer.devices=1", "--trainer.strategy=auto"]  # for a run that remembers two devices


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, images_of_noise):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCAPS_DATA", str(images_of_noise))
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache")
    for name, text in RECIPES.items():
        Path(name).write_text(text)


def train(runs: str, recipe: str, *options: str) -> int:
    goes_on = any("--ckpt_path" in option for option in options) and not any("+=" in option for option in options)
    uninterrupted = ["--trainer.callbacks+=[]"] if goes_on else []  # those of the recipe, without an `Interrupt`
    return call("train", recipe, "--allow_code", *QUIET, *options, *uninterrupted, "--runs", runs)


def train_together(runs: str, recipe: str, *options: str, processes: int = 2) -> list[Any]:
    both = [f"--trainer.devices={processes}", "--trainer.strategy=ddp", *options]
    return together(lambda rank: train(runs, recipe, *both), processes)


def difference(runs: str, others: str) -> float:
    """Return the largest difference between two weights, and check that the runs have taken equally many steps."""
    one, other = newest(runs), newest(others)
    assert one["global_step"] == other["global_step"]
    return max((one["state_dict"][k] - other["state_dict"][k]).abs().max().item() for k in one["state_dict"])


def metrics(runs: str) -> list[dict[str, float]]:
    (table,) = Path(runs).rglob("metrics.csv")
    with table.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def results(out: str) -> dict[str, str]:
    """Return the printed metrics of a test, each of which is printed once."""
    found = re.findall(r"^(test/\w+): (\S+)$", out, re.MULTILINE)
    assert len(found) == len(dict(found)) > 0, out
    assert out.count("run: ") == 1
    return dict(found)


def assert_learn_alike(recipe: str, alone: list[str], each: list[str], capfd: Any, processes: int = 2) -> None:
    capfd.readouterr()
    assert train("alone", recipe, *alone) == 0
    printed = results(capfd.readouterr().out)
    assert train_together("both", recipe, *each, processes=processes) == [0] * processes
    assert results(capfd.readouterr().out) == printed
    rows, others = metrics("alone"), metrics("both")
    assert len(rows) == len(others) > 8
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6)
        assert {name: value for name, value in row.items() if "accuracy" in name} == {
            name: value for name, value in other.items() if "accuracy" in name
        }
    assert difference("alone", "both") < 1e-5


# 1437 images: the last training batch has one image, which only the first process has; or the last validation batch.
@pytest.mark.parametrize("val_size", [36, pytest.param(101, marks=pytest.mark.slow)])
def test_two_processes_learn_as_one(val_size, capfd):
    options = [f"--data.val_size={val_size}"]
    assert_learn_alike("digits.yaml", [*options, "--data.batch_size=100"], [*options, "--data.batch_size=50"], capfd)


@pytest.mark.slow
def test_two_processes_learn_as_one_from_texts_by_length(capfd):
    make_encoder(Path("bert"))
    assert_learn_alike("texts.yaml", ["--data.batch_size=4"], ["--data.batch_size=2"], capfd)


@pytest.mark.slow
def test_three_processes_learn_as_one(capfd):
    assert_learn_alike("digits.yaml", ["--data.batch_size=99"], ["--data.batch_size=33"], capfd, processes=3)


def test_the_test_of_two_processes_is_that_of_one(capfd):
    assert train("alone", "digits.yaml", "--data.batch_size=32", "--trainer.max_epochs=1") == 0
    test = ["test", "digits.yaml", "--runs=alone", *QUIET]
    capfd.readouterr()
    assert call(*test, "--data.batch_size=50") == 0
    expected = capfd.readouterr().out
    assert together(lambda _: call(*test, "--data.batch_size=7", *DDP)) == [0, 0]
    assert capfd.readouterr().out == expected


# Runs that are resumed with another number of processes

STOP = interrupt(6, "SIGTERM", rank=0)  # at step 6 of the 15 of the first epoch


@pytest.mark.slow
def test_one_process_goes_on_where_two_have_stopped_and_the_other_way_round():
    """As many samples are taken in a step as before: the run ends as one that was never stopped."""
    one, each = "--data.batch_size=100", "--data.batch_size=50"
    assert train("straight", "digits.yaml", one) == 0
    assert train_together("two-one", "digits.yaml", each, *STOP) == [143, 0]
    assert train("two-one", "digits.yaml", one, "--ckpt_path=last", *ALONE) == 0
    assert difference("two-one", "straight") < 1e-5
    assert train("one-two", "digits.yaml", one, *STOP) == 143
    assert train_together("one-two", "digits.yaml", each, "--ckpt_path=last") == [0, 0]
    assert difference("one-two", "straight") < 1e-5


@pytest.mark.slow
def test_an_epoch_goes_on_in_batches_of_another_size_with_every_sample_once(capfd):
    """Seven batches of 50 from two processes each, then batches of 50 from one process: each image once."""
    seen = Path("seen")
    options = ["--data.batch_size=50", "--trainer.max_epochs=1"]
    options += ["--allow_code", "--trainer.callbacks+=processes.Record"]
    options += [f"--trainer.callbacks.folder={seen}"]
    assert train_together("runs", "digits.yaml", *options, *STOP) == [143, 0]
    assert train("runs", "digits.yaml", *options, "--ckpt_path=last", *ALONE) == 0
    assert newest("runs")["global_step"] == 7 + 15
    images = [line for file in seen.iterdir() for line in file.read_text().splitlines()]
    assert len(images) == 1437
    assert sorted(images) == sorted(images_of_digits())


def images_of_digits() -> list[str]:
    from torchcaps.data import Digits

    data = Digits()
    data.setup("fit")
    return [str(image.sum(dtype=torch.float64).item()) for image, _ in data.train_set]


def test_batches_that_do_not_end_where_the_run_has_stopped(capfd):
    assert train("runs", "digits.yaml", "--data.batch_size=50", *STOP) == 143
    capfd.readouterr()
    assert train_together("runs", "digits.yaml", "--data.batch_size=50", "--ckpt_path=last") == [2, 2]
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("torchcaps: ")]  # PyTorch may warn if it is slow
    assert "Traceback" not in said
    assert line == (
        "torchcaps: the checkpoint was saved within an epoch, after 350 samples in batches of 50 in all processes "
        "together, and batches of 100 do not divide them: choose data.batch_size and the number of processes so that "
        "their product is 50"
    )


# Errors


@pytest.mark.parametrize("rank", [1, pytest.param("null", marks=pytest.mark.slow)])
def test_an_error_is_said_once_and_ends_all(rank, capfd):
    assert train_together("runs", "digits.yaml", *interrupt(2, "error", rank=rank)) == [2, 2]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torchcaps: ")]
    assert said == ["torchcaps: nothing can be learned from this"]


# Embeddings


def record_computed(monkeypatch) -> None:
    """Let processes write down the texts that they compute."""
    compute = Encoder._compute

    def recorded(self, texts, store, device=None):
        with Path(f"computed-{os.environ.get('RANK', 'alone')}").open("a") as file:
            file.writelines(f"{text}\n" for text in texts)
        compute(self, texts, store, device)

    monkeypatch.setattr(Encoder, "_compute", recorded)
    monkeypatch.setattr("torchcaps.data.encoder.TOKENS_AT_ONCE", 1)  # a batch for each text


def computed(rank: Any) -> list[str]:
    file = Path(f"computed-{rank}")
    return file.read_text().splitlines() if file.exists() else []


TEXTS = [*(" ".join(["good", "bad", "film"][: n % 3 + 1] * (n // 3 + 1)) for n in range(9)), "bad", "not good"]


def embed(rank: int, kill: int | None = None) -> np.ndarray:
    """Return the embeddings of TEXTS, computed by two processes; one of them may be killed after two texts."""
    from lightning import Trainer

    from torchcaps.data.embeddings import EmbeddingStore

    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    trainer.strategy.setup_environment()
    add, added = EmbeddingStore.add, []

    def killing(self, texts, *more):
        if len(added) == 2:
            (self.folder / f".{rank}.unfinished.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        added.append(texts)
        add(self, texts, *more)

    if rank == kill:
        EmbeddingStore.add = killing
    return Encoder("bert", cache="kept").embed(TEXTS, trainer).padded(range(len(TEXTS)))[0].numpy()


def test_two_processes_compute_each_embedding_once(monkeypatch):
    make_encoder(Path("bert"))
    alone = Encoder("bert", cache="alone").embed(TEXTS).padded(range(len(TEXTS)))[0].numpy()
    record_computed(monkeypatch)
    for states in together(embed):
        np.testing.assert_allclose(states, alone, rtol=1e-3, atol=1e-3)
    first, second = computed(0), computed(1)
    assert sorted(first + second) == sorted(set(TEXTS))
    assert abs(len(first) - len(second)) <= 1
    together(embed)
    assert len(computed(0)) + len(computed(1)) == len(set(TEXTS))  # none of them again


@pytest.mark.parametrize("kill", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_the_embeddings_of_processes_of_which_one_is_killed(kill, monkeypatch):
    make_encoder(Path("bert"))
    record_computed(monkeypatch)
    with pytest.raises(RuntimeError, match="process . ended with status"):
        together(lambda rank: embed(rank, kill))
    before = len(computed(0)) + len(computed(1))
    assert before == len(set(TEXTS))
    states = Encoder("bert", cache="kept").embed(TEXTS).padded(range(len(TEXTS)))[0]
    assert 1 <= len(computed("alone")) <= before - 2  # the killed process has added two; the other may have ended too
    fresh = Encoder("bert", cache="alone").embed(TEXTS).padded(range(len(TEXTS)))[0]
    torch.testing.assert_close(states, fresh, rtol=1e-3, atol=1e-3)
