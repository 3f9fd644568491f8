"""A routing of your own: one class with one method, which works in every layer of the library.

    python examples/own_routing.py

docs/own-routing.md says what else a routing may define.
"""

import torch
from torch import Tensor

from torchcaps import Capsules, MarginLoss, squash
from torchcaps.data import Digits
from torchcaps.models import CapsNet
from torchcaps.ops import Dot, WeightedVotes
from torchcaps.routing import Routing
from torchcaps.testing import assert_routing_laws


class MomentumRouting(Routing):
    """Votes agree with a moving average of the parents, in which earlier parents have the share `memory`."""

    # Of the first vote weights, proposed by torchcaps.testing.propose_gain(MomentumRouting()).
    gain, shared_variance = 2.0, 0.98

    def __init__(self, iterations: int = 3, memory: float = 0.5):
        super().__init__(iterations)
        self.memory = memory

    def agreement(self, average: Tensor) -> Dot:
        return Dot(average)  # the logits are V_ij . average_j

    def step(self, votes: WeightedVotes, average: Tensor | None, t: int) -> tuple[Capsules, Tensor]:
        parents = squash(votes.weighted_sum())  # sum_i c_ij V_ij, with c the softmax of the logits
        earlier = parents if average is None else average
        return votes.capsules(parents), self.memory * earlier + (1 - self.memory) * parents


def main(epochs: int = 8) -> float:
    torch.manual_seed(0)
    routing = MomentumRouting(iterations=3)
    assert_routing_laws(routing)  # coefficients sum to one, order and padding change nothing, ...

    data = Digits(batch_size=32)
    data.setup()
    sizes = {"channels": 64, "kernel_size": 3, "primary_kernel_size": 3, "primary_stride": 1, "primary_types": 8}
    network = CapsNet(in_channels=1, image_size=8, classes=10, routing=routing, decoder=None, **sizes)
    loss = MarginLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    for epoch in range(epochs):
        for images, labels in data.train_dataloader():
            optimizer.zero_grad()
            error = loss(network(images).activations, labels)
            error.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {error.item():.4f}")

    with torch.inference_mode():
        right = [network(x).activations.argmax(1) == y for x, y in data.test_dataloader()]
    accuracy = torch.cat(right).float().mean().item()
    print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
