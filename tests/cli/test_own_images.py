"""Own pictures from a folder to predictions: training, report, best checkpoint, other networks, predictions."""

import csv
import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call, error_of
from pictures import draw_digits
from PIL import Image
from vision import SIZE, WIDTHS, make_vision_model

from torchcaps.data import DataError, ImageFolder, notes
from torchcaps.data.splits import digest, read_split
from torchcaps.deploy import from_pretrained, save_pretrained
from torchcaps.runs import Run
from torchcaps.training.overrides import read_overrides

SMALL = ["--model.network.depth", "8", "--data.num_workers", "0", "--data.augmentations", "[shift]"]


@pytest.fixture(scope="session")
def own(tmp_path_factory) -> Path:
    """A folder with pictures, further pictures, and a run on the pictures."""
    folder = tmp_path_factory.mktemp("own")
    draw_digits(folder / "pictures", 0, 80)
    draw_digits(folder / "new", 80, 120)
    arguments = ["--data.folder", str(folder / "pictures"), "--runs", str(folder / "runs"), *SMALL]
    assert call("train", "own/images", *arguments, "--trainer.max_epochs", "8") == 0
    return folder


def run_of(own: Path) -> Path:
    return own / "runs" / "own" / "images" / "version_0"


def predict(own: Path, *arguments: str) -> int:
    return call("predict", "own/images", *arguments, "--runs", str(own / "runs"))


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_numbers_of_papers_do_not_stand_under_own_pictures(own, capfd):
    arguments = ["own/images", "--runs", str(own / "runs"), "--protocols", "affine", "--images", "9"]
    assert call("evaluate", *arguments) == 0
    out = capfd.readouterr().out
    assert "accuracy on affine images (%)" in out
    assert "published" not in out


def test_a_run_leaves_a_report(own):
    report = run_of(own) / "report"
    assert sorted(path.name for path in report.iterdir() if path.name != "mistakes.png") == [
        "classes.csv",
        "confusion.csv",
        "confusion.png",
        "curves.png",
        "mistakes.csv",
        "summary.json",
    ]
    rows = rows_of((report / "classes.csv").read_text())
    assert [row["class"] for row in rows] == ["one", "seven", "zero", "mean of the classes"]
    assert sum(int(row["test samples"]) for row in rows[:-1]) == 36
    table = list(csv.reader((report / "confusion.csv").read_text().splitlines()))
    counts = [[int(n) for n in row[1:]] for row in table[1:]]
    summary = json.loads((report / "summary.json").read_text())
    right = sum(counts[i][i] for i in range(3)) / 36
    assert summary["metrics"]["test/accuracy"] == pytest.approx(right, abs=1e-6)
    recalls = [counts[i][i] / sum(counts[i]) for i in range(3)]
    assert summary["metrics"]["test/balanced_accuracy"] == pytest.approx(sum(recalls) / 3, abs=1e-6)
    assert {"val/accuracy", "val/balanced_accuracy", "test/loss"} < set(summary["metrics"])
    assert right > 0.9
    assert len(rows_of((report / "mistakes.csv").read_text())) == 36 - round(36 * right)
    assert summary["command"].startswith("torchcaps train own/images --data.folder")
    assert summary["names"] == ["one", "seven", "zero"]


