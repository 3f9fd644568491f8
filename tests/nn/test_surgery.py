"""replace_pooling: the pool is replaced, everything else stays, and errors. up_to: the part computes what the layer
does in the network."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torchcaps import RoutingPool2d, replace_pooling
from torchcaps.nn.surgery import up_to


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.avgpool(self.stem(x)).flatten(1))


def test_replaces_the_pool_and_nothing_else():
    net, x = Net(), torch.randn(2, 3, 8, 8)
    before, weights = net(x), {name: p.clone() for name, p in net.state_dict().items()}
    pool = RoutingPool2d(4, 0.0)
    assert replace_pooling(net, pool) is net
    assert net.avgpool is pool
    assert_close(net.state_dict(), weights)
    assert_close(net(x), before)
    pool.routing.sharpness = 5.0
    assert not torch.allclose(net(x), before)
    with pytest.raises(ValueError, match="no nn.AdaptiveAvgPool2d to size 1: give the name"):
        replace_pooling(net, pool)
    assert replace_pooling(net, RoutingPool2d(2), name="avgpool").avgpool.features == 2


def test_what_compiled_the_old_pool_is_replaced_with_it():
    net, x = Net(), torch.randn(2, 3, 8, 8)
    net.avgpool = torch.compile(net.avgpool, backend="eager")
    with torch.no_grad():
        before = net(x)
        replace_pooling(net, RoutingPool2d(4, 50.0))
        assert isinstance(net.avgpool, RoutingPool2d)
        assert not torch.allclose(net(x), before)


def test_the_new_pool_is_as_the_network_is():
    net = Net().eval().to(torch.bfloat16)
    replace_pooling(net, RoutingPool2d(4, 2.0, learn_sharpness=True))
    assert not net.avgpool.training
    assert not net.avgpool.routing.training
    assert next(net.avgpool.parameters()).dtype == torch.bfloat16
    assert replace_pooling(nn.Sequential(nn.AdaptiveAvgPool2d(1)), RoutingPool2d(4))[0].training


@pytest.mark.parametrize("size", [2, (1, None), (None, 1), (1, 2)])
def test_other_adaptive_pools_are_no_global_ones(size):
    with pytest.raises(ValueError, match="no nn.AdaptiveAvgPool2d to size 1"):
        replace_pooling(nn.Sequential(nn.AdaptiveAvgPool2d(size)), RoutingPool2d(4))


def test_replaces_a_pool_that_is_in_two_places_in_both():
    net = Net()
    net.stem.add_module("again", net.avgpool)
    replace_pooling(net, RoutingPool2d(4))
    assert net.stem.again is net.avgpool
    assert isinstance(net.avgpool, RoutingPool2d)


def test_several_pools_must_be_told_apart():
    net = Net()
    net.stem.append(nn.AdaptiveAvgPool2d(4))  # not to size 1
    net.squeeze = nn.AdaptiveAvgPool2d(1)
    with pytest.raises(ValueError, match="Net has several pools, avgpool, squeeze: choose one"):
        replace_pooling(net, RoutingPool2d(4))
    replace_pooling(net, RoutingPool2d(4), name="squeeze")
    assert isinstance(net.squeeze, RoutingPool2d)
    assert isinstance(net.avgpool, nn.AdaptiveAvgPool2d)
    with pytest.raises(ValueError, match="has no module 'pool'; it has stem, "):
        replace_pooling(net, RoutingPool2d(4), name="pool")
    with pytest.raises(ValueError, match="is the pool itself"):
        replace_pooling(nn.AdaptiveAvgPool2d(1), RoutingPool2d(4))
    with pytest.raises(ValueError, match="is the pool itself"):
        replace_pooling(net, RoutingPool2d(4), name="")


class Optional(Net):
    """A network whose forward looks at its arguments."""

    def forward(self, x=None, mask=None, scale=50, *, kind="a", plain=False, offset=0.5):
        x = (x - 100) / scale if mask is None else x
        return super().forward(2 * x + offset if kind == "a" and not plain else x)


@pytest.mark.parametrize("way", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_arguments_with_a_default_have_it_in_the_part(way):
    net, x = Optional(), torch.randn(2, 3, 8, 8)
    expected = net.stem(2 * (x - 100) / 50 + 0.5)
    for layer in ("stem", "stem.1"):
        assert_close(way(up_to(net, layer))(x), expected)


def test_modules_keep_their_modes():
    net = Net()
    net.stem[1].eval()
    part = up_to(net, "stem.1")
    assert {name: module.training for name, module in part.named_modules()} == {
        "": True,
        "stem": True,
        "stem.0": True,
        "stem.1": False,
    }
    assert not any(module.training for module in up_to(net.eval(), "stem.1").modules())
