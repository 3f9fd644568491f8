"""Masks of own pictures from a training to predictions: whole pictures, and pictures in tiles."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call, error_of
from PIL import Image

import torchcaps.deploy.predict
from torchcaps.capsules import Segmentation
from torchcaps.deploy.predict import predict_masks
from torchcaps.runs import Run

QUICK = ["--data.num_workers", "0", "--model", "unet", "--model.network.channels", "4", "--model.optimizer.lr", "0.03"]


def scene(random, height, width):
    """A picture of noise with a bright and a dark square, and its mask."""
    picture, mask = random.integers(90, 110, (height, width), dtype=np.uint8), np.zeros((height, width), np.uint8)
    for value, light in ((100, 230), (200, 10)):
        y, x = random.integers(0, height - 8), random.integers(0, width - 8)
        picture[y : y + 8, x : x + 8], mask[y : y + 8, x : x + 8] = light, value
    return picture, mask


@pytest.fixture(scope="session")
def segmented(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of a run on whole pictures and of one on tiles, and the folder of the pictures."""
    folder, random = tmp_path_factory.mktemp("masks"), np.random.default_rng(0)
    for part in ("images", "masks"):
        (folder / "my" / part).mkdir(parents=True)
    for i in range(40):
        picture, mask = scene(random, 24, 32)
        Image.fromarray(picture).save(folder / "my" / "images" / f"{i:02}.png")
        Image.fromarray(mask).save(folder / "my" / "masks" / f"{i:02}.png")
    runs = {"folder": folder / "my"}
    for name, options in (("pad", ["--data.fit", "pad"]), ("tile", ["--data.fit", "tile", "--data.size", "16"])):
        data = ["--data.folder", str(folder / "my"), "--runs", str(folder / name), *options]
        assert call("train", "own/masks", *data, *QUICK, "--trainer.max_epochs", "20", "--data.batch_size", "8") == 0
        runs[name] = folder / name / "own" / "masks" / "version_0"
    return runs


@pytest.mark.parametrize("fit", ["pad", "tile"])
def test_masks_have_the_size_and_the_values_of_their_pictures(segmented, fit, tmp_path, capfd):
    dice = json.loads((segmented[fit] / "report" / "summary.json").read_text())["metrics"]["test/dice"]
    assert dice > 0.8
    picture, mask = scene(np.random.default_rng(1), 40, 56)
    (tmp_path / "new").mkdir()
    Image.fromarray(picture).save(tmp_path / "new" / "a.png")
    capfd.readouterr()
    assert call("predict", str(segmented[fit]), "new", "--out", "out") == 0
    assert capfd.readouterr().out.splitlines() == [
        f"predictions: {Path('out/masks.csv')}",
        f"masks: out, and with colors over the pictures: {Path('out/overlays')}",
    ]
    found = np.asarray(Image.open("out/a.png"))
    assert found.shape == (40, 56)
    assert set(np.unique(found)) <= {0, 100, 200}
    drawn = np.asarray(Image.open("out/overlays/a.png"))
    assert drawn.shape == (40, 56, 3)
    colored = drawn.max(2) > drawn.min(2)
    assert (colored == (found > 0)).all()
    with Path("out", "masks.csv").open(newline="") as table:
        (row,) = csv.DictReader(table)
    values, pixels = np.unique(found, return_counts=True)
    counts = dict.fromkeys((0, 100, 200), 0) | dict(zip(values.tolist(), pixels.tolist(), strict=True))
    expected = {f"pixels({value})": str(count) for value, count in counts.items()}
    assert row == {"file": str(Path("new", "a.png")), "mask": "a.png", **expected}
    if fit == "tile":  # squares in a picture of another size are as large as in the training
        assert (found == mask).mean() > 0.97


def test_masks_of_a_folder_in_a_folder(segmented, tmp_path, capfd):
    picture = segmented["folder"] / "images" / "00.png"
    for name in ("one.png", "a b/one.png", "ü/deep/one.png"):
        (tmp_path / "odd" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, tmp_path / "odd" / name)
    Path("odd", "some.csv").write_text("file\na b/one.png\none.png\n")
    for source, places in (
        ("odd", ("a b/one.png", "one.png", "ü/deep/one.png")),
        ("odd/some.csv", ("a b/one.png", "one.png")),
    ):
        out = Path(f"out{len(places)}")
        assert call("predict", str(segmented["pad"]), source, "--out", str(out)) == 0
        with Path(out, "masks.csv").open(newline="", encoding="utf-8") as table:
            assert sorted(row["mask"] for row in csv.DictReader(table)) == [*places]
        for place in places:
            assert (out / place).exists()
            assert (out / "overlays" / place).exists()


