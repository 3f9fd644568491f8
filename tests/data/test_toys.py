"""Stereo toys: the renderer against rays followed step by step, poses, lamps, and the cached sets."""

import hashlib
import shutil
import struct
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchcaps.data import DataError, SmallNORB, StereoToys
from torchcaps.data.toys import renderer, solids, stereo_toys
from torchcaps.data.toys.renderer import BACKGROUND, BASELINE, DISTANCE, HALF_WIDTH, geometry
from torchcaps.data.toys.solids import Part, ball, box, fitted, rod, toy

ELEVATION, AZIMUTHS, LIGHTINGS = 3, [0, 6], [0, 1]
FEW: dict[str, Any] = {
    "size": 8,
    "train_elevations": [ELEVATION],
    "train_azimuths": AZIMUTHS,
    "train_lightings": LIGHTINGS,
    "test_elevations": [ELEVATION],
    "test_azimuths": [0],
    "test_lightings": [5],
}
SOLIDS = {
    "box": box((0.2, -0.1, 0.1), (1.2, 0.6, 0.8), turn=30, tilt=20),
    "cylinder": rod((-0.6, 0.2, -0.3), (0.5, -0.2, 0.4), 0.35, flat=1.5),
    "ball": ball((0.1, 0.1, -0.1), (0.8, 0.4, 0.5), tilt=35),
}

# Number of the parts of all toys of a class, and a weighted sum of their numbers.
TOTALS = [(128, 7.3205241), (147, -7.85546), (109, 18.9665409), (132, -8.8064256), (102, -0.2825249)]


def place(values: np.ndarray, size: int) -> np.ndarray:
    """Mean column and row of the pixels that are true, in units of the window."""
    down, right = np.nonzero(values.reshape(size, size))
    return HALF_WIDTH * ((2 * np.array([right.mean(), down.mean()]) + 1) / size - 1)


def walk(part: Part, elevation: float, azimuth: float, eye: int, size: int) -> np.ndarray:
    """Distances as from `geometry`, found by following each ray until a point is in the solid."""
    up, turn = np.radians(elevation), np.radians(azimuth)
    camera = np.array([(eye - 0.5) * BASELINE, -DISTANCE * np.cos(up), DISTANCE * np.sin(up)])
    steps = np.arange(0.7, 1.3, 5e-4)
    found = np.full((size, size), np.inf)
    for i, j in product(range(size), repeat=2):
        u, v = (HALF_WIDTH * ((2 * k + 1) / size - 1) for k in (j, i))
        pixel = np.array([u, -v * np.sin(up), -v * np.cos(up)])
        x, y, z = (camera + steps[:, None] * (pixel - camera)).T
        points = np.stack([x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn), z], 1)
        p = np.linalg.solve(part.axes, (points - part.center).T)
        inside = (np.abs(p) <= 1).all(0) & ((p[: part.round] ** 2).sum(0) <= 1)
        if inside.any():
            found[i, j] = steps[inside.argmax()]
    return found


# The renderer


@pytest.mark.parametrize("solid", SOLIDS)
@pytest.mark.parametrize(("elevation", "azimuth", "eye"), [(30, 0, 0), (55, 100, 1)])
def test_distances_against_walking(solid: str, elevation: float, azimuth: float, eye: int) -> None:
    part = SOLIDS[solid]
    expected = walk(part, elevation, azimuth, eye, 24).flatten()
    normals, found = geometry([part], elevation, azimuth, eye, 24)
    assert 30 < np.isfinite(expected).sum() < 24 * 24 / 2
    sure = np.isfinite(expected) & np.isfinite(found)
    # `walk` can miss a ray that is in the solid for less than a step.
    assert (np.isfinite(expected) != np.isfinite(found)).sum() <= 2
    assert (np.abs(found[sure] - expected[sure]) < 6e-4).all()
    np.testing.assert_allclose(np.linalg.norm(normals[sure], axis=1), 1, atol=1e-5)
    assert not normals[~np.isfinite(found)].any()


