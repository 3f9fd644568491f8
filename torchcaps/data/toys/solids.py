"""The fifty toys of `StereoToys`: ten of each class, built of boxes, cylinders and balls."""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.random import PCG64, Generator

# Version of the pictures. Raise it with every change to them: old caches are then not used for the new pictures.
VERSION = 1

Vector = tuple[float, float, float]


class Part(NamedTuple):
    """A solid: a unit solid, stretched, turned and moved.

    The unit solid is the set of points p whose first `round` coordinates have a length of at most 1 together, and whose
    other coordinates have |p_k| <= 1. It is a box for `round` = 0, a cylinder for 2 and a ball for 3. The solid
    consists of the points center + axes @ p.
    """

    round: int
    center: np.ndarray  # (3,)
    axes: np.ndarray  # (3, 3)


# Axes of a toy: x is forward, y to the left, z up. `fitted` scales the toy at the end, so the unit of length is free.


def box(center: Vector, lengths: Vector, turn: float = 0.0, tilt: float = 0.0) -> Part:
    """Return a box whose front is first raised by `tilt` degrees and which is then turned left by `turn` degrees."""
    (ct, cn), (st, sn) = (f(np.radians([turn, tilt])) for f in (np.cos, np.sin))
    rotation = np.array([[ct, -st, 0], [st, ct, 0], [0, 0, 1]]) @ np.array([[cn, 0, -sn], [0, 1, 0], [sn, 0, cn]])
    return Part(0, np.array(center), rotation * np.array(lengths) / 2)


def ball(center: Vector, radii: Vector, tilt: float = 0.0) -> Part:
    """Return an ellipsoid with the three `radii`, whose front is raised by `tilt` degrees."""
    x, y, z = radii
    return box(center, (2 * x, 2 * y, 2 * z), tilt=tilt)._replace(round=3)


def rod(start: Vector, end: Vector, radius: float, flat: float = 1.0) -> Part:
    """Return a cylinder between two points. Across, its two radii are `radius` and `flat * radius`.

    If the cylinder is level, the second of these is the vertical one.
    """
    a, b = np.array(start), np.array(end)
    along = (b - a) / 2
    across = np.cross(along, [0.0, 0.0, 1.0] if abs(along[2]) < 0.99 * np.linalg.norm(along) else [1.0, 0.0, 0.0])
    across *= radius / np.linalg.norm(across)
    third = np.cross(across, along)
    third *= flat * radius / np.linalg.norm(third)
    return Part(2, (a + b) / 2, np.stack([across, third, along], 1))


def both(part: Callable[[int], Part]) -> list[Part]:
    """Return a part on the left, `part(1)`, and its mirror image on the right, `part(-1)`."""
    return [part(1), part(-1)]


def animal(draw: Generator, instance: int) -> list[Part]:
    """Return the parts of a four-legged animal."""
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
        parts.append(ball((-0.05, 0, top), (0.22, 0.15, 0.22)))  # hump
    return parts


def human(draw: Generator, instance: int) -> list[Part]:
    """Return the parts of a person, some with a hat or a backpack."""
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
        reach = draw.choice([-0.62, -0.1, 0.6])  # the arm hangs down, is held out, or is raised
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
        parts.append(box((-depth * 0.75, 0, top - torso * 0.45), (0.24, shoulders * 0.75, torso * 0.7)))  # backpack
    return parts


def airplane(draw: Generator, instance: int) -> list[Part]:
    """Return the parts of an airplane: with a propeller, with jets, a biplane or a glider."""
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
        parts += [ball((nose * 0.2, 0, thick), (0.26, thick * 0.7, 0.16))]  # cockpit
    if kind == "biplane":
        parts += wings(span, chord, place, height + 0.5)
        parts += both(lambda side: rod((place, side * 0.55, height), (place, side * 0.55, height + 0.5), 0.035))
    if kind == "jets":
        z = height - 0.14
        parts += both(lambda side: rod((place - 0.3, side * 0.5, z), (place + 0.25, side * 0.5, z), 0.11))
    return parts


def wheels(places: list[float], track: float, radius: float, width: float = 0.15) -> list[Part]:
    """Return the wheels on both sides at several places x along a car."""
    return [
        rod((x, side * (track - width), radius), (x, side * track, radius), radius) for x in places for side in (1, -1)
    ]


def truck(draw: Generator, instance: int) -> list[Part]:
    """Return the parts of a truck: a van, a tanker, a crane or a tipper."""
    length, width, radius = draw.uniform(1.9, 2.5), draw.uniform(0.62, 0.8), draw.uniform(0.15, 0.21)
    cab, cab_height, gap = draw.uniform(0.42, 0.6), draw.uniform(0.55, 0.8), draw.uniform(0.06, 0.16)
    load_height = draw.uniform(0.6, 1.0)
    front, floor = length / 2, radius * 1.7
    back = -front
    load = length - cab - gap
    middle = back + load / 2
    parts = [box((0, 0, floor - 0.06), (length, width * 0.7, 0.14))]
    parts += wheels([front - cab / 2, back + 0.25, back + 0.25 + 2.2 * radius], width / 2, radius)
    if draw.random() < 0.4:  # hood before the cab
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
    """Return the parts of a car: a sedan, a beetle, a racing car or an open one."""
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
        parts += [box((front * 0.14, 0, top + roof * 0.3), (0.05, width * 0.85, roof * 0.9), tilt=25)]  # windshield
        parts += both(lambda side: box((-0.25, side * width * 0.22, top), (0.12, width * 0.32, roof * 1.1), tilt=8))
    if draw.random() < 0.5:
        parts += [box((s * front, 0, floor + 0.06), (0.12, width * 1.02, 0.1)) for s in (1, -1)]  # bumpers
    return parts


CATEGORIES = (animal, human, airplane, truck, car)


@cache
def toy(category: int, instance: int) -> list[Part]:
    """Return one of the fifty toys, which just fits into the ball of radius 1 about the origin.

    Its proportions are random numbers that depend on the category and the instance alone. Its kind (a van, a tanker,
    ...) is the instance modulo 3 or 4, so both the training and the test instances have every kind.
    """
    return fitted(CATEGORIES[category](Generator(PCG64([VERSION, category, instance])), instance))


def fitted(parts: list[Part]) -> list[Part]:
    """Return the parts moved and scaled together so that they just fit into the ball of radius 1 about the origin."""
    points = np.concatenate([part.center + _surface(part.round) @ part.axes.T for part in parts])
    middle = (points.min(0) + points.max(0)) / 2
    radius = np.linalg.norm(points - middle, axis=1).max()
    return [Part(part.round, (part.center - middle) / radius, part.axes / radius) for part in parts]


def _surface(round_: int) -> np.ndarray:
    """Return points (n, 3) on the surface of a unit solid, with its corners or edges."""
    grid = np.array(list(product(np.linspace(-1, 1, 9), repeat=3)))
    grid = grid[np.abs(grid).max(1) == 1]
    if round_:
        grid[:, :round_] /= np.maximum(np.linalg.norm(grid[:, :round_], axis=1, keepdims=True), 1e-9)
    return grid
