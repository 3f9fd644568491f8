"""Which classes a classifier is most often wrong about: how h-ImageNet was chosen."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchcaps.data.files import DataError


class Difficulty(NamedTuple):
    """How a classifier does on one class.

    Fields:
        name: of the class.
        correct: images of it that were taken for it.
        images: all images of it.
    """

    name: str
    correct: int
    images: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


def hardest_classes(labels: Sequence[str], predictions: Sequence[str], count: int) -> list[Difficulty]:
    """The `count` classes whose top-1 accuracy is lowest, the lowest first, equal ones by name.

    Source: H. Li, X. Guo, B. Dai, W. Ouyang and X. Wang, Neural Network Encapsulation, ECCV 2018, section 5:
    h-ImageNet is the 200 classes of ImageNet on which a ResNet-18's top-1 accuracy is lower than on the others. The
    paper does not list them; the list is to be made again, from a ResNet-18's predictions.

    Args:
        labels: the class of each image.
        predictions: what it was taken for.
        count: of classes.

    Raises:
        ValueError: there are not as many predictions as labels, or not so many classes.
    """
    images = Counter(labels)
    correct = Counter(label for label, prediction in zip(labels, predictions, strict=True) if label == prediction)
    if not 1 <= count <= len(images):
        raise ValueError(f"the number of classes must be from 1 to the {len(images)} that have images, got {count}")
    found = [Difficulty(name, correct[name], total) for name, total in images.items()]
    return sorted(found, key=lambda each: (each.accuracy, each.name))[:count]


def class_list(labels: Sequence[str], predictions: Sequence[str], count: int) -> str:
    """The text of a `class_list` of `ImageNet`: the hardest classes, a line each, below a comment on how hard they are.

    Arguments and errors are those of `hardest_classes`; a name that a list cannot have is one more error.
    """
    found = hardest_classes(labels, predictions, count)
    for name in (each.name for each in found):
        if name != name.strip() or "#" in name or len(name.splitlines()) != 1:
            raise ValueError(f"a class list cannot have the name {name!r}: it would read as another one, or as two")
    mean = sum(each.correct for each in found) / sum(each.images for each in found)
    head = (
        f"# the {count} hardest of {len(set(labels))} classes: top-1 accuracy {found[0].accuracy:.2f} to "
        f"{found[-1].accuracy:.2f} ({mean:.2f} over all of their images)"
    )
    return "\n".join([head, *(each.name for each in found), ""])


def read_predictions(path: Path) -> tuple[list[str], list[str]]:
    """Labels and predictions from a CSV file with columns of these names, and perhaps others.

    Raises:
        DataError: it cannot be read, or is not exactly this.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = {"label", "prediction"} - set(rows.fieldnames or ())
            if missing:
                raise DataError(
                    f"{path}: has no column {min(missing)}: expected a first line with label and prediction, separated "
                    "by commas"
                )
            pairs = []
            for row in rows:
                if not row["label"] or not row["prediction"]:
                    raise DataError(f"{path}: line {rows.line_num} has no label or no prediction")
                pairs.append((row["label"], row["prediction"]))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}: expected a CSV file in UTF-8") from None
    if not pairs:
        raise DataError(f"{path}: has no predictions: expected a line for each image")
    labels, predictions = zip(*pairs, strict=True)
    return list(labels), list(predictions)
