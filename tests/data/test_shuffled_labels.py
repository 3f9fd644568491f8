"""Shuffled labels: those of the training and of the validation set, the same in every run; the test has its own."""

import json
from pathlib import Path

import pytest
import torch
from commands import TINY, call, checkpoint
from encoders import make_encoder
from PIL import Image
from torch import Tensor

from torchcaps.data import MNIST, SST, Digits, ImageFolder, LabeledData, MultiMNIST, SmallNORB, TextTable


def labels_of(data: LabeledData, stage: str) -> Tensor:
    data.setup(stage)
    return data._loaded(stage).labels


def assert_shuffled(plain: LabeledData, shuffled: LabeledData) -> None:
    """Assert that shuffling changes which sample has which label in training and validation, and nothing else."""
    for data in (plain, shuffled):
        data.setup()
    for stage in ("fit", "validate", "test"):
        own, others = labels_of(plain, stage), labels_of(shuffled, stage)
        assert plain.keys(stage) == shuffled.keys(stage)
        assert own.sort().values.equal(others.sort().values)
        assert own.equal(others) == (stage == "test")
        inputs, batch_labels = plain.part(stage).__getitems__([0, 1])[:2]
        others_inputs, others_labels = shuffled.part(stage).__getitems__([0, 1])[:2]
        pairs = zip(inputs, others_inputs, strict=True) if isinstance(inputs, tuple) else [(inputs, others_inputs)]
        assert all(a.equal(b) for a, b in pairs)
        assert batch_labels.equal(own[:2])
        assert others_labels.equal(others[:2])


def test_images_in_memory():
    assert_shuffled(Digits(val_size=100), Digits(val_size=100, shuffle_labels=True))
    true, false = Digits(), Digits(shuffle_labels=True)
    right = (labels_of(true, "fit") == labels_of(false, "fit")).double().mean()
    assert 0.05 < right < 0.15  # 10 classes: a tenth by chance


def test_every_run_has_the_same_labels():
    torch.manual_seed(1)
    first = labels_of(Digits(val_size=100, shuffle_labels=True), "fit")
    state = torch.get_rng_state()
    data = Digits(val_size=100, shuffle_labels=True)
    data.setup("validate")  # in whatever order the stages come
    assert labels_of(data, "fit").equal(first)
    assert torch.get_rng_state().equal(state)


def test_metadata_and_images_stay_together(images_of_noise: Path):
    plain, shuffled = (SmallNORB(str(images_of_noise), shuffle_labels=on) for on in (False, True))
    for data in (plain, shuffled):
        data.setup("fit")
    for a, b in zip(plain.metadata("fit"), shuffled.metadata("fit"), strict=True):
        assert a.equal(b)
    labels = shuffled._loaded("fit").labels
    assert not labels.equal(plain._loaded("fit").labels)
    assert next(iter(shuffled._in_order("fit")))[1].equal(labels[:128])


def test_overlapping_digits_keep_labels_and_parts_together(mnist_of_noise: Path):
    root = str(mnist_of_noise)
    digits, shuffled = MNIST(root, shuffle_labels=True), MultiMNIST(root, parts=True, shuffle_labels=True)
    label_of = labels_of(digits, "fit")
    shuffled.setup("fit")
    images, labels, parts = shuffled.part("fit").__getitems__(list(range(20)))
    assert labels.sum(1).eq(2).all()
    assert parts.sum(1).clamp(max=1).allclose(images, atol=1e-6)
    known = {
        tuple(image.flatten().tolist()): int(label)
        for image, label in zip(digits._loaded("fit").images, label_of, strict=True)
    }
    for b, label in labels.nonzero().tolist():
        part = (parts[b, label, 0] * 255).round().byte()
        rows, columns = part.any(1).nonzero(), part.any(0).nonzero()
        drawn = part[int(rows[0]) : int(rows[0]) + 28, int(columns[0]) : int(columns[0]) + 28]
        # Digits of noise fill their 28 x 28 pixels, so that the place of a part can be read from it.
        assert known[tuple(drawn.flatten().tolist())] == label
    plain = MultiMNIST(root)
    plain.setup("test")
    shuffled.setup("test")
    for a, b in zip(
        plain.part("test").__getitems__([0, 1]), shuffled.part("test").__getitems__([0, 1])[:2], strict=True
    ):
        assert a.equal(b)


def test_pictures_in_files(tmp_path: Path):
    for shade, name in enumerate(("cat", "dog", "eel")):
        for i in range(12):
            path = tmp_path / "pictures" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * i + shade).save(path)
    plain, shuffled = (
        ImageFolder(str(tmp_path / "pictures"), num_workers=0, val_share=0.25, shuffle_labels=on)
        for on in (False, True)
    )
    assert_shuffled(plain, shuffled)


def test_texts(tmp_path: Path):
    encoder = str(make_encoder(tmp_path / "encoder"))
    folder = tmp_path / "data" / "sst"
    folder.mkdir(parents=True)
    sentences = "\n".join(f"({k % 5} ({k % 4} good) ({k % 3} film{k}))" for k in range(20))
    for part in ("train", "dev", "test"):
        (folder / f"{part}.txt").write_text(sentences)
    options = {"encoder": encoder, "cache": str(tmp_path / "cache")}
    plain, shuffled = (
        SST(str(folder.parent), check_hashes=False, shuffle_labels=on, **options) for on in (False, True)
    )
    assert_shuffled(plain, shuffled)

    (tmp_path / "own.csv").write_text("text,label\n" + "\n".join(f"film{k},{'ab'[k % 2]}" for k in range(60)))
    plain, shuffled = (
        TextTable(str(tmp_path / "own.csv"), val_share=0.25, shuffle_labels=on, **options) for on in (False, True)
    )
    assert_shuffled(plain, shuffled)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_command_line_and_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert call("train", "quickstart", "--trainer.max_epochs", "1", "--data.shuffle_labels", "true", *TINY) == 0
    content = torch.load(checkpoint(tmp_path / "runs"), weights_only=True)
    assert json.loads(content["recipe"])["data"]["init_args"]["shuffle_labels"] is True
    assert call("train", "quickstart", "--ckpt_path", "last", "--trainer.max_epochs", "2", *TINY) == 0
    assert call("test", "quickstart", "--ckpt_path", str(checkpoint(tmp_path / "runs"))) == 0
