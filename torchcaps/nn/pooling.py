"""Routing in the place of pooling."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.ops import Backend, StoredVotes, check_backend, choose_backend, windows
from torchcaps.private import is_traced
from torchcaps.routing import LayerShape, Routing, VectorNormRouting


class RoutingPool2d(nn.Module):
    r"""Pooling by routing: the positions of a feature map, or of each window, agree on one capsule.

    Each group of `features` channels is a capsule at every position. Those of a map or window vote with their own poses
    :math:`u_i` for one parent: with :math:`b_i = 0` at first, in each iteration

    .. math::
        c_i = \frac{\exp \lambda b_i}{\sum_k \exp \lambda b_k}, \quad
        v = \frac{\sum_i c_i u_i}{|\sum_i c_i u_i|}, \quad
        b_i \leftarrow b_i + \frac{u_i}{|u_i|} \cdot v

    and at last :math:`v = \text{activation}(\sum_i c_i u_i)`. Sharpness 0 averages; the larger it is, the closer the
    pool comes to selecting the position that agrees best with the others.

    Args:
        features: channels of a capsule; the map's channels are a multiple of it.
        sharpness: the paper's lambda, at least 0.
        iterations: agreements before the last sum. Each more adds to the logits, as a larger sharpness does, and takes
            time; the paper does not say how many it has.
        kernel_size: of the windows; None pools the whole map, of any size, as `nn.AdaptiveAvgPool2d(1)` does.
        stride: of the windows; None is `kernel_size`.
        padding: on all four sides, at most half of `kernel_size`. What is padded takes no part, as in
            `nn.AvgPool2d(count_include_pad=False)`.
        learn_sharpness: learn the sharpness, one number, from the given one on. Nothing keeps it above 0; below, the
            pool prefers what disagrees.
        activation: of the pooled capsules `(batch, 1, features)`, e.g. `squash`; None is the identity.
        routing: another algorithm in place of `VectorNormRouting` with the arguments above. Its softmax must run over
            the children, for a group has one parent.
        backend: "reference" leaves all to PyTorch's own operators, see :func:`torchcaps.use_backend`.
        device, dtype: of what is learned.

    Shape:
        - Input: `(batch, channels, height, width)`.
        - Output: `(batch, channels, rows, columns)`, where there are as many rows and columns as `nn.AvgPool2d` has,
          or 1 and 1 without windows. With `return_coefficients=True` also the coefficients, `(batch, channels //
          features, height, width)`, which sum to one over the map, or `(batch, channels // features, rows, columns,
          kernel_size, kernel_size)`, which sum to one over each window.

    It learns nothing, unless it is told to learn the sharpness. In float32, lengths beyond about 1e19 overflow and the
    pool averages.

    Reference:
        Zhao & Huang 2019, Algorithm 1 and section 3.4.
    """

    def __init__(
        self,
        features: int,
        sharpness: float = 1.0,
        iterations: int = 1,
        kernel_size: int | None = None,
        stride: int | None = None,
        padding: int = 0,
        learn_sharpness: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        routing: Routing | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if features < 1:
            raise ValueError(f"features must be at least 1, got {features}")
        if kernel_size is None and (stride is not None or padding):
            raise ValueError("stride and padding are those of windows: give a kernel_size, or leave them out")
        if kernel_size is not None and not (kernel_size >= 1 and (stride is None or stride >= 1)):
            raise ValueError(f"kernel_size and stride must be at least 1, got {kernel_size} and {stride}")
        if kernel_size is not None and not 0 <= padding <= kernel_size // 2:
            raise ValueError(f"padding must be from 0 to half of kernel_size={kernel_size}, got {padding}")
        if routing is None:
            routing = VectorNormRouting(iterations, sharpness, activation, learn_sharpness=learn_sharpness)
        elif (sharpness, iterations, learn_sharpness, activation) != (1.0, 1, False, None):
            raise ValueError("give sharpness, iterations and activation to the routing, or leave routing out")
        name = type(routing).__name__
        if routing.softmax == "parents":
            raise ValueError(
                f"{name} lets parents compete for a child, and a pool has one parent per group: the coefficients "
                "would all be one; use VectorNormRouting() or DynamicRouting(softmax='children')"
            )
        self.features = features
        self.kernel_size, self.padding = kernel_size, padding
        self.stride = stride or kernel_size or 1
        children = None if kernel_size is None else kernel_size**2
        self.routing: Any = routing.for_layer(LayerShape(1, children, 1, 1, features, features), device, dtype)
        self.backend = check_backend(backend)

    def forward(self, x: Tensor, *, return_coefficients: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if x.dim() != 4:
            raise ValueError(f"expected a map of shape (batch, channels, height, width), got {tuple(x.shape)}")
        batch, channels, height, width = x.shape
        if channels % self.features:
            raise ValueError(f"expected channels that are a multiple of features={self.features}, got {channels}")
        groups = channels // self.features
        rows, columns, window = 1, 1, (height, width)
        if self.kernel_size is None:
            poses, present = x.reshape(batch * groups, self.features, height * width), None
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
            pooled = self.routing.pool(poses, present)
        else:
            votes = StoredVotes(poses.transpose(1, 2).unsqueeze(2))
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
        """What PyTorch compiles it fuses itself, what it traces or transforms must be its own, and only the whole of
        vector-normed routing is one operator."""
        if is_traced() or choose_backend(self.backend, device) == "reference":
            return False
        return type(self.routing) is VectorNormRouting and self.routing.gradient == "unrolled"

    def _windows(self, poses: Tensor) -> tuple[Tensor, Tensor | None]:
        """The windows of maps `(n, features, height, width)`, `(n * windows, features, children)`, and where they have
        children, `(n * windows, children)`, or None: everywhere."""
        assert self.kernel_size is not None
        n, features, height, width = poses.shape
        present = None
        sizes = (self.kernel_size, self.kernel_size), (self.stride, self.stride)
        if self.padding:
            sides = (self.padding,) * 4
            of_map = F.pad(torch.ones(1, 1, height, width, device=poses.device), sides)
            present = windows(of_map, *sizes).repeat(n, 1) > 0
            poses = F.pad(poses, sides)
        return windows(poses, *sizes).unflatten(1, (features, -1)), present

    def extra_repr(self) -> str:
        options = f"features={self.features}"
        if self.kernel_size is not None:
            options += f", kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return options + ("" if self.backend == "auto" else f", backend={self.backend!r}")


def replace_pooling(
    model: nn.Module | str, pool: RoutingPool2d, name: str | None = None, pretrained: bool = True
) -> nn.Module:
    """Put a routing pool in the place of a network's global average pooling.

    All else stays, weights included. Those have learned with an average: some training lets them learn the routing.

        model = replace_pooling(my_resnet, RoutingPool2d(features=16, sharpness=5.0))
        model = replace_pooling("torchvision/resnet50", RoutingPool2d(features=16, sharpness=5.0))

    Args:
        model: a network, changed in place; or the name of one in a library that is installed, "torchvision/NAME" or
            "timm/NAME".
        pool: what to put there, on the device and in the precision of the network; its `features` divide the channels
            that are pooled.
        name: of the module to replace, whatever it is, as in `model.named_modules()`. By default the only
            `nn.AdaptiveAvgPool2d` to size 1 in the network.
        pretrained: whether a network that is named comes with its published weights, which may be downloaded.

    Returns:
        The network.

    Raises:
        ValueError: there is no such module, or more than one; the message has the names.
        ImportError: the library is not installed.
    """
    if isinstance(model, str):
        model = _named_network(model, pretrained)
    modules = dict(model.named_modules(remove_duplicate=False))
    if name is None:
        found = {key: module for key, module in modules.items() if _is_global_average(module)}
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no nn.AdaptiveAvgPool2d to size 1: give the name of the module that "
                "pools; what is a function in its forward has none"
            )
        if len({id(module) for module in found.values()}) > 1:
            raise ValueError(f"{type(model).__name__} has several pools, {', '.join(found)}: say which, by name")
        old = next(iter(found.values()))
    elif name in modules:
        old = modules[name]
    else:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has {', '.join(list(modules)[1:])}")
    if old is model:
        raise ValueError(f"this {type(model).__name__} is the pool itself, and has none inside")
    parameter = next(model.parameters(), None)
    pool = pool.train(old.training).to(parameter) if parameter is not None else pool.train(old.training)
    for key, module in modules.items():
        if module is old:
            place = key.removesuffix("._orig_mod")  # what compiled the old pool would go on running it
            parent, _, attribute = place.rpartition(".")
            setattr(modules[parent], attribute, pool)
    return model


def _is_global_average(module: nn.Module) -> bool:
    return isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))


def _named_network(name: str, pretrained: bool) -> nn.Module:
    library, _, network = name.partition("/")
    if library not in ("torchvision", "timm") or not network:
        raise ValueError(f"expected a network, 'torchvision/NAME' or 'timm/NAME', got {name!r}")
    try:
        module = importlib.import_module("timm" if library == "timm" else "torchvision.models")
    except ModuleNotFoundError as error:
        raise ImportError(f"{name!r} needs {error.name}, which is missing: pip install {library}") from error
    if library == "timm":
        return module.create_model(network, pretrained=pretrained)
    return module.get_model(network, weights="DEFAULT" if pretrained else None)
