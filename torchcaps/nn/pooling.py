"""A pool that routes the positions of a feature map, in place of average or max pooling.

Zhao, Huang: Exploring Dynamic Routing As A Pooling Layer (2019). `surgery.py` puts this pool into existing networks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.ops import Backend, StoredVotes, choose_backend, windows
from torchcaps.routing import LayerShape, Routing, VectorNormRouting
from torchcaps.utils.arguments import Count, CountOrZero, Device, FloatType, NotNegative, check_input, checked
from torchcaps.utils.private import is_traced


class RoutingPool2d(nn.Module):
    r"""Pool by routing: the positions of a feature map, or of each window, agree on one capsule.

    Each group of `features` channels is a capsule at every position. The capsules of a map or window vote with their
    own poses :math:`u_i` for one parent. The logits start at :math:`b_i = 0`. Each iteration computes

    .. math::
        c_i = \frac{\exp \lambda b_i}{\sum_k \exp \lambda b_k}, \quad
        v = \frac{\sum_i c_i u_i}{|\sum_i c_i u_i|}, \quad
        b_i \leftarrow b_i + \frac{u_i}{|u_i|} \cdot v

    and the result is :math:`v = \text{activation}(\sum_i c_i u_i)` with the last coefficients. Sharpness 0 is average
    pooling; the larger the sharpness, the closer the pool comes to selecting the position that agrees best with the
    others. The pool has no parameters unless `learn_sharpness` or `routing` brings some.

    Args:
        features: number of channels of a capsule; the map's channels must be a multiple of it.
        sharpness: the paper's lambda, at least 0; without iterations it has no effect.
        iterations: number of agreements before the last sum. Each one adds to the logits, as a larger sharpness does,
            and takes time; the paper does not give the number.
        kernel_size: size of the windows; None pools the whole map, of any size, as `nn.AdaptiveAvgPool2d(1)` does.
        stride: stride of the windows; None for `kernel_size`.
        padding: padding on all four sides, at most half of `kernel_size`. Padded positions take no part, as in
            `nn.AvgPool2d(count_include_pad=False)`.
        learn_sharpness: learn the sharpness, one number, initially `sharpness`. Nothing keeps it above 0; below 0 the
            pool prefers positions that disagree.
        activation: function of the pooled capsules `(n, 1, features)`, e.g. `squash`; None for the identity.
        routing: another algorithm in place of `VectorNormRouting` with the arguments above. Its softmax must run over
            the children, because a group has one parent. It runs by PyTorch's own functions, whatever `backend` says.
        backend: "native" runs a C++ kernel on maps and windows in float32, float64 and bfloat16. "reference" uses
            PyTorch's own functions alone and has second derivatives. See :func:`torchcaps.use_backend`.
        device, dtype: device and dtype of the learned parameters.

    Shape:
        - Input: `(batch, channels, height, width)`.
        - Output: `(batch, channels, rows, columns)`, with as many rows and columns as `nn.AvgPool2d` gives, or 1 and 1
          without windows. With `return_coefficients=True` also the coefficients, `(batch, channels // features,
          height, width)`, which sum to one over the map, or `(batch, channels // features, rows, columns, kernel_size,
          kernel_size)`, which sum to one over each window.

    In float32, lengths beyond about 1e19 overflow and the pool averages.

    Reference:
        Zhao & Huang 2019, Algorithm 1 and section 3.4.
    """

    @checked
    def __init__(
        self,
        features: Count,
        sharpness: NotNegative = 1.0,
        iterations: CountOrZero = 1,
        kernel_size: Count | None = None,
        stride: Count | None = None,
        padding: CountOrZero = 0,
        learn_sharpness: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        routing: Routing | None = None,
        backend: Backend = "auto",
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        if kernel_size is None and (stride is not None or padding):
            raise ValueError("stride and padding need windows: give a kernel_size, or leave them out")
        if kernel_size is not None and padding > kernel_size // 2:
            raise ValueError(f"padding must be at most half of kernel_size={kernel_size}, got {padding}")
        if routing is None:
            routing = VectorNormRouting(iterations, sharpness, activation, learn_sharpness=learn_sharpness)
        elif (sharpness, iterations, learn_sharpness, activation) != (1.0, 1, False, None):
            raise ValueError("give sharpness, iterations and activation to the routing, or leave routing out")
        name = type(routing).__name__
        if routing.softmax == "parents":
            raise ValueError(
                f"{name} has a softmax over parents, and a pool has one parent per group: all coefficients would be "
                "one; use VectorNormRouting() or DynamicRouting(softmax='children')"
            )
        self.features = features
        self.kernel_size, self.padding = kernel_size, padding
        self.stride = stride or kernel_size or 1
        children = None if kernel_size is None else kernel_size**2
        self.routing: Any = routing.for_layer(LayerShape(1, children, 1, 1, features, features), device, dtype)
        self.backend = backend

    @checked
    def forward(self, x: Tensor, *, return_coefficients: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        check_input("features", x, next(self.parameters(), None))
        if x.dim() != 4:
            raise ValueError(f"expected a map of shape (batch, channels, height, width), got {tuple(x.shape)}")
        batch, channels, height, width = x.shape
        if not height * width:
            raise ValueError(f"expected a map with at least one position, got {tuple(x.shape)}")
        if channels % self.features:
            raise ValueError(f"the number of channels must be a multiple of features={self.features}, got {channels}")
        groups = channels // self.features
        rows, columns, window = 1, 1, (height, width)
        if self.kernel_size is None:
            poses, present = x.reshape(batch, groups, self.features, height * width), None  # not copied, in any layout
        else:
            rows, columns = (
                (size + 2 * self.padding - self.kernel_size) // self.stride + 1 for size in (height, width)
            )
            if min(rows, columns) < 1:
                raise ValueError(f"a map of {height}x{width} has no window of kernel_size={self.kernel_size}")
            window = (self.kernel_size, self.kernel_size)
            poses, present = self._windows(x.reshape(batch * groups, self.features, height, width))
        coefficients = None
        if not return_coefficients and self._routes_in_one_operator(x.device):
            pooled = self.routing.pool(poses, present, choose_backend(self.backend, x.device))
        else:
            votes = StoredVotes(poses.flatten(0, -3).transpose(1, 2).unsqueeze(2))
            gates = None if present is None else present.to(votes.votes.dtype)
            parents = self.routing(votes.gated(gates), None, return_coefficients)
            pooled, coefficients = parents.poses, parents.coefficients
        if self.kernel_size is not None:
            pooled = pooled.reshape(batch, groups, rows, columns, self.features).movedim(-1, 2)
        pooled = pooled.reshape(batch, channels, rows, columns)
        if coefficients is None:
            return pooled
        places = () if self.kernel_size is None else (rows, columns)
        return pooled, coefficients.reshape(batch, groups, *places, *window)

    def _routes_in_one_operator(self, device: torch.device) -> bool:
        """Return whether `VectorNormRouting.pool` can run. It is unrolled vector-normed routing only, and code that
        PyTorch compiles, traces or transforms must consist of PyTorch's own operators."""
        seen = self.routing.is_uniform or self.routing.is_watched  # by the routing's own steps only
        if seen or is_traced() or choose_backend(self.backend, device) == "reference":
            return False
        return type(self.routing) is VectorNormRouting and self.routing.gradient == "unrolled"

    def _windows(self, poses: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the windows of maps `(n, features, height, width)` as poses `(n * windows, features, children)`, and
        whether each child lies in the map, `(n * windows, children)`, or None without padding."""
        assert self.kernel_size is not None
        n, features, height, width = poses.shape
        present = None
        sizes = (self.kernel_size, self.kernel_size), (self.stride, self.stride)
        if self.padding:
            sides = (self.padding,) * 4
            inside = F.pad(torch.ones(1, 1, height, width, device=poses.device), sides)
            present = windows(inside, *sizes).repeat(n, 1) > 0
            poses = F.pad(poses, sides)
        return windows(poses, *sizes).unflatten(1, (features, -1)), present

    def extra_repr(self) -> str:
        options = f"features={self.features}"
        if self.kernel_size is not None:
            options += f", kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return options + ("" if self.backend == "auto" else f", backend={self.backend!r}")
