"""Photographs in folders: which ones are read, as what, and errors of one line."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recorder import Recorder, small_trainer
from torch import Tensor

from torchcaps.data import DataError, ImageNet, imagenet
from torchcaps.data.imagenet import read_class_list
from torchcaps.recipes import load_recipe

NAMES = ["n01", "n02", "n03"]


def color(*value: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.new("RGB", size, value)


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes with four training and two test images each. Red encodes the class, green the image."""
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(NAMES):
            for image in range(count):
                save(tmp_path / "imagenet" / part / name / f"{name}_{image}.PNG", color(100 * label, 10 * image, 50))
    return tmp_path


def small(root: Path | None, **options: Any) -> ImageNet:
    options = {"size": 4, "resize": 4, "num_workers": 0, "batch_size": 100, **options}
    return ImageNet(root=str(root) if root else None, **options)


def read(data: ImageNet) -> tuple[Tensor, Tensor]:
    data.setup("test")
    images, labels = zip(*data.test_dataloader(), strict=True)
    return torch.cat(images), torch.cat(labels)


def error_of(data: ImageNet) -> str:
    with pytest.raises(DataError) as caught:
        read(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Which images


def test_images_and_labels_in_order(root: Path) -> None:
    images, labels = read(small(root))
    assert images.shape == (6, 3, 4, 4)
    assert images.dtype == torch.uint8
    assert images.is_contiguous()
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert labels.dtype == torch.int64
    assert images[:, :, 1, 2].tolist() == [[100 * label, 10 * image, 50] for label in range(3) for image in range(2)]


def test_what_counts_as_an_image(root: Path) -> None:
    folder = root / "imagenet" / "val" / "n02"
    for name in ("a.JPEG", "b.jpg", "C.JpG", "d.png", "e.gif"):
        save(folder / name, color(1, 2, 3), format="PNG")
    for name in ("f.txt", "g.svg", "png", "._a.JPEG", ".hidden.png"):
        (folder / name).write_text("no image")
    (root / "imagenet" / "val" / ".ipynb_checkpoints").mkdir()
    (root / "imagenet" / "val" / "index.txt").write_text("")
    assert read(small(root))[1].bincount().tolist() == [2, 7, 2]


def test_classes_are_known_before_setup(root: Path) -> None:
    data = small(root)
    assert (data.classes, data.names, data.shape) == (3, NAMES, (3, 4, 4))
    (root / "two.txt").write_text("n03\nn01\n")
    assert small(root, class_list=str(root / "two.txt")).classes == 2
    assert ImageNet(root="nowhere").shape == (3, 128, 128)  # needs no file
    assert ImageNet(root="nowhere").num_workers == 2


def test_a_class_list_chooses_and_numbers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "hard.txt").write_bytes(b"\xef\xbb\xbf# hard ones\n\nn03 # the hardest\r\n  n01\n")
    data = small(root, class_list=str(root / "hard.txt"))
    images, labels = read(data)
    assert data.names == ["n03", "n01"]
    assert labels.tolist() == [0, 0, 1, 1]
    assert images[:, 0, 0, 0].tolist() == [200, 200, 0, 0]
    monkeypatch.chdir(root)
    (root / "h-imagenet.txt").write_text("n02")  # comes before the package's
    assert small(root, class_list="h-imagenet.txt").names == ["n02"]


def test_h_imagenet(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / "imagenet" / part).mkdir(parents=True)
    names = read_class_list(Path(imagenet.__file__).parent / "h-imagenet.txt")
    assert len(set(names)) == len(names) == 200
    assert all(re.fullmatch(r"n\d{8}", name) for name in names)
    assert error_of(small(tmp_path, class_list="h-imagenet.txt")) == (
        f"{tmp_path}/imagenet/train: has no folder {names[0]}: expected one for each class of h-imagenet.txt"
    )
    for row in ("v1", "v2", "v3", "v3-mild", "v3-strong"):
        values = load_recipe(f"li2018/table4/h-imagenet-{row}").config["data"]["init_args"]
        assert values["class_list"] == "h-imagenet.txt"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", ": has no classes: expected one name per line"),
        (b"n01\nn02\nn01\n", ": has class n01 twice: remove one of them"),
        (b"n01\xff", r" is not a text in UTF-8 \(byte 3\): expected a text file in UTF-8, one class per line"),
    ],
)
def test_bad_class_lists(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}{problem}$"):
        read_class_list(path)


def test_a_class_list_that_does_not_fit(root: Path) -> None:
    path = root / "list.txt"
    path.write_text("n02\nn09\n")
    folder = root / "imagenet"
    assert error_of(small(root, class_list=str(path))) == (
        f"{folder}/train: has no folder n09: expected one for each class of {path}"
    )
    os.mkfifo(root / "fifo.txt")
    for unreadable in ("gone.txt", str(root), str(root / "fifo.txt")):
        assert error_of(small(root, class_list=unreadable)).startswith(f"{unreadable} cannot be read: ")


def test_missing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"no ImageNet: put its images at {tmp_path}/imagenet/{{train,val}}/<class>/*.JPEG"
    assert error_of(small(tmp_path)) == expected
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="no ImageNet"):
        small(tmp_path).prepare_data()
    assert error_of(small(None)) == (
        "no ImageNet: put its images at DIR/imagenet/{train,val}/<class>/*.JPEG and set TORCHCAPS_DATA=DIR"
    )
    (tmp_path / "imagenet" / "val").mkdir()
    assert error_of(small(tmp_path)) == (
        f"{tmp_path}/imagenet/train: has no folders: expected one for each class, with its images"
    )
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    assert "has no folders" in error_of(small(None))