def test_rare_classes_have_a_note_two_remedies_and_weights_in_the_checkpoint(own, capfd, monkeypatch):
    monkeypatch.setattr(notes, "_said", set())
    shutil.copytree(own / "pictures", "pictures")
    for path in sorted(Path("pictures", "zero").iterdir())[6:]:
        path.unlink()
    train = ["train", "own/images", "--data.folder", "pictures", *SMALL, "--trainer.max_epochs", "1"]
    assert call(*train) == 0
    note = "torchcaps: rare classes in training: zero (4), beside one (56); a network may never predict them: give "
    assert note + "--data.balance true or --model.class_weights balanced\n" in capfd.readouterr().err
    assert call(*train, "--model.class_weights", "balanced") == 0
    assert call(*train, "--data.balance", "true") == 0
    assert "rare" not in capfd.readouterr().err
    plain, weighted = (f"runs/own/images/version_{number}" for number in (0, 1))
    weights = torch.load(f"{weighted}/checkpoints/last.ckpt", weights_only=True)["state_dict"]["loss.weight"]
    assert weights.tolist() == pytest.approx([116 / (3 * 56), 116 / (3 * 56), 116 / (3 * 4)])
    assert call("test", weighted) == 0
    assert re.search(r"^test/balanced_accuracy: \d\.\d{4}$", capfd.readouterr().out, re.M)
    assert Run.find(f"{weighted}/checkpoints/last.ckpt").names == ["one", "seven", "zero"]
    for command in ("test", "train"):
        said = error_of(capfd, command, plain, "--model.class_weights", "balanced")
        assert "was trained without class weights: leave out what changes model.class_weights" in said
        said = error_of(capfd, command, weighted, "--model.class_weights", "null")
        assert "was trained with class weights: leave out what changes model.class_weights" in said
        said = error_of(capfd, command, weighted, "--model.class_weights", "[1, 1, 2]")
        assert "model.class_weights = balanced, and now it is [1.0, 1.0, 2.0]: leave out what changes it" in said
    assert "rare" not in capfd.readouterr().err


def test_the_split_lies_with_the_run(own):
    rows = rows_of((run_of(own) / "split.csv").read_text())
    assert len(rows) == 240
    assert {row["part"] for row in rows} == {"train", "val", "test"}


def test_a_checkpoint_alone_keeps_the_split_although_pictures_come_and_go(own, tmp_path, capfd):
    """Wherever it lies, and wherever the pictures lie: its test has pictures of its run's test alone."""
    parts = {row["file"]: row["part"] for row in rows_of((run_of(own) / "split.csv").read_text())}
    Path("best.ckpt").write_bytes((run_of(own) / "checkpoints" / "best.ckpt").read_bytes())
    shutil.copytree(own / "pictures", "moved")
    gone = next(path for path, part in parts.items() if part == "test")
    Path("moved", gone).rename("moved/one/new.png")
    capfd.readouterr()
    assert call("test", "best.ckpt", "--data.folder", "moved") == 0
    out, err = capfd.readouterr()
    assert re.search(r"^mean of the classes .* 35 *$", out, re.M)
    best = Path("best.ckpt").absolute()
    assert f"moved: left out 1 picture that the split of {best} does not have: one/new.png\n" in err
    assert f"moved: no longer has 1 picture of the split of {best}\n" in err
    assert Run.find("best.ckpt").data().parts == parts
    data = data_of_run("best.ckpt", "--data.folder", "moved")
    assert data.parts == {path: part for path, part in parts.items() if path != gone}


def data_of_run(run: str, *overrides: str) -> ImageFolder:
    """Return the data that a command builds for a run."""
    return Run.find(run).training(read_overrides(list(overrides))).datamodule


def test_a_split_beside_the_run_changes_nothing(own, capfd):
    parts = {row["file"]: row["part"] for row in rows_of((run_of(own) / "split.csv").read_text())}
    shutil.copytree(run_of(own), "run")
    table = Path("run/split.csv")
    for change in (
        lambda: table.write_text(table.read_text().replace("train", "test")),
        table.unlink,
        lambda: table.symlink_to("split.csv"),
        lambda: None,
    ):
        change()
        assert data_of_run("run").parts == parts
    assert "split.csv is not the split of " in capfd.readouterr().err


def test_other_pictures_need_another_split(own, capfd):
    for name in ("zero", "one", "seven"):
        shutil.copytree(own / "new" / name, Path("more", name))
    said = error_of(capfd, "test", str(run_of(own)), "--data.folder", "more")
    assert "best.ckpt: has none of the pictures in more: give the folder of its run, or, for pictures that" in said
    assert call("test", str(run_of(own)), "--data.folder", "more", "--data.split", "null") == 0
    assert data_of_run(str(run_of(own)), "--data.split", "null").split is None
    assert data_of_run(str(run_of(own)), "--data.split", "mine.csv").split == "mine.csv"


