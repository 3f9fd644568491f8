"""Networks of other libraries, often pretrained, with a routing pool or class capsules in the place of their pool."""

from typing import Literal

from torch import Tensor, nn

from torchcaps.arguments import Count, NotNegative, checked
from torchcaps.capsules import Capsules, Prediction
from torchcaps.models.cnn import Standardize
from torchcaps.models.inputs import check_images
from torchcaps.nn import CapsuleLinear, RoutingPool2d
from torchcaps.nn.surgery import global_pools, named_network, replace_module
from torchcaps.routing import DynamicRouting

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as in torchvision and most of timm
CLASS_POSE = 16


class BackboneClassifier(nn.Module):
    """Network of another library that classifies images of its own classes by routing.

    The last pool of the network, an `nn.AdaptiveAvgPool2d` to size 1, and its last linear layer are replaced. Images
    are standardized by the mean and standard deviation of ImageNet.

    Args:
        network: the network, which is changed in place.
        classes: number of classes.
        head: "pool" for a `RoutingPool2d` and a new linear layer; "capsules" for class capsules by dynamic routing, one
            for each class, to which all positions of the map vote.
        features: number of channels of a capsule, which must divide the channels that are pooled.
        sharpness: sharpness of the routing pool.

    Shape:
        - Input: `(batch, 3, height, width)`, values in [0, 1].
        - Output: a Prediction: scores `(batch, classes)`, logits with "pool" and lengths with "capsules".

    Raises:
        ValueError: the network has no such pool or no linear layer, or `features` does not divide its channels.

    Reference:
        Zhao & Huang 2019, section 3.4, for the pool; Sabour et al. 2017, section 4, for class capsules.
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        classes: Count = 10,
        head: Literal["pool", "capsules"] = "pool",
        features: Count = 16,
        sharpness: NotNegative = 5.0,
    ):
        super().__init__()
        modules = list(network.named_modules())
        linears = [name for name, module in modules if isinstance(module, nn.Linear)]
        pools = list(global_pools(network))
        if not linears or not pools:
            missing = "nn.Linear" if pools else "nn.AdaptiveAvgPool2d to size 1"
            raise ValueError(f"{type(network).__name__} has no {missing}, which the head replaces: choose another one")
        channels = network.get_submodule(linears[-1]).in_features
        assert isinstance(channels, int)
        if channels % features:
            raise ValueError(f"features must divide the {channels} channels of the pooled map, got {features}")
        self.image_shape, self.gives_logits = (3, None, None), head == "pool"
        self.standardize = Standardize(MEAN, STD)
        if head == "pool":
            replace_module(network, pools[-1], RoutingPool2d(features, sharpness))
            replace_module(network, linears[-1], nn.Linear(channels, classes))
        else:
            replace_module(network, pools[-1], _ClassLengths(channels, features, classes))
            replace_module(network, linears[-1], nn.Identity())
            after = [name for name, _ in modules].index(pools[-1])
            for name, module in modules[after:]:
                if isinstance(module, nn.Dropout):  # it would drop classes
                    replace_module(network, name, nn.Identity())
        self.network = network

    def forward(self, images: Tensor) -> Prediction:
        check_images(images, self.image_shape, next(self.parameters(), None))
        return Prediction(self.network(self.standardize(images)))


class _ClassLengths(nn.Module):
    """Lengths of class capsules, as a map `(batch, classes, 1, 1)` in the place of a pooled one."""

    def __init__(self, channels: int, features: int, classes: int):
        super().__init__()
        self.features = features
        self.class_capsules = CapsuleLinear(
            channels // features, classes, features, CLASS_POSE, DynamicRouting(3), share_positions=True
        )

    def forward(self, x: Tensor) -> Tensor:
        capsules = self.class_capsules(Capsules(x.unflatten(1, (-1, self.features)).movedim(2, -1)))
        return capsules.activations[..., None, None]


@checked
def backbone_classifier(
    name: str,
    classes: Count = 10,
    pretrained: bool = True,
    head: Literal["pool", "capsules"] = "pool",
    features: Count = 16,
    sharpness: NotNegative = 5.0,
) -> BackboneClassifier:
    """Build a `BackboneClassifier` from a network of torchvision or timm.

    Args:
        name: "torchvision/NAME" or "timm/NAME".
        pretrained: whether it starts from the weights that its library publishes, which may be downloaded.
        classes, head, features, sharpness: see `BackboneClassifier`.

    Raises:
        ImportError: the library is not installed.
        ValueError: see `BackboneClassifier`.
    """
    return BackboneClassifier(named_network(name, pretrained), classes, head, features, sharpness)