@pytest.mark.parametrize(("more", "less"), [("train", "val"), ("val", "train")])
def test_classes_of_train_and_val_differ(root: Path, more: str, less: str) -> None:
    (root / "imagenet" / more / "n025").mkdir()
    message = f"{root}/imagenet/{less}: has no folder n025: expected one for each class of train and val"
    assert error_of(small(root)) == message
    with pytest.raises(DataError, match="n025"):
        small(root).prepare_data()


def test_a_class_without_images(root: Path) -> None:
    for path in (root / "imagenet" / "val" / "n02").iterdir():
        path.rename(path.with_suffix(".txt"))
    message = error_of(small(root))
    assert message.startswith(f"{root}/imagenet/val/n02: has no images: expected files that end in .bmp, ")


def test_held_out_images_are_those_of_train(root: Path) -> None:
    data = small(root, val_size=3)
    data.setup("fit")
    ((val, val_labels),) = data.val_dataloader()
    ((train, train_labels),) = data.train_dataloader()
    assert Counter(val_labels.tolist()) == {0: 1, 1: 1, 2: 1}
    assert Counter(train_labels.tolist()) == {0: 3, 1: 3, 2: 3}
    seen = [(*image[:, 0, 0].tolist(),) for image in (*val, *train)]
    assert len(set(seen)) == 12
    assert [red // 100 for red, _, _ in seen] == [*val_labels.tolist(), *train_labels.tolist()]
    with pytest.raises(DataError, match=r"val_size .* 2\b"):
        small(root, val_size=2).setup("fit")


# Pixels


def only(root: Path, image: Image.Image) -> Tensor:
    """Read one image: (3, 4, 4)."""
    save(root / "imagenet" / "val" / "n01" / "n01_0.PNG", image)
    return read(small(root, size=2))[0][0]


def ramp(width: int, height: int) -> np.ndarray:
    """An image whose red encodes the column and green the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    return pixels


def test_the_center_of_the_longer_side_is_kept(root: Path) -> None:
    wide, high = ramp(10, 4), ramp(4, 8)
    assert np.array_equal(only(root, Image.fromarray(wide)).permute(1, 2, 0), wide[:, 3:7])
    assert np.array_equal(only(root, Image.fromarray(high)).permute(1, 2, 0), high[2:6])


def test_a_picture_is_read_as_those_of_the_test(root: Path) -> None:
    data = small(root, size=2, resize=4)
    path = root / "imagenet" / "val" / "n01" / "n01_0.PNG"
    assert torch.equal(data.picture(path), read(data)[0][0])


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_an_error_in_a_worker_is_the_same_line(root: Path) -> None:
    (root / "imagenet" / "val" / "n03" / "n03_1.PNG").write_bytes(b"no image")
    data = small(root, num_workers=2, batch_size=2)
    data.setup("test")
    batches = iter(data.test_dataloader())
    with pytest.raises(DataError) as caught:
        list(batches)
    assert str(caught.value) == error_of(small(root))
    batches._shutdown_workers()  # otherwise torch waits 5 seconds for each at garbage collection


# As a data module


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_workers_and_batches_do_not_matter(images_of_noise: Path) -> None:
    expected, labels = read(small(images_of_noise, resize=6))
    assert expected.shape == (20, 3, 6, 6)
    assert labels.tolist() == [label for label in range(10) for _ in range(2)]
    for options in ({"batch_size": 7}, {"batch_size": 6, "num_workers": 2}):
        images, found = read(small(images_of_noise, resize=6, **options))
        assert torch.equal(images, expected)
        assert torch.equal(found, labels)


def test_crops_are_of_the_square(images_of_noise: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = small(images_of_noise, size=4, resize=7, ten_crop=True, jitter=0.2, flip=True)
    images, _ = read(data)
    floats = images.float() / 255
    assert torch.equal(data.center(images), floats[..., 1:5, 1:5])
    assert torch.equal(data.crops(images)[:, 3], floats[..., 3:, 3:])
    assert torch.equal(data.crops(images)[:, 9], floats[..., 1:5, 1:5].flip(-1))
    assert data.augment(images).shape == (20, 3, 4, 4)
    for wrong in (images[..., :4, :4], images[0]):
        with pytest.raises(ValueError, match=r"ImageNet has images of shape \(n, 3, 7, 7\), got "):
            data.augment(wrong)
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",
    "ignore:.*use of fork:DeprecationWarning",
)
def test_a_trainer_crops_on_its_device_in_the_precision_of_the_run(images_of_noise: Path) -> None:
    module, trainer = Recorder(), small_trainer(precision="bf16-true")
    data = small(images_of_noise, size=4, resize=6, val_size=10, ten_crop=True, batch_size=5, num_workers=2)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    for stage, shape in (("train", (5, 3, 4, 4)), ("val", (5, 3, 4, 4)), ("test", (5, 10, 3, 4, 4))):
        assert {(tuple(images.shape), images.dtype) for images in module.seen[stage]} == {(shape, torch.bfloat16)}
