"""Ray casting: what two cameras see of a toy under a lamp."""

from collections.abc import Callable

import numpy as np

from torchcaps.data.toys.solids import Part, toy

# The cameras. A toy just fits into a ball of radius 1 about the origin.
DISTANCE = 5.0  # from the cameras to the origin
BASELINE = 0.75  # between the two cameras
HALF_WIDTH = 1.2  # half the side of the square that a camera sees in the plane through the origin
OVERSAMPLING = 2  # rays per pixel in each direction

# Gray levels: the background, and what ambient light, the sky and the lamp add to a toy.
BACKGROUND, AMBIENT, SKY, LAMP = 0.42, 0.08, 0.22, 0.7
# Direction of each lighting's lamp: degrees to the right of the cameras, and above the horizontal.
LAMPS = ((-65, 35), (65, 35), (0, 20), (0, 80), (-135, 40), (135, 40))


def geometry(parts: list[Part], elevation: float, azimuth: float, eye: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cast a ray through every pixel of one camera and return the surfaces that the rays hit.

    Axes of the room, as the cameras see it: x is to the right, y away from them, z up. Both cameras see the same
    window, a square through the origin. A point in the plane of the window is therefore at the same pixel for both
    cameras.

    Args:
        parts: parts of a toy, see `fitted`.
        elevation: elevation of the cameras above the horizontal, in degrees.
        azimuth: angle by which the toy is turned left, in degrees. At 0 it looks to the right.
        eye: 0 for the left camera, 1 for the right one.
        size: side of the image in pixels.

    Returns:
        Two float32 arrays with a row for each pixel, row by row from the top left: the unit normals of the surface in
        the room's axes, (size * size, 3), and the distance from the camera relative to that of the window, (size *
        size,). Where a ray hits nothing, the normal is 0 and the distance inf.
    """
    up, turn = np.radians([elevation, azimuth])
    right, upward = np.array([1.0, 0.0, 0.0]), np.array([0.0, np.sin(up), np.cos(up)])
    camera = DISTANCE * np.array([0.0, -np.cos(up), np.sin(up)]) + (eye - 0.5) * BASELINE * right
    steps = HALF_WIDTH * ((2 * np.arange(size) + 1) / size - 1)
    window = steps[None, :, None] * right - steps[:, None, None] * upward
    rays = window.reshape(-1, 3) - camera
    room = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
    nearest = np.full(len(rays), np.inf, np.float32)
    normals = np.zeros((len(rays), 3), np.float32)
    for part in parts:
        inverse = np.linalg.inv(room @ part.axes)
        start = (inverse @ (camera - room @ part.center)).astype(np.float32)
        enter, normal = _enter(part.round, start, (inverse @ rays.T).astype(np.float32))
        nearer = np.flatnonzero(enter < nearest)
        nearest[nearer] = enter[nearer]
        normals[nearer] = normal(nearer).T @ inverse.astype(np.float32)
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return normals / np.where(length > 0, length, 1), nearest


def _enter(round_: int, start: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return where the lines start + t * ray enter a unit solid.

    A solid is the intersection of its round part and of the slabs |p_k| <= 1. A line is inside from its last entry into
    one of them to its first exit, and the normal is that of the last entry.

    Args:
        round_: number of coordinates in the round part, see `Part`.
        start: start of all lines, (3,).
        rays: directions of the lines, (3, n).

    Returns:
        t (n,), inf for lines that miss the solid; and a function from indices of k lines to the normals where these
        enter, (3, k), of any length.
    """
    count = rays.shape[1]
    enter, exit_ = np.full(count, -np.inf, np.float32), np.full(count, np.inf, np.float32)
    last = np.zeros(count, np.int8)  # what a line entered last: 0 for the round part, k for the slab of coordinate k
    if round_:
        p, d = start[:round_], rays[:round_]
        a, b = (d * d).sum(0), p @ d
        root = b * b - a * (p @ p - 1)
        missed = root < 0
        root = np.sqrt(np.where(missed, 0, root))
        enter, exit_ = np.where(missed, np.inf, (-b - root) / a), (root - b) / a
    for k in range(round_, 3):
        d = np.where(np.abs(rays[k]) < 1e-7, np.float32(1e-7), rays[k])
        middle, half = -start[k] / d, 1 / np.abs(d)
        last[middle - half > enter] = k
        enter, exit_ = np.maximum(enter, middle - half), np.minimum(exit_, middle + half)

    def normal(lines: np.ndarray) -> np.ndarray:
        d, face = rays[:, lines], last[lines]
        normals = np.zeros_like(d)
        if round_:
            normals[:round_] = start[:round_, None] + enter[lines] * d[:round_]
            normals *= face == 0
        for k in range(round_, 3):
            normals[k] = np.where(face == k, -np.sign(d[k]), normals[k])
        return normals

    return np.where(enter <= exit_, enter, np.inf), normal


def lamp(lighting: int) -> np.ndarray:
    """Return the direction from the toy to the lamp in the axes of the room, (3,)."""
    right, up = np.radians(LAMPS[lighting])
    return np.array([np.cos(up) * np.sin(right), -np.cos(up) * np.cos(right), np.sin(up)])


def shade(normals: np.ndarray, nearest: np.ndarray, lightings: list[int], size: int) -> np.ndarray:
    """Return pictures (lightings, size, size) uint8 of what `geometry` gave for OVERSAMPLING times the size.

    Shading follows Lambert's law: a surface is as bright as the cosine of the angle between its normal and the light.
    There are no shadows.
    """
    lamps = np.stack([lamp(lighting) for lighting in lightings]).astype(np.float32)
    seen = np.isfinite(nearest)
    light = np.full((len(lamps), len(nearest)), BACKGROUND, np.float32)
    facing = normals[seen].T
    light[:, seen] = AMBIENT + SKY * np.maximum(facing[2], 0) + LAMP * np.maximum(lamps @ facing, 0)
    pictures = light.reshape(len(lamps), size, OVERSAMPLING, size, OVERSAMPLING).mean((2, 4))
    return (pictures * 255 + 0.5).astype(np.uint8)


def render(category: int, instance: int, elevation: int, azimuth: int, lightings: list[int], size: int) -> np.ndarray:
    """Return stereo pairs of one toy in one pose, one pair for each lighting: (lightings, 2, size, size) uint8.

    All numbers but `size` are those of `Metadata`.
    """
    parts = toy(category, instance)
    eyes = (geometry(parts, 30 + 5 * elevation, 10 * azimuth, eye, size * OVERSAMPLING) for eye in (0, 1))
    return np.stack([shade(*seen, lightings, size) for seen in eyes], 1)