def test_an_interrupted_prediction_goes_on(segmented, tmp_path, capfd, monkeypatch):
    run, folder = str(segmented["pad"]), segmented["folder"] / "images"
    assert call("predict", run, str(folder), "--out", "whole") == 0
    predicted, start = [], torchcaps.deploy.predict.predict_masks

    def interrupted(trained, paths, skipped):
        for index, mask in start(trained, paths, skipped):
            predicted.append(Path(paths[index]).stem)
            if len(predicted) == 15:
                raise KeyboardInterrupt
            yield index, mask

    monkeypatch.setattr("torchcaps.deploy.predict.predict_masks", interrupted)
    capfd.readouterr()
    with pytest.raises(KeyboardInterrupt):
        call("predict", run, str(folder), "--out", "out")
    assert len(list(Path("out").glob("*.png"))) == 14
    assert not Path("out", "masks.csv").exists()
    assert call("predict", run, str(folder), "--out", "out") == 0
    assert "torchcaps: going on after 14 samples" in capfd.readouterr().err
    assert predicted == [f"{i:02}" for i in (*range(15), *range(14, 40))]
    for path in (path for path in Path("whole").rglob("*") if path.is_file()):
        assert path.read_bytes() == Path("out", path.relative_to("whole")).read_bytes()
    assert sorted(x.name for x in Path("out").iterdir()) == sorted(x.name for x in Path("whole").iterdir())


def test_a_picture_in_tiles_is_predicted_as_a_whole_where_borders_change_nothing(segmented, monkeypatch, tmp_path):
    run = Run.find(segmented["tile"])
    picture, _ = scene(np.random.default_rng(2), 41, 50)
    Image.fromarray(picture).save(tmp_path / "a.png")

    def scores(images):
        return Segmentation(torch.cat([images < 0.2, torch.full_like(images, 0.2), images > 0.8], 1))

    monkeypatch.setattr(run.network(), "forward", scores)
    ((_, mask),) = predict_masks(run, [tmp_path / "a.png"])
    expected = np.where(picture < 51, 0, np.where(picture > 204, 2, 1))
    assert (mask == expected).all()


def test_explain_evaluate_and_export(segmented, tmp_path, capfd):
    run = str(segmented["pad"])
    assert call("explain", run, "--figures", "figures") == 0
    assert capfd.readouterr().out.splitlines() == [
        f"figure: {Path('figures/masks.png')}",
        f"page: {Path('figures/index.html')}",
    ]
    assert call("explain", run, "--figures", "own", "--image", str(segmented["folder"] / "images" / "00.png")) == 0
    assert call("evaluate", run, "--protocols", "corruptions", "affine") == 0
    said = capfd.readouterr().out
    assert "as they are: mean Dice (%)" in said
    assert "the network predicts masks, and this measures classes of whole images" in said
    assert call("export", run, "--to", "torch", "--out", "m.pt2") == 0
    facts = {"facts.json": ""}
    program = torch.export.load("m.pt2", extra_files=facts).module()
    assert json.loads(facts["facts.json"])["scores"] == "the class of a pixel is that with the highest score"
    assert program(torch.rand(3, 1, 32, 32)).shape == (3, 3, 32, 32)
    assert call("test", run) == 0
    assert "Dice of an image" in capfd.readouterr().out


def test_what_cannot_be_predicted(segmented, tmp_path, capfd):
    run, picture = str(segmented["pad"]), segmented["folder"] / "images" / "00.png"
    assert (
        error_of(capfd, "predict", run, str(picture)) == "torchcaps: masks are written into a folder: give --out FOLDER"
    )
    (tmp_path / "out").write_text("")
    assert (
        error_of(capfd, "predict", run, str(picture), "--out", "out")
        == "torchcaps: masks are written into a folder: give --out FOLDER"
    )
    masks = str(segmented["folder"] / "masks")
    before = (segmented["folder"] / "masks" / "00.png").read_bytes()
    assert call("predict", run, str(picture), "--out", masks) == 2
    assert "00.png is there already, and was not predicted: give another folder" in capfd.readouterr().err
    assert (segmented["folder"] / "masks" / "00.png").read_bytes() == before
    both = [str(segmented["folder"] / part) for part in ("images", "masks")]
    assert error_of(capfd, "predict", run, *both, "--out", "new") == (
        "torchcaps: several pictures are called 00, as their masks would be: predict them into different folders"
    )
    shutil.copytree(segmented["folder"] / "images", tmp_path / "deep" / "overlays")
    assert error_of(capfd, "predict", run, "deep", "--out", "new") == (
        "torchcaps: a folder of pictures is called overlays, as that of masks in colors: rename it"
    )
    (tmp_path / "bad.png").write_text("no picture")
    assert call("predict", run, "bad.png", "--out", "new") == 2
    assert "is not a picture that can be read" in capfd.readouterr().err
    assert call("predict", run, "bad.png", str(picture), "--out", "new", "--skip_bad") == 0
    assert [path.name for path in Path("new").glob("*.png")] == ["00.png"]
    assert "gives no class of each pixel: choose --model segcaps or unet" in error_of(
        capfd, "train", "own/masks", "--data.folder", str(segmented["folder"]), "--model", "capsnet_small"
    )
