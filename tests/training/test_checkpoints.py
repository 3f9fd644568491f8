"""When checkpoints are saved, that they are whole or absent, and what the commands do with damaged ones."""

import errno
import json
import os
import random
import shlex
import shutil
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from commands import call as run_command
from disks import files_of_at_most
from interruptions import Killed

from torchcaps.cli.train import _resume_command
from torchcaps.recipes import Recipe
from torchcaps.runs import Run
from torchcaps.runs.checkpoint import Checkpoint, damage
from torchcaps.runs.places import newest_first
from torchcaps.training.build import _loggers
from torchcaps.training.checkpoints import AtomicCheckpointIO, LastCheckpoints, _keeps_state
from torchcaps.training.curves import curves_of

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
TINY = [*QUIET, "--trainer.limit_train_batches=2", "--trainer.limit_test_batches=1"]
FOLDER = Path("runs/quickstart/version_0/checkpoints")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(command: str, *arguments: str) -> int:
    return run_command(command, "quickstart", *TINY, *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder of runs with a training of two epochs, which leaves two checkpoints."""
    runs = tmp_path_factory.mktemp("trained")
    assert call("train", "--runs", str(runs), "--trainer.max_epochs=2") == 0
    return runs


@pytest.fixture
def checkpoints(trained) -> Path:
    """The folder of a copy of these two checkpoints, for tests that damage them."""
    shutil.copytree(trained, "runs")
    assert sorted(path.name for path in FOLDER.iterdir()) == ["last.ckpt", "previous.ckpt"]
    return FOLDER


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def in_a_weight(path: Path) -> int:
    """Return the position of a byte in the middle of the largest weight."""
    with zipfile.ZipFile(path) as archive:
        member = max(archive.infolist(), key=lambda info: info.file_size)
        with archive.open(member) as file:
            start = file._orig_compress_start
    return start + member.file_size // 2


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit": lambda path: flip(path, in_a_weight(path)),
    "the last byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(path.stat().st_size)),
}


def harm(what: str, path: Path) -> None:
    """Damage a file as a disk does: its time of modification stays."""
    times = path.stat()
    DAMAGES[what](path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


# Damage. Every kind is tested with `damage`. Commands are tested with a file that is no zip archive ("half") and with
# an archive whose contents have changed ("one bit").


def test_damage_is_seen(checkpoints):
    path = checkpoints / "last.ckpt"
    whole, draw = path.read_bytes(), random.Random(0)
    for what in DAMAGES:
        harm(what, path)
        assert damage(path), what
        path.write_bytes(whole)
    for length in (1, 22, *(draw.randrange(len(whole)) for _ in range(5))):
        path.write_bytes(whole[:length])
        assert damage(path), length
    path.write_bytes(whole)
    assert damage(path) is None


def test_one_bit_anywhere_in_the_contents_is_seen(checkpoints):
    path = checkpoints / "last.ckpt"
    with zipfile.ZipFile(path) as archive:
        spans = []
        for member in archive.infolist():
            with archive.open(member) as file:
                spans.append((file._orig_compress_start, member.file_size, member.filename))
    draw = random.Random(0)
    for start, size, name in draw.choices(spans, weights=[span[1] for span in spans], k=10):
        place = start + draw.randrange(size)
        flip(path, place)
        assert damage(path) == f"{name} is not what was written"
        flip(path, place)
    assert damage(path) is None


@pytest.mark.parametrize("what", ["half", "one bit"])
def test_the_checkpoint_before_takes_the_place_of_a_damaged_one(what, checkpoints, capfd):
    harm(what, checkpoints / "last.ckpt")
    assert call("test", "--ckpt_path", "last") == 0
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"torchcaps: {checkpoints / 'last.ckpt'} is damaged (")
    assert line.endswith(f"): taking {checkpoints / 'previous.ckpt'}, the newest that is intact")
    assert "test/accuracy: 0." in printed.out
    assert call("test", "--ckpt_path", str(checkpoints / "last.ckpt")) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f": taking {checkpoints / 'previous.ckpt'}, the one before")


def test_training_goes_on_from_the_one_before(checkpoints, capfd):
    harm("one bit", checkpoints / "last.ckpt")
    assert call("train", "--ckpt_path", "last", "--trainer.max_epochs=2") == 0
    assert f"taking {checkpoints / 'previous.ckpt'}, the newest that is intact" in capfd.readouterr().err
    again = torch.load("runs/quickstart/version_1/checkpoints/last.ckpt", weights_only=True)
    assert curves_of(Path("runs/quickstart/version_1"))["accuracy"]["training"][0] == [1, 2]  # with the epoch before
    harm("one bit", checkpoints / "last.ckpt")  # a second time, which restores it
    first = torch.load(checkpoints / "last.ckpt", weights_only=True)
    assert all(torch.equal(again["state_dict"][name], value) for name, value in first["state_dict"].items())


def test_a_resumed_run_keeps_the_best_checkpoint_so_far(capfd):
    """The first epoch is made to be the best that there can be."""
    best = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/loss", "--data.val_size=64"]
    assert call("train", "--trainer.max_epochs=1", *best) == 0
    (kept,) = FOLDER.glob("epoch=*.ckpt")
    last = FOLDER / "last.ckpt"
    assert "epoch=0" in str(Run.find(FOLDER.parent).path)  # what commands take
    content, score = torch.load(last, weights_only=True), torch.tensor(-1.0)
    (state,) = (state for state in content["callbacks"].values() if "best_k_models" in state)
    state.update(best_model_score=score, kth_value=score, best_k_models={state["best_model_path"]: score})
    torch.save(content, last)
    capfd.readouterr()
    assert call("train", "--ckpt_path", "last", "--trainer.max_epochs=2", *best) == 0
    copied = Path("runs/quickstart/version_1/checkpoints") / kept.name
    assert f"{copied}, after epoch 1" in capfd.readouterr().out
    state.update(best_model_path="")  # as of a run that was stopped within its first epoch
    torch.save(content, last)
    assert Run.find(FOLDER.parent).path == last
    flags = dict.fromkeys(("small", "smoke", "allow_code", "model"), False)
    given = Namespace(recipe=str(FOLDER.parent), runs="runs", tokens=best, ckpt_path="a.ckpt", **flags)
    assert "+=" not in _resume_command(given, FOLDER.parent)  # the run has it
    assert "+=" in _resume_command(given, Path("without"))
    assert torch.load(copied, weights_only=True)["epoch"] == 0
    assert kept.is_file()


def test_the_best_checkpoint_of_a_run_that_was_moved(capfd):
    best = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/loss", "--data.val_size=64"]
    assert call("train", "--trainer.max_epochs=1", *best) == 0
    Path("runs").rename("moved")
    capfd.readouterr()
    assert call("train", "--ckpt_path", "moved/quickstart/version_0", "--trainer.max_epochs=1", *best) == 0
    (copied,) = Path("runs/quickstart/version_0/checkpoints").glob("epoch=*.ckpt")
    assert f"best checkpoint: {copied}, after epoch 1" in capfd.readouterr().out


def test_a_run_from_before_an_argument_existed(checkpoints, capfd):
    content = torch.load(checkpoints / "last.ckpt", weights_only=True)
    values = json.loads(content["recipe"])
    del values["model"]["top_k"], values["data"]["init_args"]["jitter"]
    AtomicCheckpointIO().save_checkpoint({**content, "recipe": json.dumps(values)}, checkpoints / "last.ckpt")
    assert call("train", "--ckpt_path", "last", "--trainer.max_epochs=2") == 0
    assert capfd.readouterr().err == ""
    assert call("train", "--ckpt_path", "last", "--model.top_k=2") == 2
    assert "was trained with model.top_k = None" in capfd.readouterr().err


def test_a_checkpoint_from_elsewhere_deletes_nothing(checkpoints, tmp_path):
    """Lightning's ModelCheckpoint deletes what its state calls the worst of the best, when a better one comes."""
    victim, beside = tmp_path / "victim", checkpoints / "victim.ckpt"
    for path in (f"local://{victim}", str(victim), str(beside), str(victim / "a.ckpt")):
        for folder in (victim, beside):
            folder.mkdir(exist_ok=True)
            (folder / "a.ckpt").touch()
        content = torch.load(checkpoints / "last.ckpt", weights_only=True)
        score = torch.tensor(1e9)
        worst = {"best_k_models": {path: score}, "kth_best_model_path": path, "kth_value": score}
        worst |= {"best_model_score": score, "current_score": score, "last_model_path": ""}
        name = "ModelCheckpoint{'monitor': 'train/loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
        content["callbacks"][name + "'train_time_interval': None}"] = {"best_model_path": path, **worst}
        forged = checkpoints / "forged.ckpt"
        AtomicCheckpointIO().save_checkpoint(content, forged)
        states = AtomicCheckpointIO().load_checkpoint(forged)["callbacks"].values()
        (state,) = [state for state in states if "best_k_models" in state]
        assert (state["best_k_models"], state["best_model_path"], state["kth_best_model_path"]) == ({}, "", "")
    best = "{class_path: ModelCheckpoint, init_args: {monitor: train/loss, filename: best}}"
    assert call("train", "--ckpt_path", str(forged), "--trainer.max_epochs=3", f"--trainer.callbacks+={best}") == 0
    assert (victim / "a.ckpt").exists()
    assert (beside / "a.ckpt").exists()
    own = torch.load(checkpoints / "last.ckpt", weights_only=True)
    kept = {"best_model_path": str(checkpoints / "previous.ckpt"), "best_k_models": {}}
    AtomicCheckpointIO().save_checkpoint({**own, "callbacks": {"ModelCheckpoint": dict(kept)}}, forged)
    assert AtomicCheckpointIO().load_checkpoint(forged)["callbacks"]["ModelCheckpoint"] == kept


def test_a_compressed_checkpoint_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "small.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**7))
    assert damage(tmp_path / "small.ckpt") == "it is compressed"


@pytest.mark.parametrize("command", ["test", "train"])
def test_damaged_ones_alone(command, checkpoints, capfd):
    harm("half", checkpoints / "last.ckpt")
    harm("one bit", checkpoints / "previous.ckpt")
    shutil.copy(checkpoints / "previous.ckpt", "mine.ckpt")
    assert call(command, "--ckpt_path", "last") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"torchcaps: {checkpoints / 'last.ckpt'} is damaged (")
    assert "no intact checkpoint under runs/quickstart" in line
    assert call(command, "--ckpt_path", "mine.ckpt") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("torchcaps: mine.ckpt is damaged")


