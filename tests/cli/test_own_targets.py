"""Several labels and numbers of own pictures after a training: test, predict, explain, evaluate, export, folders."""

import csv
import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from commands import call, error_of
from PIL import Image

from torchcaps.deploy import save_pretrained
from torchcaps.runs import Run
from torchcaps.training.checkpoints import FACTS_KEY

QUICK = ["--data.num_workers", "0", "--data.augmentations", "[]", "--trainer.max_epochs", "2"]


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of a run of several labels and of one of numbers, and their pictures: bright squares on the left, on
    the right, or on both sides, and how high they lie."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "pictures").mkdir()
    random, rows = np.random.default_rng(0), ["file,sides,height"]
    for i in range(160):
        left, right, height = i % 2, i // 2 % 2, int(random.integers(1, 12))
        picture = random.integers(0, 30, (16, 16), dtype=np.uint8)
        for side, x in ((left, 2), (right, 10)):
            picture[height : height + 4, x : x + 4] += np.uint8(200 * side)
        Image.fromarray(picture).save(folder / "pictures" / f"{i:03}.png")
        rows.append(f"{i:03}.png,{'|'.join(['left'] * left + ['right'] * right)},{100 * height}")
    (folder / "t.csv").write_text("\n".join(rows))
    data = ["--data.folder", str(folder / "pictures"), "--data.table", str(folder / "t.csv"), *QUICK]
    data += ["--runs", str(folder / "runs")]
    labels = ["--data.label", "sides", "--data.separator", "|", "--model", "capsule_cnn"]
    assert call("train", "own/images", *data, *labels) == 0
    assert call("train", "own/numbers", *data, "--data.numbers", "[height]") == 0
    checkpoints = [folder / "runs" / "own" / x / "version_0/checkpoints/best.ckpt" for x in ("images", "numbers")]
    return {"labels": checkpoints[0], "numbers": checkpoints[1], "pictures": folder / "pictures"}


def with_thresholds(checkpoint: Path, path: Path, thresholds: list[float]) -> str:
    content = torch.load(checkpoint, weights_only=True)
    content[FACTS_KEY] = json.dumps(json.loads(content[FACTS_KEY]) | {"thresholds": thresholds})
    torch.save(content, path)
    return str(path)


def content(folder: str) -> dict:
    page = (Path(folder) / "index.html").read_text(encoding="utf-8")
    return json.loads(page.split('type="application/json"')[1].split(">", 1)[1].split("</script>")[0])


def test_the_thresholds_of_a_checkpoint_count_everywhere(runs, tmp_path, capfd):
    chosen = Run.find(runs["labels"]).checkpoint.thresholds
    assert len(chosen) == 2
    never = with_thresholds(runs["labels"], tmp_path / "never.ckpt", [1.0, 1.0])
    assert call("predict", never, str(runs["pictures"]), "--out", "never.csv") == 0
    rows = list(csv.DictReader(Path("never.csv").read_text().splitlines()))
    assert (len(rows), {row["prediction"] for row in rows}) == (160, {""})
    capfd.readouterr()
    assert call("test", never) == 0
    said = capfd.readouterr().out
    assert "test/macro_f1: 0.0000" in said
    assert said.count(" 1.0000     ") >= 2  # the column of the thresholds
    assert call("explain", never, "--figures", "never") == 0
    (snapshot,) = content("never")["snapshots"]
    assert [example["named"] for example in snapshot["examples"]] == [[]] * len(snapshot["examples"])
    assert call("evaluate", never, "--protocols", "overlap", "--images", "40") == 0
    found = json.loads((tmp_path / "evaluate.json").read_text())["overlap"]["numbers"]
    without = sum(not example["labels"] for example in snapshot["examples"])
    assert found["its own test: its labels are predicted (%)"] == pytest.approx(100 * snapshot["accuracy"])
    assert 0 < without < len(snapshot["examples"])
    other = with_thresholds(runs["labels"], tmp_path / "other.ckpt", [0.5] * 3)
    for command in ("test", "explain", "predict", "export"):
        more = [str(runs["pictures"])] if command == "predict" else []
        assert "other.ckpt has 3 thresholds, and there are 2 labels" in error_of(capfd, command, other, *more)


