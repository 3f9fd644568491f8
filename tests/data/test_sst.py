"""Trees of the Sentiment Treebank, and the texts that are used for training and test."""

import os
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pooch
import pytest
import torch
from encoders import make_encoder

from torchcaps.data import SST, DataError
from torchcaps.data.order import ByLength
from torchcaps.data.sst import Phrase, read_tree

REAL = Path(os.environ.get("TORCHCAPS_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_sst = pytest.mark.skipif(
    not (REAL / "sst" / "train.txt").is_file(),
    reason=f"no SST at {REAL}/sst (set TORCHCAPS_DATA to a folder that has sst/)",
)
other_numbers = pytest.mark.filterwarnings("ignore:.* trees, the published file")

TRAIN = """(3 (2 a) (3 (3 good) (2 film)))
(1 (2 (2 a) (2 film)) (1 (2 is) (1 bad)))

(2 (2 a) (2 film))
(0 (0 bad) (1 (1 bad) (2 .)))
"""
DEV = "(4 (4 good) (2 .))\n(2 film)\n"
TEST = "(0 bad)\n(3 (3 very) (3 good))\n(2 .)"


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
        ("(3 (2 a) (3 good)) (2 b)", "from '\\(2 b\\)' on"),
        ("(7 a)", "holds label 7"),
        ("(three a)", "holds label three"),
        ("(2 )", "closes a phrase that has no words"),
        ("(2 a b)", "is not a tree from 'a b\\)' on"),
        ("(2 (2 a) b)", "from 'b\\)' on"),
        ("(2)", "from '\\(2\\)' on"),
        ("a", "from 'a' on"),
        ("()", "from '\\(\\)' on"),
    ],
)
def test_what_is_no_tree(line, said):
    with pytest.raises(DataError, match=said):
        read_tree(line)


# The set


@other_numbers
def test_every_phrase_once_for_training_and_whole_sentences_for_the_rest(root):
    texts, labels = SST(str(root)).read("fit")
    expected = {"a": 2, "good": 3, "film": 2, "good film": 3, "a good film": 3, "a film": 2, "is": 2}
    expected |= {"bad": 1, "is bad": 1, "a film is bad": 1, ".": 2, "bad .": 1, "bad bad .": 0}
    assert labels.dtype == torch.int64
    assert dict(zip(texts, labels.tolist(), strict=True)) == expected
    assert len(texts) == len(expected)
    texts, labels = SST(str(root), phrases=False).read("fit")
    assert texts == ["a good film", "a film is bad", "a film", "bad bad ."]
    assert labels.tolist() == [3, 1, 2, 0]
    assert [SST(str(root)).read(stage)[1].tolist() for stage in ("validate", "test")] == [[4, 2], [0, 3, 2]]


@other_numbers
def test_binary_leaves_out_what_is_neutral(root):
    data = SST(str(root), binary=True)
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
    assert len(SST(str(root)).names) == SST(str(root)).classes == 5


@other_numbers
def test_batches_are_embeddings_masks_and_labels(root, tmp_path):
    folder = make_encoder(tmp_path / "bert")
    data = SST(str(root), encoder=str(folder), cache=str(tmp_path / "kept"), batch_size=4)
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


