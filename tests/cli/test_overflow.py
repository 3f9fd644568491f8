"""Every command refuses a network whose scores are not finite, in the same line, before it says a number."""

import pytest
import torch
from commands import call, checkpoint
from PIL import Image

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

LINE = "torchcaps: the network gives scores that are NaN or infinite: its weights or its inputs are not finite, or too"


@pytest.fixture
def overflowing(trained, tmp_path) -> str:
    """The checkpoint of a run, whose weights are finite and so large that their products are not."""
    content = torch.load(checkpoint(trained), weights_only=True)
    for name, value in content["state_dict"].items():
        if name.endswith("weight"):
            value.fill_(1e38)
    path = tmp_path / "large.ckpt"
    torch.save(content, path)
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["test"],
        ["evaluate", "--protocols", "affine", "--images", "20"],
        ["explain", "--samples", "20"],
        ["explain", "--image", "white.png"],
        ["predict", "white.png"],
        ["export", "--to", "torch"],
    ],
    ids=" ".join,
)
def test_scores_that_overflow_are_refused(overflowing, capfd, arguments):
    capfd.readouterr()
    command, *rest = arguments
    assert call(command, overflowing, *rest) == 2
    captured = capfd.readouterr()
    assert captured.err.strip().splitlines()[-1].startswith(LINE)
    assert "accuracy" not in captured.out
