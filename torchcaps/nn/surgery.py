"""Surgery on existing networks: a routing pool in the place of a pool, and the part of a network up to a layer."""

from typing import Any

from torch import fx, nn

from torchcaps.nn.modes import evaluating
from torchcaps.nn.pooling import RoutingPool2d
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line


@checked
def replace_pooling(model: nn.Module, pool: RoutingPool2d, name: str | None = None) -> nn.Module:
    """Replace a network's global average pooling by a routing pool.

    Everything else stays, weights included. The weights were trained with an average, so train the network a little
    more with the routing.

        model = replace_pooling(my_resnet, RoutingPool2d(features=16, sharpness=5.0))

    Args:
        model: a network, which is changed in place.
        pool: the new pool, which is moved to the device and the precision of the network; its `features` must divide
            the number of pooled channels.
        name: name of the module to replace, of any kind, as in `model.named_modules()`; None for the only
            `nn.AdaptiveAvgPool2d` to size 1 in the network.

    Returns:
        The network.

    Raises:
        ValueError: if there is no such module, or more than one; the message lists the names.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if name is None:
        pools = global_pools(model)
        if not pools:
            raise ValueError(
                f"{type(model).__name__} has no nn.AdaptiveAvgPool2d to size 1: give the name of the module that "
                "pools; a function that its forward calls cannot be replaced, but add_capsules works on any network"
            )
        if len({id(module) for module in pools.values()}) > 1:
            raise ValueError(f"{type(model).__name__} has several pools, {', '.join(pools)}: choose one by its name")
        old = next(iter(pools.values()))
    elif name in modules:
        old = modules[name]
    else:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; it has {', '.join(list(modules)[1:])}")
    if old is model:
        raise ValueError(f"this {type(model).__name__} is the pool itself: give the network that contains it")
    parameter = next(model.parameters(), None)
    pool = pool.train(old.training).to(parameter) if parameter is not None else pool.train(old.training)
    for key, module in modules.items():
        if module is old:
            model.set_submodule(key.removesuffix("._orig_mod"), pool)  # a compiled wrapper would run the old pool
    return model


def global_pools(model: nn.Module) -> dict[str, nn.Module]:
    """Return all `nn.AdaptiveAvgPool2d` to size 1 in a network, by their names, in the order of its modules."""
    return {
        key: module
        for key, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))
    }


def up_to(model: nn.Module, layer: str) -> fx.GraphModule:
    """Return the part of a network whose output is that of a layer, with the modules of the network.

    Only the modules that contain the layer are traced, in evaluation mode; all others are called as they are. Arguments
    of the network after the first one keep a default that is a number, a text or None. Its own hooks are lost.

    Args:
        model: the network.
        layer: name of the layer in `model.named_modules()`; if it runs several times, its last output counts.

    Raises:
        ValueError: there is no such layer, the network does not run it, or a module that contains it cannot be traced.
    """
    if layer not in dict(model.named_modules()) or not layer:
        children = ", ".join(name for name, _ in model.named_children())
        raise ValueError(f"{type(model).__name__} has no layer {layer!r}; it has {children}")

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return not layer.startswith(f"{name}.")

        def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], *others: Any, **named: Any) -> Any:
            # A default is what it is in a call, so that the forward can ask `if mask is None`. The first is the input.
            simple = kind == "placeholder" and len(self.graph.nodes) and args
            if simple and isinstance(args[0], bool | int | float | str | None):
                return args[0]
            return super().create_proxy(kind, target, args, *others, **named)

    try:
        with evaluating(model):
            graph = Tracer().trace(model)
    except Exception as error:  # whatever the forward of a network does with a proxy
        raise ValueError(
            f"{type(model).__name__} cannot be cut after its layer {layer!r}, because torch.fx cannot trace it "
            f"({one_line(error)[:200]}): put a CapsuleHead into its forward"
        ) from None
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == layer]
    if not calls:
        raise ValueError(f"{type(model).__name__} does not run its layer {layer!r}: choose another one")
    next(node for node in graph.nodes if node.op == "output").args = (calls[-1],)
    part = fx.GraphModule(model, graph, class_name=type(model).__name__)
    part.graph.eliminate_dead_code()
    part.delete_all_unused_submodules()
    part.recompile()
    for name, module in part.named_modules():  # some that contain others are new
        module.training = model.get_submodule(name).training
    return part
