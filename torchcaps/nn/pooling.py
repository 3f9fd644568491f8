"""Routing in the place of global pooling."""

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.ops import StoredVotes
from torchcaps.routing import Routing, VectorNormRouting


class RoutingPool2d(nn.Module):
    r"""Route all positions of a feature map to one, in place of `nn.AdaptiveAvgPool2d(1)`.

    Each group of `features` channels holds `height * width` capsules, which vote with their own poses for one
    parent. Sharpness 0 averages; the larger it is, the closer the pool comes to selecting one position by
    agreement with the others. It learns nothing.

    Args:
        features: channels of a capsule; the map's channels are a multiple of it.
        sharpness: the paper's lambda.
        iterations: of the vector-normed routing.
        routing: another algorithm in place of `VectorNormRouting(iterations, sharpness)`. Its softmax must run
            over the children, for a group has one parent.

    Shape:
        - Input: `(batch, channels, height, width)`.
        - Output: `(batch, channels, 1, 1)`; with `return_coefficients=True` also the coefficients,
          `(batch, channels // features, height, width)`, which sum to one over the map.

    Reference:
        Zhao & Huang 2019, section 3.4.
    """

    def __init__(self, features: int, sharpness: float = 1.0, iterations: int = 3, routing: Routing | None = None):
        super().__init__()
        if routing is None:
            routing = VectorNormRouting(iterations, sharpness)
        elif (sharpness, iterations) != (1.0, 3):
            raise ValueError("give sharpness and iterations to the routing, or leave routing out")
        name = type(routing).__name__
        if routing.softmax == "parents":
            raise ValueError(
                f"{name} lets parents compete for a child, and a pool has one parent per group: the coefficients "
                "would all be one; use VectorNormRouting() or DynamicRouting(softmax='children')"
            )
        self.features = features
        self.routing = routing.for_layer(1, 1, features)

    def forward(self, x: Tensor, *, return_coefficients: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        batch, channels, height, width = x.shape
        if channels % self.features:
            raise ValueError(f"expected channels that are a multiple of features={self.features}, got {channels}")
        groups = channels // self.features
        children = x.reshape(batch * groups, self.features, height * width).transpose(1, 2)
        parents: Capsules = self.routing(StoredVotes(children.unsqueeze(2)), None, return_coefficients)
        pooled = parents.poses.reshape(batch, channels, 1, 1)
        if parents.coefficients is None:
            return pooled
        return pooled, parents.coefficients.reshape(batch, groups, height, width)

    def extra_repr(self) -> str:
        return f"features={self.features}"
