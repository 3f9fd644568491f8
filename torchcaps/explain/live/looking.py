"""What a trained network makes of one input: scores, shares and reconstructions, as HTML for the page."""

from collections.abc import Sequence
from functools import cached_property
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from torchcaps.capsules import Prediction
from torchcaps.deploy import Trained
from torchcaps.deploy.trained import probabilities_of
from torchcaps.explain.credit import NoCapsules, credit
from torchcaps.explain.live.markup import bars, figures, heated, note, picture, shaded
from torchcaps.explain.pixels import Places, heat_of, places
from torchcaps.explain.words import LoadedEncoder, word_shares, words_of
from torchcaps.models import EmbeddingCapsNet
from torchcaps.models.reconstructing import ReconstructingCapsNet
from torchcaps.utils.arguments import FloatTensor, checked

LIMIT = (
    "Shares say from where the capsules of a class got their votes in this one pass. They do not say that the answer "
    "would be another without these parts."
)


class Looking:
    """A trained network that is looked into, by one thread at a time.

    Args:
        trained: the network.
    """

    @checked
    def __init__(self, trained: Trained) -> None:
        self.trained, self.network = trained, trained.network
        self.lock = RLock()  # Gradio handles events in several threads

    @property
    def likeliest(self) -> int:
        """Number of classes that one input has."""
        labels = self.trained.values.get("model", {}).get("labels_per_image", 1)
        return labels if isinstance(labels, int) else 1

    @cached_property
    def seen(self) -> dict[str, Places]:
        """Which pixels the capsules see, by layers that have them on a grid."""
        return places(self.network, self.trained.data.shape)  # type: ignore[attr-defined]

    @property
    def pose_features(self) -> int:
        """Number of entries of a pose that the network draws from; 0 without a decoder."""
        network = self.network
        if isinstance(network, ReconstructingCapsNet) and network.decoder is not None:
            return network.decoder.features
        return 0

    @checked
    def classes(self, scores: FloatTensor, chosen: int) -> list[int]:
        """Return the class that was chosen to look at, or with -1 the likeliest ones."""
        return scores.argsort(descending=True)[: self.likeliest].tolist() if chosen < 0 else [chosen]

    @checked
    def scores(self, prediction: Prediction) -> str:
        """Return bars of the scores of one input."""
        scores = prediction.evidence[0].detach().float().cpu()
        if self.trained.temperature is None and prediction.activations is not None:
            said, values = "How present each class is: the activation of its capsule", scores
        else:
            said = "Probability of each class"
            values = probabilities_of(scores, self.trained.temperature or 1.0)
        return bars(self.trained.names, values, said, self.likeliest)

    @checked
    def image(self, image: FloatTensor, chosen: int, changes: Sequence[float]) -> tuple[str, str, str]:
        """Return scores, maps of shares and reconstructions of an image `(1, channels, height, width)`.

        Args:
            image: the image.
            chosen: class whose shares and pose are shown; -1 for the likeliest.
            changes: what is added to the pose's entries; none for zeros.
        """
        with self.lock:
            try:
                found = credit(self.network, image.to(self._like))
            except NoCapsules:
                with torch.no_grad():
                    return self.scores(self._predicted(image)), note("This network has no capsules."), ""
            prediction = found.prediction
            maps = heat_of(found, self.seen, (image.shape[2], image.shape[3]))
            classes = self.classes(prediction.evidence[0], chosen)
            shown = []
            for label in classes:
                name = self.trained.names[label]
                for layer, heat in maps.items():
                    peak = float(heat[0, label].max())
                    said = f"Layer {layer}: shares in {name}, at the lightest place {peak:.1f} times an even one."
                    alt = f"heat map of the shares of layer {layer} in class {name}"
                    shown.append((picture(heated(image[0], heat[0, label], peak)), alt, said))
            said = figures(shown) + note(LIMIT) if shown else note("The capsules of this network are not on a grid.")
            return self.scores(prediction), said, self._drawn(prediction, classes, changes)

    @checked
    def drawn(self, image: FloatTensor, chosen: int, changes: Sequence[float]) -> str:
        """Return the reconstructions of an image; see `image`."""
        if not self.pose_features:
            return ""
        with self.lock, torch.no_grad():
            prediction = self._predicted(image)
            return self._drawn(prediction, self.classes(prediction.evidence[0], chosen), changes)

    @torch.no_grad()
    def _drawn(self, prediction: Prediction, classes: list[int], changes: Sequence[float]) -> str:
        if not self.pose_features:
            return ""
        capsules: Any = prediction.capsules
        shown = []
        for label in classes:
            name, labels = self.trained.names[label], torch.tensor([label], device=capsules.poses.device)
            first = self.network.reconstruct(capsules, labels)  # type: ignore[operator]
            shown.append((picture(first[0]), f"reconstruction from the capsule of class {name}", f"from {name}"))
            if any(changes):
                poses = capsules.poses.clone()
                poses[:, label] += torch.tensor(changes).to(poses).view(poses.shape[2:])
                changed = self.network.reconstruct(capsules._replace(poses=poses), labels)  # type: ignore[operator]
                alt = f"reconstruction from the capsule of class {name} with a changed pose"
                shown.append((picture(changed[0]), alt, f"from {name}, pose changed"))
        return figures(shown)

    def _predicted(self, inputs: Tensor | tuple[Tensor, ...]) -> Prediction:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        output = self.network(*(tensor.to(self._like) for tensor in given))
        return output if isinstance(output, Prediction) else Prediction(output)

    @property
    def _like(self) -> Tensor:
        return next(self.network.parameters(), torch.empty(0))


class Reading(Looking):
    """A trained network of texts that is looked into.

    Args:
        trained: the network; its encoder is loaded for the first text.
    """

    @checked
    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.encoder = LoadedEncoder.of(trained.data)  # type: ignore[arg-type]

    @checked
    def text(self, text: str, chosen: int) -> tuple[str, str]:
        """Return scores, and the words shaded by their shares in a class; see `image` for the class."""
        with self.lock:
            inputs = self.encoder.states(text)
            words = words_of(self.encoder, text)
            if not isinstance(self.network, EmbeddingCapsNet):
                with torch.no_grad():
                    return self.scores(self._predicted(inputs)), note("This network has no capsules for words.")
            found = credit(self.network, tuple(tensor.to(self._like) for tensor in inputs))
            (label, *_) = self.classes(found.prediction.evidence[0], chosen)
            first = found.layers[0]
            shares, even = (word_shares(words, x, self.network.layers)[0, label] for x in (first.shares, first.even))
            times = shares / even.clamp_min(1e-12)
            rest = max(0.0, 1 - float(shares.sum()))
            said = (
                f"Shares of the words in class {self.trained.names[label]}, at most "
                f"{float(times.max()):.1f} times an even one. {100 * rest:.0f} % belong to tokens of no "
                "word, such as those at the beginning and the end."
            )
            return self.scores(found.prediction), shaded(text, words, times) + note(said) + note(LIMIT)
