"""Own pictures in folders: classes, shapes, parts, bad files, augmentation."""

import csv
import itertools
import os
import shlex
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps.data import DataError, ImageFolder, notes
from torchcaps.data.pictures import read_all


def draw(path: Path, shade: int = 100, size: tuple[int, int] = (10, 8), mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 20, 30)).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of ten gray pictures of 10 x 8 pixels."""
    for label, name in enumerate(("cat", "dog")):
        for i in range(10):
            draw(tmp_path / "pictures" / name / f"{i}.png", 100 * label + i)
    return tmp_path / "pictures"


def data_of(folder: Path, **options) -> ImageFolder:
    return ImageFolder(str(folder), **{"num_workers": 0, **options})


def error_of(folder: Path, **options) -> str:
    def use() -> None:
        data = data_of(folder, **options)
        data.prepare_data()
        data.setup()

    with pytest.raises(DataError) as caught:
        use()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classes_and_shape_are_those_of_the_pictures(folder):
    data = data_of(folder)
    assert data.network_arguments() == {"classes": 2, "in_channels": 1, "image_size": 8}
    assert data.resolved_arguments() == {"class_names": ["cat", "dog"], "channels": 1, "size": 8, "window": None}
    draw(folder / "dog" / "color.jpg", mode="RGB")
    assert data_of(folder).shape == (3, 8, 8)
    assert data_of(folder, size=5, channels=1).shape == (1, 5, 5)
    for i in range(30):
        draw(folder / "cat" / f"large{i}.png", size=(300, 200))
    assert data_of(folder).shape == (3, 64, 64)


@pytest.mark.parametrize(
    ("folder", "title"), [("/a/toys/", "pictures in toys"), (".", "pictures in ."), (None, "ImageFolder")]
)
def test_a_title(folder, title):
    assert ImageFolder(folder, class_names=["b", "a"], channels=3, size=16).title == title


def test_what_was_found_needs_no_folder():
    data = ImageFolder("gone", class_names=["b", "a"], channels=3, size=16)
    assert (data.names, data.classes, data.shape) == (["b", "a"], 2, (3, 16, 16))
    with pytest.raises(DataError, match="gone is not a folder: expected a folder with a folder of pictures for each"):
        data.setup("fit")


def test_class_names_are_different():
    with pytest.raises(ValueError, match="class_names must be two or more different names, got"):
        ImageFolder("gone", class_names=["cat", "dog", "cat"])


def test_reading_in_threads_leaves_the_filters_of_warnings_as_they_were(folder, monkeypatch):
    both, opened, order = threading.Barrier(2), Image.open, itertools.count()

    def opened_together(*arguments, **options):
        place = next(order)
        both.wait(10)
        time.sleep(0.1 * place)  # the second reader ends after the first
        return opened(*arguments, **options)

    monkeypatch.setattr(Image, "open", opened_together)
    filters = list(warnings.filters)
    readings = read_all([folder / "cat" / "0.png", folder / "dog" / "0.png"], (1, 8, 8), "stretch")
    assert [reading.error for reading in readings] == ["", ""]
    assert len({reading.digest for reading in readings}) == 2
    assert warnings.filters == filters


def test_images_have_the_labels_of_their_folders(folder):
    data = data_of(folder)
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        for images, labels in loader:
            assert images.dtype == torch.uint8
            assert torch.equal(images[:, 0, 4, 4] >= 100, labels == 1)
    images = data.augment(next(iter(data.train_dataloader()))[0])
    assert images.dtype == torch.float32
    assert images.shape[1:] == (1, 8, 8)


def test_parts_do_not_share_pictures_and_stay_the_same(folder, tmp_path):
    data = data_of(folder, val_share=0.2, test_share=0.3)
    data.setup()
    parts = [set(data.keys(stage)) for stage in ("fit", "validate", "test")]
    assert [len(part) for part in parts] == [10, 4, 6]
    assert len(set.union(*parts)) == 20
    again = data_of(folder, val_share=0.2, test_share=0.3)
    again.setup()
    assert [set(again.keys(stage)) for stage in ("fit", "validate", "test")] == parts


def test_the_split_is_written_down_and_read_again(folder, tmp_path, capfd):
    data = data_of(folder)
    path = data.write_split(tmp_path / "run")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {(row["file"], row["part"]) for row in rows} == set(data.parts.items())
    assert list(rows[0]) == ["file", "part"]
    draw(folder / "cat" / "new.png")
    again = data_of(folder, split=str(path))
    assert again.parts == data.parts
    said = f"{folder}: left out 1 picture that the split of {path} does not have: cat/new.png\n"
    assert said in capfd.readouterr().err
    draw(folder / "cow" / "new.png")
    assert data_of(folder, split=str(path)).names == ["cat", "dog"]
    (folder / "cat" / "0.png").unlink()
    assert data_of(folder, split=str(path)).parts == {p: part for p, part in data.parts.items() if p != "cat/0.png"}
    assert f"{folder}: no longer has 1 picture of the split of {path}\n" in capfd.readouterr().err
    path.write_text("file,part\nfox/1.png,test\n")
    assert "has none of the pictures in" in error_of(folder, split=str(path))


def test_folders_of_parts(tmp_path):
    for part, count in (("train", 6), ("Valid", 2), ("test", 3)):
        for name in ("a", "b"):
            for i in range(count):
                draw(tmp_path / part / name / "deeper" / f"{part}{i}.png")
    data = data_of(tmp_path)
    data.setup()
    assert [len(data.keys(stage)) for stage in ("fit", "validate", "test")] == [12, 4, 6]
    assert all(key.startswith("Valid/") for key in data.keys("validate"))
    draw(tmp_path / "validation" / "a" / "x.png")
    assert "has 2 folders for the part 'val'" in error_of(tmp_path)
    (tmp_path / "validation" / "a" / "x.png").unlink()
    (tmp_path / "validation" / "a").rmdir()
    (tmp_path / "validation").rmdir()
    draw(tmp_path / "test" / "aa" / "x.png")
    assert "there is no class 'aa' in training; did you mean a" in error_of(tmp_path)


@pytest.mark.parametrize("names", [("Training", "Dev", "TESTING"), ("training", "eval", "Test")])
def test_other_names_of_the_parts(tmp_path, names, capfd):
    for part in (*names, "unlabeled"):
        for name in ("a", "b"):
            draw(tmp_path / part / name / f"{part}.png")
    draw(tmp_path / names[2] / "alone.png")
    draw(tmp_path / "cover.png")
    (tmp_path / "readme.txt").write_text("how these were made")
    data = data_of(tmp_path)
    assert data.names == ["a", "b"]
    data.prepare_data()
    said = f"left out what lies in no folder of a class: {names[2]}/alone.png, cover.png, unlabeled\n"
    assert said in capfd.readouterr().err
    data.setup()
    assert [len(data.keys(stage)) for stage in ("fit", "validate", "test")] == [2, 2, 2]
    shutil.rmtree(tmp_path / names[0])
    said = error_of(tmp_path)
    assert said.startswith(f"{tmp_path}: has {', '.join(sorted(names[1:]))}, and no folder train: add one with")


def test_links_are_followed_and_folders_of_servers_are_left_out(folder, tmp_path):
    draw(tmp_path / "elsewhere" / "linked.png")
    (folder / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(folder / "cat")  # a circle
    for name in ("@eaDir", "__MACOSX", ".thumbnails"):
        draw(folder / "cat" / name / "1.png" / "small.jpg")
        draw(folder / name / "small.jpg")
    data = data_of(folder)
    assert data.names == ["cat", "dog"]
    assert set(data.parts) == {f"{name}/{i}.png" for name in data.names for i in range(10)} | {"cat/more/linked.png"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names themselves")
def test_a_name_that_is_not_utf8_is_an_error_at_once(folder):
    os.rename(folder / "cat" / "1.png", os.fsencode(folder / "cat") + b"/caf\xe9.png")
    assert "cat/caf\\udce9.png': the name is not text in UTF-8: rename the file" in error_of(folder)


def test_pictures_that_are_in_two_parts_are_counted(tmp_path, capfd):
    for i, part in enumerate(("train", "val", "test")):
        for name in ("a", "b"):
            for k in range(3):
                draw(tmp_path / part / name / f"{part}{k}.png", 50 * i + k + 10 * (name == "a"))
    for part, count in (("val", 1), ("test", 2)):
        for k in range(count):
            shutil.copy(tmp_path / "train" / "a" / f"train{k}.png", tmp_path / part / "a" / f"copy{k}.png")
    data_of(tmp_path).setup()
    said = capfd.readouterr().err
    assert f"{tmp_path}: training has 1 of 7 validation pictures too\n" in said
    assert f"{tmp_path}: training has 2 of 8 test pictures too\n" in said


def test_a_missing_part_is_split_off_the_training_pictures(tmp_path):
    for part, count in (("train", 20), ("test", 3)):
        for name in ("a", "b"):
            for i in range(count):
                draw(tmp_path / part / name / f"{i}.png")
    data = data_of(tmp_path)
    data.setup()
    assert [len(data.keys(stage)) for stage in ("fit", "validate", "test")] == [34, 6, 6]
    assert all(key.startswith("test/") for key in data.keys("test"))


def test_a_class_of_one_picture_is_trained_on(folder, capfd):
    draw(folder / "yak" / "only.png")
    data = data_of(folder)
    data.prepare_data()
    data.setup()
    assert "yak/only.png" in data.keys("fit")
    assert "classes that have too few pictures to be tested: yak (1)" in capfd.readouterr().err


def test_runs_in_the_folder_of_the_pictures_are_no_class(folder):
    draw(folder / "runs" / "own" / "images" / "version_0" / "report" / "curves.png")
    assert data_of(folder).names == ["cat", "dog"]


def test_bad_files_are_named_and_skipped_only_when_asked(folder, capfd):
    """All at once, also those of the test, before the training."""
    (folder / "dog" / "4.png").write_bytes((folder / "dog" / "4.png").read_bytes()[:50])
    for part in ("train", "val", "test"):
        bad = next(path for path, of in data_of(folder).parts.items() if of == part)
        (folder / bad).write_bytes(b"no picture")
    with pytest.raises(DataError) as caught:
        data_of(folder).setup("fit")
    first, more = str(caught.value).split(" (and 3 more: ")
    assert " is not a picture that can be read" in first
    assert more.endswith("), or leave such files out by --data.skip_bad true")
    named = more.partition(")")[0].split(", ")
    assert len(set(named)) == 3
    data = data_of(folder, skip_bad=True)
    data.setup()
    keys = {key for stage in ("fit", "validate", "test") for key in data.keys(stage)}
    assert len(keys) == 16
    assert not keys & set(named)
    assert "left out 4 pictures that cannot be read: " in capfd.readouterr().err


def test_twenty_bad_files_are_named_in_one_line(folder, capfd):
    for i in range(10):
        for name in ("cat", "dog"):
            draw(folder / name / f"bad{i}.png").write_bytes(b"no picture")
    said = error_of(folder)
    assert all(f"{name}/bad{i}.png" in said for i in range(10) for name in ("cat", "dog"))
    for i in range(10):
        draw(folder / "cat" / f"worse{i}.png").write_bytes(b"no picture")
    assert error_of(folder).endswith(", ... (29)), or leave such files out by --data.skip_bad true")


def test_a_test_reads_the_test_pictures_alone(folder):
    bad = next(path for path, part in data_of(folder).parts.items() if part == "train")
    (folder / bad).write_bytes(b"no picture")
    data_of(folder).setup("test")


def test_a_class_whose_training_pictures_cannot_be_read_is_an_error(folder):
    for path in (path for path, part in data_of(folder).parts.items() if part == "train" and path.startswith("dog")):
        (folder / path).write_bytes(b"no picture")
    assert "no training picture of dog can be read: mend some, or remove" in error_of(folder, skip_bad=True)


def test_other_files_and_animations_are_named(folder, capfd):
    (folder / "cat" / "notes.txt").write_text("not a picture")
    (folder / "cat" / ".hidden.png").write_text("nothing")
    frames = [Image.new("L", (8, 8), shade) for shade in (10, 200)]
    frames[0].save(folder / "dog" / "moving.gif", save_all=True, append_images=frames[1:])
    data_of(folder).prepare_data()
    said = capfd.readouterr().err
    assert "left out 1 file beside the pictures: cat/notes.txt" in said
    assert "took the first picture of 1 animation: dog/moving.gif" in said


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="data.folder is missing: give --data.folder FOLDER"):
        ImageFolder()
    assert "is not a folder" in error_of(tmp_path / "gone")
    assert "has pictures of 0 classes, two" in error_of(tmp_path)
    draw(tmp_path / "a" / "x.png")
    assert "has pictures of 1 class, two or more are needed" in error_of(tmp_path)
    draw(tmp_path / "b" / "x.png")
    assert "no picture to test on: a class needs three pictures" in error_of(tmp_path)
    assert "set data.test_share above 0" in error_of(tmp_path, test_share=0.0)
    (tmp_path / "b").rename(tmp_path / "train")
    assert "train was taken for a part: rename it if it is a class" in error_of(tmp_path)
    (tmp_path / "train").rename(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "void").mkdir()
    assert "there are no pictures in empty, void: expected files that end in .bmp, " in error_of(tmp_path)


def test_a_class_that_was_not_trained_on(folder):
    assert "has a class 'dog', which is none of cat, cow" in error_of(folder, class_names=["cat", "cow"])


def test_gray_images_have_no_colors_to_change(folder, capfd):
    data_of(folder, augmentations=["color"]).prepare_data()
    assert 'the augmentation "color" changes nothing: these images are gray' in capfd.readouterr().err


@pytest.mark.parametrize("name", ["shift", "flip", "rotate", "zoom", "color", "erase"])
def test_every_augmentation_changes_images_and_keeps_their_shape(tmp_path, name):
    pixels = torch.randint(0, 255, (24, 24, 3), dtype=torch.uint8)
    for label in ("a", "b"):
        for i in range(3):
            (tmp_path / label).mkdir(exist_ok=True)
            Image.fromarray(pixels.numpy()).save(tmp_path / label / f"{i}.png")
    data = data_of(tmp_path, augmentations=[name])
    data.setup("fit")
    images, _ = next(iter(data.train_dataloader()))
    changed = data.augment(images.repeat(20, 1, 1, 1))
    assert changed.shape[1:] == (3, 24, 24)
    assert (changed >= 0).all()
    assert (changed <= 1).all()
    assert not torch.equal(changed, changed[:1].expand_as(changed))
    plain = data_of(tmp_path)
    assert torch.equal(plain.augment(images), images / 255)


def deep_folder(folder: Path, low: int = 700, high: int = 1000, count: int = 10) -> Path:
    """Two classes of gray pictures of 16 bits, whose values are from `low` to `high`."""
    for name in ("cat", "dog"):
        for i in range(count):
            path = folder / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.linspace(low, high, 64).reshape(8, 8).astype(np.uint16)).save(path)
    return folder


def test_pictures_of_16_bits_get_the_window_of_those_in_training(tmp_path, capfd):
    folder = deep_folder(tmp_path / "a")
    data = data_of(folder)
    assert data.resolved_arguments()["window"] == (700, 1000)
    said = f"{folder}: 12 training pictures with more than 8 bits: 700 is black and 1000 white (data.window)"
    assert said in capfd.readouterr().err
    data.setup()
    assert (int(data.train_set[0][0].min()), int(data.train_set[0][0].max())) == (0, 255)
    bright = folder / data.keys("test")[0]
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(bright)
    capfd.readouterr()
    again = data_of(folder)
    again.setup()
    assert again.window == (700, 1000)
    assert int(again.test_set[0][0].min()) == 255
    assert f"{bright}: 100 % of its pixels are beyond data.window, 700 to 1000" in capfd.readouterr().err
    kept = ImageFolder("gone", class_names=["a", "b"], channels=1, size=8, window=(700, 1000))
    assert kept.picture(bright).unique().tolist() == [255]


def test_pictures_of_8_bits_beside_deeper_ones_stay_as_they_are(tmp_path, capfd):
    folder = deep_folder(tmp_path / "a")
    for i in range(10):
        draw(folder / "cat" / f"b{i}.png", 77)
    data = data_of(folder)
    data.setup()
    images = [data.train_set[i][0].unique().tolist() for i, name in enumerate(data.keys("fit")) if "/b" in name]
    assert images == [[77]] * len(images) != []
    assert "the other training pictures have 8 bits: 0 is black and 255 white in those" in capfd.readouterr().err


def test_a_window_is_two_numbers(tmp_path):
    assert data_of(deep_folder(tmp_path / "a"), window=(0, 4095)).resolved_arguments()["window"] == (0, 4095)
    with pytest.raises(ValueError, match="window must be two numbers, the smaller one first, got 5 and 5"):
        ImageFolder(window=(5, 5))


def test_few_gray_levels_are_said(tmp_path, folder, capfd):
    data_of(deep_folder(tmp_path / "a"), window=(0, 65535)).setup()
    advice = (
        "most training pictures use 2 of 256 gray levels or fewer: their values are about 700 to 1000, and 0 is black "
        "and 65535 white: set --data.window 700 1000\n"
    )
    assert advice in capfd.readouterr().err
    for i in range(3):  # hot pixels
        pixels = np.linspace(700, 1000, 64).reshape(8, 8).astype(np.uint16)
        pixels[0, 0] = 65535
        Image.fromarray(pixels).save(tmp_path / "a" / "cat" / f"{i}.png")
    data_of(tmp_path / "a").setup()
    assert "about 700 to 1000, and 700 is black and 65535 white: set --data.window 700 1000" in capfd.readouterr().err
    data_of(folder).setup()
    assert "12 of 12 training pictures have one gray alone, such as cat/" in capfd.readouterr().err
    data_of(deep_folder(tmp_path / "c")).setup()
    assert "gray level" not in capfd.readouterr().err
    for path in (tmp_path / "c").rglob("*.png"):
        Image.new("L", (8, 8), 3 + len(path.name)).save(path)
    data_of(tmp_path / "c").setup()
    assert "the training pictures use 1 of 256 gray levels: a network sees little in" in capfd.readouterr().err


def test_gray_pictures_in_files_of_colors_are_gray(folder):
    for path in folder.rglob("*.png"):
        Image.open(path).convert("RGB").save(path)
    assert data_of(folder).shape == (1, 8, 8)
    draw(folder / "dog" / "9.png", mode="RGB")
    assert data_of(folder).shape == (3, 8, 8)


def test_pictures_far_from_square_are_said_to_be_cut(folder, capfd, monkeypatch):
    draw(folder / "cat" / "0.png", size=(300, 20))
    draw(folder / "cat" / "1.png", size=(20, 300))
    said = "2 pictures of 20 are far from square, such as cat/0.png, and only their middle is kept: --data.fit pad or"
    data_of(folder).prepare_data()
    assert said in capfd.readouterr().err
    monkeypatch.setattr(notes, "_said", set())
    data_of(folder, fit="pad").prepare_data()
    assert "square" not in capfd.readouterr().err


def patients(folder: Path, count: int = 12, scans: int = 5) -> Path:
    """Pictures of patients, in a folder for each of them; each patient has one class."""
    random = np.random.default_rng(0)
    for patient in range(count):
        for scan in range(scans):
            path = folder / ("ill", "well")[patient % 2] / f"patient{patient:02}" / f"{scan}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return folder


def groups_by_part(data: ImageFolder, group) -> list[set[str]]:
    return [{group(path) for path, of in data.parts.items() if of == part} for part in ("train", "val", "test")]


def test_no_group_is_in_two_parts(tmp_path, capfd):
    folder = patients(tmp_path / "a")
    of_patient = lambda path: path.split("/")[1]  # noqa: E731
    leaking = groups_by_part(data_of(folder), of_patient)
    assert set.intersection(*leaking)
    data = data_of(folder, group="folder")
    parts = groups_by_part(data, of_patient)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 12
    assert all(len({int(name[-2:]) % 2 for name in part}) == 2 for part in parts)  # both classes in each part
    data.prepare_data()
    assert f"{folder}: 12 groups: 8 in training, 2 in validation, 2 in test" in capfd.readouterr().err


def test_a_pattern_makes_groups_of_names(tmp_path, capfd):
    for patient in range(8):
        for side in ("left", "right"):
            draw(tmp_path / ("a", "b")[patient % 2] / f"p{patient}_{side}.png", 10 * patient)
    data = data_of(tmp_path, group="p[0-9]+")
    parts = groups_by_part(data, lambda path: path.split("/")[1].split("_")[0])
    assert sum(map(len, parts)) == 8
    assert data_of(tmp_path, group="(.+)_(?:left|right)").parts == data.parts
    draw(tmp_path / "a" / "other.png")
    data_of(tmp_path, group="p[0-9]+").prepare_data()
    assert f"{tmp_path}: without a group, and so a group of its own: a/other.png" in capfd.readouterr().err
    for group, said in (
        ("q[0-9]", "no name of a file has it: set it to folder, none or a regular expression"),
        ("folder", "there are no folders in those of the classes: set it to"),
        ("[", "data.group '[' is no pattern (unterminated character set"),
        (
            "(p)([0-9]+)",
            "has 2 pairs of brackets: keep one, around the name of the group, and begin the others with (?:",
        ),
    ):
        assert said in error_of(tmp_path, group=group)
    (tmp_path / "a" / "other.png").unlink()
    assert "by data.group 'p' all pictures are of one group, 'p': set another" in error_of(tmp_path, group="p")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{class}/patient{k}/{i}.png", "folder"),
        ("{class}/p{k}_{i}.png", "'(.+)[ _-]'"),
        ("{class}/p{k}{letter}.png", r"'(.*\d)[a-zA-Z]$'"),
        ("{class}/p{k}s{i}.png", r"'(.*\d)\D+\d+$'"),
        ("{class}/p{k}.{i}.png", r"'(.*\d)\D+\d+$'"),
        ("{class}/slide-{k}_x{i}00_y{n}00.png", r"'(.+?)[ _-]?x\d+[ _-]?y\d+'"),
        ("{class}/{class}_{n}.png", None),
        ("{class}/IMG 2020-{n}.png", None),
        ("{class}/{n}.png", None),
        ("{class}/more/{n}.png", None),
    ],
)
def test_pictures_that_seem_to_belong_together_are_said(tmp_path, capfd, monkeypatch, names, expected):
    for name in ("a", "b"):
        for n in range(12):
            k, i = divmod(n, 3)
            draw(tmp_path / names.format_map({"class": name, "k": k, "i": i, "n": n, "letter": "xyz"[i]}), 9 * n)
    data_of(tmp_path).prepare_data()
    said = capfd.readouterr().err
    assert ("seem to belong together" in said) == (expected is not None)
    if expected is None:
        return
    ways = "which makes 4 groups, or a coarser pattern, or --data.group none if not"
    assert f"give --data.group {expected}, {ways}" in said
    monkeypatch.setattr(notes, "_said", set())
    data_of(tmp_path, group="none").prepare_data()
    assert "belong" not in capfd.readouterr().err
    data_of(tmp_path, group=shlex.split(expected)[0]).prepare_data()  # the advice is right
    assert f"{tmp_path}: 4 groups: " in capfd.readouterr().err


def test_groups_in_folders_of_parts_are_checked(tmp_path):
    for part in ("train", "test"):
        patients(tmp_path / part, count=4)
    said = "groups are in several parts: patient00 (train, test), patient02 (train, test), patient01 (train, test), "
    assert said in error_of(tmp_path, group="folder", val_share=0.0)
    for path in sorted((tmp_path / "test").rglob("patient*")):
        path.rename(path.with_name(f"other{path.name}"))
    data_of(tmp_path, group="folder", val_share=0.0).setup()


def test_folders_of_parts_that_share_patients_are_said(tmp_path, capfd, monkeypatch):
    for part in ("train", "test"):
        patients(tmp_path / part, count=6)
    data_of(tmp_path).prepare_data()
    pair = "test/ill/patient00/0.png, train/ill/patient00/4.png"
    assert f"pictures seem to belong together, such as {pair}: if they" in capfd.readouterr().err
    for path in sorted((tmp_path / "test").rglob("patient*")):
        path.rename(path.with_name(f"other{path.name}"))
    monkeypatch.setattr(notes, "_said", set())
    data_of(tmp_path).prepare_data()
    assert "belong" not in capfd.readouterr().err


def test_classes_that_seem_to_be_patients_are_said(tmp_path, capfd):
    for patient in range(6):
        for i in range(4):
            draw(tmp_path / f"patient{patient}" / ("ill", "well")[i % 2] / f"{i}.png", 9 * i)
    data_of(tmp_path).prepare_data()
    said = f"{tmp_path}: 6 classes have the same folders, ill, well: if these are the classes, give each a folder, with"
    assert said in capfd.readouterr().err
    data_of(patients(tmp_path.parent / "others")).prepare_data()
    assert "same folders" not in capfd.readouterr().err


def test_a_window_without_deep_pictures_is_said_to_change_nothing(folder, capfd):
    data_of(folder, window=(0, 4095)).setup()
    assert "data.window changes nothing: no training picture is gray with more than 8 bits" in capfd.readouterr().err


def test_a_test_without_the_training_pictures_says_nothing_of_the_window(tmp_path, capfd):
    folder = deep_folder(tmp_path / "a")
    data = data_of(folder)
    kept = str(data.write_split(tmp_path / "run"))
    for path, part in data.parts.items():
        if part != "test":
            (folder / path).unlink()
    only_test = data_of(folder, split=kept, window=(700, 1000), class_names=["cat", "dog"])
    only_test.setup("test")
    assert len(only_test.test_set) == 4
    assert "data.window" not in capfd.readouterr().err


def test_a_table_beside_pictures_without_classes_is_named(tmp_path):
    draw(tmp_path / "pictures" / "a.png")
    (tmp_path / "labels.csv").write_text("file,label\n")
    said = (
        "two or more are needed: expected a folder with a folder of pictures for each class, or a table of the classes"
    )
    assert f"{said}: --data.table {tmp_path / 'labels.csv'}" in error_of(tmp_path)


def test_a_split_that_leaks_is_refused_with_groups(tmp_path):
    folder = patients(tmp_path / "a")
    path = data_of(folder).write_split(tmp_path / "run")
    assert "train anew, without it, for a new split, or set data.group to none" in error_of(
        folder, split=str(path), group="folder"
    )
    kept = data_of(folder, group="folder")
    path = kept.write_split(tmp_path / "run")
    assert data_of(folder, group="folder", split=str(path)).parts == kept.parts


def test_classes_and_groups_that_cannot_be_split_are_said(tmp_path, capfd):
    for name, patient, count in (("a", "p1", 40), ("a", "p2", 3), ("a", "p3", 3), ("b", "p4", 5)):
        for i in range(count):
            draw(tmp_path / name / patient / f"{i}.png", i)
    data_of(tmp_path, group="folder").prepare_data()
    said = capfd.readouterr().err
    assert "classes with one group cannot be split, and are in one part alone: b (p4)" in said
    assert "the group p1 has 40 of 51 pictures, which are all in training" in said
    assert "classes that have too few pictures or groups to be tested: b (5)" in said


def table(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_names_pictures_and_their_classes(tmp_path, capfd):
    for i in range(24):
        draw(tmp_path / "pictures" / f"part{i % 2}" / f"P_{i}.jpg", 10 * i)
    draw(tmp_path / "pictures" / "other.jpg")
    rows = [f"L{i // 2},{f'P_{i}' if i % 3 else f'part{i % 2}/P_{i}.jpg'},{'ab'[i // 2 % 2]}" for i in range(24)]
    path = table(tmp_path / "labels.csv", ["lesion_id,image_id,dx", *rows])
    options = {"table": str(path), "picture": "image_id", "label": "dx"}
    data = data_of(tmp_path / "pictures", **options)
    data.prepare_data()
    data.setup()
    assert data.names == ["a", "b"]
    assert len(data.parts) == 24
    for stage in ("fit", "validate", "test"):
        labels = [int(path.split("_")[1].split(".")[0]) // 2 % 2 for path in data.keys(stage)]
        assert data.part(stage).labels.tolist() == labels
    said = capfd.readouterr().err
    assert "left out what lies in no row of the table: other.jpg" in said
    assert "file beside" not in said
    assert "rows with the same lesion_id (12 values) may belong together, as those of one patient" in said
    assert "give --data.group lesion_id, or --data.group none if not" in said
    grouped = data_of(tmp_path / "pictures", group="lesion_id", **options)
    lesions = groups_by_part(grouped, lambda path: int(path.split("_")[1].split(".")[0]) // 2)
    assert sum(map(len, lesions)) == 12
    assert data_of(tmp_path / "pictures", group="folder", **options).parts  # those within the folder of the pictures


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (["image,label", "0,a", "1,b"], {}, "no column 'file'"),
        (
            ["0,a", "1,b", "2,a"],
            {},
            'if the first line is a sample, name the columns by --data.columns "[file, label]"',
        ),
        (["0,a", "1,b", "2,a"], {"columns": ["file", "label"]}, "has no picture to test on"),
        (
            ["file,label", "0,a", "9,b"],
            {},
            "line 3: no picture is called '9': mend such rows, or leave",
        ),
        (["file,label", "0,a", ",b"], {}, "line 3: file is empty: mend such rows"),
        (["file,label", "0,a", "1,"], {}, "line 3: label is empty: mend such rows"),
        (["file,label", "0,a", "0.png,b", "1,b"], {}, "line 3: 0.png is 'b', and 'a' in line 2: give each picture one"),
        (["file,label", "8,a", "9,b"], {}, "names no picture in"),
        (["file,label", "0,a", "1,a"], {}, "all pictures have the class 'a' in column 'label'"),
        (["file,label", "0,a", "1,b"], {}, "every picture has another class in column 'label'"),
        (["file,label,who", "0,a,x", "1,b,", "2,a,y"], {"group": "who"}, "line 3: who is empty: fill it in"),
        (
            ["file,label,who", "0,a,x", "1,b,x", "2,a,x"],
            {"group": "who"},
            "by data.group 'who' all pictures are of one",
        ),
        (
            ["file,label", "0,a", "1,b", "2,a"],
            {"group": "who"},
            "set it to folder, none, a column of the table (file, l",
        ),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, lines, options, said):
    for i in range(3):
        draw(tmp_path / "pictures" / f"{i}.png", 50 * i)
    path = table(tmp_path / "t.csv", lines)
    assert said in error_of(tmp_path / "pictures", table=str(path), **options)


def test_names_in_a_table_have_many_forms(tmp_path):
    folder = tmp_path / "pictures"
    files = ["a/0.png", "a/1.png", "b/2.png", "b/3.png", "b/4.png", "b/5.png", "cafe\u0301.png", "c/0.png"]
    for i, name in enumerate(files):
        draw(folder / name, 20 * i)
    names = ["a\\0.png", "1", "b/2", str(folder / "b" / "3.png"), "pictures/b/4.png", "5.png", "caf\u00e9", "./c/0"]
    path = table(folder / "t.csv", ["file,label", *(f"{name},{'ab'[i % 2]}" for i, name in enumerate(names))])
    path.rename(tmp_path / "t.csv")
    data = data_of(folder, table=str(tmp_path / "t.csv"))
    assert data._listed.labels == {name: "ab"[i % 2] for i, name in enumerate(files)}
    table(tmp_path / "t.csv", ["file,label", "0,a", "1,b"])
    said = "line 2: several pictures are called '0': give the path in the folder"
    assert said in error_of(folder, table=str(tmp_path / "t.csv"))


def test_a_column_that_repeats_the_class_is_no_group(tmp_path, capfd):
    for i in range(12):
        draw(tmp_path / "pictures" / f"{i}.png", 20 * i)
    rows = [f"{i},{'abc'[i % 3]},{i % 3},p{i // 2}" for i in range(12)]
    path = table(tmp_path / "t.csv", ["file,label,class_id,patient", *rows])
    data_of(tmp_path / "pictures", table=str(path)).prepare_data()
    said = capfd.readouterr().err
    assert "class_id" not in said
    assert "give --data.group patient" in said


def test_rows_that_cannot_be_used_are_left_out_if_asked(tmp_path, capfd):
    for i in range(12):
        draw(tmp_path / "pictures" / f"{i}.png", 20 * i)
    path = table(tmp_path / "t.csv", ["file,label", *(f"{i},{'ab'[i % 2]}" for i in range(14))])
    data = data_of(tmp_path / "pictures", table=str(path), skip_bad=True)
    assert len(data.parts) == 12
    said = f"{path}: left out 2 rows: line 14: no picture is called '12', line 15:"
    assert said in capfd.readouterr().err


def test_near_copies_across_the_split_are_said(tmp_path, capfd, monkeypatch):
    random = np.random.default_rng(0)
    for i in range(20):
        picture = Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).resize((60, 60), 2)
        path = tmp_path / ("a", "b")[i % 2] / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        picture.save(path)
    data = data_of(tmp_path)
    data.setup()
    assert "copies" not in capfd.readouterr().err
    source, target = data.keys("fit")[0], data.keys("test")[0]
    Image.open(tmp_path / source).resize((45, 45)).point(lambda x: 20 + 0.8 * x).convert("L").save(tmp_path / target)
    data_of(tmp_path).setup()
    said = f"{tmp_path}: training has near copies of 1 of 4 test pictures, such as {target} and {source}\n"
    assert said in capfd.readouterr().err
    shutil.copy(tmp_path / source, tmp_path / target)
    monkeypatch.setattr(notes, "_said", set())
    data_of(tmp_path).setup()
    said = capfd.readouterr().err
    assert "training has 1 of 4 test pictures too" in said
    assert "near copies" not in said


def test_a_balanced_epoch(folder):
    """It has as many pictures as before, equally many of each class; validation and test stay as they are."""
    for i in range(10, 100):
        draw(folder / "cat" / f"{i}.png", 100)
    data, plain = data_of(folder, balance=True), data_of(folder)
    for one in (data, plain):
        one.setup()
    labels = torch.cat([labels for _, labels in data.train_dataloader()])
    assert plain.train_set.labels.bincount().tolist() == [70, 6]
    assert labels.bincount().tolist() == [38, 38]
    for loader in ("val_dataloader", "test_dataloader"):
        both = [torch.cat([labels for _, labels in getattr(one, loader)()]).tolist() for one in (data, plain)]
        assert both[0] == both[1]


@pytest.mark.parametrize(("fit", "size"), [("crop", 8), ("pad", 18), ("stretch", 18)])
def test_the_size_is_that_of_what_is_kept(tmp_path, fit, size):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L", (18, 8), 80 * number).save(tmp_path / name / f"{number}.png")
    assert ImageFolder(str(tmp_path), fit=fit).shape == (1, size, size)
