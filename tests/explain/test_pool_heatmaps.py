"""Heatmaps show where a routing pool looks."""

import pytest
import torch
from networks import Network
from PIL import Image
from torch import nn

from torchcaps import RoutingPool2d, create_model
from torchcaps.data import MNIST
from torchcaps.explain import heatmaps, heatmaps_figure, write_figures
from torchcaps.explain.page import picture_samples, samples_of


def network(pool: RoutingPool2d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 2, stride=2), nn.BatchNorm2d(4), nn.Dropout(0.5), pool, nn.Flatten()
    return nn.Sequential(*layers)


def test_shares_of_the_whole_map_relative_to_the_average():
    model = network(RoutingPool2d(2, 6.0)).eval()
    images = torch.rand(3, 1, 8, 12)
    maps = heatmaps(model, images)
    assert maps.shape == (3, 2, 8, 12)
    _, coefficients = model[3](model[:3](images), return_coefficients=True)
    # Bilinear: the image's pixels 2k and 2k + 1 are a quarter of a map's pixel from the center of the map's pixel k.
    inner = 0.25 * coefficients[:, :, 0, 1] + 0.75 * coefficients[:, :, 0, 2]
    torch.testing.assert_close(maps[:, :, 0, 4], 24 * inner.detach())
    torch.testing.assert_close(maps[:, :, 0, 0], 24 * coefficients[:, :, 0, 0].detach())
    torch.testing.assert_close(heatmaps(network(RoutingPool2d(2, 0.0)), images), torch.ones(3, 2, 8, 12))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 1, 1), (3, 2, 1), (2, 1, 0)])
def test_shares_of_windows(kernel, stride, padding):
    x = torch.rand(2, 4, 6, 6)
    window = {"kernel_size": kernel, "stride": stride, "padding": padding}
    uniform = heatmaps(nn.Sequential(RoutingPool2d(2, 0.0, **window)), x)
    torch.testing.assert_close(uniform, torch.ones(2, 2, 6, 6))
    pool = RoutingPool2d(2, 5.0, **window)
    maps = heatmaps(nn.Sequential(pool), x)
    _, coefficients = pool(x, return_coefficients=True)
    found, average = torch.zeros(2, 2, 6, 6), torch.zeros(6, 6)
    for row in range(coefficients.shape[2]):
        for column in range(coefficients.shape[3]):
            places = [
                (y, z)
                for y in range(row * stride - padding, row * stride - padding + kernel)
                for z in range(column * stride - padding, column * stride - padding + kernel)
                if 0 <= y < 6 and 0 <= z < 6
            ]
            for y, z in places:
                down, right = y - row * stride + padding, z - column * stride + padding
                found[:, :, y, z] += coefficients[:, :, row, column, down, right]
                average[y, z] += 1 / len(places)
    torch.testing.assert_close(maps, found / average)


def test_compiled_networks_and_what_is_left_behind():
    model, images = network(RoutingPool2d(2, 6.0)).eval(), torch.rand(2, 1, 4, 4)
    expected = heatmaps(model, images)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images)
    torch.testing.assert_close(heatmaps(compiled, images), expected)
    model.train()[1].eval()
    with pytest.raises(ValueError, match=r"of a batch of shape \(2, 3, 4, 4\) it says: .*channels"):
        heatmaps(model, torch.rand(2, 3, 4, 4))
    assert [module.training for module in model[:3]] == [True, False, True]
    assert not model[3]._forward_hooks


def test_the_last_run_of_a_pool_counts():
    x = torch.rand(1, 4, 3, 3)
    twice = Network(lambda net, x: (net.pool(x), net.pool(x=x.flip(3))), pool=RoutingPool2d(2, 6.0))
    torch.testing.assert_close(heatmaps(twice, x), heatmaps(nn.Sequential(RoutingPool2d(2, 6.0)), x.flip(3)))


def test_which_pool():
    model = nn.Sequential(RoutingPool2d(2, 9.0, kernel_size=2), RoutingPool2d(2, 5.0))
    x = torch.rand(1, 2, 4, 4)
    _, coefficients = model[1](model[0](x), return_coefficients=True)
    expected = nn.functional.interpolate(4 * coefficients, (4, 4), mode="bilinear")
    torch.testing.assert_close(heatmaps(model, x), expected)
    assert (heatmaps(model, x, name="0") - 1).abs().max() > 0.01
    with pytest.raises(ValueError, match="no RoutingPool2d named '2'; there are 0, 1"):
        heatmaps(model, x, name="2")
    with pytest.raises(ValueError, match="Linear .*RoutingPool2d"):
        heatmaps(nn.Linear(1, 1), x)
    with pytest.raises(ValueError, match=r"Network did not run its RoutingPool2d on these images"):
        heatmaps(Network(lambda net, x: x, pool=RoutingPool2d(1)), x)


def test_figures():
    model, images = network(RoutingPool2d(2, 6.0)), torch.rand(3, 1, 8, 8)
    figure_of_many = heatmaps_figure(model, images, ["a", "b", "c"])
    maps = heatmaps(model, images).mean(1)
    for index in range(3):
        assert figure_of_many.axes[index].get_title() == "abc"[index]
        shown = torch.from_numpy(figure_of_many.axes[3 + index].images[0].get_array().data)
        torch.testing.assert_close(shown, maps[index])
    for index in range(3):
        assert figure_of_many.axes[3 + index].images[0].get_clim() == pytest.approx(
            (float(maps.min()), float(maps.max()))
        )
    figure_of_one = heatmaps_figure(model, images[:1])
    assert [axis.get_title() for axis in figure_of_one.axes[1:4]] == ["all groups", "group 0", "group 1"]
    of_one_group = heatmaps_figure(nn.Sequential(RoutingPool2d(1, 2.0)), torch.rand(1, 1, 4, 4))
    assert len(of_one_group.axes) == 2 + 1  # the image and its only map, and the color bar


def test_write_figures_of_a_network_with_a_pool(tmp_path, monkeypatch):
    monkeypatch.setattr("torchcaps.explain.figures.write", lambda figure, path: path)  # writing takes a second
    model, images = create_model("pooling_cnn", in_channels=1, channels=4, features=2), torch.rand(4, 1, 20, 20)
    samples = samples_of(images, torch.tensor([1, 1, 0, 2]), ["a", "b", "c"], list("1234"))
    written = [path.name for path, _ in write_figures(model, samples, tmp_path)]
    assert written == ["heatmaps.png", "heatmaps-of-groups.png", "credit.png"]
    own_pictures, drawn = samples_of(images, None, ["a", "b", "c"], list("1234")), []
    monkeypatch.setattr("torchcaps.explain.pool_heatmaps.heatmaps_figure", lambda *arguments: drawn.append(arguments))
    assert [path.name for path, _ in write_figures(model, own_pictures, tmp_path)] == ["heatmaps-of-pictures.png"]
    ((_, shown, titles),) = drawn
    assert shown.equal(images)
    assert titles == list("1234")


def test_own_pictures_are_what_the_network_sees(tmp_path):
    Image.fromarray((torch.rand(8, 24) * 255).byte().numpy()).save(tmp_path / "wide.png")
    data = MNIST()
    (image,) = picture_samples(data, [tmp_path / "wide.png"]).inputs
    assert image.equal(data.center(data.picture(tmp_path / "wide.png").unsqueeze(0)))