@pytest.mark.parametrize("solid", SOLIDS)
def test_normals_are_those_of_the_surface(solid: str) -> None:
    """Differences of neighboring points lie in the surface: d(point) . normal = 0."""
    size, elevation = 400, 40
    normals, nearest = geometry([SOLIDS[solid]], elevation, 0, 0, size)
    up = np.radians(elevation)
    camera = np.array([-BASELINE / 2, -DISTANCE * np.cos(up), DISTANCE * np.sin(up)])
    steps = HALF_WIDTH * ((2 * np.arange(size) + 1) / size - 1)
    window = np.stack(np.broadcast_arrays(steps, -steps[:, None] * np.sin(up), -steps[:, None] * np.cos(up)), -1)
    points = camera + np.where(np.isfinite(nearest), nearest, np.nan).reshape(size, size, 1) * (window - camera)
    normals = normals.reshape(size, size, 3)
    for along in (points[1:, :-1] - points[:-1, :-1], points[:-1, 1:] - points[:-1, :-1]):
        moved = np.linalg.norm(along, axis=-1)
        off = np.abs((along * normals[:-1, :-1]).sum(-1)) / moved
        good = off[np.isfinite(off) & (moved < 0.03)]  # not over an edge that hides something
        assert len(good) > 5000
        assert np.quantile(good, 0.9) < 0.05
    towards = ((camera - points) * normals).sum(-1)
    assert (towards[np.isfinite(towards)] > -1e-4).all()


