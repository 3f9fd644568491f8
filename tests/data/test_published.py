"""What holds for every published data set: how its files are found, downloaded, checked and refused, its split, its
batches and its options."""

import hashlib
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from commands import call, error_of
from noise import write_all, write_archives, write_idx_files
from torch import Tensor

from torchcaps.data import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SST,
    SVHN,
    AffineMNIST,
    AffNIST,
    ClutteredDigits,
    DataError,
    Digits,
    DiverseMultiMNIST,
    ExpandedMNIST,
    FashionMNIST,
    ImageData,
    MultiMNIST,
    Published,
    SegmentedDigits,
    SmallNORB,
    StereoToys,
)
from torchcaps.data.files import CanonicalFile
from torchcaps.data.published import checked_images, checked_labels

OF_MNIST = [ExpandedMNIST, AffineMNIST, MultiMNIST, DiverseMultiMNIST]
OF_IMAGES = [MNIST, FashionMNIST, *OF_MNIST, AffNIST, CIFAR10, CIFAR100, SVHN, SmallNORB]

every_set = pytest.mark.parametrize("kind", [*OF_IMAGES, SegmentedDigits, SST])
every_set_of_images = pytest.mark.parametrize("kind", OF_IMAGES)
every_format = pytest.mark.parametrize("kind", [MNIST, FashionMNIST, AffNIST, CIFAR10, CIFAR100, SVHN, SmallNORB, SST])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A data root with samples of noise of every set, whose hashes are not the published ones."""
    root = tmp_path_factory.mktemp("files")
    write_idx_files(root / "mnist", 20)
    write_all(root, 20)
    archive = root / "sst" / SST.archive.name
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            (root / "sst" / Path(name).name).write_bytes(opened.read(name))
    archive.unlink()
    return root


@pytest.fixture(scope="module")
def archives(root: Path, tmp_path_factory) -> Path:
    """A data root with archives in place of the files in them."""
    archives = tmp_path_factory.mktemp("archives")
    write_archives(archives, root)
    for name in ("mnist", "fashion-mnist", "svhn", "affnist"):
        (archives / name).symlink_to(root / name)
    return archives


def made(kind: type[Published], root: Path | None = None, **options: Any) -> Published:
    if issubclass(kind, MultiMNIST):
        options |= {"epoch_size": 50, "test_size": 30}
    if kind is SegmentedDigits:
        options |= {"train_size": 50, "test_size": 30}
    return kind(str(root) if root else None, **options)


def contents(data: Published) -> list[Tensor]:
    """All that a set reads from its files."""
    if isinstance(data, SST):
        texts, labels = zip(*(data.read(stage) for stage in ("fit", "validate", "test")), strict=True)
        return [*(torch.tensor([hash(text) for text in part]) for part in texts), *labels]
    assert isinstance(data, ImageData)
    return [*data.load(train=True), *data.load(train=False)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def error(data: Published) -> str:
    with pytest.raises(DataError) as caught:
        contents(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Where files come from


@every_set
def test_offline(kind, tmp_path, no_network):
    first = next(iter(made(kind).files()))
    for root, place in ((None, "DIR"), (tmp_path / "mine", str(tmp_path / "mine"))):
        no_network.clear()
        with pytest.raises(DataError) as caught:
            made(kind, root).prepare_data()
        advice = "" if root else " and set TORCHCAPS_DATA=DIR"
        tried = [f"{url} (ConnectionError: Name or service not known and a second line)" for url in first.urls]
        assert str(caught.value) == (
            f"cannot download {first.name} ({first.algorithm} {first.digest}): put it at "
            f"{place}/{first.folder}/{first.name}{advice}; tried {', '.join(tried)}"
        )
        assert no_network == list(first.urls)


@every_set
def test_root_and_environment(kind, root, archives, tmp_path, monkeypatch, no_network):
    expected = contents(made(kind, root, check_hashes=False))
    assert same(contents(made(kind, archives, check_hashes=False)), expected)
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    made(kind, root).prepare_data()  # the argument goes before the variable
    monkeypatch.setenv("TORCHCAPS_DATA", str(root))
    assert same(contents(made(kind, check_hashes=False)), expected)
    assert no_network == []


@every_set
def test_missing_files_are_downloaded(kind, root, archives, tmp_path, monkeypatch):
    asked = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> str:
        asked.append((url, known_hash, path / fname))
        path.mkdir(parents=True, exist_ok=True)
        return shutil.copy(archives / path.name / fname, path)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    if kind is AffNIST:  # the test set of affNIST has no hash, so that it is not downloaded
        (tmp_path / "affnist").symlink_to(root / "affnist")
    data = made(kind, tmp_path, check_hashes=False)
    data.prepare_data()
    assert asked == [
        (file.urls[0], f"{file.algorithm}:{file.digest}", tmp_path / "cache" / "torchcaps" / file.folder / file.name)
        for file in data.files()
    ]
    assert same(contents(data), contents(made(kind, root, check_hashes=False)))


def test_the_published_hashes_and_addresses_stay():
    files = [
        (file.folder, file.name, file.digest, file.urls)
        for kind in (MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN, SmallNORB, SST)
        for file in (
            *made(kind).files(),
            *(() if kind not in (CIFAR10, CIFAR100) else (*kind.train_batches, *kind.test_batches)),
        )
    ]
    files += [("smallnorb", name, plain, ()) for name, (_, plain) in SmallNORB.md5.items()]
    assert hashlib.sha256(repr(files).encode()).hexdigest() == HASH_OF_HASHES


HASH_OF_HASHES = "f3a77bdc401c53f6abd32d0ef47cde4237474ec51e67a3254685df6d1f264f2e"


# Hashes


def test_a_file_and_its_hash(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"hello")
    for algorithm in ("md5", "sha256"):
        CanonicalFile("f", "a", hashlib.new(algorithm, b"hello").hexdigest()).check(path)
    given = hashlib.md5(b"hello").hexdigest()
    for urls, advice in (((), "replace the file"), (("http://a",), "replace the file, or remove it to have it downl")):
        with pytest.raises(
            DataError, match=f"^{path}: has md5 {given}, and the published file has {'0' * 32}: {advice}"
        ):
            CanonicalFile("f", "a", "0" * 32, urls).check(path)


def test_what_is_no_regular_file_is_not_read(tmp_path):
    (tmp_path / "f").mkdir()
    os.mkfifo(tmp_path / "f" / "a")  # nobody writes to it
    (tmp_path / "f" / "b").mkdir()
    for name in "ab":
        line = rf"^{tmp_path}/f/{name}: cannot be read \(it is not a regular file\): replace the file$"
        with pytest.raises(DataError, match=line):
            CanonicalFile("f", name, "0" * 32).find(str(tmp_path))


@every_set
def test_another_hash_is_an_error_unless_it_is_asked_for(kind, root, archives, monkeypatch):
    for place in (root, archives):
        assert "set check_hashes to false" in error(made(kind, place))
    checked: list[str] = []
    monkeypatch.setattr(CanonicalFile, "check", lambda file, path: checked.append(path.name))
    contents(made(kind, archives))
    files = {file.name for file in made(kind, archives).files() if kind is not AffNIST or "train" in file.name}
    assert set(checked) == files
    checked.clear()
    contents(made(kind, archives, check_hashes=False))
    assert checked == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_run_records_that_hashes_were_not_checked(root, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCAPS_DATA", str(root))
    arguments = ("train", "zhao2019/table1/fashion-mnist-max", "--small", "--smoke")
    assert "train-images-idx3-ubyte.gz: has md5 " in error_of(capfd, *arguments)
    assert call(*arguments, "--data.check_hashes", "false") == 0
    (values,) = tmp_path.rglob("smoke_*/config.yaml")
    assert "check_hashes: false" in values.read_text()


# Damage


@every_format
@pytest.mark.parametrize("form", ["root", "archives"])
def test_damaged_files_that_are_not_checked(kind, form, request, tmp_path, no_network):
    """Each gives one line that names the file, and is never replaced."""
    source = request.getfixturevalue(form)
    folder = "affnist" if kind is AffNIST else next(iter(made(kind).files())).folder
    for name in {folder, "mnist"}:
        shutil.copytree(source / name, tmp_path / name, dirs_exist_ok=True)
    data = made(kind, tmp_path, check_hashes=False)
    contents(data)
    for path in filter(Path.is_file, (tmp_path / folder).rglob("*")):
        good = path.read_bytes()
        for content in (b"", b"neither this nor that\n", good[: len(good) // 3], good[: -len(good) // 9]):
            path.write_bytes(content)
            assert error(data).startswith(f"{path}: cannot be read (")
        path.unlink()
        path.mkdir()
        assert error(data).startswith(f"{path}: cannot be read (")
        path.rmdir()
        path.write_bytes(good)
    contents(data)
    assert no_network == []


@pytest.mark.parametrize(
    ("images", "labels", "problem"),
    [
        (torch.zeros(3, 1, 2, 2), [0, 1, 2], r"holds \(3, 1, 2, 2\) of torch.float32, expected one or more images"),
        (torch.zeros(3, 1, 2, 3, dtype=torch.uint8), [0, 1, 2], r"holds \(3, 1, 2, 3\) of torch.uint8"),
        (torch.zeros(3, 1, 2, 2, dtype=torch.uint8), [0, 1], r"holds labels \(2,\), expected 3 from 0 to 9"),
        (torch.zeros(3, 1, 2, 2, dtype=torch.uint8), [0, 1, 10], "expected 3 from 0 to 9"),
        (torch.zeros(3, 1, 2, 2, dtype=torch.uint8), [0, 1, 1.5], "expected 3 from 0 to 9"),
    ],
)
def test_what_files_may_hold(images, labels, problem):
    with pytest.raises(ValueError, match=problem):
        checked_labels(labels, len(checked_images(images, (1, 2, 2))), 10)


# Splits, batches and options


@every_set_of_images
def test_the_split_is_fixed_and_stratified(kind, root):
    parts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = made(kind, root, check_hashes=False, val_size=kind.classes)
        data.setup("fit")
        assert data.val_set.labels.bincount().tolist() == [1] * kind.classes
        whole = data.load(train=True)[1].bincount()
        assert torch.equal(data.train_set.labels.bincount(), whole - 1)
        parts.append([*data.part("fit").__getitems__([0, 1, 2]), *data.part("validate").__getitems__([0, 1, 2])])
    assert same(*parts)


@every_set_of_images
def test_batches(kind, root):
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        data = made(kind, root, check_hashes=False, batch_size=7)
        data.setup()
        orders.append([labels for _, labels in data.train_dataloader()])
    assert same(*orders)
    batches = list(data.test_dataloader())
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert images.dtype == torch.float32
    assert images.shape[1:] == data.shape
    assert images.min() >= 0
    assert 0.9 < images.max() <= 1
    assert len(data.keys("test")) == len(data.test_set)
    if not isinstance(data, MultiMNIST):  # whose images are made of those of the files
        raw, expected = data.load(train=False)
        assert torch.equal(images, raw.float() / 255)
        assert torch.equal(labels, expected)
        assert labels.dtype == torch.int64
        assert [len(batch[1]) for batch in batches] == [7] * (len(raw) // 7) + [len(raw) % 7] * (len(raw) % 7 > 0)


@pytest.mark.parametrize("kind", [*OF_IMAGES, Digits, ClutteredDigits, StereoToys])
def test_every_set_takes_every_option(kind):
    shape = kind().shape
    side = shape[1] + 2
    data = kind(batch_size=3, val_size=20, num_workers=0, flip=True, resize=side, ten_crop=True, shuffle_labels=True)
    assert (data.batch_size, data.val_size, data.flip, data.resize, data.ten_crop) == (3, 20, True, side, True)
    assert data.crops(torch.rand(4, *shape)).shape == (4, 10, *shape)
    assert data.augment(torch.rand(4, *shape)).shape == (4, *shape)
    assert len(set(data.names)) == kind.classes
    with pytest.raises(TypeError, match="resise"):
        kind(resise=side)
    with pytest.raises(ValueError, match=r"batch_size .* 0\b"):
        kind(batch_size=0)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (FileNotFoundError(2, "No such file or directory"), "No such file or directory"),
        (MemoryError(), "the memory is full"),
    ],
)
def test_a_file_that_another_one_could_not_replace(tmp_path, refusal, said):
    file = CanonicalFile("f", "a", "0" * 32, ("http://a",))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a").write_bytes(b"hello")

    def read(path):
        raise refusal

    with pytest.raises(DataError, match=rf"^{tmp_path}/f/a: cannot be read \({said}\)$"):
        MNIST(str(tmp_path), check_hashes=False).read_file(file, read)