def test_shares_beside_a_split_are_refused(own, capfd):
    run = str(run_of(own))
    said = r"--data.test_share has no effect on the split of .*: leave it out$"
    for command in (["train", run], ["test", run], ["explain", run]):
        assert re.search(said, error_of(capfd, *command, "--data.test_share", "0.4"))
    arguments = ["--data.folder", str(own / "pictures"), "--data.split", f"{run}/split.csv", "--data.test_share=0.4"]
    assert re.search(said, error_of(capfd, "train", "own/images", *arguments))
    share = json.loads(torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)["recipe"])["data"]["init_args"]
    assert call("test", run, f"--data.test_share={share['test_share']}") == 0  # as in the command of the training


def test_a_training_goes_on_with_the_split_of_its_checkpoint(own, tmp_path, capfd):
    shutil.copytree(own / "pictures", "pictures")
    arguments = ["--data.folder", "pictures", *SMALL]
    assert call("train", "own/images", *arguments, "--trainer.max_epochs", "1") == 0
    parts = {row["file"]: row["part"] for row in rows_of(Path("runs/own/images/version_0/split.csv").read_text())}
    gone = next(path for path, part in parts.items() if part == "val")
    Path("pictures", gone).rename("pictures/one/new.png")
    Path("alone.ckpt").write_bytes(Path("runs/own/images/version_0/checkpoints/last.ckpt").read_bytes())
    shutil.rmtree("runs/own/images/version_0")
    assert call("train", "alone.ckpt", "--trainer.max_epochs", "2") == 0
    (last,) = Path("runs").rglob("last.ckpt")
    Path("alone.ckpt").unlink()
    del parts[gone]
    assert {row["file"]: row["part"] for row in rows_of((last.parents[1] / "split.csv").read_text())} == parts
    assert read_split(str(last)) == {digest(path): part for path, part in parts.items()}
    assert Run.find(last).data().parts == parts


def test_an_uploaded_folder_names_no_picture(own, capfd):
    folder = save_pretrained(run_of(own) / "checkpoints" / "best.ckpt", "saved")
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    hashes = torch.load(run_of(own) / "checkpoints" / "best.ckpt", weights_only=True)["split"]
    for path in (own / "pictures").rglob("*.png"):
        assert path.name.encode() not in content
    assert all(key.numpy().tobytes() not in content for part in hashes.values() for key in part)
    data = from_pretrained(folder).data()
    with pytest.raises(DataError, match="saved is a folder, which holds no split"):
        data.setup("test")
    data.split = str(run_of(own) / "split.csv")
    data.setup("test")
    assert len(data.keys("test")) == 36


def test_the_best_checkpoint_holds_all_that_predictions_need(own, tmp_path):
    best = tmp_path / "best.ckpt"
    best.write_bytes((run_of(own) / "checkpoints" / "best.ckpt").read_bytes())
    trained = Run.find(best)
    assert trained.names == ["one", "seven", "zero"]
    assert trained.data().shape == (1, 8, 8)
    assert trained.temperature is None  # 36 validation samples tell none
    assert trained.facts["metrics"]["val/accuracy"] > 0.9
    metrics = rows_of((run_of(own) / "metrics.csv").read_text())
    losses = [(float(row["val/loss"]), int(row["epoch"]) + 1) for row in metrics if row["val/loss"]]
    assert min(losses)[1] == trained.facts["epoch"]
    probabilities = trained.probabilities(torch.rand(2, 1, 8, 8))
    assert torch.allclose(probabilities.sum(1), torch.ones(2))
    white = torch.ones(1, 1, 8, 8)
    scores = trained.scores(white)
    assert torch.equal(trained.probabilities(white), scores.softmax(1))
    calibrated = replace(trained, checkpoint=replace(trained.checkpoint, temperature=0.5))
    assert torch.equal(calibrated.probabilities(white), (2 * scores).softmax(1))


