"""Stereo toys: pairs of pictures of simple solid toys over smallNORB's grid of poses, rendered here."""

import os
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pooch
import torch
from numpy.random import PCG64, Generator
from rich.console import Console
from rich.progress import track
from torch import Tensor

from torchcaps.data.files import DataError, own_folder
from torchcaps.data.smallnorb import (
    AZIMUTHS,
    ELEVATIONS,
    LIGHTINGS,
    TEST_INSTANCES,
    TRAINING_INSTANCES,
    Metadata,
    StereoData,
)

VERSION = 1  # of the pictures: whatever changes them changes this, so that no cache is taken for theirs

# The cameras. A toy just fits into a ball of radius 1 about the origin.
DISTANCE = 5.0
BASELINE = 0.75
HALF_WIDTH = 1.2  # of what they see in the plane through the origin
OVERSAMPLING = 2

# Grey levels: of the background, and of a toy what no light, the sky and the lamp add.
BACKGROUND, AMBIENT, SKY, LAMP = 0.42, 0.08, 0.22, 0.7
# Where the lamp of each lighting is: degrees to the right of the cameras, and above the horizontal.
LAMPS = ((-65, 35), (65, 35), (0, 20), (0, 80), (-135, 40), (135, 40))

Vector = tuple[float, float, float]


class Part(NamedTuple):
    """A solid, the image of a unit solid: the points p with |p_k| <= 1, but for the first `round` coordinates together
    the length <= 1. So 0 is a box, 2 a cylinder, 3 a ball.

    A point p goes to centre + axes @ p.
    """

    round: int
    centre: np.ndarray  # (3,)
    axes: np.ndarray  # (3, 3)


# The toys: x is forward, y to the left, z up. Lengths are relative, see `fitted`.


def box(centre: Vector, lengths: Vector, turn: float = 0.0, tilt: float = 0.0) -> Part:
    """A box: first its nose goes up by `tilt` degrees, then it turns left by `turn`."""
    (ct, cn), (st, sn) = (f(np.radians([turn, tilt])) for f in (np.cos, np.sin))
    rotation = np.array([[ct, -st, 0], [st, ct, 0], [0, 0, 1]]) @ np.array([[cn, 0, -sn], [0, 1, 0], [sn, 0, cn]])
    return Part(0, np.array(centre), rotation * np.array(lengths) / 2)


def ball(centre: Vector, radii: Vector, tilt: float = 0.0) -> Part:
    return box(centre, tuple(2 * r for r in radii), tilt=tilt)._replace(round=3)  # type: ignore[arg-type]  # of three


def rod(start: Vector, end: Vector, radius: float, flat: float = 1.0) -> Part:
    """A cylinder between two points; `flat` times its radius in one direction, upright if the rod is level."""
    a, b = np.array(start), np.array(end)
    along = (b - a) / 2
    across = np.cross(along, [0.0, 0.0, 1.0] if abs(along[2]) < 0.99 * np.linalg.norm(along) else [1.0, 0.0, 0.0])
    across *= radius / np.linalg.norm(across)
    third = np.cross(across, along)
    third *= flat * radius / np.linalg.norm(third)
    return Part(2, (a + b) / 2, np.stack([across, third, along], 1))


def both(part: Callable[[int], Part]) -> list[Part]:
    """A part on the left and its like on the right."""
    return [part(1), part(-1)]


