"""The weights that Heinsen trained and published in 2019, for the networks of `heinsen2019.py`.

The files lie in github.com/glassroom/heinsen_routing.
"""

import os
import re

from torch import Tensor, nn

from torchcaps.models.heinsen2019 import heinsen_smallnorb, heinsen_sst
from torchcaps.models.state_dicts import load_published, read_state_dict
from torchcaps.utils.arguments import checked

HOME = "github.com/glassroom/heinsen_routing"
ADVICE = f"give a file of {HOME} as it was published"


@checked
def load_authors_weights(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load the weights that the author trained and published in 2019, for smallNORB, SST-2 or SST-5.

    Args:
        path: path of `smallNORB_pretrained_model_state_dict.pt`, `SST2R_...` or `SST5R_...`
        model: network to fill; None builds the network that fits the file's keys and number of classes.

    Returns:
        The network, in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a state dict, or if its names and shapes, without those of constants, are not
            exactly those of the network. The network then stays as it was.
    """
    published = read_state_dict(path, HOME, ADVICE)
    return load_published(_network_of(published, path) if model is None else model, published, _authors_name, path)


def _network_of(published: dict[str, Tensor], path: str | os.PathLike[str]) -> nn.Module:
    """Build the network whose keys and number of classes a published state dict has."""
    weight = published.get("routings.1.W")
    if weight is not None and weight.dim() == 4 and "convolve.0.weight" in published:
        return heinsen_smallnorb(classes=weight.shape[1])
    if weight is not None and weight.dim() == 4 and "depth_emb" in published:
        return heinsen_sst(classes=weight.shape[1])
    raise ValueError(
        f"{path} is not from one of the author's networks, which have routings.1.W and either convolve.0.weight or "
        f"depth_emb: {ADVICE}"
    )


def _authors_name(name: str) -> str:
    """Return the name in the author's code of a parameter or a buffer of our network."""
    for ours, theirs in (
        (r"^features\.", "convolve."),
        (r"^scores\.", "compute_a."),
        (r"^poses\.", "compute_mu."),
        (r"^depth$", "depth_emb"),
        (r"^detector\.", "detect_parts."),
        (r"^capsules\.layers\.(\d)\.weight$", r"routings.\1.W"),
        (r"^capsules\.layers\.(\d)\.bias$", r"routings.\1.B"),
        (r"^capsules\.layers\.(\d)\.routing\.beta_use$", r"routings.\1.beta_use"),
        (r"^capsules\.layers\.(\d)\.routing\.beta_ignore$", r"routings.\1.beta_ign"),
    ):
        name = re.sub(ours, theirs, name)
    return name