def test_predictions_of_a_folder(own, capfd):
    assert predict(own, str(own / "new"), "--out", "p.csv") == 0
    assert "predictions: p.csv" in capfd.readouterr().out
    rows = rows_of(Path("p.csv").read_text())
    assert len(rows) == len(list((own / "new").rglob("*.png")))
    assert list(rows[0]) == ["file", "prediction", "probability", "P(one)", "P(seven)", "P(zero)"]
    right = [Path(row["file"]).parent.name == row["prediction"] for row in rows]
    assert sum(right) / len(right) > 0.9
    for row in rows:
        shares = [float(row[f"P({name})"]) for name in ("one", "seven", "zero")]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert float(row["probability"]) == max(shares) == float(row[f"P({row['prediction']})"])
    assert [path.name for path in Path().iterdir()] == ["p.csv"]


def test_files_tables_and_standard_input_give_the_same(own, capfd, monkeypatch):
    files = sorted((own / "new" / "one").glob("*.png"))[:3]
    assert predict(own, *map(str, files)) == 0
    expected = capfd.readouterr().out
    assert len(rows_of(expected)) == 3
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{file}\n" for file in files)))
    assert predict(own, "-") == 0
    assert capfd.readouterr().out == expected
    table = own / "new" / "one" / "table.csv"
    table.write_text("number,picture\n" + "".join(f"1,{file.name}\n" for file in files))
    assert predict(own, str(table), "--column", "picture", "--batch_size", "2") == 0
    assert capfd.readouterr().out == expected
    assert "no column 'file'" in error_of(capfd, "predict", "own/images", "--runs", str(own / "runs"), str(table))
    table.unlink()


def test_an_interrupted_prediction_goes_on(own, capfd, monkeypatch):
    files = [str(own / "new")]
    assert predict(own, *files, "--out", "whole.csv") == 0
    rows = Path("whole.csv").read_text().splitlines()
    real, read = Run.probabilities, []

    def stops(self, inputs):
        read.append(len(inputs))
        if len(read) == 3:
            raise KeyboardInterrupt
        return real(self, inputs)

    monkeypatch.setattr(Run, "probabilities", stops)
    with pytest.raises(KeyboardInterrupt):
        predict(own, *files, "--out", "p.csv", "--batch_size", "8")
    assert not Path("p.csv").exists()
    monkeypatch.setattr(Run, "probabilities", lambda self, inputs: read.append(len(inputs)) or real(self, inputs))
    read.clear()
    capfd.readouterr()
    assert predict(own, *files, "--out", "p.csv", "--batch_size", "8") == 0
    assert "going on after 16 samples" in capfd.readouterr().err
    assert sum(read) == len(rows) - 1 - 16
    # Floats may differ in the last digit with the size of the batches.
    assert [row.split(",")[:2] for row in Path("p.csv").read_text().splitlines()] == [
        row.split(",")[:2] for row in rows
    ]
    Path(".p.csv.1-of-1.unfinished").write_text('{"checkpoint": "another"}\nx,one,1,1,0,0\n')
    assert predict(own, *files, "--out", "p.csv") == 0
    assert "is of another checkpoint or samples: starting anew" in capfd.readouterr().err
    assert Path("p.csv").read_text().splitlines() == rows


def test_what_was_left_out_before_an_interruption_is_counted(own, capfd, monkeypatch):
    good = sorted(str(path) for path in (own / "new").rglob("*.png"))[:6]
    bad = []
    for number in range(3):
        Path(f"bad{number}.png").write_text("no picture")
        bad.append(f"bad{number}.png")
    arguments = (bad[0], *good[:3], bad[1], *good[3:], bad[2], "--skip_bad", "--batch_size", "2", "--out", "p.csv")
    real, read = Run.probabilities, []

    def stops(self, inputs):
        read.append(len(inputs))
        if len(read) == 4:
            raise KeyboardInterrupt
        return real(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "probabilities", stops)
        with pytest.raises(KeyboardInterrupt):
            predict(own, *arguments)
    capfd.readouterr()
    assert predict(own, *arguments) == 0
    err = capfd.readouterr().err
    assert "going on after 6 samples" in err
    assert "left out 3 files: bad0.png, before the interruption; bad1.png, before the interruption; bad2.png is" in err
    assert [row["file"] for row in rows_of(Path("p.csv").read_text())] == good


