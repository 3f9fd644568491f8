"""Pose vectors of class capsules along turning toys: known turns, changes worked out by hand, and their figures."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pooch
import pytest
import torch
from commands import call
from figures import assert_texts_fit
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from networks import Network
from torch import Tensor, nn

from torchcaps import Capsules, Prediction
from torchcaps.data import Metadata, StereoData
from torchcaps.explain import (
    PoseTrajectories,
    pose_trajectories,
    pose_trajectories_figure,
    relative_changes,
    relative_changes_figure,
    write_figures,
)
from torchcaps.explain.page import image_samples
from torchcaps.explain.poses import BY_AZIMUTH, BY_ELEVATION, TRAJECTORIES, in_the_plane

ELEVATIONS, AZIMUTHS, LIGHTINGS = [0, 3, 8], [0, 2, 6, 18, 34], [1, 5]
FEW: dict[str, Any] = {"test_elevations": ELEVATIONS, "test_azimuths": AZIMUTHS, "test_lightings": LIGHTINGS}


class CodedToys(StereoData):
    """Two test toys of each category; an image has six pixels, and the first five are the numbers of `Metadata`."""

    shape = picture = (2, 1, 3)
    instances = (1, 5)

    def __init__(self, seed: int = 0, kept: slice = slice(None), **options: Any) -> None:
        super().__init__(**{"batch_size": 7, **FEW, **options})
        self.seed, self.kept = seed, kept

    def read(self, train: bool) -> tuple[Tensor, Metadata]:
        columns = torch.cartesian_prod(*map(torch.tensor, (range(5), self.instances, *self.grid(train))))
        order = torch.randperm(len(columns), generator=torch.Generator().manual_seed(self.seed))
        rows = columns[order[self.kept]]
        pixels = torch.cat([rows, torch.zeros(len(rows), 1, dtype=torch.int64)], 1)
        return pixels.view(-1, *self.picture).byte(), Metadata(*rows.unbind(1))


class Turned(nn.Module):
    """A network whose class capsules are two pose vectors of three features that turn and grow with the toy.

    For a toy of instance i at elevation e, azimuth a and lighting l, the pose vectors of its own category are
    (10 i + l) R(10 a degrees) (3, 4, 0) and (0, 1 + e, 0); those of other categories are -7 everywhere. At azimuth 340
    degrees the network predicts the next category, which is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Prediction:
        self.sizes.append(len(images))
        with torch.no_grad():  # in training mode, both layers would change the numbers
            numbers = self.dropout(self.norm(images.flatten(1)) / self.norm(torch.ones(2, 6, dtype=images.dtype))[:1])
        category, instance, elevation, azimuth, lighting, _ = (255 * numbers).round().to(images.dtype).unbind(1)
        turn = torch.deg2rad(10 * azimuth)
        cos, sin, zero = turn.cos(), turn.sin(), torch.zeros_like(turn)
        first = (10 * instance + lighting)[:, None] * torch.stack([3 * cos - 4 * sin, 3 * sin + 4 * cos, zero], 1)
        second = torch.stack([zero, 1 + elevation, zero], 1)
        poses = torch.full((len(images), 5, 2, 3), -7.0, dtype=images.dtype)
        own = category.long()
        poses[torch.arange(len(images)), own] = torch.stack([first, second], 1)
        seen = (own + (azimuth == 34)) % 5
        return Prediction(torch.eye(5)[seen] - 3, Capsules(poses))


class Vectors(Turned):
    """The same network with the first pose vector alone."""

    def forward(self, images: Tensor) -> Prediction:
        scores, capsules, _ = super().forward(images)
        return Prediction(scores, Capsules(capsules.poses[:, :, 0]))


@pytest.fixture(scope="module")
def found() -> dict[str, PoseTrajectories]:
    return {name: pose_trajectories(Turned(), CodedToys(), name) for name in ("elevation", "azimuth")}


# Trajectories