def test_the_nearest_part_is_seen() -> None:
    parts = [ball((0, y, 0), (0.3, 0.3, 0.3)) for y in (0.5, -0.6, 0.0)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        _, nearest = geometry([parts[k] for k in order], 0, 0, 0, 31)
        assert nearest.min() == geometry([parts[1]], 0, 0, 0, 31)[1].min()
        np.testing.assert_allclose(nearest.min(), 1 - (0.6 + 0.3) / DISTANCE, atol=2e-3)


def test_a_toy_turns_left_and_at_0_looks_to_the_right() -> None:
    nose = [ball((0.8, 0, 0), (0.1, 0.1, 0.1))]
    places = [place(np.isfinite(geometry(nose, 45, azimuth, 0, 96)[1]), 96) for azimuth in (0, 90, 180, 270)]
    (right, _), (_, away), (left, _), (_, near) = places
    assert right > 0.7
    assert left < -0.7
    assert away < -0.4  # up in the image
    assert near > 0.4


# Lamps


FACES = {"left": (-1, 0, 0), "right": (1, 0, 0), "front": (0, -1, 0), "top": (0, 0, 1), "below": (0, 0, -1)}


@pytest.mark.parametrize(
    ("lighting", "order"),
    [
        (0, ["right", "left"]),
        (1, ["left", "right"]),
        (2, ["left", "top", "front"]),
        (3, ["left", "front", "top"]),
        (4, ["right", "left"]),
        (5, ["left", "right"]),
    ],
)
def test_where_the_lamps_are(lighting: int, order: list[str]) -> None:
    """The faces in `order` are increasingly bright. No lamp lights a face that looks down."""
    levels = {face: _shaded(normal, lighting) for face, normal in FACES.items()}
    assert levels["below"] == min(levels.values())
    for darker, brighter in pairwise(order):
        assert levels[darker] < levels[brighter]
    if lighting in (2, 3):
        assert levels["left"] == levels["right"]
    assert (levels["front"] > levels["below"]) == (lighting < 4)  # the lamps of 4 and 5 are behind the toy


def _shaded(normal: tuple[int, int, int], lighting: int) -> int:
    rays = renderer.OVERSAMPLING**2
    normals = np.repeat(np.array([normal], np.float32), rays, 0)
    return int(renderer.shade(normals, np.ones(rays, np.float32), [lighting], 1)[0, 0, 0])


def test_shading_by_hand() -> None:
    # 65 degrees to the left and 35 up: cos 35 sin 65 = 0.742; cos 35 cos 65 = 0.346; sin 35 = 0.574.
    assert _shaded((-1, 0, 0), 0) == round(255 * (0.08 + 0.7 * 0.7424))
    assert _shaded((1, 0, 0), 0) == round(255 * 0.08)
    assert _shaded((0, -1, 0), 0) == round(255 * (0.08 + 0.7 * 0.3462))
    assert _shaded((0, 0, 1), 0) == round(255 * (0.08 + 0.22 + 0.7 * 0.5736))


def test_a_pixel_is_the_mean_of_its_rays() -> None:
    nearest = np.array([1, np.inf] * 2 + [np.inf] * 12, np.float32)  # 4 x 4 rays: two pixels of the first row see it
    normals = np.zeros((16, 3), np.float32)
    normals[[0, 2], 0] = 1
    (picture,) = renderer.shade(normals, nearest, [0], 2)
    mixed, plain = round(255 * (0.75 * BACKGROUND + 0.25 * 0.08)), round(255 * BACKGROUND)
    assert picture.tolist() == [[mixed, mixed], [plain, plain]]


# The toys


def test_fifty_toys() -> None:
    seen = set()
    for category, instance in product(range(5), range(10)):
        parts = toy(category, instance)
        points = np.concatenate([part.center + solids._surface(part.round) @ part.axes.T for part in parts])
        assert np.linalg.norm(points, axis=1).max() == pytest.approx(1)
        # The toy is visible in every pose, and never at the edge of the picture.
        for elevation, azimuth in ((8, 26), (1, 4)):
            pairs = renderer.render(category, instance, elevation, azimuth, [3], 24)
            background = pairs == round(255 * BACKGROUND)
            assert background[..., [0, -1], :].all()
            assert background[..., :, [0, -1]].all()
            assert 0.03 < 1 - background.mean() < 0.5
        seen.add(pairs.tobytes())
    assert len(seen) == 50


def numbers(part: Part) -> tuple[float, ...]:
    """Return where a part is and how far it reaches, whichever way its own axes point."""
    return (part.round, *np.round([*part.center, *(part.axes @ part.axes.T).flatten()], 9) + 0.0)


@pytest.mark.parametrize("category", [0, 2, 3, 4], ids=["animal", "airplane", "truck", "car"])
def test_both_sides_of_a_toy_are_alike(category: int) -> None:
    mirror = np.diag([1, -1, 1])
    for instance in range(10):
        parts = toy(category, instance)
        other = [part._replace(center=mirror @ part.center, axes=mirror @ part.axes) for part in parts]
        assert sorted(map(numbers, parts)) == sorted(map(numbers, other))


def test_toys_of_this_version() -> None:
    """If this fails, the pictures are others: raise VERSION, and take the new numbers."""
    assert solids.VERSION == 1
    for category, (count, total) in enumerate(TOTALS):
        parts = [part for instance in range(10) for part in toy(category, instance)]
        weights = np.cos(np.arange(12 * len(parts)))  # none like another
        values = np.concatenate([[*part.center, *part.axes.flatten()] for part in parts])
        assert (len(parts), weights @ values) == (count, pytest.approx(total, abs=1e-6))


def test_fitted_parts_are_moved_and_scaled_only() -> None:
    first, second = fitted([ball((3, 0, 0), (1, 1, 1)), ball((7, 0, 0), (1, 1, 1))])
    np.testing.assert_allclose([first.center, second.center], [[-2 / 3, 0, 0], [2 / 3, 0, 0]], atol=1e-9)
    np.testing.assert_allclose(first.axes, np.eye(3) / 3, atol=1e-9)


def test_what_the_numbers_of_a_pose_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seen(parts: list[Part], *pose: float) -> tuple[np.ndarray, np.ndarray]:
        asked.append(pose)
        return geometry(parts, *pose)  # type: ignore[arg-type]

    monkeypatch.setattr(renderer, "geometry", seen)
    left_and_right = renderer.render(1, 0, 0, 34, [2, 5], 8)
    renderer.render(1, 0, 8, 2, [0], 8)
    assert asked == [(30, 340, 0, 16), (30, 340, 1, 16), (70, 20, 0, 16), (70, 20, 1, 16)]
    for lighting, pair in zip((2, 5), left_and_right, strict=True):
        for eye in (0, 1):
            (picture,) = renderer.shade(*geometry(toy(1, 0), 30, 340, eye, 16), [lighting], 8)
            assert np.array_equal(pair[eye], picture)


# The sets


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "torchcaps" / "stereo-toys"


def test_the_set(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = StereoToys(**FEW, batch_size=64)
    data.prepare_data()
    assert sorted(path.name for path in cache.iterdir()) == ["test-8-v1-e3-a0-l5.npy", "train-8-v1-e3-a0.6-l0.1.npy"]
    assert capfd.readouterr() == ("", "")
    data.setup()
    assert data.names == ["animal", "human", "airplane", "truck", "car"]
    images, labels = data.load(train=True)
    assert images.shape == (100, *data.shape)
    assert images.dtype == torch.uint8
    known = data.metadata("fit")
    assert torch.equal(labels, known.category)
    expected = product((4, 6, 7, 8, 9), [ELEVATION], AZIMUTHS, LIGHTINGS, range(5))
    assert list(zip(*(column.tolist() for column in (*known[1:], known.category)), strict=True)) == list(expected)
    for k in (0, 3, 12, 99):
        category, instance, elevation, azimuth, lighting = (int(column[k]) for column in known)
        (pair,) = renderer.render(category, instance, elevation, azimuth, [lighting], 8)
        assert np.array_equal(images[k].numpy(), pair)
    assert set(data.metadata("test").instance.tolist()) == {0, 1, 2, 3, 5}
    (batch, labels), *rest = data.test_dataloader()
    assert batch.shape == (25, 2, 8, 8)
    assert batch.dtype == torch.float32
    assert not rest
    assert torch.equal((batch * 255).round().byte(), data.load(train=False)[0])


def test_rendered_once_and_memory_mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = StereoToys(**FEW).read(train=True)[0].clone()
    monkeypatch.setattr(stereo_toys, "render", None)
    data = StereoToys(**FEW)
    images, _ = data.read(train=True)
    assert torch.equal(images, before)
    images += 1  # a copy of the page, not the file
    assert torch.equal(data.read(train=True)[0], before)
    (path,) = cache.iterdir()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([before[-1, -1, -1, -1] ^ 1]))
    assert data.read(train=True)[0][-1, -1, -1, -1] == before[-1, -1, -1, -1] ^ 1


def test_of_a_root(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole grid has the order of smallNORB's test set, whose hash is published."""
    (tmp_path / "root" / "stereo-toys").mkdir(parents=True)
    np.save(tmp_path / "root" / "stereo-toys" / "test-8-v1.npy", np.zeros((24300, 2, 8, 8), np.uint8))
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "root"))
    data = StereoToys(size=8)
    data.setup("test")
    known = data.metadata("test")
    assert data.load(train=False)[0].shape == (24300, 2, 8, 8)
    assert known.category.tolist() == [0, 1, 2, 3, 4] * 4860
    info = struct.pack("<5i", 0x1E3D4C54, 2, 24300, 4, 1) + torch.stack(known[1:], 1).int().numpy().tobytes()
    (published,) = (md5 for name, (_, md5) in SmallNORB.md5.items() if name.endswith("testing-info"))
    assert hashlib.md5(info).hexdigest() == published
    # Missing sets are rendered, but not into the user's folder.
    StereoToys(**FEW).read(train=False)
    assert [path.name for path in cache.iterdir()] == ["test-8-v1-e3-a0-l5.npy"]
    assert len(list((tmp_path / "root" / "stereo-toys").iterdir())) == 1