def test_parts_on_several_machines_make_one_table(own, capfd, monkeypatch):
    new = str(own / "new")
    assert predict(own, new, "--out", "whole.csv") == 0
    Path("p.csv").write_text(of_another_day := "file,prediction,probability\n")
    for part in ("3/3", "1/3"):
        assert predict(own, new, "--out", "p.csv", "--part", part) == 0
    assert "part 1 is done; p.csv is written after part 2" in capfd.readouterr().out
    assert Path("p.csv").read_text() == of_another_day
    first, third = (Path(f".p.csv.{part}-of-3") for part in (1, 3))
    rows = third.read_text().splitlines(keepends=True)
    row = rows[1].split(",")
    for damaged in (
        "".join(rows[: len(rows) // 2]),
        "".join(rows[:-1]),
        "".join([*rows, rows[1]]),
        "".join([rows[0], ",".join([*row[:1], "another", *row[2:]]), *rows[2:]]),
        first.read_text(),
    ):
        third.write_text(damaged)
        assert predict(own, new, "--out", "p.csv", "--part", "1/3") == 0
        assert "part 1 is done; p.csv is written after parts 2, 3" in capfd.readouterr().out
    assert predict(own, new, "--out", "p.csv", "--part", "3/3") == 0
    assert ".p.csv.3-of-3 is damaged, or of another checkpoint or samples: starting anew" in capfd.readouterr().err
    assert third.read_text().splitlines()[0] == rows[0].strip()
    monkeypatch.setenv("RANK", "1")  # as torchrun would start the second of three processes
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert predict(own, new, "--out", "p.csv") == 0
    assert "predictions: p.csv" in capfd.readouterr().out
    columns = [[row.split(",")[:2] for row in Path(name).read_text().splitlines()] for name in ("whole.csv", "p.csv")]
    assert columns[0] == columns[1]
    monkeypatch.delenv("RANK")
    files = sorted(str(path) for path in (own / "new").rglob("*.png"))[:2]
    for part in (10**17, 2, 3):
        assert predict(own, *files, "--out", "p.csv", "--part", f"{part}/{10**17}") == 0
        assert ("no sample is left for part" in capfd.readouterr().err) == (part > 2)
    assert predict(own, *files, "--out", "p.csv", "--part", f"1/{10**17}") == 0
    assert len(Path("p.csv").read_text().splitlines()) == 3
    assert sorted(path.name for path in Path().iterdir()) == ["p.csv", "whole.csv"]


def test_paths_that_no_file_can_have(own, capfd):
    Path("t.csv").write_text(f"file\n{'a' * 5000}\n")
    for path in ("~nobody-of-this-name/b.png", "a" * 5000, "t.csv"):
        assert predict(own, path) == 2
        (error,) = capfd.readouterr().err.splitlines()
        assert error.startswith("torchcaps: there is no file ")
        assert len(error) < 500
    with pytest.raises(ValueError, match="nobody-of-this-name"):
        Run.find("~nobody-of-this-name/x")


def test_weights_that_are_nan_are_one_line(own, capfd):
    content = torch.load(run_of(own) / "checkpoints" / "best.ckpt", weights_only=True)
    content["state_dict"] = {name: value * torch.nan for name, value in content["state_dict"].items()}
    torch.save(content, "nan.ckpt")
    assert call("predict", "own/images", "--ckpt_path", "nan.ckpt", str(own / "new"), "--out", "p.csv") == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert re.match("torchcaps: nan.ckpt: .* has values that are NaN", error)
    assert not Path("p.csv").exists()


def test_bad_pictures_are_skipped_only_when_asked(own, capfd):
    Path("bad.png").write_text("no picture")
    good = str(next((own / "new" / "one").glob("*.png")))
    assert predict(own, "bad.png", good) == 2
    said = capfd.readouterr().err
    assert "bad.png is not a picture that can be read" in said
    assert "or leave such files out by --skip_bad" in said
    for name in ("worse.png", "worst.png"):
        Path(name).write_text("no picture")
    paths = ("bad.png", good, "worse.png", "worst.png")
    for command in (["predict", "own/images"], ["explain", "own/images", "--image"]):
        assert call(*command, *paths, "--runs", str(own / "runs")) == 2
        said = capfd.readouterr().err.splitlines()[-1]
        assert "bad.png is not a picture that can be read: give a PNG or JPEG file (and 2 more: worse.png" in said
    assert predict(own, "bad.png", good, "--skip_bad", "--out", "p.csv") == 0
    assert [row["file"] for row in rows_of(Path("p.csv").read_text())] == [good]
    assert "left out 1 file: bad.png is not a picture" in capfd.readouterr().err


def test_bad_calls(own, capfd):
    def error(*arguments: str) -> str:
        return error_of(capfd, "predict", "own/images", "--runs", str(own / "runs"), *arguments)

    assert "there is no file gone.png" in error("gone.png")
    assert "argument --batch_size: expected an integer of at least 1, got 0" in error("--batch_size", "0", str(own))
    assert "--out . is a folder" in error("--out", ".", str(own))
    assert "--part must be K/N with K from 1 to N, such as 3/8, got 4/3" in error("--part", "4/3", str(own))
    assert "give --out, and no -" in error("--part", "1/3", str(own))
    assert "unknown argument --data.folder" in error("--data.folder", "x", str(own))
    assert "no checkpoint gone.ckpt" in error("--ckpt_path", "gone.ckpt", str(own))
    assert "data.folder is missing: give --data.folder FOLDER" in error_of(capfd, "train", "own/images")
    assert "there is no network 'capsnet_mnst'; did you mean capsnet_mnist" in error_of(
        capfd, "train", "own/images", "--model", "capsnet_mnst"
    )


def test_values_of_a_checkpoint_from_elsewhere_run_no_code(own, capfd):
    best = run_of(own) / "checkpoints" / "best.ckpt"
    content = torch.load(best, weights_only=True)
    values = json.loads(content["recipe"])
    values["model"]["network"] = {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch owned"}}
    torch.save(content | {"recipe": json.dumps(values)}, "evil.ckpt")
    said = error_of(capfd, "predict", "own/images", "--ckpt_path", "evil.ckpt", str(own / "new"))
    assert "its network or its data cannot be built" in said
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    ("name", "shape", "loss"),
    [("capsnet_digits", (1, 8, 8), "MarginLoss"), ("pooling_cnn", (1, 17, 17), "CrossEntropyLoss")],
)
def test_another_network_by_its_name(own, name, shape, loss, capfd):
    size = ["--data.size", "17"] if name == "pooling_cnn" else []
    arguments = ["--data.folder", str(own / "pictures"), "--data.num_workers", "0", *size]
    assert call("train", "own/images", "--model", name, "--smoke", *arguments) == 0
    trained = Run.find("runs/own/images/smoke_0/checkpoints/best.ckpt")
    assert trained.data().shape == shape
    assert trained.values["model"]["loss"]["class_path"].endswith(loss)
    assert trained.scores(torch.rand(2, *shape)).shape == (2, 3)
    assert getattr(trained.network(), "decoder", None) is None  # nothing would train it


def test_a_run_knows_its_data_and_its_network(own, capfd):
    """No command that takes a run asks for the folder again. A recipe's name means its newest run."""
    runs = ["--runs", str(own / "runs")]
    accuracy = json.loads((run_of(own) / "report" / "summary.json").read_text())["metrics"]["test/accuracy"]
    for run in (["own/images", *runs], [str(run_of(own))], [str(run_of(own) / "checkpoints" / "best.ckpt")]):
        assert call("test", *run) == 0
        out = capfd.readouterr().out
        assert f"test/accuracy: {accuracy:.4f}" in out
        assert "mean of the classes" in out
    assert list(Path().iterdir()) == []
    assert call("explain", "own/images", *runs, "--samples", "9", "--figures", "drawn") == 0
    assert "page: drawn/index.html" in capfd.readouterr().out
    last = str(run_of(own) / "checkpoints" / "last.ckpt")
    assert "--trainer.max_epochs 8 or more" in error_of(capfd, "train", last, "--trainer.max_epochs", "2")
    assert call("train", "own/images", "--ckpt_path", last, "--trainer.max_epochs", "8") == 0
    command = json.loads(Path("runs/own/images/version_0/report/summary.json").read_text())["command"]
    assert command == f"torchcaps train own/images --trainer.max_epochs 8 --ckpt_path {last}"


def test_a_network_of_transformers(own, capfd, tmp_path):
    """Its size and its colors become those of the data; predictions need no weights but those of the checkpoint."""
    folder = make_vision_model(tmp_path / "vit", size=16, image_size=16, patch_size=4, **SIZE)
    arguments = ["--data.folder", str(own / "pictures"), "--data.num_workers", "0", "--model", f"transformers/{folder}"]
    arguments += ["--model.network.trainable", "head", "--model.network.routing", "EMRouting"]
    assert call("train", "own/images", "--smoke", *arguments) == 0
    said = capfd.readouterr().out
    assert f"trains transformers/{folder} with a CapsuleHead, EMRouting: " in said
    assert re.search("[0-9,]+ parameters, [0-9,]+ of them trained, 3 classes, images of 3x16x16$", said, re.M)
    best = "runs/own/images/smoke_0/checkpoints/best.ckpt"
    (folder / "model.safetensors").unlink()
    last = "runs/own/images/smoke_0/checkpoints/last.ckpt"
    assert call("test", last, *arguments, "--trainer.limit_test_batches", "1") == 0  # what is the same may be repeated
    for epochs in ("2", "3"):
        more = ["--ckpt_path", last, "--trainer.max_epochs", epochs]
        assert call("train", "own/images", "--smoke", *more) == 0
        last = max(Path("runs").rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        assert Run.find(last).values["model"]["network"]["init_args"]["pretrained"] is True
        last = str(last)
    trained = Run.find(best)
    assert trained.data().shape == (3, 16, 16)
    assert trained.scores(torch.rand(4, 3, 16, 16)).shape == (4, 3)
    assert trained.values["model"]["loss"]["class_path"] == "torch.nn.CrossEntropyLoss"
    assert predict(own, str(own / "new" / "one"), "--ckpt_path", best, "--out", "p.csv") == 0


def test_two_learning_rates_and_a_size(own, tmp_path):
    folder = make_vision_model(tmp_path / "cnn", "ConvNext", **WIDTHS)
    arguments = ["--data.folder", str(own / "pictures"), "--data.num_workers", "0", "--model", f"transformers/{folder}"]
    arguments += ["--model.network.pretrained", "false", "--model.features_lr", "0.0002", "--data.size", "64"]
    assert call("train", "own/images", "--smoke", *arguments) == 0
    last = torch.load("runs/own/images/smoke_0/checkpoints/last.ckpt", weights_only=True)
    head, features = last["optimizer_states"][0]["param_groups"]
    assert [group["one_cycle"][0] for group in (head, features)] == [0.001, 0.0002]
    assert features["lr"] == pytest.approx(head["lr"] / 5)
    names = [name for name in last["state_dict"] if name.startswith("network.classifier")]
    assert 0 < len(head["params"]) <= len(names)
    assert Run.find("runs/own/images/smoke_0/checkpoints/best.ckpt").data().shape == (3, 64, 64)


def test_a_network_of_texts_takes_no_pictures(own, capfd):
    arguments = ("--model", "heinsen_sst", "--data.folder", str(own / "pictures"))
    said = error_of(capfd, "train", "own/images", *arguments)
    assert "heinsen_sst is a network of texts, and the data has pictures: choose another --model" in said


def test_a_library_that_is_not_installed(own, capfd):
    if "torchvision" in sys.modules:
        pytest.skip("torchvision is installed")
    said = error_of(
        capfd, "train", "own/images", "--model", "torchvision/resnet18", "--data.folder", str(own / "pictures")
    )
    assert re.search(r"'torchvision/resnet18' needs torchvision, which is missing: pip install torchvision", said)


def test_16_bits_groups_and_a_table_from_training_to_predictions(tmp_path, capfd):
    random = np.random.default_rng(0)
    lines = ["patient,picture,finding"]
    for i in range(36):
        pixels = random.normal(800 + 100 * (i // 3 % 2), 10, (16, 16)).astype(np.uint16)
        (tmp_path / "scans").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "scans" / f"s{i:02}.png")
        lines.append(f"p{i // 3},s{i:02},{('ill', 'well')[i // 3 % 2]}")
    table = tmp_path / "scans" / "table.csv"
    table.write_text("\n".join(lines))
    columns = ["--data.table", str(table), "--data.picture", "picture", "--data.label", "finding"]
    options = [*columns, "--data.group", "patient", "--data.window", "700", "1000", "--runs", str(tmp_path / "runs")]
    folder = ["--data.folder", str(tmp_path / "scans")]
    assert call("train", "own/images", *folder, *options, *SMALL, "--trainer.max_epochs", "1") == 0
    assert "12 groups: 8 in training, 2 in validation, 2 in test" in capfd.readouterr().err
    trained = Run.find(tmp_path / "runs" / "own" / "images" / "version_0" / "checkpoints" / "last.ckpt")
    assert (trained.data().window, trained.data().shape) == ((700, 1000), (1, 16, 16))
    assert call("test", "own/images", "--runs", str(tmp_path / "runs")) == 0
    assert "is not that of" not in capfd.readouterr().err
    other = ["--data.split", "null", "--data.window", "0", "1000"]
    assert call("test", "own/images", "--runs", str(tmp_path / "runs"), *other) == 0
    said = capfd.readouterr().err
    assert ".ckpt: its network may have been trained on what is now tested" in said
    assert "data.window is [0.0, 1000.0], and the network was trained with [700.0, 1000.0]" in said
    assert call("predict", "own/images", str(table), "--runs", str(tmp_path / "runs")) == 0
    output = capfd.readouterr()
    assert [Path(row["file"]).stem for row in rows_of(output.out[output.out.index("file,") :])] == [
        f"s{i:02}" for i in range(36)
    ]
    assert "more than 8 bits" not in output.err


def test_several_labels_and_numbers_from_training_to_a_run_without_their_table(own, tmp_path, capfd):
    names = sorted(path.name for path in (own / "pictures").rglob("*.png"))
    rows = "".join(f"{name},{'three|seven' if i % 3 else 'three' * (i % 2)},{i}\n" for i, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"file,tags,n\n{rows}")
    data = ["--data.folder", str(own / "pictures"), "--data.table", str(tmp_path / "t.csv"), "--data.num_workers", "0"]
    labels = ["--data.label", "tags", "--data.separator", "|", "--model.network.depth", "8"]
    assert call("train", "own/images", *data, *labels, "--smoke", "--runs", str(tmp_path / "runs")) == 0
    assert (
        call("train", "own/numbers", *data, "--data.numbers", "[n]", "--smoke", "--runs", str(tmp_path / "runs")) == 0
    )
    assert "data.numbers is missing: give --data.numbers" in error_of(capfd, "train", "own/numbers", *data)
    (tmp_path / "t.csv").unlink()
    of_labels, of_numbers = (Run.find(str(tmp_path / "runs" / "own" / x / "smoke_0")) for x in ("images", "numbers"))
    assert (of_labels.data().target, of_labels.data().names) == ("labels", ["seven", "three"])
    assert (of_numbers.data().target, of_numbers.data().names) == ("numbers", ["n"])