def animal(draw: Generator, instance: int) -> list[Part]:
    length, width, height = draw.uniform(0.7, 1.2), draw.uniform(0.34, 0.56), draw.uniform(0.34, 0.58)
    legs, thick = draw.uniform(0.3, 0.85), draw.uniform(0.07, 0.12)
    neck, lean = (-0.1, 0.25, 0.7)[instance % 3], draw.uniform(0.1, 0.45)
    head, snout = draw.uniform(0.17, 0.24), draw.uniform(0.2, 0.42)
    ears, horns, tail = draw.choice([0.09, 0.16, 0.26]), draw.random() < 0.4, draw.uniform(0.25, 0.6)
    back, front = -length / 2, length / 2
    top = legs + height
    x, z = front + lean, top + neck
    parts = [ball((0, 0, legs + height / 2), (length * 0.62, width / 2, height / 2), tilt=draw.uniform(-6, 10))]
    for end in (front * 0.72, back * 0.72):
        parts += [rod((end, y, 0), (end, 0.85 * y, legs * 1.3), thick) for y in (0.3 * width, -0.3 * width)]
    parts += [
        rod((front * 0.7, 0, top - height * 0.4), (x, 0, z), 0.15),
        ball((x, 0, z), (head * 1.15, head * 0.85, head)),
        rod((x, 0, z - 0.02), (x + snout, 0, z - 0.1), head * 0.5),
        rod((back * 1.1, 0, top - height * 0.3), (back - tail * 0.5, 0, top - tail * 0.8), 0.045),
    ]
    parts += both(lambda side: ball((x - 0.05, side * (head + ears * 0.4), z + head * 0.5), (0.06, ears * 0.8, ears)))
    if horns:
        parts += both(lambda side: rod((x, side * 0.1, z + 0.1), (x - 0.1, side * 0.26, z + 0.5), 0.045))
    if draw.random() < 0.3:
        parts.append(ball((-0.05, 0, top), (0.22, 0.15, 0.22)))  # a hump
    return parts


def human(draw: Generator, instance: int) -> list[Part]:
    legs, stride, apart = draw.uniform(0.75, 1.0), draw.uniform(-0.3, 0.3), draw.uniform(0.12, 0.22)
    torso, shoulders, depth = draw.uniform(0.6, 0.75), draw.uniform(0.44, 0.66), draw.uniform(0.24, 0.38)
    head, limb = draw.uniform(0.17, 0.23), draw.uniform(0.08, 0.12)
    top = legs + torso
    parts = both(lambda side: rod((side * stride, side * apart, 0), (0, side * 0.13, legs * 1.03), limb * 1.15))
    parts += both(lambda side: box((side * stride + 0.07, side * apart, 0.045), (0.34, 0.17, 0.09)))
    if draw.random() < 0.5:
        parts.append(box((0, 0, legs + torso / 2), (depth, shoulders, torso)))
    else:
        parts.append(ball((0, 0, legs + torso / 2), (depth * 0.62, shoulders * 0.58, torso * 0.58)))
    parts.append(rod((0, 0, top - 0.05), (0, 0, top + 0.15), 0.08))
    parts.append(ball((0.02, 0, top + 0.1 + head), (head, head * 0.9, head * 1.1)))
    for side in (1, -1):
        reach = draw.choice([-0.62, -0.1, 0.6])  # an arm that hangs down, is held out, or is up
        forward, out = draw.uniform(-0.15, 0.4), 0.14 if reach < -0.5 else 0.42 if reach < 0 else 0.3
        shoulder = (0.0, side * shoulders / 2, top - 0.1)
        hand = (forward, side * (shoulders / 2 + out), top - 0.1 + reach)
        parts += [rod(shoulder, hand, limb * 0.85), ball(hand, (0.11, 0.11, 0.11)), ball(shoulder, (0.13, 0.13, 0.13))]
    hat = ("none", "brim", "cap", "tall")[instance % 4]
    crown = top + 0.1 + head * 1.6
    if hat == "brim":
        parts += [rod((0, 0, crown), (0, 0, crown + 0.05), head * 1.9), rod((0, 0, crown), (0, 0, crown + 0.24), head)]
    elif hat == "cap":
        parts += [ball((0, 0, crown), (head * 1.15, head * 1.05, 0.16)), box((0.25, 0, crown), (0.3, 0.3, 0.05))]
    elif hat == "tall":
        parts.append(rod((0, 0, crown), (0, 0, crown + 0.4), head * 0.85))
    if draw.random() < 0.4:
        parts.append(box((-depth * 0.75, 0, top - torso * 0.45), (0.24, shoulders * 0.75, torso * 0.7)))  # a rucksack
    return parts