def test_known_turns(found):
    azimuth, elevation = found["azimuth"], found["elevation"]
    assert azimuth.angles.tolist() == [0, 20, 60, 180, 340]
    assert elevation.angles.tolist() == [30, 45, 70]
    for trajectories in found.values():
        assert trajectories.category.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert trajectories.instance.tolist() == [1, 5] * 5
    assert (azimuth.varying, azimuth.fixed) == ("azimuth", "elevation 30°, lighting 1")
    assert (elevation.varying, elevation.fixed) == ("elevation", "azimuth 0°, lighting 1")
    assert azimuth.poses.shape == (10, 5, 2, 3)
    assert elevation.poses.shape == (10, 3, 2, 3)
    for toy in range(10):
        size = 11.0 if toy % 2 == 0 else 51.0
        for step, degrees in enumerate((0, 20, 60, 180, 340)):
            cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            expected = [[size * (3 * cos - 4 * sin), size * (3 * sin + 4 * cos), 0], [0, 1, 0]]
            torch.testing.assert_close(azimuth.poses[toy, step], torch.tensor(expected).double(), rtol=1e-5, atol=1e-4)
        for step, number in enumerate(ELEVATIONS):
            expected = [[3 * size, 4 * size, 0], [0, 1 + number, 0]]
            torch.testing.assert_close(elevation.poses[toy, step], torch.tensor(expected).double())
    assert (
        azimuth.right.tolist() == [[True] * 4 + [False]] * 10
    )  # though the capsule is always that of the toy's own class
    assert elevation.right.all()


def test_where_the_rest_is_held():
    found = pose_trajectories(Turned(), CodedToys(test_elevations=[8], test_lightings=[5]), "azimuth")
    assert found.fixed == "elevation 70°, lighting 5"
    torch.testing.assert_close(found.poses[0, 0], torch.tensor([[45.0, 60, 0], [0, 9, 0]]).double())
    found = pose_trajectories(Turned(), CodedToys(test_azimuths=[18]), "elevation")
    torch.testing.assert_close(found.poses[1, 0, 0], torch.tensor([-153.0, -204, 0]).double(), rtol=1e-5, atol=1e-3)


def test_the_order_of_the_set_and_the_batches_do_not_matter(found):
    network = Turned()
    for seed, batch_size in ((1, 7), (2, 300)):
        again = pose_trajectories(network, CodedToys(seed, batch_size=batch_size), "azimuth")
        torch.testing.assert_close(again.poses, found["azimuth"].poses, rtol=0, atol=0)
        assert torch.equal(again.right, found["azimuth"].right)
    assert network.sizes == [7] * 7 + [1] + [50]


def test_a_vector_is_one_pose_vector(found):
    trajectories = pose_trajectories(Vectors(), CodedToys(), "azimuth")
    assert trajectories.poses.shape == (10, 5, 1, 3)
    assert torch.equal(trajectories.poses[:, :, 0], found["azimuth"].poses[:, :, 0])


def test_a_network_in_training_mode_and_in_double_precision(found):
    network = Turned().train()
    trajectories = pose_trajectories(network, CodedToys(), "azimuth")
    assert torch.equal(trajectories.poses, found["azimuth"].poses)
    double = pose_trajectories(network.double(), CodedToys(), "azimuth")
    assert double.poses.dtype == torch.float64
    torch.testing.assert_close(double.poses, trajectories.poses, rtol=1e-5, atol=1e-4)
    assert not trajectories.poses.requires_grad


def test_images_are_taken_at_the_center():
    class Small(CodedToys):
        shape = (2, 1, 1)  # the middle pixel of each image of the pair
        stored_shape = CodedToys.shape

    class Seen(nn.Module):
        def forward(self, images):
            assert images.shape[1:] == (2, 1, 1)
            return Prediction(torch.zeros(len(images), 5), Capsules(255 * images.view(-1, 1, 2).expand(-1, 5, 2)))

    poses = pose_trajectories(Seen(), Small(resize=3), "azimuth").poses
    instance_and_lighting = torch.tensor([[1.0, 1], [5, 1]] * 5).double().view(10, 1, 1, 2)
    torch.testing.assert_close(poses, instance_and_lighting.expand(10, 5, 1, 2))


