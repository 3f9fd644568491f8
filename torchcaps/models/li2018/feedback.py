"""Feedback agreement, a regularizer: a generator must be able to rebuild a lower layer from a higher one.

Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018), section 3.2 and appendix B.

This file attaches the regularizer to any two layers of a network by forward hooks. The loss of one pair of layers is in
`agreement_unit.py`.
"""

import contextlib
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.li2018.agreement_unit import AgreementUnit, Divergence, MapShape
from torchcaps.models.li2018.encapsulated import as_map
from torchcaps.models.li2018.transport import Cost
from torchcaps.nn.modes import evaluating
from torchcaps.ops import at_least_float32
from torchcaps.utils.arguments import Count, NotNegative, Positive, checked, is_row, shown
from torchcaps.utils.checks import one_line


class FeedbackAgreement(nn.Module):
    """Run a network and, in training, measure how well lower layers can be rebuilt from higher ones.

        feedback = FeedbackAgreement(model, pairs=[("features.4", "features.7")])
        optimizer = torch.optim.Adam([*model.parameters(), *feedback.parameters()])
        prediction, divergence = feedback(images)
        loss = criterion(prediction, labels) + divergence

    The network is not changed and is not a submodule: the parameters and the state of this module are those of its
    units alone. Hooks watch the network only while this module runs it in training. Move, save and switch to evaluation
    both the network and this module.

    A layer of a pair may return

    - a map `(batch, channels, height, width)`;
    - features `(batch, features)`, seen as a map of one position;
    - capsules, with or without a grid, whose poses are compared;
    - a Prediction with capsules.

    If a layer runs several times, its last output counts. If the network changes that output in place afterwards, the
    changed output counts. A network returned by `torch.compile` runs uncompiled in training; a network compiled in
    place by `model.compile()` runs compiled.

    Args:
        model: any network of images.
        pairs: pairs of names, a lower and a higher layer each, as in `model.named_modules()`.
        image_shape: shape `(channels, height, width)` of the image on which the network runs once, in evaluation, to
            find the layers' shapes.
        weight: weight of the divergence in the loss, the paper's lambda.
        divergence, cost, eps, iterations, debias, plan_gradient, critic, capsule_generator: options of each pair's
            :class:`AgreementUnit`.

    Shape:
        - Input: the input of the network.
        - Output: the output of the network, and the weight times the sum of the pairs' divergences, a scalar; in
          evaluation the scalar is zero.

    Raises:
        TypeError: if a layer returns something else; the message names it.
        ValueError: if a layer does not exist or did not run, or cannot be generated from the other layer of its pair;
            or if the network does not run on an image of `image_shape`.

    Reference:
        Li et al. 2018, section 3.2: two pairs per module gave 4.55 % of errors on CIFAR-10, one 4.58 %, none 5.82 %.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        pairs: Iterable[Sequence[str]],
        image_shape: tuple[Count, Count, Count] = (3, 32, 32),
        weight: NotNegative = 10.0,
        divergence: Divergence = "sinkhorn",
        cost: Cost = "cosine",
        eps: Positive = 1.0,
        iterations: Count = 10,
        debias: bool = True,
        plan_gradient: bool = False,
        critic: bool = True,
        capsule_generator: bool = True,
    ):
        super().__init__()
        self.pairs, self.weight = _check_pairs(pairs, model), weight
        self._model = (model,)  # the tuple keeps it from becoming a submodule
        options = divergence, cost, eps, iterations, debias, plan_gradient, critic, capsule_generator
        shapes = self._shapes(image_shape)
        self.units = nn.ModuleList()
        for lower, higher in self.pairs:
            try:
                self.units.append(AgreementUnit(shapes[lower], shapes[higher], *options))
            except ValueError as error:
                raise ValueError(f"layers {lower!r} and {higher!r}: {error}") from error
        parameter = _parameter(model)
        if parameter is not None:
            self.to(parameter)

    def forward(self, *inputs: Any) -> tuple[Any, Tensor]:
        if not self.training:
            return self._model[0](*inputs), at_least_float32(next(self.parameters()).new_zeros(()))
        prediction, maps = self._watch(*inputs)
        divergences = [
            unit(maps[lower][0], maps[higher][0]) for unit, (lower, higher) in zip(self.units, self.pairs, strict=True)
        ]
        return prediction, self.weight * torch.stack(divergences).sum()

    def _shapes(self, image_shape: tuple[int, int, int]) -> dict[str, MapShape]:
        parameter = _parameter(self._model[0])
        zeros = torch.zeros(2, *image_shape) if parameter is None else parameter.new_zeros(2, *image_shape)
        with torch.no_grad(), evaluating(self._model[0]):
            try:
                _, outputs = self._run(zeros)
            except Exception as error:  # a network may raise any
                raise ValueError(
                    f"{type(self._model[0]).__name__} does not run on images of image_shape={tuple(image_shape)} "
                    f"({one_line(error)}): set image_shape to the (channels, height, width) that it takes"
                ) from error
            maps = self._maps(outputs)
        return {name: MapShape(x.shape[1], x.shape[2], x.shape[3], types) for name, (x, types) in maps.items()}

    def _watch(self, *inputs: Any) -> tuple[Any, dict[str, tuple[Tensor, int | None]]]:
        """Run the network; return its output, and the outputs of the pairs' layers by name as `_as_map` gives them."""
        prediction, outputs = self._run(*inputs)
        return prediction, self._maps(outputs)

    def _run(self, *inputs: Any) -> tuple[Any, dict[str, Any]]:
        """Run the network; return its output, and by name the outputs of those layers of the pairs that ran."""
        (model,) = self._model
        layers = dict(model.named_modules(remove_duplicate=False))
        outputs: dict[str, Any] = {}
        with contextlib.ExitStack() as hooks:  # removes the hooks even if the network raises
            for name in self._names():
                _check_name(name, layers, model)

                def keep(layer: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                    outputs[name] = output

                hooks.callback(layers[name].register_forward_hook(keep).remove)
            if any("_orig_mod" in name.split(".") for name in layers):
                # Code that was compiled without hooks would run again and skip them.
                hooks.enter_context(torch.compiler.set_stance("force_eager"))
            prediction = model(*inputs)
        return prediction, outputs

    def _maps(self, outputs: dict[str, Any]) -> dict[str, tuple[Tensor, int | None]]:
        for name in self._names():
            if name not in outputs:
                raise ValueError(f"layer {name!r} did not run: name a layer that the network calls")
        return {name: _as_map(outputs[name], name) for name in self._names()}

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for pair in self.pairs for name in pair))

    def extra_repr(self) -> str:
        pairs = ", ".join(f"{lower} from {higher}" for lower, higher in self.pairs)
        return f"{pairs}, weight={self.weight}"


