"""Vectors of a CapsuleHead for retrieval, and how well its probabilities tell digits of unknown classes.

    python benchmarks/retrieval.py [--seeds 0 1 2] [--steps 300]

The 8x8 digits of scikit-learn, a CapsuleHead behind two convolutions, and the same convolutions with average pooling.
First with all classes: 1437 digits train, 360 are queries and answers. Then without the digits 7, 8 and 9: the queries
and answers are all digits of these three classes. Printed is the share of the 10 nearest answers, by cosine, that have
the query's class; and the area under the ROC curve of the highest probability, which should be higher for known digits
than for unknown ones.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from torchcaps import CapsuleHead


def train(head: nn.Module, images: Tensor, labels: Tensor, steps: int) -> tuple[nn.Module, nn.Module]:
    first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
    features = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
    optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = cross_entropy(head(features(images[batch])), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return features.eval(), head.eval()


def precision(vectors: Tensor, labels: Tensor) -> float:
    likeness = normalize(vectors, dim=1) @ normalize(vectors, dim=1).T
    nearest = likeness.fill_diagonal_(-2).topk(10).indices
    return (labels[nearest] == labels[:, None]).float().mean().item()


@torch.no_grad()
def show_precisions(features: nn.Module, head: CapsuleHead, images: Tensor, labels: Tensor) -> None:
    maps = features(images)
    prediction = head.predict(maps)
    poses, likeliest = prediction.capsules.poses, prediction.scores.argmax(1)
    mask = one_hot(likeliest, head.classes).unsqueeze(-1)
    vectors = {
        "poses of all classes": poses.flatten(1),
        "the same, zeros but for the likeliest": (poses * mask).flatten(1),
        "pose of the likeliest class alone": (poses * mask).sum(1),
        "logits": prediction.scores,
        "features, averaged": maps.mean((2, 3)),
    }
    for name, vector in vectors.items():
        print(f"  {name}: {precision(vector, labels):.3f}")


@torch.no_grad()
def show_unknown(name: str, network: nn.Module, known: Tensor, labels: Tensor, unknown: Tensor) -> None:
    (surest, answers), (surest_unknown, _) = (network(images).softmax(1).max(1) for images in (known, unknown))
    is_known = [1] * len(known) + [0] * len(unknown)
    area = roc_auc_score(is_known, torch.cat([surest, surest_unknown]))
    accuracy = (answers == labels).float().mean().item()
    print(f"  {name}: area under the ROC curve {area:.3f}, accuracy of known digits {accuracy:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().view(-1, 1, 8, 8) / 16
    for seed in options.seeds:
        torch.manual_seed(seed)
        fit, held = torch.randperm(1797).split([1437, 360])
        print(f"seed {seed}, all classes are known")
        parts = train(CapsuleHead(64, classes=10), images[fit], labels[fit], options.steps)
        show_precisions(*parts, images[held], labels[held])

        print(f"seed {seed}, 7, 8 and 9 are unknown")
        fit, held, unknown = fit[labels[fit] < 7], held[labels[held] < 7], labels >= 7
        parts = train(CapsuleHead(64, classes=7), images[fit], labels[fit], options.steps)
        show_precisions(*parts, images[unknown], labels[unknown])
        show_unknown("CapsuleHead", nn.Sequential(*parts), images[held], labels[held], images[unknown])
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 7))
        parts = train(pool, images[fit], labels[fit], options.steps)
        show_unknown("average pooling", nn.Sequential(*parts), images[held], labels[held], images[unknown])


if __name__ == "__main__":
    main()