# Changes


def test_relative_changes_by_hand():
    turn = torch.deg2rad(torch.tensor([0.0, 60, 90, 180]))
    circle = 5 * torch.stack([turn.cos(), turn.sin()], 1)
    line = torch.tensor([[0.0, 2], [0, 4], [0, 0], [0, -1]])
    distance, norm, cosine = relative_changes(torch.stack([circle, line], 1))
    torch.testing.assert_close(distance, torch.tensor([[0, 0], [1, 1], [2**0.5, 1], [2, 1.5]]))
    torch.testing.assert_close(norm, torch.tensor([[1, 1], [1, 2], [1, 0], [1, 0.5]]))
    expected = torch.tensor([[1, 1], [0.5, 1], [0, math.nan], [-1, -1]])
    torch.testing.assert_close(cosine, expected, equal_nan=True, atol=1e-6, rtol=0)


def test_changes_of_known_turns(found):
    """The first pose vector changes by 2 sin(a/2), 1 and cos a; the second does not change, or only in its length."""
    azimuth = relative_changes(found["azimuth"].poses)
    turn = torch.deg2rad(found["azimuth"].angles.double())
    ones = torch.ones(5, dtype=torch.float64)
    for changes, first, second in zip(
        azimuth, (2 * (turn / 2).sin(), ones, turn.cos()), (0 * ones, ones, ones), strict=True
    ):
        expected = torch.stack([first, second], 1).expand(10, 5, 2)
        torch.testing.assert_close(changes, expected, rtol=0, atol=1e-5)
    elevation = relative_changes(found["elevation"].poses)
    assert elevation.distance[3].tolist() == [[0, 0], [0, 3], [0, 8]]
    assert elevation.norm[3].tolist() == [[1, 1], [1, 4], [1, 9]]
    torch.testing.assert_close(elevation.cosine, torch.ones(10, 3, 2).double())


def test_changes_relative_to_zero_are_nan():
    poses = torch.tensor([[0.0, 0], [3, 4], [0, 0]]).unsqueeze(1)
    for changes in relative_changes(poses):
        assert changes.isnan().all()
    distance, norm, cosine = relative_changes(poses[1:])
    assert (distance.tolist(), norm.tolist()) == ([[0], [1]], [[1], [0]])
    assert cosine[0] == 1
    assert cosine[1].isnan()
    with pytest.raises(ValueError, match=r"expected poses of shape \(\.\.\., steps, vectors, features\), got "):
        relative_changes(poses[0])


def test_cosines_do_not_leave_their_range():
    first = torch.rand(500, 1, 1, 7, generator=torch.Generator().manual_seed(0))
    cosine = relative_changes(torch.cat([first, 3 * first, -0.1 * first], 1)).cosine
    assert cosine.abs().max() == 1


# Multidimensional scaling


def test_what_is_planar_keeps_its_distances():
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(30, 2, generator=generator).double()
    turned = plane @ torch.linalg.qr(torch.randn(5, 5, generator=generator).double())[0][:2] + 3
    placed = torch.from_numpy(in_the_plane(turned))
    torch.testing.assert_close(torch.pdist(placed), torch.pdist(plane))
    torch.testing.assert_close(torch.pdist(torch.from_numpy(in_the_plane(1e-9 * turned))), 1e-9 * torch.pdist(plane))
    assert torch.equal(placed, torch.from_numpy(in_the_plane(turned)))