def test_written_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render, done = renderer.render, []

    def stops(*arguments: Any) -> np.ndarray:
        done.append(arguments)
        if len(done) > 12:
            assert len(list(cache.iterdir())) == 1  # a part of it
            raise KeyboardInterrupt
        return render(*arguments)

    monkeypatch.setattr(stereo_toys, "render", stops)
    with pytest.raises(KeyboardInterrupt):
        StereoToys(**FEW).prepare_data()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            np.zeros((100, 2, 8, 7), np.uint8),
            r"holds shape \(100, 2, 8, 7\) of uint8, expected \(100, 2, 8, 8\)",
        ),
        (np.zeros((100, 2, 8, 8), np.int8), "of int8, expected"),
        (None, "mmap length is greater than file size"),
    ],
    ids=["shape", "dtype", "truncated"],
)
def test_a_corrupt_cache(cache: Path, content: np.ndarray | None, problem: str) -> None:
    cache.mkdir(parents=True)
    path = cache / "train-8-v1-e3-a0.6-l0.1.npy"
    np.save(path, np.zeros((100, 2, 8, 8), np.uint8) if content is None else content)
    if content is None:
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"^{path}: .*{problem}.*: remove the file to have it rendered again$"):
        StereoToys(**FEW).read(train=True)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"size .* 7\b"):
        StereoToys(size=7)
    with pytest.raises(ValueError, match="^test_azimuths must be some of 0, 2, 4"):
        StereoToys(test_azimuths=[3])


def test_a_cache_that_must_not_be_read_or_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove a file, to free disk space or to change who may write would not help."""
    StereoToys(**FEW).prepare_data()
    with monkeypatch.context() as patch:
        refusal = PermissionError(13, "Permission denied")
        patch.setattr(np, "load", lambda *a, **k: (_ for _ in ()).throw(refusal))
        with pytest.raises(DataError, match="Permission denied$"):
            StereoToys(**FEW).read(train=True)
    shutil.rmtree(cache)
    cache.write_text("a file")
    with pytest.raises(DataError, match="is a file, and must be a folder$"):
        StereoToys(**FEW).prepare_data()
