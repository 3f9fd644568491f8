"""The Stanford Sentiment Treebank, read from its trees."""

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, own_folder
from torchcaps.data.published import Published, unreadable
from torchcaps.data.texts import TextData
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import counted

LABELS = ["very negative", "negative", "neutral", "positive", "very positive"]
NEUTRAL = 2
STAGE_FILES = {"fit": ("train.txt", 8544), "validate": ("dev.txt", 1101), "test": ("test.txt", 2210)}

# A leaf "(label token)", the beginning "(label" of another node, its end ")", or spaces. A token may contain a
# no-break space.
NODE = re.compile(r"\((?P<label>[^\s()]+) +(?:(?P<token>[^ ()]+)\))?|(?P<end>\))| +")


class Phrase(NamedTuple):
    """A phrase: a node of a tree."""

    text: str  # tokens as in the file, separated by spaces
    label: int  # 0 very negative, 1 negative, 2 neutral, 3 positive, 4 very positive


def read_tree(line: str) -> list[Phrase]:
    """Return the phrases of a tree in the format of the Penn Treebank, such as `(3 (2 Quite) (3 good))`.

    The whole sentence comes last.

    Raises:
        ValueError: the line does not have this format.
    """
    phrases: list[Phrase] = []
    opened: list[tuple[int, list[str]]] = []
    place = 0
    while place < len(line):
        node = NODE.match(line, place)
        if node is None or (phrases and not opened and node.group().strip()):
            raise ValueError(
                f"is not a tree from {line[place : place + 20]!r} on, expected one like (3 (2 Quite) (3 good))"
            )
        place = node.end()
        if node["label"]:
            if node["label"] not in ("0", "1", "2", "3", "4"):
                raise ValueError(f"holds label {node['label'][:20]}, expected 0 to 4")
            opened.append((int(node["label"]), [node["token"]] if node["token"] else []))
        if node["token"] or node["end"]:
            if not opened or not opened[-1][1]:
                raise ValueError("closes a phrase that has no words")
            label, tokens = opened.pop()
            phrases.append(Phrase(" ".join(tokens), label))
            if opened:
                opened[-1][1].extend(tokens)
    if opened or not phrases:
        raise ValueError("ends before its tree is complete")
    return phrases


class SST(Published, TextData):
    """Stanford Sentiment Treebank: 11,855 sentences of film reviews, with a sentiment label for every phrase.

    Source: R. Socher et al., Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank, EMNLP 2013;
    https://nlp.stanford.edu/sentiment/. As in Heinsen 2019, the training set has every phrase of the training trees
    once, and the validation and the test set have whole sentences. Texts are as in the files: tokens separated by
    spaces, with brackets as -LRB- and -RRB-.

    | | training | validation | test |
    |---|---|---|---|
    | five classes | 8,544 sentences, 159,274 phrases | 1,101 | 2,210 |
    | binary | 6,920 sentences, 77,616 phrases | 872 | 1,821 |

    The binary phrases come from all 8,544 trees, as in the author's code. The 6,920 trees alone have 67,349.

    The files train.txt, dev.txt and test.txt, or the archive trainDevTestTrees_PTB.zip, are read from `<root>/sst`. The
    archive has a published hash; the files have published numbers of sentences, which are checked in its place.

    In half precision the embeddings of all sets take 10 GB for an encoder of 7 layers of 384, and 170 GB for
    gpt2-large, 37 layers of 1,280. Those of whole sentences alone take an eighth of that.

    Args:
        root: see `Published`.
        binary: whether there are two classes, negative and positive, without neutral texts, in place of five.
        phrases: whether to train on every phrase, or else on whole sentences.
        options: see `Published` and `TextData`.

    Raises:
        DataError: see `Published`, and `Encoder` for what `setup` raises.
    """

    archive = CanonicalFile(
        "sst",
        "trainDevTestTrees_PTB.zip",
        "5c613a4f673fc74097d523a2c83f38e0cc462984d847b82c7aaf36b01cbbbfcc",
        ("https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip",),
    )

    @checked
    def __init__(self, root: str | None = None, binary: bool = False, phrases: bool = True, **options: Any) -> None:
        super().__init__(root, **options)
        self.binary, self.phrases = binary, phrases
        self.classes = 2 if binary else 5

    @property
    def names(self) -> list[str]:
        return ["negative", "positive"] if self.binary else LABELS

    def files(self) -> Iterable[CanonicalFile]:
        return () if self._folder() else (self.archive,)

    def read(self, stage: str) -> tuple[list[str], Tensor]:
        every = stage == "fit" and self.phrases
        chosen = [phrase for tree in self._trees(stage) for phrase in (tree if every else tree[-1:])]
        if self.binary:
            chosen = [Phrase(text, int(label > NEUTRAL)) for text, label in chosen if label != NEUTRAL]
        if every:
            first: dict[str, int] = {}
            for text, label in chosen:
                first.setdefault(text, label)
            chosen = list(map(Phrase._make, first.items()))
        return [text for text, _ in chosen], torch.tensor([label for _, label in chosen])

    def _folder(self) -> Path | None:
        """Return the user's folder if it has a file of trees."""
        folder = own_folder(self.root, "sst")
        return folder if folder and any((folder / name).exists() for name, _ in STAGE_FILES.values()) else None

    def _trees(self, stage: str) -> list[list[Phrase]]:
        """Return the phrases of each tree of a stage's file."""
        name, count = STAGE_FILES[stage]
        if (folder := self._folder()) is None:
            return self.read_file(self.archive, lambda path: _trees(zipfile.ZipFile(path).read(f"trees/{name}")))
        try:
            trees = _trees((folder / name).read_bytes())
            if self.check_hashes and len(trees) != count:
                raise ValueError(f"it has {counted(len(trees), 'tree')}, and the published file {count}")
        except Exception as error:
            advice = "replace the file; to read another number of trees, set check_hashes to false"
            raise unreadable(folder / name, error, advice) from None
        return trees


def _trees(raw: bytes) -> list[list[Phrase]]:
    trees = [read_tree(line) for line in raw.decode("utf-8").replace("\r\n", "\n").split("\n") if line.strip()]
    if not trees:
        raise ValueError("it has no tree")
    return trees
