"""Made pictures of cells, with a class of each pixel."""

from typing import Annotated, Any

import numpy as np

from torchcaps.data.masks import Scenes
from torchcaps.utils.arguments import Range, checked

AREA = 64 * 64  # pixels, to which the numbers of cells belong
CELLS, RINGS, DIRT = 9.0, 0.9, 6.0  # mean numbers in this area
AXES = ((0.8, 1.6), (0.8, 1.6)), ((6, 11), (3, 6)), ((3, 5), (3, 5))  # half axes along and across, of dirt, cell, ring
TILT = 0.25  # standard deviation of their angle, in radians
NOISE = 0.05  # standard deviation


class Cells(Scenes):
    """Cells: gray pictures of cells that touch and overlap, with a class of each pixel: background, cell or ring.

    A cell is an ellipse with half axes of 6 to 11 and of 3 to 6 pixels, brighter in its middle. Cells lie in any place,
    nearly in one direction, as in a tissue: their angles have a standard deviation of 14 degrees. A ring is a cell with
    half axes of 3 to 5 pixels that is dark in its middle and bright at its border. Rings have about 1 % of the pixels.
    What is drawn later lies above; cells are drawn in random order. The light is uneven, there are bright specks of
    dirt, which are background, and noise (standard deviation 0.05). A larger picture shows more cells.

    `test_angle` is a test of another viewpoint, in which cells lie in another direction: the test shows the same
    scenes, turned. They are drawn turned, so that nothing is interpolated and no corner is empty; only the noise stays
    where it was.

    Args:
        size: height and width of an image.
        test_angle: angle by which the scenes of the test are turned, in degrees, clockwise.
        options: see `Scenes`.

    Raises:
        ValueError: an argument is out of range.
    """

    classes = 3

    @checked
    def __init__(
        self, size: Annotated[int, Range(16)] = 64, test_angle: Annotated[float, Range(-360, 360)] = 0.0, **options: Any
    ) -> None:
        self.shape = (1, size, size)
        super().__init__(**options)
        self.test_angle = test_angle

    @property
    def names(self) -> list[str]:
        return ["background", "cell", "ring"]

    def _scene(self, stage: str, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        size = self.shape[1]
        turn = np.radians(self.test_angle if stage == "test" else 0)
        # Axes of the scene: its origin is the middle of the picture, x is to the right and y down.
        steps = np.arange(size) - (size - 1) / 2
        right, down = steps[None, :], steps[:, None]
        x, y = np.cos(turn) * right + np.sin(turn) * down, np.cos(turn) * down - np.sin(turn) * right
        reach = size / np.sqrt(2) + 10  # of the scene, whose corners come into a picture that is turned
        image, mask = np.full((size, size), random.uniform(0.1, 0.25)), np.zeros((size, size), np.uint8)
        counts = random.poisson(np.array([DIRT, CELLS, RINGS]) * (2 * reach) ** 2 / AREA)
        above = random.permutation(np.repeat([1, 2], counts[1:]))
        for kind in [*[0] * counts[0], *above]:
            center = random.uniform(-reach, reach, 2)
            angle, light = TILT * random.standard_normal(), random.uniform(0.45, 0.8)
            axes = np.array([random.uniform(*axis) for axis in AXES[kind]])
            across, along = x - center[0], y - center[1]
            distance = np.hypot(
                (np.cos(angle) * across + np.sin(angle) * along) / axes[0],
                (np.cos(angle) * along - np.sin(angle) * across) / axes[1],
            )
            middle = np.clip(1 - distance, 0, 1)
            of_kind = (light, light * (0.7 + 0.4 * middle), light * (1.2 - 1.1 * middle))[kind]
            cover = np.clip(0.5 + (1 - distance) * axes.mean(), 0, 1)  # a border of one pixel
            image += cover * (of_kind - image)
            if kind:
                mask[distance <= 1] = kind
        slope = random.uniform(-0.4, 0.4, 2) / size
        image *= 1 + slope[0] * x + slope[1] * y
        image += NOISE * random.standard_normal(image.shape)
        return (image.clip(0, 1) * 255).round().astype(np.uint8), mask