def airplane(draw: Generator, instance: int) -> list[Part]:
    length, thick = draw.uniform(1.9, 2.4), draw.uniform(0.14, 0.22)
    span, chord, sweep = draw.uniform(0.8, 1.2), draw.uniform(0.3, 0.5), (0, 20, 38)[instance % 3]
    place, height = draw.uniform(0.0, 0.25), draw.choice([-0.6, 0.0, 0.9]) * thick
    tail, fin = draw.uniform(0.36, 0.55), draw.uniform(0.35, 0.55)
    nose, end = length / 2, -length / 2
    tail_height = draw.choice([0.0, fin])

    def wings(half: float, width: float, at: float, z: float) -> list[Part]:
        turned = np.radians(sweep)
        x, y = at - half / 2 * np.sin(turned), half / 2 * np.cos(turned)
        return both(lambda side: box((x, side * y, z), (width, half * 1.1, 0.06), turn=side * sweep))

    parts = [
        rod((end * 0.75, 0, 0), (nose * 0.72, 0, 0), thick),
        ball((nose * 0.72, 0, 0), (nose * 0.28, thick, thick)),
    ]
    parts += [ball((end * 0.7, 0, 0.02), (-end * 0.32, thick, thick))]
    parts += wings(span, chord, place, height) + wings(tail, chord * 0.6, end * 0.88, tail_height)
    parts.append(box((end * 0.9, 0, fin / 2 + 0.03), (chord * 0.62, 0.06, fin), tilt=-20))
    kind = ("propeller", "jets", "biplane", "glider")[instance % 4]
    if kind in ("propeller", "biplane"):
        parts += [rod((nose, 0, 0), (nose + 0.06, 0, 0), 0.07), box((nose + 0.03, 0, 0), (0.04, 0.14, 0.75))]
        parts += [ball((nose * 0.2, 0, thick), (0.26, thick * 0.7, 0.16))]  # a cockpit
    if kind == "biplane":
        parts += wings(span, chord, place, height + 0.5)
        parts += both(lambda side: rod((place, side * 0.55, height), (place, side * 0.55, height + 0.5), 0.035))
    if kind == "jets":
        z = height - 0.14
        parts += both(lambda side: rod((place - 0.3, side * 0.5, z), (place + 0.25, side * 0.5, z), 0.11))
    return parts


def wheels(places: list[float], track: float, radius: float, width: float = 0.15) -> list[Part]:
    """Wheels on either side at several places along a car."""
    return [
        rod((x, side * (track - width), radius), (x, side * track, radius), radius) for x in places for side in (1, -1)
    ]


def truck(draw: Generator, instance: int) -> list[Part]:
    length, width, radius = draw.uniform(1.9, 2.5), draw.uniform(0.62, 0.8), draw.uniform(0.15, 0.21)
    cab, cab_height, gap = draw.uniform(0.42, 0.6), draw.uniform(0.55, 0.8), draw.uniform(0.06, 0.16)
    load_height = draw.uniform(0.6, 1.0)
    front, floor = length / 2, radius * 1.7
    back = -front
    load = length - cab - gap
    middle = back + load / 2
    parts = [box((0, 0, floor - 0.06), (length, width * 0.7, 0.14))]
    parts += wheels([front - cab / 2, back + 0.25, back + 0.25 + 2.2 * radius], width / 2, radius)
    if draw.random() < 0.4:  # a bonnet before the cab
        parts += [
            box((front - cab * 0.3, 0, floor + cab_height / 2), (cab * 0.6, width * 0.95, cab_height)),
            box((front + 0.12, 0, floor + cab_height * 0.25), (0.4, width * 0.75, cab_height * 0.5)),
        ]
    else:
        parts.append(box((front - cab / 2, 0, floor + cab_height / 2), (cab, width * 0.95, cab_height)))
    parts.append(box((front + 0.02, 0, floor - 0.06), (0.12, width, 0.12)))
    kind = ("van", "tank", "crane", "tipper")[instance % 4]
    if kind == "van":
        parts.append(box((middle, 0, floor + load_height / 2), (load, width, load_height)))
    elif kind == "tank":
        half = load_height * 0.42
        parts += [rod((back, 0, floor + half), (back + load, 0, floor + half), width / 2, flat=2 * half / width)]
        parts += [rod((middle, 0, floor + 2 * half), (middle, 0, floor + 2 * half + 0.1), 0.12)]
    elif kind == "crane":
        foot = back + load * 0.3
        parts += [
            box((middle, 0, floor + 0.05), (load, width, 0.1)),
            rod((foot, 0, floor), (foot, 0, floor + 0.16), 0.3),
        ]
        parts += [box((foot, 0, floor + 0.34), (0.42, 0.4, 0.4))]
        parts += [rod((foot, 0, floor + 0.4), (front + 0.1, 0, floor + cab_height + load_height * 0.6), 0.07)]
    else:
        tilt = draw.uniform(8, 22)
        z = floor + 0.12 + load / 2 * np.sin(np.radians(tilt))
        parts += [box((middle, 0, z), (load, width, 0.1), tilt=tilt)]
        parts += both(lambda side: box((middle, side * width * 0.48, z + 0.2), (load, 0.08, 0.42), tilt=tilt))
        parts += [box((back + load - 0.05, 0, z + 0.4), (0.09, width, 0.4), tilt=tilt)]
    if draw.random() < 0.5:  # exhausts
        x, y, z = front - cab - 0.03, width * 0.4, floor + cab_height + 0.25
        parts += both(lambda side: rod((x, side * y, floor), (x, side * y, z), 0.045))
    return parts


