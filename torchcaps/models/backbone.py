"""Capsules on the features of any network: of torchvision, timm, transformers, or one's own."""

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.models.cnn import FeatureClassifier, Standardize, Trainable
from torchcaps.models.libraries import NamedNetwork, load_file, named_network
from torchcaps.models.registry import register_model
from torchcaps.models.zhao2019 import pooling_resnet
from torchcaps.nn import CapsuleHead, CapsuleRegressor, RoutingPool2d
from torchcaps.nn.head import FeatureDims
from torchcaps.nn.inputs import SIDES
from torchcaps.nn.modes import evaluating
from torchcaps.nn.surgery import global_pools, replace_pooling, up_to
from torchcaps.routing import Routing
from torchcaps.utils.arguments import Count, CountOrZero, NotNegative, checked
from torchcaps.utils.checks import one_line

# Layers of torchvision's classifiers whose output are the features; of several in a network, the first one here.
LAYERS = (
    "permute",
    "features",
    "layers",
    "layer4",
    "trunk_output",
    "conv5",
    "inception5b",
    "Mixed_7c",
    "encoder",
    "blocks",
)
WRAPPERS = nn.DataParallel | nn.parallel.DistributedDataParallel
MOST_OTHER_TOKENS = 16  # class and register tokens
REGISTERS = 4  # beside a class token, in the networks that have some
# Modules whose output of three or five dimensions has its channels second, or last.
CHANNELS_SECOND = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d),
    *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.InstanceNorm3d),
    *(nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveMaxPool3d, nn.AdaptiveAvgPool3d),
)
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)


