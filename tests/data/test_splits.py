"""Splits of own data: shares of every class, small classes, independence of the order; in tables and checkpoints."""

import os
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from torchcaps.data import DataError
from torchcaps.data.splits import PARTS, digest, packed, read_split, split_by_class


def samples(counts: dict[str, int]) -> tuple[list[str], list[str]]:
    classes = [name for name, count in counts.items() for _ in range(count)]
    return [f"{name}/{i}" for i, name in enumerate(classes)], classes


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, (1, 0, 0)),
        (2, (2, 0, 0)),
        (3, (1, 1, 1)),
        (4, (2, 1, 1)),
        (20, (14, 3, 3)),
        (100, (70, 15, 15)),
    ],
)
def test_every_class_has_its_shares(count, expected):
    keys, classes = samples({"a": count, "b": 40})
    parts = split_by_class(keys, classes, {"val": 0.15, "test": 0.15})
    found = Counter(part for part, name in zip(parts, classes, strict=True) if name == "a")
    assert (found["train"], found["val"], found["test"]) == expected


def test_no_share_is_no_part():
    keys, classes = samples({"a": 10})
    assert Counter(split_by_class(keys, classes, {"val": 0.0, "test": 0.2})) == {"train": 8, "test": 2}
    assert set(split_by_class(keys, classes, {})) == {"train"}


SPLIT = {digest(f"cat/{i}.png"): PARTS[i % 3] for i in range(7)}


def saved(path: Path, split: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "split": split}, path)
    return str(path)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_checkpoint_holds_a_split_without_names(tmp_path):
    path = saved(tmp_path / "a.ckpt", packed(SPLIT))
    assert read_split(path) == SPLIT
    assert b"cat/" not in Path(path).read_bytes()
    link = tmp_path / "split of another run"
    link.symlink_to(path)
    assert read_split(str(link)) == SPLIT


def test_a_part_may_be_empty(tmp_path):
    split = {key: part for key, part in SPLIT.items() if part != "val"}
    assert read_split(saved(tmp_path / "a.ckpt", packed(split))) == split


def test_a_hundred_thousand_samples_take_less_than_a_megabyte(tmp_path):
    split = packed({digest(str(i)): PARTS[i % 3] for i in range(100_000)})
    assert os.path.getsize(saved(tmp_path / "a.ckpt", split)) < 1e6


def test_tables_have_names_or_hashes(tmp_path):
    assert read_split(write(tmp_path / "a.csv", "part,file\ntest,cat/1.png\n")) == {digest("cat/1.png"): "test"}
    key = digest("a text").hex()
    assert read_split(write(tmp_path / "a.csv", f"hash,part\n{key},val\n{key},val\n")) == {digest("a text"): "val"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "a.csv: has the columns a, b: expected file and part, or hash and part, as in the split.csv of"),
        ("file,class,part\ncat/1.png,cat,test\n", "has the columns file, class, part: expected file and part, or hash"),
        ("file,part\ncat/1.png,tset\n", "a.csv line 2: the part is 'tset': expected train, val, test"),
        ("file,part\na,test\nb,val\na,train\n", "line 4: a is in train, and in test above: give each sample one part"),
        (f"hash,part\n{'a' * 16},test\n{'a' * 16},val\n", "line 3: a+ is in val, and in test above: give each sample"),
        ("hash,part\ncat/1.png,test\n", "line 2: 'cat/1.png' is no hash of 16 digits from 0 to f"),
        (f"hash,part\n{'AB ' * 5}F,test\n", "line 2: 'AB AB AB AB AB F' is no hash of 16 digits from 0 to f"),
    ],
)
def test_tables_that_are_no_split(tmp_path, text, said):
    with pytest.raises(DataError, match=said) as error:
        read_split(write(tmp_path / "a.csv", text))
    assert "\n" not in str(error.value)


HASHES = torch.zeros(2, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    "split",
    [
        None,
        [1],
        {"train": [b"12345678"]},
        {"tset": HASHES},
        {1: HASHES},
        {"test": HASHES.long()},
        {"test": HASHES.flatten()},
        {"test": HASHES[:, :7]},
        {"test": HASHES[:1].expand(2**40, 8)},
        {"test": HASHES.to_sparse()},
        {"test": HASHES.to("meta")},
        {"test": HASHES},  # one sample twice
        {"test": HASHES[:1], "train": HASHES[1:]},
    ],
)
def test_checkpoints_with_another_split(tmp_path, split):
    with pytest.raises(DataError, match="a.ckpt holds .*: set data.split to another, or to null for a new split"):
        read_split(saved(tmp_path / "a.ckpt", split))


def test_files_without_a_split(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("split.csv", "file,part\n")
    for name in ("old.ckpt", "a.zip"):
        with pytest.raises(DataError, match=f"{name} holds no split: set data.split to the split.csv of the run, or"):
            read_split(str(tmp_path / name))
    with pytest.raises(DataError, match="is a folder, which holds no split .`save_pretrained` writes none.: set data"):
        read_split(str(tmp_path))
    with pytest.raises(DataError, match="gone.csv cannot be read: No such file or directory"):
        read_split(str(tmp_path / "gone.csv"))
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    with pytest.raises(DataError, match="loop.csv cannot be read: Too many levels of symbolic links"):
        read_split(str(tmp_path / "loop.csv"))
    with pytest.raises(DataError, match="~nobody-of-this-name/a.csv cannot be read: No such file"):
        read_split("~nobody-of-this-name/a.csv")


def test_the_split_of_a_checkpoint_counts_whatever_lies_beside_it(tmp_path, capsys):
    path, table = saved(tmp_path / "run" / "checkpoints" / "a.ckpt", packed(SPLIT)), tmp_path / "run" / "split.csv"
    rows = [f"cat/{i}.png,{PARTS[i % 3]}" for i in range(7)]
    assert read_split(path) == SPLIT
    write(table, "\n".join(["file,part", *rows]))
    assert read_split(path) == SPLIT
    assert capsys.readouterr().err == ""
    for text in ("\n".join(["file,part", *rows[:-1], "cat/6.png,test"]), "no table"):
        write(table, text)
        assert read_split(path) == SPLIT
    said = f"torchcaps: {table} is not the split of {path}, which counts: to use the table, set data.split to it\n"
    assert capsys.readouterr().err == said
    table.unlink()
    table.symlink_to("split.csv")
    assert read_split(path) == SPLIT
