"""The largest network, sharded over two processes by FSDP, takes the step of one that is not.

Lightning's FSDP strategies need GPUs. These processes have none, so that PyTorch's `fully_shard` is called directly.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from processes import together
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from torchcaps.models import create_model

STEPS, EACH = 1, 2  # steps, and images of each process in a step. After more steps, rounding decides here.


def largest() -> nn.Module:
    torch.manual_seed(0)
    return create_model("encapnet_v2", classes=200, image_size=128)


@cache
def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(EACH, 3, 128, 128, generator=generator), torch.randint(200, (EACH,), generator=generator)


def loss_of(network: nn.Module, step: int, rank: int) -> Tensor:
    images, labels = batch(step, rank)
    return nn.functional.cross_entropy(network(images).evidence, labels)


def clip(network: nn.Module) -> None:
    """Bound the gradients, which 101 layers make as large as 10^14 at first, with two images in a batch."""
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def alone() -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return the losses of both halves of each batch, and the weights after the last step, of a whole network."""
    network = largest()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            loss = loss_of(network, step, rank)
            (loss / 2).backward()
            losses[rank].append(loss.item())
        clip(network)
        optimizer.step()
    return losses, network.state_dict()


def sharded(rank: int) -> tuple[list[float], int]:
    """Return the losses of this process and the number of parameters that it holds; the first one saves all weights."""
    dist.init_process_group("gloo")
    network = largest()
    for layer in network.layers:
        fully_shard(layer)
    fully_shard(network)
    held = sum(parameter.to_local().numel() for parameter in network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(network, step, rank)
        loss.backward()
        clip(network)
        optimizer.step()
        losses.append(loss.item())
    whole = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, "whole.pt")
    dist.destroy_process_group()
    return losses, held


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # which nothing changes in place
def test_the_largest_network_learns_in_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first, held), (second, rest) = together(sharded, seconds=600)
    whole = torch.load("whole.pt", weights_only=True)
    losses, weights = alone()
    trained = dict(largest().named_parameters())  # as they were before the first step
    count = sum(parameter.numel() for parameter in trained.values())
    assert count == 176_279_264
    assert held + rest == count
    assert abs(held - rest) < count / 100  # each holds half
    assert first == pytest.approx(losses[0], rel=1e-4)
    assert second == pytest.approx(losses[1], rel=1e-4)
    assert whole.keys() == weights.keys()
    moved = max((weights[name] - parameter).abs().max().item() for name, parameter in trained.items())
    apart = max((weights[name] - whole[name]).abs().max().item() for name in trained)
    print(f"apart {apart}, moved {moved}, held {held} and {rest}")
    assert apart < moved / 1000
