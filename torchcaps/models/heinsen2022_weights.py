"""The weights that Heinsen trained and published in 2022, for the heads of `heinsen2022.py`.

The files lie in github.com/glassroom/heinsen_routing_2022_paper.
"""

import os
import re

from torch import Tensor

from torchcaps.models.heinsen2022 import VectorRoutingHead
from torchcaps.models.state_dicts import load_published, read_state_dict
from torchcaps.utils.arguments import checked

HOME = "github.com/glassroom/heinsen_routing_2022_paper"
ADVICE = f"give a .state_dict file of {HOME} as it was published"

# Our names in a layer's routing, and those of the author's class EfficientVectorRouting.
AUTHORS_NAMES = {
    "activation_weight": "W_A",
    "activation_bias": "B_A",
    "vote_scale": "W_F1",
    "vote_weight": "W_F2",
    "vote_bias": "B_F2",
    "prediction_weight": "W_G1",
    "prediction_scale": "W_G2",
    "prediction_bias": "B_G2",
    "similarity_weight": "W_S",
    "similarity_bias": "B_S",
    "beta_use": "beta_use",
    "beta_ignore": "beta_ign",
    "beta_use.weight": "compute_beta_use.weight",
    "beta_use.bias": "compute_beta_use.bias",
    "beta_ignore.weight": "compute_beta_ign.weight",
    "beta_ignore.bias": "compute_beta_ign.bias",
}


@checked
def load_authors_head(path: str | os.PathLike[str], model: VectorRoutingHead | None = None) -> VectorRoutingHead:
    """Load the weights of a head that the author trained and published in 2022.

    The author's heads were trained on batches whose padding was routed like tokens. These heads leave padding out, so
    that the scores of a text in a padded batch are those of the text alone, and differ from the author's.

    Args:
        path: path of `pretrained_..._head_for_....state_dict`.
        model: head to fill; None builds the head that fits the shapes in the file.

    Returns:
        The head, in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a state dict, or if its names and shapes, without those of constants, are not
            exactly those of the head. The head then stays as it was.
    """
    published = read_state_dict(path, HOME, ADVICE)
    return load_published(_head_of(published, path) if model is None else model, published, _authors_name, path)


def _head_of(published: dict[str, Tensor], path: str | os.PathLike[str]) -> VectorRoutingHead:
    """Build the head whose sizes a published state dict has."""
    sizes = {}
    for name in ("W", "route.0.W_F1", "route.0.W_F2", "route.2.B_F2"):
        if name not in published or published[name].dim() != 2 or not all(published[name].shape):
            raise ValueError(f"{path} is not one of the author's heads, which have a matrix {name}: {ADVICE}")
        sizes[name] = published[name].shape
    layers, width = sizes["W"]
    hidden, pose, classes = sizes["route.0.W_F1"][0], sizes["route.0.W_F2"][1], sizes["route.2.B_F2"][0]
    return VectorRoutingHead(layers, width, classes, hidden, pose)


def _authors_name(name: str) -> str:
    """Return the name in the author's code of a parameter of our head."""
    if name.startswith("depth_"):
        return {"depth_scale": "W", "depth_offset": "B"}[name]
    layer = re.fullmatch(r"capsules\.layers\.(\d)\.routing\.(.+)", name)
    assert layer is not None, name
    return f"route.{layer[1]}.{AUTHORS_NAMES[layer[2]]}"