def test_points_that_are_few_or_the_same():
    assert in_the_plane(torch.ones(4, 3).double()).tolist() == [[0, 0]] * 4
    assert in_the_plane(torch.ones(1, 3).double()).tolist() == [[0, 0]]
    line = torch.tensor([[1.0], [2], [4]]).double()
    torch.testing.assert_close(torch.pdist(torch.from_numpy(in_the_plane(line))), torch.tensor([1.0, 3, 2]).double())


# Figures

NAMES = ["animal", "human", "airplane", "truck", "car"]


def test_figure_of_changes(found):
    figure = relative_changes_figure(found["azimuth"], NAMES)
    assert len(figure.axes) == 3 * 2
    assert [axis.get_title() for axis in figure.axes] == ["pose vector 1", "pose vector 2", "", "", "", ""]
    labels = [axis.get_ylabel().replace("\n", " ") for axis in figure.axes]
    expected = ["distance to the first, relative to its norm", "norm, relative to that of the first"]
    assert labels == [expected[0], "", expected[1], "", "cosine with the first", ""]
    assert figure.get_supxlabel() == "azimuth, degrees"
    assert "of 10 toys" in figure.get_suptitle()
    assert "elevation 30°, lighting 1; the network is right about 80 % of the images" in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [*NAMES, "mean", "each toy"]
    styles = [(to_hex(line.get_color()), line._unscaled_dash_pattern) for line in legend.get_lines()]
    assert len({color for color, _ in styles}) == 7
    assert len({str(dashes) for _, dashes in styles[:5]}) == 5
    changes = relative_changes(found["azimuth"].poses)
    for axis, (row, vector) in zip(figure.axes, torch.cartesian_prod(*map(torch.arange, (3, 2))).tolist(), strict=True):
        toys, kinds, (mean,) = axis.lines[:10], axis.lines[10:15], axis.lines[15:]
        for toy, line in enumerate(toys):
            assert line.get_xdata().tolist() == [0, 20, 60, 180, 340]
            assert line.get_ydata().tolist() == changes[row][toy, :, vector].tolist()
            assert to_hex(line.get_color()) == styles[6][0]
        for kind, line in enumerate(kinds):
            expected = changes[row][2 * kind : 2 * kind + 2, :, vector].mean(0)
            torch.testing.assert_close(torch.tensor(line.get_ydata()), expected)
            assert (to_hex(line.get_color()), line._unscaled_dash_pattern) == styles[kind]
        assert to_hex(mean.get_color()) == styles[5][0] == "#000000"
        torch.testing.assert_close(torch.tensor(mean.get_ydata()), changes[row][:, :, vector].mean(0))
    assert figure.axes[5].get_xticks().tolist() == [0, 90, 180, 270]
    assert "azimuth 0°" in relative_changes_figure(found["elevation"]).get_suptitle()


def test_means_leave_out_what_is_undefined(found):
    poses = found["azimuth"].poses.clone()
    poses[0, 0, 0] = 0  # no change can be relative to zero
    poses[1, 2, 0] = 0
    poses[:, 1, 1] = 0
    figure = relative_changes_figure(found["azimuth"]._replace(poses=poses))
    changes = relative_changes(poses)
    distance, cosine = figure.axes[0].lines[-1].get_ydata(), figure.axes[4].lines[-1].get_ydata()
    torch.testing.assert_close(torch.tensor(distance), changes.distance[1:, :, 0].mean(0))
    assert cosine[2] == pytest.approx(float(changes.cosine[2:, 2, 0].mean()))
    assert math.isnan(figure.axes[5].lines[-1].get_ydata()[1])
    figure.draw_without_rendering()