def car(draw: Generator, instance: int) -> list[Part]:
    length, width, radius = draw.uniform(1.7, 2.1), draw.uniform(0.8, 0.95), draw.uniform(0.18, 0.24)
    body, roof = draw.uniform(0.24, 0.34), draw.uniform(0.24, 0.36)
    front, floor = length / 2, radius * 0.8
    back, top = -front, floor + body
    parts = wheels([front * 0.62, back * 0.62], width / 2 + 0.03, radius)
    kind = ("saloon", "beetle", "racer", "open")[instance % 4]
    if kind == "saloon":
        cabin, x = length * draw.uniform(0.38, 0.52), draw.uniform(-0.22, -0.02)
        parts += [box((0, 0, floor + body / 2), (length, width, body))]
        parts += [box((x, 0, top + roof / 2), (cabin * 0.7, width * 0.84, roof))]
        parts += [box((x + cabin * 0.36, 0, top + roof * 0.22), (cabin * 0.45, width * 0.82, roof * 0.7), tilt=-40)]
        parts += [box((x - cabin * 0.36, 0, top + roof * 0.22), (cabin * 0.45, width * 0.82, roof * 0.7), tilt=40)]
    elif kind == "beetle":
        parts += [ball((0, 0, floor + body * 0.5), (front, width * 0.46, body * 0.8))]
        parts += [ball((-0.08, 0, top * 0.95), (length * 0.29, width * 0.4, roof * 1.15))]
        for x in (front * 0.62, back * 0.62):
            wing = (radius * 1.4, 0.15, radius * 1.15)
            parts += [ball((x, y, radius * 1.1), wing) for y in (width * 0.4, -width * 0.4)]
    elif kind == "racer":
        parts += [ball((0, 0, floor + body * 0.3), (front * 1.1, width * 0.3, body * 0.75))]
        parts += [ball((-0.15, 0, top * 0.95), (0.3, 0.16, roof * 0.7))]
        parts += [box((front * 0.98, 0, floor), (0.2, width * 1.1, 0.06))]
        parts += [
            box((back * 0.95, 0, top + 0.2), (0.26, width * 1.1, 0.06)),
            box((back * 0.95, 0, top), (0.12, 0.12, 0.4)),
        ]
        parts += [rod((x, -width / 2, radius), (x, width / 2, radius), 0.05) for x in (front * 0.62, back * 0.62)]
    else:
        parts += [box((0, 0, floor + body * 0.35), (length, width, body * 0.7))]
        parts += [box((front * 0.55, 0, floor + body * 0.7), (front * 0.88, width * 0.95, body * 0.5))]
        parts += [box((back * 0.75, 0, floor + body * 0.75), (-back * 0.5, width * 0.95, body * 0.6))]
        parts += [box((front * 0.14, 0, top + roof * 0.3), (0.05, width * 0.85, roof * 0.9), tilt=25)]  # a windscreen
        parts += both(lambda side: box((-0.25, side * width * 0.22, top), (0.12, width * 0.32, roof * 1.1), tilt=8))
    if draw.random() < 0.5:
        parts += [box((s * front, 0, floor + 0.06), (0.12, width * 1.02, 0.1)) for s in (1, -1)]  # bumpers
    return parts


CATEGORIES = (animal, human, airplane, truck, car)


@cache
def toy(category: int, instance: int) -> list[Part]:
    """One of the fifty: always the same, in a ball of radius 1 about the origin.

    Its kind is the instance modulo 3 or 4, so that every kind is among the training and among the test instances; its
    proportions are drawn.
    """
    return fitted(CATEGORIES[category](Generator(PCG64([VERSION, category, instance])), instance))