class Features(nn.Module):
    """Features of a network before its pool, in the layout that a `CapsuleHead` takes.

    Args:
        network: module with a method `forward_features`, as timm's have, or whose output are the features or has them
            as `last_hidden_state`, as in transformers.
        example: a batch of inputs, which shows the layout. Maps whose second and third sizes alone are in the
            proportion of the images have their channels last. For square images, tokens beyond a square number, such as
            class tokens, come first.
        skip_tokens: number of tokens to leave out, the first ones; None for those that precede the patches.
        dims: number of dimensions of the features' map, see `CapsuleHead`; None for what the example shows, and the
            last module whose output has its channels second, such as a convolution, or last.

    Shape:
        - Output: maps `(batch, channels, height, width)`, also of tokens that are patches of images; maps of one or
          three dimensions, `(batch, channels, *sides)`; other tokens `(batch, tokens, channels)`; vectors `(batch,
          channels)`.

    Attributes:
        dims: the number of dimensions for a `CapsuleHead`.
    """

    def __init__(
        self, network: nn.Module, example: Tensor, skip_tokens: int | None = None, dims: FeatureDims | None = None
    ):
        super().__init__()
        self.network = network
        self.channels_last, self.skip_tokens, self.side, self.image_side = False, 0, 0, 1
        name, size = type(network).__name__, tuple(example.shape)
        try:
            # Gradients need tensors from outside of inference_mode: a clone is one.
            fixed = any(x.is_inference() for x in (*network.parameters(), *network.buffers()))
            with evaluating(network), torch.inference_mode(fixed), torch.enable_grad():
                features, is_second = self._once(example.clone())
        except NotImplementedError:
            raise  # from a parameter without values, on the device "meta"
        except Exception as error:
            raise ValueError(
                f"{name} does not run on inputs of shape {size} ({one_line(error)[:200]}): give an example that it "
                "takes, or a size if the network is given by its name"
            ) from None
        rank = features.dim() if isinstance(features, Tensor) else 0
        if rank not in ((2, 3, 4, 5) if dims is None else (2, 3) if dims == 0 else (2 + dims,)):
            shown = tuple(features.shape) if rank else type(features).__name__
            sides = ", ".join(SIDES[dims]) if dims else ""
            expected = {None: "maps, tokens or vectors", 0: "tokens or vectors"}.get(
                dims, f"(batch, channels, {sides})"
            )
            raise ValueError(f"the features of {name} must be {expected}, got {shown}: choose another layer")
        if rank == 5 and dims is None and not is_second:
            raise ValueError(
                f"the features of {name} are {tuple(features.shape)}, and its modules do not say where the channels "
                "are: give dims=3 if they are (batch, channels, depth, height, width)"
            )
        of_rank: dict[int, FeatureDims] = {2: 0, 3: 1 if is_second and skip_tokens is None else 0, 4: 2, 5: 3}
        self.dims = dims = of_rank[rank] if dims is None else dims
        of_square = len(size) == 4 and size[2] == size[3]
        if rank == 4:
            a, b, c = features.shape[1:]
            height, width = size[2:] if len(size) == 4 else (0, 0)
            in_proportion = a * width == b * height and b * width != c * height
            self.channels_last = getattr(network, "output_fmt", "") == "NHWC" or in_proportion
        elif rank == 3 and dims == 0:
            tokens = features.shape[1]
            self.skip_tokens = _other_tokens(network, size, tokens) if skip_tokens is None else skip_tokens
            if self.skip_tokens >= tokens:
                raise ValueError(f"skip_tokens must be less than the {tokens} tokens of {name}, got {skip_tokens}")
            side = math.isqrt(tokens - self.skip_tokens)
            if of_square and side**2 == tokens - self.skip_tokens:
                self.side, self.image_side, self.dims = side, size[2], 2
        self.channels = features.shape[1 if dims and not self.channels_last else -1]

    def forward(self, inputs: Tensor) -> Tensor:
        output = getattr(self.network, "forward_features", self.network)(inputs)
        features: Tensor = getattr(output, "last_hidden_state", output)
        if self.channels_last:
            return features.movedim(-1, 1)
        if self.skip_tokens:
            features = features[:, self.skip_tokens :]
        if not self.side:
            return features
        # Other images may have other numbers of patches, in rows and columns as far as they are known.
        rows, columns = (size * self.side // self.image_side for size in inputs.shape[2:])
        if rows * columns != features.shape[1]:
            rows, columns = features.shape[1], 1
        return features.transpose(1, 2).unflatten(2, (rows, columns))

    def _once(self, example: Tensor) -> tuple[Any, bool]:
        """Return the features of an example, and whether they are `(batch, channels, length)` or a map of a volume.

        Drop the parts of the network that do not run, such as its classifier, and freeze other parameters without a
        gradient: of several processes, each would wait for their gradients.
        """
        ran: set[nn.Module] = set()
        second = None  # shape of the last output of three or five dimensions, if its channels are the second

        def note(module: nn.Module, _: Any, out: Any) -> None:
            nonlocal second
            ran.add(module)
            if isinstance(module, CHANNELS_SECOND + CHANNELS_LAST) and isinstance(out, Tensor) and out.dim() in (3, 5):
                second = out.shape if isinstance(module, CHANNELS_SECOND) else None

        hooks = [x.register_forward_hook(note) for x in self.network.modules()]
        parameters = [p for p in self.network.parameters() if p.is_floating_point()]
        frozen = [p for p in parameters if not p.requires_grad]
        gradients = None
        try:
            for parameter in frozen:  # so that a frozen network loses the same parts
                parameter.requires_grad_(True)
            features = self(example)
            if isinstance(features, Tensor) and features.requires_grad:
                gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in frozen:
                parameter.requires_grad_(False)
        if gradients is not None:
            unused = {p for p, gradient in zip(parameters, gradients, strict=True) if gradient is None}
            for name, part in list(self.network.named_children()):
                owned = set(part.parameters())
                if owned and owned <= unused and ran.isdisjoint(part.modules()):
                    setattr(self.network, name, nn.Identity())
            for parameter in unused:
                parameter.requires_grad_(False)
        return features, isinstance(features, Tensor) and features.shape == second


def _other_tokens(network: nn.Module, size: tuple[int, ...], tokens: int) -> int:
    """Return how many tokens, such as class and register tokens, precede the patches of an image of this size."""
    known = getattr(network, "num_prefix_tokens", None)  # of timm
    if known is not None or len(size) != 4:
        return known or 0
    patch = getattr(getattr(network, "config", None), "patch_size", None)  # of transformers
    if isinstance(patch, int) and 0 <= tokens - (size[2] // patch) * (size[3] // patch) <= MOST_OTHER_TOKENS:
        return tokens - (size[2] // patch) * (size[3] // patch)
    side = math.isqrt(tokens)
    others = tokens - side**2
    if size[2] != size[3] or others > MOST_OTHER_TOKENS or not (others < side or others == 1 + REGISTERS):
        return 0
    if others > 1:
        warnings.warn(
            f"the first {others} of {tokens} tokens seem to be class and register tokens, and are left out: give "
            f"skip_tokens={others}, or 0 to keep all",
            stacklevel=5,
        )
    return others


@checked
def add_capsules(
    model: nn.Module | str,
    classes: Count | None = None,
    routing: Routing | None = None,
    *,
    numbers: Count | None = None,
    layer: str | None = None,
    example: Tensor | None = None,
    skip_tokens: CountOrZero | None = None,
    dims: FeatureDims | None = None,
    trainable: Trainable = "all",
    pretrained: bool | str = True,
    size: Count | None = None,
    types: Count = 16,
    pose: Count = 16,
    parts: Count | None = None,
) -> FeatureClassifier:
    """Put a :class:`CapsuleHead` behind the features of a network, in the place of its pool and its classifier.

        model = add_capsules("timm/vit_tiny_patch16_224", classes=10)
        logits = model(images).scores  # images (batch, 3, 224, 224) in [0, 1]

    With numbers in place of classes it is a :class:`CapsuleRegressor`, and the scores are numbers. The result has the
    network's features as `model.features` and the head as `model.classifier`, for example for two
    learning rates.

    Args:
        model: the name of a network, "torchvision/NAME", "timm/NAME" or "transformers/FOLDER" (a folder, or a name of
            the Hugging Face Hub), which then takes images in [0, 1] and standardizes them as its library says; or a
            module, which takes what it took before, and should not be used for anything else afterwards.
        classes, routing, types, pose, parts: see :class:`CapsuleHead`.
        layer: name of the layer of a module whose output are the features, in `model.named_modules()`; None for
            networks of the three libraries, and modules with a method `forward_features`, where it is known. The
            modules that contain the layer are traced in evaluation mode, and ask for `self.training` no more.
        example: a batch of inputs of a module, to learn the layout of its features; None for an image of the size that
            a network of the libraries was made for.
        skip_tokens: number of first tokens to leave out; None for class and register tokens, which precede a square of
            patches; 0 to keep all.
        dims: number of dimensions of the features' map, see :class:`CapsuleHead`: give it if the modules of the network
            do not say where the channels of a signal or a volume are.
        numbers: how many numbers it gives, in place of classes.
        trainable: "all", or "head": the features then keep their weights and stay in evaluation mode, so that batch
            normalization keeps its statistics too.
        pretrained: for a name: True for the weights that its library publishes, which may be downloaded; the path of a
            file of weights, `.safetensors` or a state dict of `torch.save`; False for random weights.
        size: for a name: height and width of the images; None for those of its library.

    Raises:
        ImportError: the library is not installed.
        ValueError: there are neither classes nor numbers, or both; there is no such network or layer, it cannot be cut
            there, does not run on the example, or its features are neither maps nor tokens nor vectors.
    """
    named: NamedNetwork | None = None
    if (classes is None) == (numbers is None):
        raise ValueError("give add_capsules the number of classes, or numbers: one of the two")
    if isinstance(model, str):
        if example is not None:
            raise ValueError("example is for a module: give size, the height and width of the images")
        named = named_network(model, pretrained is True, size)
        network = named.network
    elif size is not None or pretrained is not True:
        raise ValueError("size and pretrained are for a network that is given by its name: leave them out")
    else:
        network, layer = _unwrapped(model, layer)
    part = _before_pool(network, layer)
    like = next(part.parameters(), torch.empty(0))
    if example is None:
        example = like.new_zeros(1, *(_image_shape(network) if named is None else named.image_shape))
    features = Features(part, example, skip_tokens, dims)
    if isinstance(pretrained, str):
        load_file(part, pretrained, str(model))
    factory: Any = {"device": like.device, "dtype": like.dtype}
    head = capsules_of(features.channels, classes or 1, numbers, routing, types, pose, parts, features.dims, **factory)
    if named is not None:
        return _classifier(named, features, head, trainable)
    features.training = network.training  # not train(), which sets the modules of the user too
    classifier = FeatureClassifier(features, head.train(network.training), None, trainable=trainable)
    classifier.training = network.training
    return classifier


@checked
def library_network(
    name: str,
    classes: Count = 10,
    pretrained: bool | str = True,
    head: Literal["capsules", "pool"] = "capsules",
    routing: Routing | None = None,
    trainable: Trainable = "all",
    size: Count | None = None,
    types: Count = 16,
    pose: Count = 16,
    features: Count = 16,
    sharpness: NotNegative = 5.0,
    numbers: Count | None = None,
) -> FeatureClassifier:
    """Build a network of a library with another end. This is what `--model timm/NAME` names.

    Args:
        name: "torchvision/NAME", "timm/NAME" or "transformers/FOLDER".
        head: "capsules" for :func:`add_capsules`; "pool" for a :class:`RoutingPool2d` in the place of the network's
            average pool, and a new linear layer in the place of the last one.
        classes, pretrained, trainable, size: see :func:`add_capsules`.
        routing, types, pose: see :class:`CapsuleHead`.
        features, sharpness: see :class:`RoutingPool2d`.
        numbers: how many numbers it gives, in place of classes, by a :class:`CapsuleRegressor`.

    Raises:
        ImportError: the library is not installed.
        ValueError: see :func:`add_capsules`; or the network has no average pool, or no last linear layer, that could be
            replaced.
    """
    unused = {"features": features != 16, "sharpness": sharpness != 5.0}
    if head == "pool":
        unused = {
            "routing": routing is not None,
            "types": types != 16,
            "pose": pose != 16,
            "numbers": numbers is not None,
        }
    for argument, is_given in unused.items():
        if is_given:
            raise ValueError(f"{argument} is not for head={head!r}: leave it out, or choose the other head")
    if head == "capsules":
        options: Any = {"types": types, "pose": pose, "numbers": numbers, "pretrained": pretrained, "size": size}
        return add_capsules(name, None if numbers else classes, routing, trainable=trainable, **options)
    named = named_network(name, pretrained is True, size)
    network, pools = named.network, list(global_pools(named.network))
    if not pools or name.startswith("transformers/"):
        raise ValueError(f"{name} has no nn.AdaptiveAvgPool2d to size 1 that could be replaced: use head='capsules'")
    if name.startswith("torchvision/"):  # a network of timm is built without its last layer
        linears = [key for key, module in network.named_modules() if isinstance(module, nn.Linear)]
        if not linears:
            raise ValueError(f"{name} has no nn.Linear at its end that could be replaced: use head='capsules'")
        network.set_submodule(linears[-1], nn.Identity())
    replace_pooling(network, RoutingPool2d(features, sharpness), pools[-1])
    if isinstance(pretrained, str):
        load_file(network, pretrained, name)
    with evaluating(network), torch.no_grad():
        pooled = network(torch.zeros(1, *named.image_shape))
    return _classifier(named, network, nn.Linear(pooled.shape[1], classes), trainable)


@register_model
def capsule_resnet(
    routing: Routing | None = None,
    depth: Count = 20,
    in_channels: Count = 3,
    classes: Count = 10,
    types: Count = 16,
    pose: Count = 16,
    numbers: Count | None = None,
) -> FeatureClassifier:
    """The ResNet of `pooling_resnet` with a CapsuleHead in place of its pool, not in a paper: 326,689 parameters.

    With numbers it gives so many numbers in place of classes, by a `CapsuleRegressor`.
    """
    features = pooling_resnet(depth, in_channels, classes).features
    assert isinstance(features, nn.Sequential)
    end = capsules_of(64, classes, numbers, routing, types, pose, dims=2)
    return FeatureClassifier(features[:-2], end, (in_channels, None, None))


def capsules_of(
    channels: int,
    classes: int,
    numbers: int | None,
    routing: Routing | None,
    types: int,
    pose: int,
    parts: int | None = None,
    dims: FeatureDims | None = None,
    **factory: Any,
) -> CapsuleHead | CapsuleRegressor:
    """Build the end of a network: a CapsuleRegressor for numbers, or else a CapsuleHead for classes."""
    if numbers is None:
        return CapsuleHead(channels, classes, routing, types, pose, parts, dims, **factory)
    if parts is not None:
        raise ValueError("parts is for classes: leave it out, or give classes in place of numbers")
    return CapsuleRegressor(channels, numbers, routing, types, pose, dims=dims, **factory)


def _classifier(named: NamedNetwork, features: nn.Module, end: nn.Module, trainable: Trainable) -> FeatureClassifier:
    """Return a classifier of images in [0, 1] with the features of a library's network."""
    standardized = nn.Sequential(Standardize(named.mean, named.std), features)
    return FeatureClassifier(standardized, end, named.image_shape, trainable=trainable).train()


def _unwrapped(network: nn.Module, layer: str | None) -> tuple[nn.Module, str | None]:
    """Return the network that torch.compile or a data-parallel module wraps, and the layer's name in it."""
    for name, kind in (("_orig_mod", nn.Module), ("module", WRAPPERS)) * 2:  # one may wrap the other
        inner = getattr(network, name, None)
        if isinstance(inner, nn.Module) and isinstance(network, kind):
            network, layer = inner, layer and layer.removeprefix(f"{name}.")
    return network, layer


def _before_pool(network: nn.Module, layer: str | None) -> nn.Module:
    """Return the part of a network whose output are the features."""
    if layer is not None:
        return up_to(network, layer)
    if hasattr(network, "forward_features"):
        return network
    libraries = _libraries_of(network)
    if "transformers" in libraries:
        base: Any = network.base_model if "For" in type(network).__name__ else network  # ViTForImageClassification
        return getattr(base, "vision_model", base)  # of CLIP
    children = dict(network.named_children())
    known = [name for name in LAYERS if name in children] if "torchvision" in libraries else []
    if not known:
        raise ValueError(
            f"{type(network).__name__} does not say which of its layers has the features: give layer, the name of one; "
            f"it has {', '.join(children)}"
        )
    last = children[known[0]]
    return up_to(network, f"{known[0]}.{len(last) - 1}" if isinstance(last, nn.ModuleList) else known[0])


def _libraries_of(network: nn.Module) -> set[str]:
    """Return the names of the packages of a network's class and of its bases."""
    return {kind.__module__.partition(".")[0] for kind in type(network).__mro__}


def _image_shape(network: nn.Module) -> tuple[int, ...]:
    """Return the shape of the images that a network of a library was made for."""
    known: Any = getattr(network, "pretrained_cfg", None)  # of timm
    if known:
        return tuple(known["input_size"])
    config: Any = getattr(network, "config", network)  # of transformers; networks of torchvision have image_size too
    side = getattr(config, "image_size", 224)
    side = side[-1] if isinstance(side, tuple | list) else side
    if not _libraries_of(network) & {"torchvision", "transformers"}:
        raise ValueError(f"give example, a batch of inputs of {type(network).__name__}")
    return getattr(config, "num_channels", 3), side, side
