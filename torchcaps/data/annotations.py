"""Bounding boxes of objects, from annotations in the format of ILSVRC (Pascal VOC's XML)."""

import math
from pathlib import Path
from xml.etree import ElementTree

from torchcaps.data.files import DataError
from torchcaps.utils.checks import one_line

EDGES = ("xmin", "ymin", "xmax", "ymax")

Region = tuple[int, int, int, int]  # left, top, right, bottom, in pixels


class _Annotation(ElementTree.TreeBuilder):
    """Refuses a document type: without one there are no entities, which could expand a short file into a huge one."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("it has a DOCTYPE")


def find_object(path: Path, size: tuple[int, int], margin: float) -> Region | None:
    """Read the bounding box of an image's largest object from an annotation in the XML of Pascal VOC:

        annotation/size/{width,height}, annotation/object/bndbox/{xmin,ymin,xmax,ymax}.

    Args:
        path: path of the annotation.
        size: width and height of the image. If the annotation has another size, its boxes are scaled to this one.
        margin: part of the box's width to add left and right, and of its height to add above and below. The result
            does not reach beyond the image.

    Returns:
        The box in whole pixels; None if the annotation has no object.

    Raises:
        DataError: the file cannot be read or does not have this format.
    """
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_Annotation()))
        scales = [side / _number(root, f"size/{name}") for side, name in zip(size, ("width", "height"), strict=True)]
        boxes = [[_number(box, edge) for edge in EDGES] for box in root.iterfind("object/bndbox")]
        if not boxes:
            return None
        left, top, right, bottom = max(boxes, key=_area)
        region = []
        for low, high, scale, side in zip((left, top), (right, bottom), scales, size, strict=True):
            more = margin * (high - low)
            region.append((max(0, math.floor((low - more) * scale)), min(side, math.ceil((high + more) * scale))))
            if low >= high or region[-1][0] >= region[-1][1]:
                raise ValueError(f"its largest box, {low:g} to {high:g}, is empty or outside of the image")
    except (OSError, ElementTree.ParseError, LookupError, ValueError, ArithmeticError) as error:
        reason = one_line(error)
        raise DataError(f"{path}: is not an annotation of ILSVRC ({reason}): replace or remove the file") from None
    (left, right), (top, bottom) = region
    return left, top, right, bottom


def _number(element: ElementTree.Element, name: str) -> float:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"it has no {name}")
    return float(text)


def _area(box: list[float]) -> float:
    left, top, right, bottom = box
    return max(right - left, 0) * max(bottom - top, 0)
