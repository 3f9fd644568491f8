"""The study of poses, `benchmarks/equivariance.py`: its measures, and each row on noise."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from torchcaps.data import turned_pairs

PATH = Path(__file__).parents[2] / "benchmarks" / "equivariance.py"
spec = importlib.util.spec_from_file_location("equivariance", PATH)
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_rotation_is_read_off_poses_that_turn(rows):
    rotations = torch.linalg.qr(torch.randn(5, rows, rows))[0]
    rotations[:, 0] *= torch.linalg.det(rotations).unsqueeze(1)  # rotations, no reflections
    poses = torch.randn(5, 4, rows, rows)
    turned = (poses @ rotations.unsqueeze(1)).flatten(2)
    assert_close(study.turn_of(poses.flatten(2), turned), rotations, atol=1e-4, rtol=0)
    if rows == 3:
        flat = poses * torch.tensor([1.0, 1.0, 0.0])  # all directions in a plane: still one rotation
        turned = (flat @ rotations.unsqueeze(1)).flatten(2)
        assert_close(study.turn_of(flat.flatten(2), turned), rotations, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [2, 3])
def test_angles(rows):
    turn = torch.eye(rows)
    turn[0, 0] = turn[1, 1] = math.cos(0.5)
    turn[0, 1], turn[1, 0] = math.sin(0.5), -math.sin(0.5)
    assert_close(study.angles(turn[None], torch.eye(rows)[None]), torch.rad2deg(torch.tensor([0.5])))
    assert_close(study.angles(turn[None], turn.T[None]), torch.rad2deg(torch.tensor([1.0])))


def test_numbers_of_a_layer_become_capsules():
    numbers = torch.randn(3, study.CAPSULES * 5)
    capsules = study.AsCapsules()(numbers)
    assert_close(capsules.activations, numbers[:, : study.CAPSULES].softmax(1))
    assert_close(capsules.poses.flatten(1), numbers[:, study.CAPSULES :])


@pytest.mark.parametrize("row", study.ROWS)
def test_each_row_on_noise(row, monkeypatch):
    monkeypatch.setattr(study, "PROBE_STEPS", 5)
    torch.manual_seed(0)
    images, labels = (255 * torch.rand(300, 1, 28, 28)).byte(), torch.arange(300) % 3
    part = study.Part(images, labels, lambda indices, random: turned_pairs(images[indices] / 255, 90, random))
    network = study.trained(row, part, steps=2, rate=0.01, seed=0)
    numbers = study.measured(network, [part, part], 0, (300, 200))
    assert all(map(math.isfinite, numbers.values()))
    assert ("without probe" in numbers) == (row != "supervised")
