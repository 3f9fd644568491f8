"""A routing pool in place of the average pool of an existing network, which then trains a little more.

    python examples/routing_pool.py

With torchvision or timm installed, the network is their ResNet-18 with weights from ImageNet, which they download.
Otherwise it is a ResNet-20 of torchcaps, trained here first, which is what the tests run. Digits show how the pool is
replaced, not that it is better.
"""

import importlib.util

import torch
from torch import Tensor, nn

from torchcaps import RoutingPool2d, create_model, replace_pooling
from torchcaps.data import Digits


def existing_network() -> nn.Module:  # which ends in an average pool and a linear layer for ten classes
    if importlib.util.find_spec("torchvision"):
        network = importlib.import_module("torchvision.models").resnet18(weights="DEFAULT")
    elif importlib.util.find_spec("timm"):
        network = importlib.import_module("timm").create_model("resnet18", pretrained=True)
    else:
        return create_model("pooling_resnet", pooling="average")  # ResNet-20
    network.fc = nn.Linear(512, 10)
    return network


def scores(network: nn.Module, images: Tensor) -> Tensor:
    side = 128 if hasattr(network, "fc") else 16  # maps of 4x4: a ResNet-18 has a stride of 32
    output = network(nn.functional.interpolate(images, size=(side, side)).expand(-1, 3, -1, -1))
    return getattr(output, "scores", output)  # networks of torchcaps return a Prediction


def train(network: nn.Module, data: Digits, epochs: int) -> float:  # returns the test accuracy
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    network.train()
    for _ in range(epochs):
        for images, labels in data.train_dataloader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores(network, images), labels).backward()
            optimizer.step()
    with torch.inference_mode():
        right = [scores(network.eval(), x).argmax(1) == y for x, y in data.test_dataloader()]
    return torch.cat(right).float().mean().item()


def main(epochs: int = 4) -> float:
    torch.manual_seed(0)
    data, network = Digits(batch_size=64), existing_network()
    data.setup()
    print(f"average pool: test accuracy {train(network, data, epochs):.3f}")
    replace_pooling(network, RoutingPool2d(features=16, sharpness=5.0))  # the weights stay
    print(f"routing pool, before any training: {train(network, data, 0):.3f}")
    print(f"routing pool, trained for {epochs} epochs: {(accuracy := train(network, data, epochs)):.3f}")
    return accuracy


if __name__ == "__main__":
    main()
