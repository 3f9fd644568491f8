"""Launches of a pass on a CUDA device: a pass that Python starts takes as long as they do. No device is needed."""

import os

import pytest
import torch
from algorithms import make

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from launches import Launches, of_head, of_iteration, of_layer

# Most launches of an iteration, forward and backward; docs/performance.md has the goals.
ITERATION = {
    "dynamic": 10,
    "inverted_attention": 12,
    "vector_norm": 12,
    "self_routing": 27,  # all of the layer: it does not iterate
    "em": 11,
    "heinsen": 19,
    "variational_bayes": 10,
}
HEAD = 90  # of a whole pass with its loss


@pytest.mark.parametrize(("name", "most"), ITERATION.items())
def test_launches_of_an_iteration(name, most):
    counts = of_iteration(name)
    assert sum(counts.values()) <= most, counts


def test_launches_of_a_head():
    found = of_head()
    assert found.total <= HEAD, found.counts
    assert not found.waits


@pytest.mark.parametrize("name", ITERATION)
def test_the_host_does_not_wait(name):
    """It looks at a layer in its first passes alone."""
    assert not of_layer(make(name)).waits


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0]])
def test_waiting_is_seen(wait):
    with Launches() as launches:
        wait(torch.ones(2))
    assert launches.waits


def test_what_is_counted():
    with Launches() as launches:
        x = torch.empty(2, 3)
        x.t().flatten()  # a copy
        x.view(6).add_(1)
    assert launches.counts == {"clone": 1, "add_": 1}
