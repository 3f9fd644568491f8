"""The classification heads of Heinsen: An Algorithm for Routing Vectors in Sequences (2022).

A head classifies what a frozen encoder of texts or images has computed: the hidden states of all its layers. Where the
text leaves something out, the head follows the author's code (github.com/glassroom/heinsen_routing_2022_paper). There,
padding is routed like tokens; here it changes nothing.

`heinsen2022_weights.py` loads the published weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.inputs import check_embeddings, without_padding
from torchcaps.models.registry import register_model
from torchcaps.nn import CapsuleShared, CapsuleStack
from torchcaps.routing import HeinsenVectorRouting
from torchcaps.utils.arguments import Count, checked


class VectorRoutingHead(nn.Module):
    r"""Head for a frozen encoder: one capsule per position and layer, and three routings, the last one to scores.

    Let e be the state of a position in layer l of the encoder, and N a LayerNorm without parameters. Then

    .. math::
        x = N(e) \circ \text{scale}_l + \text{offset}_l, \quad
        \text{scores} = \text{routing}(\text{routing}(\text{routing}(x)))

    The first routing takes any number of vectors, which share its parameters. The second one has parameters of its own
    for each of its children, and so has the third, whose parents have one entry each: the logits.

    Args:
        layers: number of states per position, one for each layer of the encoder and one for its input.
        width: size of a state.
        classes: number of classes.
        hidden: number of parents of the first and of the second routing.
        pose: size of these parents.
        iterations: number of iterations of each routing.

    Shape:
        - Input: states `(batch, positions, layers, width)` with any number of positions (tokens of a text, patches of
          an image), and a mask `(batch, positions)`, bool (True for a token) or numbers from 0 (padding) to 1 (a
          token), or None without padding. A `key_padding_mask` of PyTorch is the opposite: give `~mask`. A number
          between 0 and 1 gates a token, as in mixup, and has a gradient; a 0 or 1 has none. On the CPU, numbers outside
          of [0, 1] raise an error. States of padding change nothing, even if they are NaN.
        - Output: a Prediction: scores `(batch, classes)`, which are logits, and the class capsules, poses
          `(batch, classes, 1)`.

    Raises:
        ValueError: if the states or the mask have another shape.

    Attributes:
        capsules: stack of the three capsule layers.

    Reference:
        Heinsen 2022, and its author's code.
    """

    @checked
    def __init__(
        self,
        layers: Count = 25,
        width: Count = 1024,
        classes: Count = 5,
        hidden: Count = 64,
        pose: Count = 1024,
        iterations: Count = 2,
    ):
        super().__init__()
        self.layers, self.width = layers, width
        self.depth_scale = nn.Parameter(torch.ones(layers, width))
        self.depth_offset = nn.Parameter(torch.zeros(layers, width))
        routing = HeinsenVectorRouting(iterations)
        self.capsules = CapsuleStack(
            CapsuleShared(None, hidden, width, routing, out_pose=pose),
            CapsuleShared(hidden, hidden, pose, routing),
            CapsuleShared(hidden, classes, pose, routing, out_pose=1),
        )

    def reset_parameters(self) -> None:
        """Set the scale of all layers to one and the offset to zero, as at the beginning."""
        nn.init.ones_(self.depth_scale)
        nn.init.zeros_(self.depth_offset)

    @checked
    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Prediction:
        capsules = self.capsules(self.primary_capsules(embeddings, mask))
        return Prediction(capsules.poses.squeeze(-1), capsules)

    def primary_capsules(self, embeddings: Tensor, mask: Tensor | None = None) -> Capsules:
        """Return one child per position and layer, `(batch, positions * layers, width)`, with scores if there is a
        mask."""
        check_embeddings(embeddings, mask, self.depth_scale)
        embeddings, scores = without_padding(embeddings.to(self.depth_scale.dtype), mask)
        normal = F.layer_norm(embeddings, embeddings.shape[-1:])
        return Capsules((normal * self.depth_scale + self.depth_offset).flatten(1, 2), scores)


@register_model
def heinsen_texts(
    classes: Count = 5, layers: Count = 25, width: Count = 1024, hidden: Count = 64, pose: Count = 1024
) -> VectorRoutingHead:
    """Heinsen's vector routing on the states of RoBERTa-large: 5,068,422 parameters; 2 classes: 5,058,435."""
    return VectorRoutingHead(layers, width, classes, hidden, pose)


@register_model
def heinsen_images(
    classes: Count = 1000, layers: Count = 25, width: Count = 1024, hidden: Count = 64, pose: Count = 1024
) -> VectorRoutingHead:
    """Heinsen's vector routing on the states of BEiT-large: 8,380,777 parameters; 10 classes: 5,085,067."""
    return VectorRoutingHead(layers, width, classes, hidden, pose)
