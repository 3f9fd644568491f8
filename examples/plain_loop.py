"""A head of capsules in a plain PyTorch loop, on the 8x8 digits of scikit-learn: half a minute on two cores.

    python examples/plain_loop.py

Layers of capsules are modules like any other, and stand among them.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from torchcaps import CapsuleLinear, DynamicRouting, MarginLoss, PrimaryCapsules


class Network(nn.Module):
    """Two convolutions, and capsules in place of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
        self.primary = PrimaryCapsules(64, out_capsules=8, out_pose=8)  # 8 types at each of 4 x 4 positions
        self.head = CapsuleLinear(8 * 4 * 4, 10, in_pose=8, out_pose=16, routing=DynamicRouting(iterations=3))

    def forward(self, images: Tensor) -> Tensor:
        digits = self.head(self.primary(self.features(images)))  # digits.poses: (batch, 10, 16)
        return digits.activations  # the length of each pose, (batch, 10): how present the digit is


def main(epochs: int = 15) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)

    network, loss = Network(), MarginLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    for epoch in range(epochs):
        for batch in torch.tensor(train)[torch.randperm(len(train))].split(32):
            optimizer.zero_grad()
            error = loss(network(images[batch]), labels[batch])
            error.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {error.item():.4f}")

    with torch.inference_mode():
        accuracy = (network(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"test accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
