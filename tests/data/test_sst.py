"""Trees of the Sentiment Treebank, and the texts that are used for training and test."""

import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from encoders import make_encoder

from torchcaps.data import SST, DataError
from torchcaps.data.sst import Phrase, read_tree

TRAIN = """(3 (2 a) (3 (3 good) (2 film)))
(1 (2 (2 a) (2 film)) (1 (2 is) (1 bad)))

(2 (2 a) (2 film))
(0 (0 bad) (1 (1 bad) (2 .)))
"""
DEV = "(4 (4 good) (2 .))\n(2 film)\n"
TEST = "(0 bad)\n(3 (3 very) (3 good))\n(2 .)"


def sst(root: Path, **options) -> SST:
    return SST(str(root), check_hashes=False, **options)


def write(folder: Path, train: str = TRAIN) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("train", train), ("dev", DEV), ("test", TEST)):
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder.parent


@pytest.fixture
def root(tmp_path) -> Path:
    return write(tmp_path / "data" / "sst")


# Trees


def test_a_tree_by_hand():
    assert read_tree("(3 (2 a) (3 (3 good) (2 film)))") == [
        Phrase("a", 2),
        Phrase("good", 3),
        Phrase("film", 2),
        Phrase("good film", 3),
        Phrase("a good film", 3),
    ]
    assert read_tree("(0 bad)") == [Phrase("bad", 0)]
    assert read_tree(r" (2 (2 8\xa01\/2) (2 -LRB-))  ".replace(r"\xa0", "\xa0"))[-1] == Phrase("8\xa01\\/2 -LRB-", 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "ends before its tree is complete"),
        ("(3 (2 a) (3 good)", "ends before its tree is complete"),
        ("(3 (2 a) (3 good))) ", "from '\\) ' on"),
        ("(7 a)", "holds label 7"),
        ("(2 a b)", "is not a tree from 'a b\\)' on"),
        ("()", "from '\\(\\)' on"),
    ],
)
def test_what_is_no_tree(line, said):
    with pytest.raises(ValueError, match=said):
        read_tree(line)


# The set


def test_every_phrase_once_for_training_and_whole_sentences_for_the_rest(root):
    texts, labels = sst(root).read("fit")
    expected = {"a": 2, "good": 3, "film": 2, "good film": 3, "a good film": 3, "a film": 2, "is": 2}
    expected |= {"bad": 1, "is bad": 1, "a film is bad": 1, ".": 2, "bad .": 1, "bad bad .": 0}
    assert labels.dtype == torch.int64
    assert dict(zip(texts, labels.tolist(), strict=True)) == expected
    assert len(texts) == len(expected)
    texts, labels = sst(root, phrases=False).read("fit")
    assert texts == ["a good film", "a film is bad", "a film", "bad bad ."]
    assert labels.tolist() == [3, 1, 2, 0]
    assert [sst(root).read(stage)[1].tolist() for stage in ("validate", "test")] == [[4, 2], [0, 3, 2]]


def test_binary_leaves_out_what_is_neutral(root):
    data = sst(root, binary=True)
    texts, labels = data.read("fit")
    assert dict(zip(texts, labels.tolist(), strict=True)) == {
        "good": 1,
        "good film": 1,
        "a good film": 1,
        "bad": 0,
        "is bad": 0,
        "a film is bad": 0,
        "bad .": 0,
        "bad bad .": 0,
    }
    assert data.read("test")[0] == ["bad", "very good"]
    assert (data.classes, data.names) == (2, ["negative", "positive"])
    assert len(sst(root).names) == sst(root).classes == 5


def test_batches_are_embeddings_masks_and_labels(root, tmp_path):
    folder = make_encoder(tmp_path / "bert")
    data = sst(root, encoder=str(folder), cache=str(tmp_path / "kept"), batch_size=4)
    with pytest.raises(RuntimeError, match='call data.setup\\("fit"\\) first'):
        data.train_dataloader()
    data.setup()
    assert [len(data.part(stage)) for stage in ("fit", "validate", "test")] == [13, 2, 3]
    seen = []
    for (embeddings, mask), labels in data.train_dataloader():
        assert embeddings.shape[:2] == mask.shape
        assert embeddings.shape[2:] == (3, 8)
        assert len(labels) == len(mask)
        seen += labels.tolist()
    assert Counter(seen) == Counter(data.train_set.labels.tolist())
    ((embeddings, mask), labels) = next(iter(data.test_dataloader()))
    assert labels.tolist() == [0, 3, 2]  # not shuffled
    assert mask.sum(1).tolist() == [3, 4, 3]
    one = data.test_set[1]
    torch.testing.assert_close(one[0][0], embeddings[1])
    assert one[1] == 3


def test_trained_in_batches_of_equal_length(root, tmp_path):
    options = {"encoder": str(make_encoder(tmp_path / "bert")), "cache": str(tmp_path / "kept"), "batch_size": 4}
    data = sst(root, group_by_length=True, **options)
    data.setup("fit")
    padding = sum(int((mask == 0).sum()) for (_, mask), _ in data.train_dataloader())
    assert padding <= 6
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 13


# Files


def test_another_number_of_trees_is_an_error(root):
    with pytest.raises(DataError, match=r"train.txt: cannot be read .*it has 4 trees, and the published file 8544\)"):
        SST(str(root)).read("fit")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"(2 a)\n(2 (2 b)", "ends before its tree is complete"),
        (b"(2 a)\n\n(9 b)", "holds label 9, expected 0 to 4"),
        (b"\n", "it has no tree"),
        (b"(2 \xff)", "UnicodeDecodeError"),
    ],
)
def test_corrupt_files(root, content, said):
    path = root / "sst" / "train.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{path}: cannot be read .*{said}.*; replace the file"):
        sst(root).read("fit")
    archive = root / "other" / "sst" / SST.archive.name
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as written:
        written.write(path, "trees/train.txt")
    with pytest.raises(DataError, match=f"^{archive}: cannot be read .*{said}.*{SST.archive.digest}: replace the file"):
        sst(root / "other").read("fit")


def test_neutral_texts_only(root, tmp_path):
    (root / "sst" / "train.txt").write_text("(2 ok)")
    data = sst(root, binary=True, encoder=str(make_encoder(tmp_path / "bert")))
    with pytest.raises(DataError, match="no text to embed"):
        data.setup("fit")


@pytest.mark.parametrize("real", ["sst"], indirect=True)
def test_the_real_test_set(real):
    labels = SST(real).read("test")[1]
    assert torch.bincount(labels).tolist() == [279, 633, 389, 510, 399]  # the published histogram
    assert len(SST(real, binary=True).read("test")[1]) == 1821


@pytest.mark.slow
@pytest.mark.parametrize("real", ["sst"], indirect=True)
@pytest.mark.parametrize(("binary", "counts"), [(False, (8544, 1101, 2210)), (True, (6920, 872, 1821))])
def test_the_real_numbers(real, binary, counts):
    data = SST(real, binary=binary, phrases=False)
    found = [data.read(stage) for stage in ("fit", "validate", "test")]
    assert tuple(len(texts) for texts, _ in found) == counts
    if not binary:  # the published histograms
        assert torch.bincount(found[2][1]).tolist() == [279, 633, 389, 510, 399]
        assert torch.bincount(found[0][1]).tolist() == [1092, 2218, 1624, 2322, 1288]
    texts, labels = SST(real, binary=binary).read("fit")
    assert len(texts) == len(set(texts)) == (77_616 if binary else 159_274)
    assert found[0][0][0] in texts
    assert len(labels.unique()) == data.classes
