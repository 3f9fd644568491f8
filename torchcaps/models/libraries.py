"""Networks of torchvision, timm and transformers by their names, with the images that each was made for."""

import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from torchcaps.models.pretrained import load_state, read_tensors
from torchcaps.utils.arguments import shown
from torchcaps.utils.checks import counted, nearest, one_line
from torchcaps.utils.files import user_path
from torchcaps.utils.hub import refuse_kernels

LIBRARIES = ("torchvision", "timm", "transformers")
LEAST_STD, LARGEST_SIDE = 1e-3, 10_000  # of images in a configuration of transformers


class NamedNetwork(NamedTuple):
    """A network of a library.

    Fields:
        network: the network.
        mean, std: mean and standard deviation by which its images are standardized, of each color.
        size: height and width of its images.
    """

    network: nn.Module
    mean: Sequence[float]
    std: Sequence[float]
    size: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return len(self.mean), self.size, self.size


def named_network(name: str, pretrained: bool, size: int | None = None) -> NamedNetwork:
    """Build a network of a library.

    Args:
        name: "torchvision/NAME", "timm/NAME", or "transformers/FOLDER" with a folder or a name of the Hugging Face Hub.
        pretrained: whether it has the weights that the library publishes, which may be downloaded.
        size: height and width of the images, if they are to have others than the library says.

    Raises:
        ImportError: the library is not installed.
        ValueError: the name is unknown, or the network cannot be built.
    """
    library, _, network = name.partition("/")
    if library not in LIBRARIES or not network:
        raise ValueError(
            f"expected the name of a network, 'torchvision/NAME', 'timm/NAME' or 'transformers/FOLDER', got {name!r}"
        )
    build = {"torchvision": _of_torchvision, "timm": _of_timm, "transformers": _of_transformers}[library]
    try:
        return build(network, pretrained, size)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        advice = f"pip install {library}" if missing.partition(".")[0] == library else "install it"
        raise ImportError(f"{name!r} needs {missing}, which is missing: {advice}") from None
    except NotImplementedError:
        raise  # from a parameter without values, on the device "meta"
    except Exception as error:  # each library raises its own, also while it downloads
        if "unknown model" in str(error).lower():
            raise ValueError(f"{library} has no network {network!r}{nearest(network, _names(library))}") from None
        # A ValueError is of its configuration, which random weights need too.
        hint = (
            "; pretrained=False builds it with random weights" if pretrained and type(error) is not ValueError else ""
        )
        raise ValueError(f"{library} cannot build {network!r} ({one_line(error)[:200]}){hint}") from None


def _names(library: str) -> list[str]:
    module: Any = importlib.import_module(library)
    return module.list_models() if library == "timm" else module.models.list_models(module=module.models)


def _of_torchvision(name: str, pretrained: bool, size: int | None) -> NamedNetwork:
    models: Any = importlib.import_module("torchvision.models")
    weights = models.get_model_weights(name).DEFAULT
    images = weights.transforms()
    side = size or images.crop_size[0]
    options: dict[str, Any] = {"weights": weights if pretrained else None}
    if not pretrained and name in ("googlenet", "inception_v3"):
        options |= {"init_weights": True, "transform_input": True, "aux_logits": False}  # as with weights
    if not pretrained and name.startswith("vit_"):
        options["image_size"] = side
    return NamedNetwork(models.get_model(name, **options), images.mean, images.std, side)


def _of_timm(name: str, pretrained: bool, size: int | None) -> NamedNetwork:
    timm: Any = importlib.import_module("timm")
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0}
    known = timm.models.get_pretrained_cfg(name)
    if size is not None and known and known.fixed_input_size:
        options["img_size"] = size
    network = timm.create_model(name, **options)
    images = network.pretrained_cfg
    return NamedNetwork(network, images["mean"], images["std"], size or images["input_size"][-1])


def _of_transformers(name: str, pretrained: bool, size: int | None) -> NamedNetwork:
    transformers: Any = importlib.import_module("transformers")
    folder = str(user_path(name)) if os.path.isdir(user_path(name)) else name
    values, _ = transformers.PretrainedConfig.get_config_dict(folder)
    refuse_kernels(values)
    images, _ = transformers.ImageProcessingMixin.get_image_processor_dict(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = getattr(config, "vision_config", config)
    mean, std = standardization(images, getattr(config, "num_channels", 3))
    sides = (size, images.get("crop_size"), images.get("size"))
    side = image_side(next((value for value in sides if value is not None), getattr(config, "image_size", None)))
    if pretrained:
        network = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False)
    else:
        network = transformers.AutoModel.from_config(config)
    return NamedNetwork(network.float(), mean, std, side)


def standardization(values: dict[str, Any], channels: int) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation of each color of images in [0, 1], from `preprocessor_config.json`.

    Args:
        channels: number of colors that the network takes.

    Raises:
        ValueError: they are no such numbers.
    """
    mean: Any = values.get("image_mean")
    std: Any = values.get("image_std")
    for name, value, least in (("image_mean", mean, 0.0), ("image_std", std, LEAST_STD)):
        plain = isinstance(value, list) and len(value) == channels and not any(isinstance(x, bool) for x in value)
        if not plain or not all(isinstance(x, int | float) and least <= x <= 1 for x in value):
            raise ValueError(
                f"its preprocessor_config.json has {name} = {shown(value)}: "
                f"expected {counted(channels, 'number')} from {least:g} to 1, one of each color"
            )
    return mean, std


def image_side(size: Any) -> int:
    """Return the height and width of images, from a number or a dictionary in a configuration of transformers.

    Raises:
        ValueError: it has none that images can have.
    """
    side = (size.get("height") or size.get("shortest_edge")) if isinstance(size, dict) else size
    if type(side) is not int or not 1 <= side <= LARGEST_SIDE:
        raise ValueError(
            f"its configuration has images of size {shown(size)}: expected an int from 1 to {LARGEST_SIDE:,}"
        )
    return side


def load_file(network: nn.Module, path: str, name: str) -> None:
    """Load weights of a local file, `.safetensors` or a state dict of `torch.save`, into a network. What else is in the
    file, such as a classifier, is left out.

    Raises:
        ValueError: there is no such file, or it does not have the weights of this network.
    """
    file = user_path(path)
    if not os.path.isfile(file):
        raise ValueError(f"pretrained: there is no file {path}: give true, false or a file of weights of {name}")
    try:
        safe = file.suffix == ".safetensors"
        state: Any = read_tensors(file)[0] if safe else torch.load(file, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state.get("model", state))
        known = network.state_dict()
        for prefix in ("module.", "_orig_mod.") * 2:  # of data-parallel and of compiled networks, in any order
            if not any(key.startswith(prefix) for key in known):
                consume_prefix_in_state_dict_if_present(state, prefix)
        for key in [key for key in known if key.endswith("num_batches_tracked")]:
            state.setdefault(key, known[key])  # files of before PyTorch 0.4.1 have none
        parts = {key.partition(".")[0] for key in known}
        state = {key: value for key, value in state.items() if key.partition(".")[0] in parts}
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise TypeError("a state dict has tensors")
    except ImportError:
        raise
    except Exception:  # of a file that anybody wrote
        raise ValueError(f"{path} is neither a safetensors file nor a state dict of torch.save") from None
    load_state(network, state, path)
