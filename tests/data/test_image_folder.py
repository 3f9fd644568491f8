"""Own pictures in folders: classes, shapes, parts, bad files, augmentation."""

import csv
import itertools
import os
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image

from torchcaps.data import DataError, ImageFolder
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
    assert data.facts() == {"classes": 2, "in_channels": 1, "image_size": 8}
    assert data.found() == {"class_names": ["cat", "dog"], "channels": 1, "size": 8}
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
    bad, digests = read_all([folder / "cat" / "0.png", folder / "dog" / "0.png"], (1, 8, 8), "stretch")
    assert bad == {}
    assert len(set(digests)) == 2
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