def test_a_folder_predicts_as_the_checkpoint(runs, tmp_path):
    for name in ("labels", "numbers"):
        folder = save_pretrained(runs[name], tmp_path / name)
        for source, out in ((runs[name], "a.csv"), (folder, "b.csv")):
            assert call("predict", str(source), str(runs["pictures"]), "--out", out) == 0
        assert Path("a.csv").read_text() == Path("b.csv").read_text()
    card = (tmp_path / "labels" / "README.md").read_text()
    thresholds = Run.find(runs["labels"]).thresholds.tolist()
    assert f"## Labels\n\nleft (above {thresholds[0]:.4f}), right (above {thresholds[1]:.4f})\n" in card
    assert "pipeline_tag: image-classification\n" in card
    assert "- exact_match\n- f1\n" in card
    assert "name: test macro f1\n" in card
    assert "run.probabilities(inputs) > run.thresholds  # (batch, 2)" in card
    card = (tmp_path / "numbers" / "README.md").read_text()
    assert "## Numbers\n\nheight\n" in card
    assert "- type: r_squared\n" in card
    assert "| metrics test/rmse/height |" in card
    assert "run.scores(inputs)  # (batch, 1), in the units of the training" in card
    assert "pipeline_tag: other" in card


def test_a_file_for_other_programs_says_what_its_scores_are(runs):
    images = torch.rand(3, 1, 16, 16)
    for name, of_scores in (
        ("labels", "the probability of a label is sigmoid(score)"),
        ("numbers", "numbers in the units of the training"),
    ):
        assert call("export", str(runs[name]), "--out", "a.onnx") == 0
        session, run = onnxruntime.InferenceSession("a.onnx"), Run.find(runs[name])
        facts = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
        assert facts[name] == run.names
        assert facts["scores"] == of_scores
        assert "classes" not in facts
        assert facts.get("thresholds") == (run.thresholds.tolist() if name == "labels" else None)
        (scores,) = session.run(["scores"], {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(scores), run.scores(images), rtol=1e-4, atol=1e-3)


def test_pages_and_protocols_of_both(runs, capfd):
    assert call("explain", str(runs["labels"]), "--figures", "labels") == 0
    assert "figures that need one class for each sample are left out" in capfd.readouterr().err
    found = content("labels")
    assert (found["target"], found["scores"], found["confusion"]) == ("labels", "probabilities", None)
    assert found["thresholds"] == pytest.approx(Run.find(runs["labels"]).thresholds.tolist(), rel=1e-4)
    assert [row[0] for row in found["table"]] == ["label", "left", "right", "mean of the labels"]
    assert call("explain", str(runs["numbers"]), "--figures", "numbers") == 0
    found = content("numbers")
    (snapshot,) = found["snapshots"]
    assert (found["target"], found["scores"], snapshot["accuracy"]) == ("numbers", "numbers", None)
    example = snapshot["examples"][0]
    assert example["true"][0] in [100 * height for height in range(1, 12)]
    assert example["maps"][0]["maps"][0]
    assert "transformed" not in example
    picture = str(next(runs["pictures"].iterdir()))
    assert call("explain", str(runs["numbers"]), "--image", picture, "--figures", "mine") == 0
    assert "true" not in content("mine")["snapshots"][0]["examples"][0]
    assert call("evaluate", str(runs["numbers"]), "--protocols", "affine", "parts", "--images", "40") == 0
    said = capfd.readouterr().out
    assert said.count("does not apply") == 1
    assert "the network predicts numbers, and this measures classes of whole images" in said
    assert "dead capsules (%)" in said


def test_labels_are_separated_as_in_the_table_of_the_training(runs):
    content = torch.load(runs["labels"], weights_only=True)
    values = json.loads(content["recipe"])
    values["data"]["init_args"]["separator"] = ";"
    torch.save(content | {"recipe": json.dumps(values)}, "semicolon.ckpt")
    always = with_thresholds(Path("semicolon.ckpt"), Path("always.ckpt"), [0.0, 0.0])
    assert call("predict", always, str(runs["pictures"]), "--out", "p.csv") == 0
    rows = csv.DictReader(Path("p.csv").read_text().splitlines())
    assert {row["prediction"] for row in rows} == {"left;right"}


@pytest.mark.parametrize(
    ("target", "kind"),
    [(["--data.label", "sides", "--data.separator", "|"], "labels"), (["--data.numbers", "[height]"], "numbers")],
)
def test_a_cross_entropy_with_options_is_for_classes_alone(runs, capfd, target, kind):
    data = ["--data.folder", str(runs["pictures"]), "--data.table", str(runs["pictures"].parent / "t.csv"), *QUICK]
    line = error_of(
        capfd, "train", "own/images", *data, *target, "--model", "capsule_cnn", "--model.loss.label_smoothing", "0.1"
    )
    assert f"and the data has {kind}: leave out the options of model.loss" in line


def test_a_folder_has_the_loss_of_its_checkpoint(runs, tmp_path, capfd):
    folder = save_pretrained(runs["numbers"], tmp_path / "numbers")
    losses = []
    for source, options in ((runs["numbers"], []), (folder, ["--data.split", "null"])):
        capfd.readouterr()
        assert call("test", str(source), *options) == 0
        losses.append(capfd.readouterr().out.splitlines()[0])
    assert losses[0].startswith("test/loss: ")
    assert losses[0] == losses[1]
