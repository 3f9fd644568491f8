"""Capsule layers without iterations: a master branch and an aide branch in place of routing.

Li, Guo, Dai, Ouyang, Wang: Neural Network Encapsulation (2018), section 3.1. What the paper leaves out follows the
authors' code (github.com/hli2020/nn_encapsulation).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models.li2018.relu_squash import relu_squash
from torchcaps.nn.inputs import as_capsules
from torchcaps.routing import squash
from torchcaps.utils.arguments import Count, CountOrZero, Device, FloatType, checked

Coefficients = Literal["own", "other", "both"]


class CapsuleBlock2d(nn.Module):
    r"""Make capsules on a grid of children of their own type (master) and of all types (aide), as Li et al. 2018.

    Let conv be a convolution of each type alone and conv' a convolution of all types together, whose kernel is larger
    by 4. The coefficients c and c' are one number each per type and position. They come from 3x3 convolutions of each
    type's capsules in one branch or in both. Then

    .. math::
        m = f(\text{conv}(x)), \quad a = f(\text{conv}'(x)), \quad
        y = f(c \, m + c' \, a + \text{shortcut}), \quad f = \text{squash} \circ \text{ReLU} \circ \text{BN}

    where squash shrinks each capsule. Without the aide, :math:`y = f(\text{conv}(x) + \text{shortcut})`.

    The paper's type I makes capsules larger and grids smaller (kernel_size=3, stride=2, padding=1). Its type II keeps
    both sizes (kernel_size=1).

    Args:
        capsules: number of capsule types, the same in input and output.
        in_pose, out_pose: number of features of a child and of a parent; both are vectors.
        kernel_size, stride, padding: options of the master's convolution. The aide's convolution has kernel_size + 4
            and padding + 2. padding=None is kernel_size // 2.
        coefficients: branch from which a branch's coefficients are computed: its "own" (the paper's v1), the "other"
            (v2) or "both" (v3). None leaves out the aide and the coefficients.
        skip: add the input before the last f, through a 3x3 convolution of the same stride where the shape changes.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, capsules, height, width, in_pose)`; scores are not used.
        - Output: poses `(batch, capsules, height_out, width_out, out_pose)`, which lie in memory like a map `(batch,
          channels, height, width)`, so that consecutive blocks copy nothing. A pose's length, in [0, 1), says how
          present the capsule is.

    Reference:
        Li et al. 2018, section 3.1, equation 6 and Figure 3. Four points are from the authors' code: both branches end
        in BN, ReLU and squash; the sizes of their kernels; the initial biases of the coefficients are normal; all
        convolutions start from Xavier's normal initialization.
    """

    @checked
    def __init__(
        self,
        capsules: Count,
        in_pose: Count,
        out_pose: Count,
        kernel_size: Count = 3,
        stride: Count = 1,
        padding: CountOrZero | None = None,
        coefficients: Coefficients | None = "both",
        skip: bool = False,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        padding = kernel_size // 2 if padding is None else padding
        if skip and 2 * padding != kernel_size - 1:
            raise ValueError(
                "skip=True needs an odd kernel_size and padding=(kernel_size - 1) / 2, so that the skip has the same "
                f"grid, got kernel_size={kernel_size} and padding={padding}"
            )
        self.capsules, self.in_pose, self.out_pose = capsules, in_pose, out_pose
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.coefficients = coefficients
        before, channels = capsules * in_pose, capsules * out_pose
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def master() -> nn.Conv2d:
            return nn.Conv2d(before, channels, kernel_size, stride, padding, groups=capsules, bias=False, **factory)

        if coefficients is None:
            self.conv = master()
        else:
            self.master = nn.Sequential(master(), BNReLUSquash(capsules, out_pose, **factory))
            aide = nn.Conv2d(before, channels, kernel_size + 4, stride, padding + 2, bias=False, **factory)
            self.aide = nn.Sequential(aide, BNReLUSquash(capsules, out_pose, **factory))
            # For "both", the sum of the two convolutions is one convolution of both branches, without concatenating
            # them; one bias is enough.
            out = capsules * (2 if coefficients == "both" else 1)
            self.from_master = nn.Conv2d(channels, out, 3, padding=1, groups=capsules, **factory)
            one_bias = coefficients == "both"
            self.from_aide = nn.Conv2d(channels, out, 3, padding=1, groups=capsules, bias=not one_bias, **factory)
        self.shortcut: nn.Module | None = None
        if skip and (in_pose != out_pose or stride != 1):
            self.shortcut = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False, **factory)
        elif skip:
            self.shortcut = nn.Identity()
        self.activation = BNReLUSquash(capsules, out_pose, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of all convolutions anew and reset the batch normalization. Their own
        `reset_parameters` draws other weights: call it first, as `apply` does."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()

    @checked
    def forward(self, capsules: Capsules | Tensor, shortcut: Capsules | Tensor | None = None) -> Capsules:
        """Compute the parents.

        Args:
            capsules: the children.
            shortcut: capsules in the shape of the output, added before the last BN as a skip over several layers.
        """
        x = self._map(capsules)
        y = self.conv(x) if self.coefficients is None else self._mixed(self.master(x), self.aide(x))
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        if shortcut is not None:
            skipped = as_capsules(shortcut, self.activation.bn.weight).poses
            added = as_map(skipped) if skipped.dim() == 5 else skipped
            if added.shape != y.shape:
                expected = (y.shape[0], self.capsules, *y.shape[2:], self.out_pose)
                raise ValueError(f"expected a shortcut of shape {expected}, as the output, got {tuple(skipped.shape)}")
            y = y + added
        return Capsules(as_poses(self.activation(y), self.out_pose))

    def _mixed(self, master: Tensor, aide: Tensor) -> Tensor:
        """Return c master + c' aide."""
        c_master, c_aide = self.from_master(master), self.from_aide(aide)
        if self.coefficients == "both":
            c_master, c_aide = (c_master + c_aide).unflatten(1, (self.capsules, 2)).unbind(2)
        elif self.coefficients == "other":
            c_master, c_aide = c_aide, c_master
        master, aide = (branch.unflatten(1, (self.capsules, self.out_pose)) for branch in (master, aide))
        return torch.addcmul(master * c_master.unsqueeze(2), aide, c_aide.unsqueeze(2)).flatten(1, 2)

    def _map(self, capsules: Capsules | Tensor) -> Tensor:
        poses = as_capsules(capsules, self.activation.bn.weight).poses
        if poses.dim() != 5 or (poses.shape[1], poses.shape[4]) != (self.capsules, self.in_pose):
            raise ValueError(
                f"expected poses of shape (batch, {self.capsules}, height, width, {self.in_pose}), "
                f"got {tuple(poses.shape)}"
            )
        if min(poses.shape[2:4]) < 1 or min(poses.shape[2:4]) + 2 * self.padding < self.kernel_size:
            raise ValueError(
                f"a grid of {poses.shape[2]}x{poses.shape[3]} is too small for kernel_size={self.kernel_size} and "
                f"padding={self.padding}"
            )
        return as_map(poses)

    def extra_repr(self) -> str:
        return (
            f"{self.capsules}, in_pose={self.in_pose}, out_pose={self.out_pose}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, coefficients={self.coefficients!r}"
        )


class BNReLUSquash(nn.Module):
    """Batch normalization and ReLU of a map, then squash of each capsule in it."""

    def __init__(
        self, capsules: int, pose: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ):
        super().__init__()
        self.pose = pose
        self.bn = nn.BatchNorm2d(capsules * pose, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.bn.training and x.shape[0] * x.shape[2] * x.shape[3] < 2:
            raise ValueError(
                "batch normalization needs more than one sample or position in training: use a larger batch, or eval()"
            )
        return relu_squash(self.bn(x), self.pose)


def as_map(poses: Tensor) -> Tensor:
    """View poses `(batch, types, height, width, features)` as a map `(batch, types * features, height, width)`."""
    return poses.movedim(-1, 2).flatten(1, 2)


def as_poses(x: Tensor, features: int) -> Tensor:
    """View a map `(batch, types * features, height, width)` as poses `(batch, types, height, width, features)`."""
    return x.unflatten(1, (-1, features)).movedim(2, -1)


class CapsuleFC(nn.Module):
    r"""Sum each feature of all children with learned weights, and squash the parents, as Li et al. 2018.

    .. math:: v_j = \text{squash}(s_j), \quad s_j^h = \sum_i W^h_{ij} \, u_i^h

    Args:
        in_capsules: number of children.
        out_capsules: number of parents.
        pose: number of features of a capsule, child or parent; both are vectors.
        device, dtype: device and dtype of the parameters.

    Shape:
        - Input: Capsules or a tensor of poses, `(batch, in_capsules, pose)`, or on a grid `(batch, types, height,
          width, pose)`, which is flattened in this order; scores are not used.
        - Output: poses `(batch, out_capsules, pose)`; a pose's length, in [0, 1), says how present the capsule is.
        - `weight`: `(pose, in_capsules, out_capsules)`.

    Reference:
        Li et al. 2018, section 3.1. As in the authors' code, the weights are initially uniform between
        -1 / sqrt(in_capsules) and 1 / sqrt(in_capsules).
    """

    @checked
    def __init__(
        self,
        in_capsules: Count,
        out_capsules: Count,
        pose: Count,
        device: Device | None = None,
        dtype: FloatType | None = None,
    ):
        super().__init__()
        self.in_capsules, self.out_capsules, self.pose = in_capsules, out_capsules, pose
        self.weight = nn.Parameter(torch.empty(pose, in_capsules, out_capsules, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.in_capsules**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    @checked
    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        poses = as_capsules(capsules, self.weight).poses
        children = poses.flatten(1, -2) if poses.dim() in (3, 5) else poses
        if children.shape[1:] != (self.in_capsules, self.pose):
            raise ValueError(
                f"expected poses of shape (batch, {self.in_capsules}, {self.pose}), or as many capsules on a grid, "
                f"got {tuple(poses.shape)}"
            )
        return Capsules(squash(torch.einsum("bih,hij->bjh", children, self.weight)))

    def extra_repr(self) -> str:
        return f"{self.in_capsules}, {self.out_capsules}, pose={self.pose}"