def test_figure_of_trajectories(found):
    figure = pose_trajectories_figure([found["elevation"], found["azimuth"]], NAMES)
    panels, bars = figure.axes[:10], figure.axes[10:]
    for row, (trajectories, correct) in enumerate(zip(found.values(), ("3 of 3", "4 of 5"), strict=True)):
        for category, axis in enumerate(panels[5 * row : 5 * row + 5]):
            assert axis.get_title() == f"{NAMES[category]}, instance 1\nright about {correct} images"
            steps = len(trajectories.angles)
            placed = torch.from_numpy(in_the_plane(trajectories.poses[2 * category].flatten(0, 1))).view(steps, 2, 2)
            for vector, points in enumerate(axis.collections):
                path, ring = axis.lines[2 * vector : 2 * vector + 2]
                torch.testing.assert_close(torch.tensor(path.get_xydata()), placed[:, vector])
                torch.testing.assert_close(torch.tensor(points.get_offsets().data), placed[:, vector])
                torch.testing.assert_close(torch.tensor(ring.get_xydata()), placed[:1, vector])
                assert len({to_hex(color) for color in points.get_facecolors()}) == steps
            shapes = {str(points.get_paths()[0].vertices.tolist()) for points in axis.collections}
            assert len(shapes) == len(axis.collections) == 2
    labels = ["elevation, degrees\n(azimuth 0°, lighting 1)", "azimuth, degrees\n(elevation 30°, lighting 1)"]
    assert [bar.get_ylabel() for bar in bars] == labels
    assert [bar.get_ylim() for bar in bars] == [(30, 70), (0, 360)]


@pytest.mark.parametrize("columns", [1, 5])
def test_no_text_is_cut_off_or_overlaps(found, columns):
    def at(trajectories: PoseTrajectories) -> PoseTrajectories:
        kept = trajectories.category < columns
        fields = {name: getattr(trajectories, name)[kept] for name in ("poses", "category", "instance", "right")}
        return trajectories._replace(**fields | {"poses": fields["poses"][:, :, :columns]})

    few = [at(trajectories) for trajectories in found.values()]
    assert_texts_fit(pose_trajectories_figure(few, NAMES))
    assert_texts_fit(relative_changes_figure(few[1], NAMES))


@pytest.fixture
def of_poses(monkeypatch):
    """Write figures of poses alone: the networks of these tests take no other images, as other figures need."""
    monkeypatch.setattr("torchcaps.explain.figures.FIGURES", (TRAJECTORIES, BY_ELEVATION, BY_AZIMUTH))


def pose_figures(network: nn.Module, data: StereoData, folder: Path) -> list[str]:
    """The names of the figures that are written."""
    return [path.name for path, _ in write_figures(network, image_samples(data, 3), folder, data)]