def fitted(parts: list[Part]) -> list[Part]:
    """Parts moved and scaled into the ball of radius 1 about the origin; they just fit."""
    points = np.concatenate([part.centre + _surface(part.round) @ part.axes.T for part in parts])
    middle = (points.min(0) + points.max(0)) / 2
    radius = np.linalg.norm(points - middle, axis=1).max()
    return [Part(part.round, (part.centre - middle) / radius, part.axes / radius) for part in parts]


def _surface(round_: int) -> np.ndarray:
    """Points (n, 3) on a unit solid, among them those that reach farthest."""
    grid = np.array(list(product(np.linspace(-1, 1, 9), repeat=3)))
    grid = grid[np.abs(grid).max(1) == 1]
    if round_:
        grid[:, :round_] /= np.maximum(np.linalg.norm(grid[:, :round_], axis=1, keepdims=True), 1e-9)
    return grid


# The renderer


def geometry(parts: list[Part], elevation: float, azimuth: float, eye: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """What one camera sees of a toy, by casting a ray through every pixel.

    The cameras are at the azimuth 0 and look level with their baseline: x is to the right, y away from them, z up. The
    image is that of a window about the origin, so that what is as far away as the origin is at the same place for both.

    Args:
        parts: of a toy, see `fitted`.
        elevation, azimuth: degrees, of the cameras, and of the toy, which at 0 looks to the right; it turns left.
        eye: 0 is the left camera, 1 the right one.
        size: of the image, in pixels.

    Returns:
        For each pixel, row by row from the top left, the normal of the surface there, (size * size, 3) float32, in the
        room and not in the toy; and its distance from the camera relative to the window's, (size * size,), inf where
        there is nothing but the background.
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
        start = (inverse @ (camera - room @ part.centre)).astype(np.float32)
        enter, normal = _enter(part.round, start, (inverse @ rays.T).astype(np.float32))
        nearer = np.flatnonzero(enter < nearest)
        nearest[nearer] = enter[nearer]
        normals[nearer] = normal(nearer).T @ inverse.astype(np.float32)
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return normals / np.where(length > 0, length, 1), nearest


def _enter(round_: int, start: np.ndarray, rays: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Where the lines start + t * ray enter a unit solid: t (n,), inf for those that miss it, and a function from
    some of the lines to normals there (3, k), of any length.

    A solid is what the round part and the slabs |p_k| <= 1 have in common: a line is in it from the last entry to the
    first exit, and the normal is that of the last entry.
    """
    count = rays.shape[1]
    enter, exit_ = np.full(count, -np.inf, np.float32), np.full(count, np.inf, np.float32)
    last = np.zeros(count, np.int8)  # which of the four was entered last: 0 for the round part, k for a slab
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
    """The direction from the toy to the lamp: (3,), in the room."""
    right, up = np.radians(LAMPS[lighting])
    return np.array([np.cos(up) * np.sin(right), -np.cos(up) * np.cos(right), np.sin(up)])


def shade(normals: np.ndarray, nearest: np.ndarray, lightings: list[int], size: int) -> np.ndarray:
    """What `geometry` gives at OVERSAMPLING times the size, as pictures (lightings, size, size) uint8.

    Lambert's law: light that falls on a surface is as much as the cosine of its angle. There are no shadows.
    """
    lamps = np.stack([lamp(lighting) for lighting in lightings]).astype(np.float32)
    seen = np.isfinite(nearest)
    light = np.full((len(lamps), len(nearest)), BACKGROUND, np.float32)
    facing = normals[seen].T
    light[:, seen] = AMBIENT + SKY * np.maximum(facing[2], 0) + LAMP * np.maximum(lamps @ facing, 0)
    pictures = light.reshape(len(lamps), size, OVERSAMPLING, size, OVERSAMPLING).mean((2, 4))
    return (pictures * 255 + 0.5).astype(np.uint8)


def render(category: int, instance: int, elevation: int, azimuth: int, lightings: list[int], size: int) -> np.ndarray:
    """Stereo pairs of one toy in one pose, the numbers as in `Metadata`: (lightings, 2, size, size) uint8."""
    parts = toy(category, instance)
    eyes = (geometry(parts, 30 + 5 * elevation, 10 * azimuth, eye, size * OVERSAMPLING) for eye in (0, 1))
    return np.stack([shade(*seen, lightings, size) for seen in eyes], 1)


class StereoToys(StereoData):
    """Stereo toys: 24,300 training and 24,300 test stereo pairs of toys, rendered here, in grey, 5 classes.

    This is not smallNORB: it has that set's classes, its grid, its split by instances (4, 6, 7, 8 and 9 for training)
    and the order of its test set, but its toys are boxes, cylinders and balls, without a ground and without shadows. An
    accuracy on one is not to be taken for one on the other.

    There are ten toys of each class. All are of one colour; at azimuth 0 they look to the right. The cameras are five
    times as far away as a toy reaches from its middle, 30 to 70 degrees above the horizontal. The lamps stay where they
    are when a toy turns.

    A set is rendered once, in about a minute of one core's time for both at 48 x 48, and kept in pooch's cache, in
    `stereo-toys`, as one .npy file for each choice of poses, written whole or not at all; it is memory-mapped. A file
    that lies in `<root>/stereo-toys` is taken instead.

    Args:
        root: folder of data sets; by default the environment variable TORCHCAPS_DATA.
        size: of an image, in pixels.
        options: see `StereoData` and `ImageData`. Only the poses that are chosen are rendered.

    Raises:
        ValueError: an argument is out of range.
        DataError: a rendered file is not what its name says, or cannot be written.
    """

    def __init__(self, root: str | None = None, size: int = 48, **options: Any) -> None:
        if size < 8:
            raise ValueError(f"size must be at least 8 pixels, got {size}")
        self.shape = (2, size, size)
        super().__init__(**options)
        self.root, self.size = root, size

    def prepare_data(self) -> None:
        # Lightning calls this in one process per machine, so that the others do not all render.
        for train in (True, False):
            self._find(train)

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        path = self._find(train)
        columns = np.meshgrid(*self._axes(train), indexing="ij")
        instance, elevation, azimuth, lighting, category = (torch.from_numpy(column.flatten()) for column in columns)
        shape = len(category), *self.shape
        try:
            images = np.load(path, mmap_mode="c")
            if images.shape != shape or images.dtype != np.uint8:
                raise ValueError(f"holds shape {images.shape} of {images.dtype}, expected {shape} of uint8")
        except (OSError, EOFError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: {reason}: remove the file to have it rendered again") from None
        return torch.from_numpy(images), Metadata(category, instance, elevation, azimuth, lighting)

    def _axes(self, train: bool) -> tuple[list[int], ...]:
        """Instances, elevations, azimuths, lightings, categories: the last one changes fastest, as in smallNORB."""
        instances = list(TRAINING_INSTANCES if train else TEST_INSTANCES)
        return instances, *self.grid(train), list(range(self.classes))

    def _find(self, train: bool) -> Path:
        """The file of a set, rendered if it is not there."""
        name = f"{'train' if train else 'test'}-{self.size}-v{VERSION}"
        grid = self.grid(train)
        if grid != (list(ELEVATIONS), list(AZIMUTHS), list(LIGHTINGS)):
            name += "".join(f"-{axis}{'.'.join(map(str, chosen))}" for axis, chosen in zip("eal", grid, strict=True))
        own = own_folder(self.root, "stereo-toys")
        if own and (own / f"{name}.npy").exists():
            return own / f"{name}.npy"
        path = pooch.os_cache("torchcaps") / "stereo-toys" / f"{name}.npy"
        if not path.exists():
            self._render(train, path)
        return path

    def _render(self, train: bool, path: Path) -> None:
        instances, elevations, azimuths, lightings, categories = self._axes(train)
        poses = list(product(instances, elevations, azimuths))
        shape = (len(poses) * len(lightings) * len(categories), *self.shape)
        console = Console(stderr=True)
        rendering = f"rendering toys for {'training' if train else 'the test'}"
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for pose in track(poses, rendering, console=console, transient=True, disable=not console.is_terminal):
                    pairs = [render(category, *pose, lightings, self.size) for category in categories]
                    file.write(np.stack(pairs, 1).tobytes())
            part.replace(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}: make room, or the folder writable") from None
        finally:
            part.unlink(missing_ok=True)