# Writing


def test_a_checkpoint_between_its_names_is_found(checkpoints, capfd):
    """`next.ckpt` alone is the state after an interruption before the last rename."""
    (checkpoints / "previous.ckpt").unlink()
    (checkpoints / "last.ckpt").rename(checkpoints / "next.ckpt")
    assert run_command("test", str(checkpoints.parent), *TINY) == 0
    assert call("test", "--ckpt_path", "last") == 0
    assert call("train", "--ckpt_path", "last", "--trainer.max_epochs=3") == 0
    assert capfd.readouterr().err == ""
    assert torch.load("runs/quickstart/version_1/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


@pytest.mark.parametrize(
    ("rename", "left"), [("previous.ckpt", {"next.ckpt", "last.ckpt"}), ("last.ckpt", {"next.ckpt", "previous.ckpt"})]
)
def test_an_interruption_between_the_renames_loses_nothing(rename, left, monkeypatch, trained):
    """The interruption comes while the checkpoint of the second epoch is saved."""
    replace, done = Path.replace, []

    def interrupted(path: Path, target: Path) -> Path:
        if len(done) > 2 and target.name == rename:
            raise Killed
        done.append(target.name)
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(Killed):
            call("train", "--trainer.max_epochs=3")
    assert {path.name for path in FOLDER.iterdir()} == left
    found = newest_first([FOLDER])[0]
    assert found.name == "next.ckpt"
    here, there = (torch.load(path, weights_only=True) for path in (found, next(trained.rglob("last.ckpt"))))
    assert here["global_step"] == there["global_step"] == 4
    assert all(torch.equal(here["state_dict"][name], value) for name, value in there["state_dict"].items())
    assert call("train", "--trainer.max_epochs=3", "--ckpt_path", "last") == 0
    version = FOLDER.parents[1] / "version_1"
    assert torch.load(version / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 6


def test_the_newest_of_several_runs_comes_first(tmp_path):
    """Runs are ordered by their numbers, because copies of files may have other times."""
    folders = [tmp_path / name / "checkpoints" for name in ("version_9", "version_10", "version_of_mine", "none")]
    found = [(1, "next"), (1, "last"), (0, "last"), (0, "previous")]
    for seconds, (run, name) in enumerate(found):
        path = folders[run] / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (seconds, seconds))
    for name in ("epoch=1.ckpt", ".next.unfinished.ckpt"):
        (folders[0] / name).touch()
    for name in ("version_of_mine", "version_²", "version_٩٩", "version_99_", f"version_{'9' * 99}"):
        folders.append(tmp_path / name / "checkpoints")
        folders[-1].mkdir(parents=True)
        (folders[-1] / "last.ckpt").touch()
    assert newest_first(folders) == [folders[run] / f"{name}.ckpt" for run, name in found]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """torch may raise an error of its own after that of the disk."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)

    def full(checkpoint, file):
        file.write(b"PK")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos\n 64 vs 2")  # noqa: B904

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=f"^cannot write {path}: No space left on device$"):
        AtomicCheckpointIO().save_checkpoint({"step": 2}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(path) == {"step": 1}


def test_a_training_that_cannot_write(checkpoints, capfd):
    """Files may have up to 1 MB, and a checkpoint has 5 MB."""
    before = {path.name: path.read_bytes() for path in checkpoints.iterdir()}
    with files_of_at_most(10**6):
        assert call("train", "--ckpt_path", "last", "--trainer.max_epochs=3") == 2
    (line,) = capfd.readouterr().err.splitlines()
    path = Path("runs/quickstart/version_1/checkpoints/next.ckpt")
    assert line.startswith(f"torchcaps: cannot write {path}: File too large; to continue: torchcaps train quickstart ")
    assert line.endswith(" --ckpt_path last")
    assert list(path.parent.iterdir()) == []
    assert {path.name: path.read_bytes() for path in checkpoints.iterdir()} == before
    assert run_command(*shlex.split(line.partition("to continue: torchcaps ")[2])) == 0
    found = torch.load("runs/quickstart/version_2/checkpoints/last.ckpt", weights_only=True)
    assert found["global_step"] == 6


def test_metrics_that_cannot_be_written(tmp_path):
    logger = _loggers(tmp_path / "version_0")[0]
    logger.log_metrics({"loss": 1.0})
    path = tmp_path / "version_0" / "metrics.csv"
    with files_of_at_most(4), pytest.raises(OSError, match=f"^cannot write {path}: File too large$"):
        logger.save()


# How often, and where


@pytest.mark.parametrize(
    ("epochs", "batches", "options", "seconds", "steps"),
    [
        (3, 2, [], 120, [2, 4, 6]),  # at the end of every epoch
        (2, 3, [], 0, [1, 2, 3, 4, 5, 6]),  # every so often within an epoch
        (2, 5, ["--trainer.accumulate_grad_batches=2"], 0, [1, 2, 3, 4, 5, 6]),  # none where gradients wait for more
        (-1, 4, ["--trainer.max_steps=6"], 120, [4, 6]),  # one where training ends
        (1, 2, ["--trainer.enable_checkpointing=false"], 0, []),
    ],
)
def test_when_checkpoints_are_saved(epochs, batches, options, seconds, steps, monkeypatch):
    saved = []
    save = AtomicCheckpointIO.save_checkpoint

    def noting(self, checkpoint, path, storage_options=None):
        saved.append(checkpoint["global_step"])
        save(self, checkpoint, path)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", noting)
    monkeypatch.setattr(LastCheckpoints, "SECONDS", seconds)
    length = [f"--trainer.max_epochs={epochs}", f"--trainer.limit_train_batches={batches}"]
    assert call("train", *length, *options) == 0
    assert saved == steps
    assert bool(list(Path().rglob("*.ckpt"))) == bool(steps)


def test_images_that_an_encoder_encodes_keep_their_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"init_args": {"images": {"init_args": {"split": None, "test_share": 0.1}}}}
    kept = with_split(data)
    assert kept["init_args"]["images"]["init_args"]["split"] == str(tmp_path / "best.ckpt")


def test_a_split_of_another_kind_is_left_alone():
    assert with_split({"init_args": {"split": "letters"}}) == {"init_args": {"split": "letters"}}


def with_split(data):
    checkpoint = Checkpoint(Path("best.ckpt"), {"model": {}, "data": data}, {}, {})
    return Run(checkpoint, Recipe("mine", (), {}))._with_split()["data"]


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(PermissionError):
        damage(tmp_path / "last.ckpt")


def test_which_optimizers_keep_a_state():
    weights = [torch.nn.Parameter(torch.ones(1))]
    plain, heavy = (torch.optim.SGD(weights, 0.1, momentum=momentum) for momentum in (0, 0.9))
    for optimizer in (plain, heavy, torch.optim.Adam(weights)):
        weights[0].grad = torch.ones(1)
        optimizer.step()
        assert _keeps_state(optimizer) == any(optimizer.state.values())
