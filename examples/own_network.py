"""Capsules on a network of your own, in a plain PyTorch loop: a minute on two cores, 98 % of the 8x8 digits of
scikit-learn.

    python examples/own_network.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from torchcaps import CapsuleHead, DynamicRouting


def main(steps: int = 600) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float().unsqueeze(1)  # inputs in [0, 1]
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)

    features = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()
    )
    head = CapsuleHead(64, classes=10, routing=DynamicRouting())  # any routing; logits for cross-entropy
    network = nn.Sequential(features, head)

    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        batch = torch.tensor(train)[torch.randint(len(train), (64,))]
        loss = F.cross_entropy(network(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    network.eval()
    with torch.inference_mode():
        accuracy = (network(images[test]).argmax(1) == labels[test]).float().mean().item()
        prediction = head.predict(features(images[test]), return_coefficients=True)
    print(f"test accuracy: {accuracy:.3f}")
    print(f"class capsules {tuple(prediction.capsules.poses.shape)}")  # a pose of 16 numbers for each class
    print(f"coefficients {tuple(prediction.capsules.coefficients.shape)}")  # 16 types at 4 x 4 positions, 10 classes
    return accuracy


if __name__ == "__main__":
    main()
