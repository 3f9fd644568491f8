"""Splits of own data: shares of every class, small classes, independence of the order; in tables and checkpoints."""

import os
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcaps.data import DataError
from torchcaps.data.splits import PARTS, digest, packed, read_split, split_by_class, split_by_group


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
    with pytest.raises(DataError, match="a.ckpt holds .*: set data.split to another, or train anew, without it"):
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


SHARES = {"val": 0.15, "test": 0.15}


def of_groups(groups: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """Return the class and the group of each sample, given the number of samples of each class in each group."""
    rows = [(name, group) for group, counts in groups.items() for name, count in counts.items() for _ in range(count)]
    return [name for name, _ in rows], [group for _, group in rows]


def shares_of(classes, groups, shares=SHARES) -> dict[tuple[str, str], int]:
    parts = split_by_group(classes, groups, shares)
    assert len(set(zip(groups, parts, strict=True))) == len(set(groups))  # no group is in two parts
    return Counter(zip(classes, parts, strict=True))


def test_groups_of_one_size_are_split_by_the_shares():
    found = shares_of(*of_groups({f"p{i}": {"ab"[i % 2]: 10} for i in range(40)}))
    assert found == {(name, part): n for name in "ab" for part, n in (("train", 140), ("val", 30), ("test", 30))}
    found = shares_of(*of_groups({f"p{i}": {"ab"[i % 2]: 10} for i in range(40)}), {"val": 0.5, "test": 0.1})
    assert found == {(name, part): n for name in "ab" for part, n in (("train", 80), ("val", 100), ("test", 20))}


@pytest.mark.parametrize(("groups", "parts"), [(1, {"train"}), (2, {"train", "test"}), (3, {"train", "val", "test"})])
def test_a_class_of_few_groups(groups, parts):
    rows = {f"p{i}": {"a": 10} for i in range(20)} | {f"q{i}": {"b": 5 + i} for i in range(groups)}
    assert {part for name, part in shares_of(*of_groups(rows)) if name == "b"} == parts


def test_every_class_is_trained_whatever_the_groups():
    random = np.random.default_rng(0)
    for _ in range(200):
        names = "abcde"[: random.integers(2, 6)]
        groups = {
            f"p{i}": {name: int(random.integers(1, 30)) for name in names if random.random() < 0.4} or {"a": 1}
            for i in range(random.integers(2, 30))
        }
        classes, of = of_groups(groups)
        found = shares_of(classes, of)
        assert {name for name, part in found if part == "train"} == set(classes)


def test_a_group_with_most_samples_is_trained_and_the_others_are_split():
    found = shares_of(*of_groups({"big": {"a": 500}} | {f"p{i}": {"a": 5, "b": 5} for i in range(40)}))
    assert 25 <= found["b", "test"] <= 35
    assert 25 <= found["b", "val"] <= 35
    assert found["a", "train"] > 600


def test_a_split_by_groups_depends_on_no_order():
    random = np.random.default_rng(0)
    for _ in range(100):
        classes = random.choice(list("abcd"), 60, p=[0.4, 0.3, 0.2, 0.1]).tolist()
        groups = [f"p{i}" for i in random.integers(0, 15, 60)]
        parts = dict(zip(groups, split_by_group(classes, groups, SHARES), strict=True))
        order = random.permutation(60)
        mixed = [groups[i] for i in order]
        assert dict(zip(mixed, split_by_group([classes[i] for i in order], mixed, SHARES), strict=True)) == parts