def _check_pairs(pairs: Iterable[Sequence[str]], model: nn.Module) -> list[tuple[str, str]]:
    given = pairs if isinstance(pairs, str) else list(pairs)
    if not given or not all(is_row(pair) and len(pair) == 2 and _are_names(pair) for pair in given):
        raise ValueError(
            f"pairs must be one or more pairs of names, a lower and a higher layer each, got {shown(given)}: give "
            "[('lower', 'higher')], for example"
        )
    layers = dict(model.named_modules(remove_duplicate=False))
    for name in (name for pair in given for name in pair):
        _check_name(name, layers, model)
    return [(lower, higher) for lower, higher in given]


def _are_names(pair: Sequence[Any]) -> bool:
    return all(isinstance(name, str) for name in pair)


def _check_name(name: str, layers: dict[str, nn.Module], model: nn.Module) -> None:
    if name not in layers:
        nearest = ", ".join(difflib.get_close_matches(name, filter(None, layers), n=3, cutoff=0)) or "none"
        raise ValueError(f"{type(model).__name__} has no layer {name!r}; the nearest are {nearest}")


def _as_map(output: Any, name: str) -> tuple[Tensor, int | None]:
    """Return a layer's output as a map, and the number of capsule types in its channels, see `MapShape`."""
    x = output.capsules if isinstance(output, Prediction) else output
    if isinstance(x, Tensor) and x.dim() in (2, 4):
        return (x if x.dim() == 4 else x[..., None, None]), None
    if isinstance(x, Tensor) and x.dim() in (5, 6):
        x = Capsules(x, pose_dims=x.dim() - 4)  # on a grid
    if not isinstance(x, Capsules):
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(output).__name__}"
        raise TypeError(
            f"layer {name!r} returns {got}; expected a map (batch, channels, height, width), features (batch, "
            "features) or capsules: name another layer"
        )
    poses, sides = x.poses, x.poses.dim() - 2 - x.known_pose_dims()
    if sides == 0:
        return poses.flatten(1)[..., None, None], poses.shape[1]
    if sides == 1:  # a line is a grid of height 1
        poses = poses.unsqueeze(2)
    return as_map(poses.flatten(4)), poses.shape[1]


def _parameter(model: nn.Module) -> Tensor | None:
    """Return a parameter that has the device and the precision of the network, or None."""
    return next((p for p in model.parameters() if p.is_floating_point()), None)
