"""The Stanford Sentiment Treebank, read from its trees."""

import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcaps.data.files import CanonicalFile, DataError, own_folder
from torchcaps.data.texts import TextData
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line

LABELS = ["very negative", "negative", "neutral", "positive", "very positive"]
NEUTRAL = 2
FILES = {"fit": ("train.txt", 8544), "validate": ("dev.txt", 1101), "test": ("test.txt", 2210)}

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
        DataError: the line does not have this format. The message does not name the file.
    """
    phrases: list[Phrase] = []
    opened: list[tuple[int, list[str]]] = []
    place = 0
    while place < len(line):
        found = NODE.match(line, place)
        if found is None or (phrases and not opened and found.group().strip()):
            raise DataError(
                f"is not a tree from {line[place : place + 20]!r} on, expected one like (3 (2 Quite) (3 good))"
            )
        place = found.end()
        if found["label"]:
            if found["label"] not in ("0", "1", "2", "3", "4"):
                raise DataError(f"holds label {found['label'][:20]}, expected 0 to 4")
            opened.append((int(found["label"]), [found["token"]] if found["token"] else []))
        if found["token"] or found["end"]:
            if not opened or not opened[-1][1]:
                raise DataError("closes a phrase that has no words")
            label, tokens = opened.pop()
            phrases.append(Phrase(" ".join(tokens), label))
            if opened:
                opened[-1][1].extend(tokens)
    if opened or not phrases:
        raise DataError("ends before its tree is complete")
    return phrases


class SST(TextData):
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

    The files train.txt, dev.txt and test.txt, or the archive trainDevTestTrees_PTB.zip, are read from `<root>/sst`. If
    they are missing, the archive is downloaded once into pooch's cache and checked against its published hash. Files
    with another number of sentences are used, with a warning. A corrupt file is an error and is never replaced.

    In half precision the embeddings of all sets take 10 GB for an encoder of 7 layers of 384, and 170 GB for
    gpt2-large, 37 layers of 1,280. Those of whole sentences alone take an eighth of that.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        binary: whether there are two classes, negative and positive, without neutral texts, in place of five.
        phrases: whether to train on every phrase, or else on whole sentences.
        options: see `TextData`.

    Raises:
        DataError: in `setup`, if a file or the encoder is corrupt or cannot be downloaded; see `Encoder`.
    """

    archive = CanonicalFile(
        "sst",
        "trainDevTestTrees_PTB.zip",
        "5c613a4f673fc74097d523a2c83f38e0cc462984d847b82c7aaf36b01cbbbfcc",
        ("https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip",),
    )

    @checked
    def __init__(self, root: str | None = None, binary: bool = False, phrases: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.root, self.binary, self.phrases = root, binary, phrases
        self.classes = 2 if binary else 5

    @property
    def names(self) -> list[str]:
        return ["negative", "positive"] if self.binary else LABELS

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine: the others wait instead of downloading too.
        folder = own_folder(self.root, "sst")
        if not folder or not any((folder / name).exists() for name, _ in FILES.values()):
            self.archive.find(self.root)

    def read(self, stage: str) -> tuple[list[str], Tensor]:
        path, trees = self._trees(stage)
        every = stage == "fit" and self.phrases
        chosen = [phrase for tree in trees for phrase in (tree if every else tree[-1:])]
        if self.binary:
            chosen = [Phrase(text, int(label > NEUTRAL)) for text, label in chosen if label != NEUTRAL]
        if every:
            first: dict[str, int] = {}
            for text, label in chosen:
                first.setdefault(text, label)
            chosen = list(map(Phrase._make, first.items()))
        if not chosen:
            raise DataError(f"{path}: {FILES[stage][0]} has neutral texts only: replace the file")
        return [text for text, _ in chosen], torch.tensor([label for _, label in chosen])

    def _trees(self, stage: str) -> tuple[Path, list[list[Phrase]]]:
        """Return the path of a stage's file and the phrases of each of its trees."""
        path, raw = self._find(stage)
        name, count = FILES[stage]
        where = f"{path}: {name}" if path.name != name else f"{path}:"
        try:
            lines = raw.decode("utf-8").replace("\r\n", "\n").split("\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 at byte {error.start}: replace the file") from None
        trees = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    trees.append(read_tree(line))
                except DataError as error:
                    raise DataError(f"{where} line {number} {error}: replace the file") from None
        if not trees:
            raise DataError(f"{where} has no tree: replace the file")
        if len(trees) != count:
            warnings.warn(
                f"{where} has {len(trees)} trees, the published file {count}: it is used anyway", stacklevel=2
            )
        return path, trees

    def _find(self, stage: str) -> tuple[Path, bytes]:
        """Return the path of a stage's file, or of the archive that has it, and the file's content."""
        name = FILES[stage][0]
        folder = own_folder(self.root, "sst")
        if folder and (folder / name).exists():
            try:
                return folder / name, (folder / name).read_bytes()
            except OSError as error:
                raise DataError(f"{folder / name}: cannot be read: {error.strerror}") from None
        path = self.archive.find(self.root)
        try:
            with zipfile.ZipFile(path) as archive:
                raw = archive.read(f"trees/{name}")
        except (OSError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise self.archive.corrupt(path, f"cannot be read: {one_line(error)}") from None
        self.archive.warn_of_other_hash(path)
        return path, raw