@pytest.mark.usefixtures("of_poses")
def test_write_pose_figures(tmp_path, monkeypatch):
    written = pose_figures(Vectors(), CodedToys(), tmp_path / "new")
    assert written == ["trajectories.png", "poses-by-elevation.png", "poses-by-azimuth.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(written)
    monkeypatch.setattr("torchcaps.explain.figures.write", lambda figure, path: path)  # writing takes a second
    assert pose_figures(Turned(), CodedToys(test_elevations=[4]), tmp_path) == written[::2]
    assert pose_figures(Turned(), CodedToys(test_azimuths=[4]), tmp_path) == written[:2]
    own_pictures = replace(image_samples(CodedToys(), 3), labels=None)
    assert not list(write_figures(Turned(), own_pictures, tmp_path, CodedToys()))


# Bad input


@pytest.mark.usefixtures("of_poses")
def test_networks_without_class_capsules(tmp_path):
    def changed(change: Callable[[Prediction], Any]) -> nn.Module:
        return Network(lambda net, images: change(net.turned(images)), turned=Turned())

    plain = changed(lambda out: Prediction(out.scores))
    on_a_grid = changed(lambda out: Prediction(out.scores, Capsules(torch.zeros(len(out.scores), 5, 2, 2, 3))))
    for network in (plain, on_a_grid, changed(lambda out: out.scores)):
        assert not pose_figures(network, CodedToys(), tmp_path)
        with pytest.raises(TypeError, match="one capsule for each class"):
            pose_trajectories(network, CodedToys(), "azimuth")
    few = changed(lambda out: Prediction(out.scores[:, :3], Capsules(out.capsules.poses[:, :3])))
    with pytest.raises(ValueError, match=r"class capsule.* 5 .* 3\b"):
        pose_trajectories(few, CodedToys(), "azimuth")
    lost = changed(lambda out: Prediction(out.scores, Capsules(out.capsules.poses / 0)))
    with pytest.raises(ValueError, match="class capsules have poses that are not finite"):
        pose_trajectories(lost, CodedToys(), "azimuth")


@pytest.mark.usefixtures("of_poses")
def test_nothing_varies(tmp_path):
    data = CodedToys(test_elevations=[4], test_azimuths=[4])
    with pytest.raises(ValueError, match=r"azimuth.*data\.test_azimuths"):
        pose_trajectories(Turned(), data, "azimuth")
    assert not pose_figures(Turned(), data, tmp_path)


def test_bad_arguments():
    with pytest.raises(ValueError, match="varying must be one of 'elevation', 'azimuth', got 'lighting'"):
        pose_trajectories(Turned(), CodedToys(), "lighting")


def test_sets_that_are_not_a_whole_grid():
    class Twice(CodedToys):
        def read(self, train):
            images, metadata = super().read(train)
            return torch.cat([images, images]), Metadata(*(torch.cat([column, column]) for column in metadata))

    expected = r"expected one test image of category 0, instance 1 at azimuth 0, elevation 0, lighting 1, found 2"
    with pytest.raises(ValueError, match=expected):
        pose_trajectories(Turned(), Twice(), "azimuth")
    with pytest.raises(ValueError, match=r"expected one test image of category \d, instance \d at azimuth .* found 0"):
        pose_trajectories(Turned(), CodedToys(kept=slice(100)), "azimuth")
    with pytest.raises(ValueError, match="the test set is empty"):
        pose_trajectories(Turned(), CodedToys(kept=slice(0)), "azimuth")
    with pytest.raises(ValueError, match="expected PoseTrajectories, one for each row of panels, got none"):
        pose_trajectories_figure([])


# The command line

TINY = """
seed_everything: 0
model:
  network: {class_path: torchcaps.models.heinsen_smallnorb, init_args: {parts: 3, channels: 4}}
  loss: {class_path: torch.nn.CrossEntropyLoss}
  classes: 5
data:
  class_path: torchcaps.data.StereoToys
  init_args:
    size: 32
    train_elevations: [0]
    train_azimuths: [0]
    train_lightings: [0]
    test_elevations: [0, 8]
    test_azimuths: [0, 6, 20]
    test_lightings: [3]
trainer: {max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
"""


# Lightning's own imports and deprecations under this torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.slow
def test_explain_stereo_toys(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    Path("tiny.yaml").write_text(TINY)
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path  # writing it takes a second

    monkeypatch.setattr("torchcaps.explain.figures.write", keep)
    assert call("train", "tiny.yaml") == 0
    capfd.readouterr()
    assert call("explain", "tiny.yaml", "--ckpt_path", "last") == 0
    folder = Path("runs/tiny/version_0/figures")
    names = ["dynamics.png", "trajectories.png", "poses-by-elevation.png", "poses-by-azimuth.png", "credit.png"]
    *said, page = capfd.readouterr().out.splitlines()
    assert said == [f"figure: {folder / name}" for name in names]
    assert page == f"page: {folder / 'index.html'}"
    assert "animal, instance 0" in figures[1].axes[0].get_title()
    assert "25 toys" in figures[3].get_suptitle()
    assert len(figures[3].axes) == 12
    assert figures[3].axes[0].lines[0].get_xdata().tolist() == [0, 60, 200]

    single = ["--data.test_elevations=[4]", "--data.test_azimuths=[4]"]
    assert call("explain", "tiny.yaml", "--ckpt_path", "last", *single, "--figures", "still") == 0
    assert not [path for path in Path("still").iterdir() if path.name.startswith(("poses", "trajectories"))]
