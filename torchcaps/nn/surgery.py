"""Surgery on existing networks: replace average pooling by a routing pool."""

import importlib

from torch import nn

from torchcaps.arguments import checked
from torchcaps.nn.pooling import RoutingPool2d


@checked
def replace_pooling(
    model: nn.Module | str, pool: RoutingPool2d, name: str | None = None, pretrained: bool = True
) -> nn.Module:
    """Replace a network's global average pooling by a routing pool.

    Everything else stays, weights included. The weights were trained with an average, so train the network a little
    more with the routing.

        model = replace_pooling(my_resnet, RoutingPool2d(features=16, sharpness=5.0))
        model = replace_pooling("torchvision/resnet50", RoutingPool2d(features=16, sharpness=5.0))

    Args:
        model: a network, which is changed in place, or the name of a network in an installed library,
            "torchvision/NAME" or "timm/NAME".
        pool: the new pool, which is moved to the device and the precision of the network; its `features` must divide
            the number of pooled channels.
        name: name of the module to replace, of any kind, as in `model.named_modules()`; None for the only
            `nn.AdaptiveAvgPool2d` to size 1 in the network.
        pretrained: load the published weights of a network given by name; its library may download them.

    Returns:
        The network.

    Raises:
        ValueError: if there is no such module, or more than one; the message lists the names.
        ImportError: if the library is not installed.
    """
    if isinstance(model, str):
        model = named_network(model, pretrained)
    modules = dict(model.named_modules(remove_duplicate=False))
    if name is None:
        found = global_pools(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no nn.AdaptiveAvgPool2d to size 1: give the name of the module that "
                "pools; a function that its forward calls cannot be replaced"
            )
        if len({id(module) for module in found.values()}) > 1:
            raise ValueError(f"{type(model).__name__} has several pools, {', '.join(found)}: choose one by its name")
        old = next(iter(found.values()))
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
            replace_module(model, key.removesuffix("._orig_mod"), pool)  # a compiled wrapper would run the old pool
    return model


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of this name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def global_pools(model: nn.Module) -> dict[str, nn.Module]:
    """Return all `nn.AdaptiveAvgPool2d` to size 1 in a network, by their names, in the order of its modules."""
    return {
        key: module
        for key, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1))
    }


def named_network(name: str, pretrained: bool) -> nn.Module:
    """Build a network of torchvision or timm, see `replace_pooling`."""
    library, _, network = name.partition("/")
    if library not in ("torchvision", "timm") or not network:
        raise ValueError(f"expected a network's name, 'torchvision/NAME' or 'timm/NAME', got {name!r}")
    try:
        module = importlib.import_module("timm" if library == "timm" else "torchvision.models")
    except ModuleNotFoundError as error:
        raise ImportError(f"{name!r} needs {error.name}, which is missing: pip install {library}") from None
    if library == "timm":
        return module.create_model(network, pretrained=pretrained)
    return module.get_model(network, weights="DEFAULT" if pretrained else None)