@pytest.mark.parametrize("count", [1, 19, 20, 1000, 1007, 2345])
def test_batches_of_equal_length(count):
    """Every text comes once, in a new order each time, with little padding. Only the last batch is smaller."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 50, (count,)).numpy()
    sampler = ByLength(lengths, 20, seed=0)
    order = list(sampler)
    assert sorted(order) == list(range(count))
    assert len(sampler) == count
    if count >= 1000:
        assert order != list(sampler)
        assert order == list(ByLength(lengths, 20, seed=0))  # the same in another process
        sampler.set_epoch(0)
        assert order == list(sampler)
        assert order != list(ByLength(lengths, 20, seed=1))
        spread = [int(max(lengths[order[i : i + 20]]) - min(lengths[order[i : i + 20]])) for i in range(0, count, 20)]
        assert sum(spread) / len(spread) < 10
        firsts = [int(lengths[order[i]]) for i in range(0, 400, 20)]
        assert firsts != sorted(firsts)


@pytest.mark.parametrize("count", [7, 20, 41, 2345])
def test_batches_of_equal_length_in_several_processes(count):
    """Three processes have together the batches of one process whose batches are three times as large."""
    lengths = torch.randint(1, 50, (count,), generator=torch.Generator().manual_seed(0)).numpy()
    alone = list(ByLength(lengths, 60, seed=0))
    samplers = [ByLength(lengths, 20, seed=0, processes=3, rank=rank) for rank in range(3)]
    orders = [list(sampler) for sampler in samplers]
    batches = [[order[i : i + 20] for i in range(0, len(order), 20)] for order in orders]
    turns = -(-count // 60)
    assert [len(mine) for mine in batches] == [turns] * 3
    assert [-(-len(sampler) // 20) for sampler in samplers] == [turns] * 3  # as a DataLoader expects
    for k, parts in enumerate(zip(*batches, strict=True)):
        own = [part[: sampler.share(k)[0]] for part, sampler in zip(parts, samplers, strict=True)]
        assert sorted(sample for part in own for sample in part) == sorted(alone[60 * k : 60 * k + 60])
    assert isinstance(samplers[0], torch.utils.data.DistributedSampler)  # which Lightning does not replace


@other_numbers
def test_trained_in_batches_of_equal_length(root, tmp_path):
    options = {"encoder": str(make_encoder(tmp_path / "bert")), "cache": str(tmp_path / "kept"), "batch_size": 4}
    data = SST(str(root), group_by_length=True, **options)
    data.setup("fit")
    padding = sum(int((mask == 0).sum()) for (_, mask), _ in data.train_dataloader())
    assert padding <= 6
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 13


# Files


def test_another_number_of_trees_is_said(root):
    with pytest.warns(UserWarning, match=r"train.txt: has 4 trees, the published file 8544: it is used anyway"):
        SST(str(root)).read("fit")


@other_numbers
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"(2 a)\n(2 (2 b)", "train.txt: line 2 ends before its tree is complete: replace the file"),
        (b"(2 a)\n\n(9 b)", "train.txt: line 3 holds label 9, expected 0 to 4: replace the file"),
        (b"\n", "train.txt: has no tree: replace the file"),
        (b"(2 \xff)", "train.txt: is not UTF-8 at byte 3: replace the file"),
        (b"(2 ok)", "train.txt: train.txt has neutral texts only: replace the file"),
    ],
)
def test_corrupt_files(root, content, said):
    (root / "sst" / "train.txt").write_bytes(content)
    with pytest.raises(DataError) as error:
        SST(str(root), binary=True).read("fit")
    assert f"{root}/sst/{said}" in str(error.value)


def archive_of(root: Path, path: Path, **files: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("train", "dev", "test"):
            archive.writestr(f"trees/{name}.txt", files.get(name, (root / "sst" / f"{name}.txt").read_text()))
    return path


@other_numbers
def test_the_archive_as_it_is_published(root, tmp_path, monkeypatch):
    path = archive_of(root, tmp_path / "other" / "sst" / SST.archive.name)
    with pytest.warns(UserWarning, match=f"{path} has sha256 .*, the published file has 5c613a4f.*: it is used"):
        found = SST(str(tmp_path / "other")).read("test")
    assert found[0] == SST(str(root)).read("test")[0]
    digest = pooch.file_hash(str(path))
    monkeypatch.setattr(SST, "archive", replace(SST.archive, digest=digest))
    assert SST(str(tmp_path / "other")).read("fit")[0] == SST(str(root)).read("fit")[0]
    archive_of(root, path, train="(2 (2 a)")
    with (
        pytest.warns(UserWarning, match="has sha256"),
        pytest.raises(DataError, match=f"{path}: train.txt line 1 ends before its tree is complete"),
    ):
        SST(str(tmp_path / "other")).read("fit")
    path.write_bytes(b"PK")
    with pytest.raises(DataError, match=f"{path}: cannot be read: .*; the sha256 should be {digest}: replace the file"):
        SST(str(tmp_path / "other")).read("fit")


@other_numbers
def test_downloaded_once(root, tmp_path, monkeypatch):
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append((url, known_hash))
        return str(archive_of(root, Path(path) / fname))

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    digest = "5c613a4f673fc74097d523a2c83f38e0cc462984d847b82c7aaf36b01cbbbfcc"
    with pytest.warns(UserWarning, match="has sha256"):
        assert len(SST().read("test")[0]) == 3
    assert asked == [("https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip", f"sha256:{digest}")]


def test_without_a_network(no_network):
    with pytest.raises(DataError, match=r"cannot download trainDevTestTrees_PTB.zip \(sha256 5c61.*put it at DIR/sst/"):
        SST().prepare_data()


@needs_sst
def test_the_real_test_set():
    labels = SST(str(REAL)).read("test")[1]
    assert torch.bincount(labels).tolist() == [279, 633, 389, 510, 399]  # the published histogram
    assert len(SST(str(REAL), binary=True).read("test")[1]) == 1821


@pytest.mark.slow
@needs_sst
@pytest.mark.parametrize(("binary", "counts"), [(False, (8544, 1101, 2210)), (True, (6920, 872, 1821))])
def test_the_real_numbers(binary, counts):
    data = SST(str(REAL), binary=binary, phrases=False)
    found = [data.read(stage) for stage in ("fit", "validate", "test")]
    assert tuple(len(texts) for texts, _ in found) == counts
    if not binary:  # the published histograms
        assert torch.bincount(found[2][1]).tolist() == [279, 633, 389, 510, 399]
        assert torch.bincount(found[0][1]).tolist() == [1092, 2218, 1624, 2322, 1288]
    texts, labels = SST(str(REAL), binary=binary).read("fit")
    assert len(texts) == len(set(texts)) == (77_616 if binary else 159_274)
    assert found[0][0][0] in texts
    assert len(labels.unique()) == data.classes
