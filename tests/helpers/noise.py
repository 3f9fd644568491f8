"""Files of noise in the formats of the data sets."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import norb
import pytest
import torch
from PIL import Image
from scipy.io import savemat


def accept_hashes(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Let the hashes of all files below a data root count as the published ones, in this process and those it forks."""
    from torchcaps.data.files import CanonicalFile  # takes seconds, which the tests of the core need not wait

    check = CanonicalFile.check

    def check_others(file: Any, path: Path) -> None:
        if not path.is_relative_to(root):
            check(file, path)

    patch.setattr(CanonicalFile, "check", check_others)


def write_all(root: Path, samples: int = 16) -> None:
    """Write a few samples of every data set that is read from files, except MNIST."""
    write_idx_files(root / "fashion-mnist", samples)
    generator = torch.Generator().manual_seed(0)
    for folder, batches, key, classes in (
        ("cifar-10/cifar-10-batches-py", [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], b"labels", 10),
        ("cifar-100/cifar-100-python", ["train", "test"], b"fine_labels", 100),
    ):
        (root / folder).mkdir(parents=True)
        for name in batches:
            count = samples * classes // 10
            images = torch.randint(256, (count, 3072), generator=generator).byte().numpy()
            batch = {b"data": images, key: [k % classes for k in range(count)]}
            (root / folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (root / "svhn").mkdir()
    for name in ("train", "test"):
        images = torch.randint(256, (32, 32, 3, samples), generator=generator).byte().numpy()
        labels = (torch.arange(samples) % 10 + 1).byte().numpy()[:, None]
        savemat(root / "svhn" / f"{name}_32x32.mat", {"X": images, "y": labels})
    (root / "affnist").mkdir()
    images = torch.randint(256, (1600, samples), generator=generator).byte().numpy()
    test = {"image": images, "label_int": (torch.arange(samples) % 10).byte().numpy()[None]}
    content = io.BytesIO()
    savemat(content, {"affNISTdata": test})
    with zipfile.ZipFile(root / "affnist" / "test.mat.zip", "w") as archive:
        archive.writestr("test.mat", content.getvalue())
    write_photographs(root / "imagenet")
    norb.write(root / "smallnorb", False, norb.small_norb())
    trees = ("(4 (2 a) (4 (4 good) (2 film)))", "(0 (0 bad) (2 .))", "(3 good)", "(2 film)") * 2
    write_trees(root, {f"{name}.txt": "\n".join(trees).encode() for name in ("train", "dev", "test")})


def write_trees(root: Path, files: dict[str, bytes]) -> None:
    """Write the archive of the Stanford Sentiment Treebank."""
    (root / "sst").mkdir()
    with zipfile.ZipFile(root / "sst" / "trainDevTestTrees_PTB.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(f"trees/{name}", content)


def write_archives(root: Path, files: Path) -> None:
    """Write the data sets that are published as archives, with the files below another data root."""
    for name, inside in (("cifar-10", "cifar-10-batches-py"), ("cifar-100", "cifar-100-python")):
        (root / name).mkdir(parents=True)
        with tarfile.open(root / name / f"{name}-python.tar.gz", "w:gz") as archive:
            archive.add(files / name / inside, inside)
    write_trees(root, {path.name: path.read_bytes() for path in (files / "sst").iterdir()})
    norb.write(root / "smallnorb", True, norb.small_norb())


def write_idx_files(folder: Path, samples: int = 16) -> None:
    """Write a few images in the format of MNIST."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "t10k"):
        images = torch.randint(256, (samples, 28, 28), generator=generator).byte()
        labels = (torch.arange(samples) % 10).byte()
        for name, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            header = struct.pack(f">BBBB{data.dim()}I", 0, 0, 8, data.dim(), *data.shape)
            (folder / f"{name}.gz").write_bytes(gzip.compress(header + bytes(data.flatten().tolist())))


def write_photographs(folder: Path) -> None:
    """Write two training and two validation images of noise for each of ten classes, and a list of four classes."""
    generator = torch.Generator().manual_seed(0)
    for part in ("train", "val"):
        for label in range(10):
            (folder / part / f"n{label:08}").mkdir(parents=True)
            for image in range(2):
                size = (
                    int(torch.randint(5, 61, (), generator=generator)),
                    int(torch.randint(5, 81, (), generator=generator)),
                )
                pixels = torch.randint(256, (*size, 3), generator=generator).byte().numpy()
                Image.fromarray(pixels).save(folder / part / f"n{label:08}" / f"{part}_{label}_{image}.JPEG")
    (folder / "four.txt").write_text("# four of ten\nn00000007\nn00000002\nn00000004\nn00000009\n")
