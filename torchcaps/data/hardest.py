"""The classes that a classifier gets wrong most often. h-ImageNet was chosen in this way."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchcaps.data.files import DataError
from torchcaps.utils.arguments import Count, checked


class Difficulty(NamedTuple):
    """Result of a classifier on one class.

    Fields:
        name: name of the class.
        correct: number of its images that are classified correctly.
        images: number of its images.
    """

    name: str
    correct: int
    images: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


@checked
def hardest_classes(labels: Sequence[str], predictions: Sequence[str], count: Count) -> list[Difficulty]:
    """Return the `count` classes with the lowest top-1 accuracy, the lowest first. Equal ones are sorted by name.

    Source: H. Li, X. Guo, B. Dai, W. Ouyang and X. Wang, Neural Network Encapsulation, ECCV 2018, section 5: h-ImageNet
    consists of the 200 classes of ImageNet with the lowest top-1 accuracy of a ResNet-18. The paper does not list them.
    This function makes such a list from a ResNet-18's predictions.

    Args:
        labels: name of the class of each image.
        predictions: name of the predicted class of each image.
        count: number of classes to return.

    Raises:
        ValueError: the numbers of labels and predictions differ, or fewer than `count` classes have images.
    """
    images = Counter(labels)
    correct = Counter(label for label, prediction in zip(labels, predictions, strict=True) if label == prediction)
    if count > len(images):
        raise ValueError(f"the number of classes must be from 1 to the {len(images)} that have images, got {count}")
    found = [Difficulty(name, correct[name], total) for name, total in images.items()]
    return sorted(found, key=lambda each: (each.accuracy, each.name))[:count]


def class_list(labels: Sequence[str], predictions: Sequence[str], count: int) -> str:
    """Return the text of a `class_list` for `ImageNet`: a comment, then the hardest classes, one per line.

    The comment gives their accuracies.

    Args:
        labels, predictions, count: see `hardest_classes`.

    Raises:
        ValueError: see `hardest_classes`; or a class has a name that cannot stand in such a list.
    """
    found = hardest_classes(labels, predictions, count)
    for name in (each.name for each in found):
        if name != name.strip() or "#" in name or len(name.splitlines()) != 1:
            raise ValueError(f"a class list cannot have the name {name!r}: it would be read as another name, or as two")
    mean = sum(each.correct for each in found) / sum(each.images for each in found)
    head = (
        f"# the {count} hardest of {len(set(labels))} classes: top-1 accuracy {found[0].accuracy:.2f} to "
        f"{found[-1].accuracy:.2f} ({mean:.2f} over all of their images)"
    )
    return "\n".join([head, *(each.name for each in found), ""])


def read_predictions(path: Path) -> tuple[list[str], list[str]]:
    """Read labels and predictions from a CSV file that has the columns `label` and `prediction`, and possibly others.

    Raises:
        DataError: the file cannot be read or does not have this format.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            missing = {"label", "prediction"} - set(rows.fieldnames or ())
            if missing:
                raise DataError(
                    f"{path}: has no column {min(missing)}: expected a first line with label and prediction, separated "
                    "by a comma"
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
