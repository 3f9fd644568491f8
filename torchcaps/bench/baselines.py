"""Baselines: the papers' layers as most published code writes them, with the votes in memory.

Each function takes one of our layers, for its parameters, and children. It returns the parents' poses and, if the
algorithm has them, scores; a function of a layer without votes takes and returns what the layer does. The ratios of
`torchcaps bench` refer to the baselines. To read the algorithms, see the modules of `torchcaps.routing` instead.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.models.li2018.encapsulated import as_map, as_poses
from torchcaps.nn import CapsuleConv2d


def inverted_attention_conv(layer: Any, poses: Tensor, scores: None) -> tuple[Tensor, ...]:
    """BASELINE: a layer of Tsai et al. 2020, as in the authors' code."""
    parents = None
    for _ in range(layer.routing.iterations):
        parents = _inverted_attention(layer, poses, parents)
    assert parents is not None
    return (parents,)


def inverted_attention_stack(stack: Any, poses: Tensor, scores: None) -> tuple[Tensor, ...]:
    """BASELINE: the layers of Tsai et al. 2020, Procedure 2, as in the authors' code.

    All layers take part in all passes, even where a lower layer's pass can no longer reach the last layer.
    :class:`torchcaps.CapsuleStack` leaves those passes out, with the same result.
    """
    layers, first = stack.layers, poses
    routed: list[Tensor] = []
    for layer in layers:
        routed.append(_inverted_attention(layer, routed[-1] if routed else first, None))
    for _ in range(layers[0].routing.iterations - 1):
        children = [first, *routed[:-1]]
        routed = [_inverted_attention(layer, x, p) for layer, x, p in zip(layers, children, routed, strict=True)]
    return (routed[-1],)


def _windows(layer: Any, x: Tensor) -> Tensor:
    """Unfold a map into the windows of a convolution, `(b, n, y, x, ..., k, l)`."""
    for side in (0, 1):
        x = x.unfold(2 + side, layer.kernel_size[side], layer.stride[side])
    return x


def _inverted_attention(layer: Any, poses: Tensor, parents: Tensor | None) -> Tensor:
    """One pass, from the parents of the pass before to new ones.

    A convolution's input is unfolded into windows. One einsum of three operands makes the agreement from windows,
    weights and parents, and another the parents from windows, weights and coefficients.
    """
    weight, routing = layer.weight, layer.routing
    if isinstance(layer, CapsuleConv2d):
        poses = _windows(layer, poses)
        shape = (poses.shape[0], *poses.shape[2:4], *weight.shape[:4])
        to_agreement, to_parents = "bnyxrdkl,nklmdh,bmyxrh->byxnklm", "bnyxrdkl,nklmdh,byxnklm->bmyxrh"
    else:
        poses = poses.flatten(1, -3)
        shape = (poses.shape[0], *weight.shape[:2])
        to_agreement, to_parents = "bnrd,nmdh,bmrh->bnm", "bnrd,nmdh,bnm->bmrh"
    if parents is None:
        coefficients = poses.new_full(shape, 1 / shape[-1])
    else:
        agreement = torch.einsum(to_agreement, poses, weight, parents)
        coefficients = (agreement / math.sqrt(parents.shape[-2:].numel())).softmax(-1)
    updated = torch.einsum(to_parents, poses, weight, coefficients).flatten(-2)
    normed = F.layer_norm(updated, updated.shape[-1:], routing.weight, routing.bias)
    return normed.unflatten(-1, layer.out_pose)


def heinsen(layer: Any, poses: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """BASELINE: Heinsen 2019, Algorithm 1 line by line: E-step, D-step and M-step on a tensor of all votes."""
    poses, scores = poses.flatten(1, -3), scores.flatten(1)
    if layer.weight.shape[0] == 1:  # children share one set of weights
        votes = torch.einsum("bird,jdh->bijrh", poses, layer.weight[0])
    else:
        votes = torch.einsum("bird,ijdh->bijrh", poses, layer.weight)
    if layer.bias is not None:
        votes = votes + layer.bias
    mean, parent_scores = heinsen_loop(layer.routing, votes.flatten(3), scores)
    return mean.unflatten(-1, layer.out_pose), parent_scores


def heinsen_loop(routing: Any, votes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Iterate on votes `(b, i, j, k)`."""
    presence = scores.sigmoid().unsqueeze(-1)
    shares = torch.full_like(votes[..., 0], 1 / votes.shape[2])
    for t in range(routing.iterations):
        used = presence * shares
        ignored = presence - used
        parent_scores = (routing.beta_use * used).sum(1) - (routing.beta_ignore * ignored).sum(1)
        total = used.sum(1).unsqueeze(-1) + routing.eps
        mean = torch.einsum("bij,bijk->bjk", used, votes) / total
        variance = torch.einsum("bij,bijk->bjk", used, (votes - mean.unsqueeze(1)) ** 2) / total + routing.eps
        if t < routing.iterations - 1:
            log_density = -((votes - mean.unsqueeze(1)) ** 2 / (2 * variance.unsqueeze(1))).sum(-1)
            log_density = log_density - 0.5 * variance.log().sum(-1).unsqueeze(1)
            shares = (F.logsigmoid(parent_scores).unsqueeze(1) + log_density).softmax(-1)
    return mean, parent_scores


def capnet_dynamic(layer: Any, poses: Tensor, scores: Tensor | None) -> tuple[Tensor, ...]:
    """BASELINE: dynamic routing on stored votes of a grid, as Li et al. 2018: accumulated logits, softmax, squash.

    A `CapsuleHead` has scores, by which each child counts.
    """
    votes = torch.einsum("bgyxd,gjdh->bgyxjh", poses, layer.weight).flatten(1, 3)
    return (dynamic_loop(layer.routing, votes, None if scores is None else scores.sigmoid().flatten(1)),)


def dynamic_loop(routing: Any, votes: Tensor, presence: Tensor | None = None) -> Tensor:
    """Iterate on votes `(b, i, j, k)` of children that are present by `(b, i)`."""
    over = 1 if routing.softmax == "children" else 2
    logits = torch.zeros_like(votes[..., 0])
    for t in range(routing.iterations):
        coefficients = logits.softmax(over)
        if presence is not None:
            coefficients = presence.unsqueeze(-1) * coefficients
        parents = _squash((coefficients.unsqueeze(-1) * votes).sum(1))
        if t < routing.iterations - 1:
            logits = logits + (votes * parents.unsqueeze(1)).sum(-1)
    return parents


def digit_capsules(layer: Any, poses: Tensor, scores: None) -> tuple[Tensor, ...]:
    """BASELINE: Sabour et al. 2017, as in the tutorials.

    It makes a copy of the weights per sample, a broadcast matrix product for the votes, and a logit per sample, child
    and parent. Unlike many tutorials, it takes the softmax over the right axis.
    """
    weight = layer.weight.transpose(-1, -2).unsqueeze(0).repeat(poses.shape[0], 1, 1, 1, 1)
    poses = poses.flatten(1, -2)
    votes = (weight @ poses[:, :, None, :, None]).squeeze(-1)
    logits = torch.zeros(*votes.shape[:3], 1, dtype=votes.dtype, device=votes.device)
    for t in range(layer.routing.iterations):
        parents = _squash((logits.softmax(2) * votes).sum(1, keepdim=True))
        if t < layer.routing.iterations - 1:
            logits = logits + (votes * parents).sum(-1, keepdim=True)
    return (parents.squeeze(1),)


def em_conv(layer: Any, poses: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """BASELINE: Hinton et al. 2018, Procedure 1 on a tensor of all votes of all windows."""
    windows = _windows(layer, poses)
    votes = torch.einsum("bnyxrdkl,nklmdh->byxnklmrh", windows, layer.weight).flatten(7).flatten(3, 5)
    presence = _windows(layer, scores.sigmoid()).permute(0, 2, 3, 1, 4, 5).flatten(3)
    mean, parent_scores = em_loop(layer.routing, votes, presence)
    return mean.unflatten(-1, layer.out_pose).movedim(3, 1), parent_scores.movedim(3, 1)


def em_loop(routing: Any, votes: Tensor, presence: Tensor) -> tuple[Tensor, Tensor]:
    """Iterate on votes `(..., i, j, k)` of children that are present by `(..., i)`."""
    assignment = torch.full_like(votes[..., 0], 1 / votes.shape[-2])
    for t in range(routing.iterations):
        assigned = presence.unsqueeze(-1) * assignment
        total = assigned.sum(-2).unsqueeze(-1)
        mean = (assigned.unsqueeze(-1) * votes).sum(-3) / total
        variance = (assigned.unsqueeze(-1) * (votes - mean.unsqueeze(-3)) ** 2).sum(-3) / total
        variance = variance.clamp_min(routing.eps)
        cost = ((routing.beta_u.unsqueeze(-1) + 0.5 * variance.log()) * total).sum(-1)
        inverse_temperature = routing.inverse_temperature * (1 - routing.decay ** (t + 1))
        parent_scores = inverse_temperature * (routing.beta_a - cost)
        if t < routing.iterations - 1:
            log_density = -((votes - mean.unsqueeze(-3)) ** 2 / (2 * variance.unsqueeze(-3))).sum(-1)
            log_density = log_density - 0.5 * (2 * math.pi * variance).log().sum(-1).unsqueeze(-2)
            assignment = (F.logsigmoid(parent_scores).unsqueeze(-2) + log_density).softmax(-1)
    return mean, parent_scores


def encapsulated(block: Any, capsules: Capsules | Tensor, shortcut: Capsules | None = None) -> Capsules:
    """BASELINE: a layer of Li et al. 2018, section 3.1, in PyTorch's operators one after another."""
    x = as_map(_poses(capsules))
    if block.coefficients is None:
        y = block.conv(x)
    else:
        master, aide = (_bn_relu_squash(branch[1], branch[0](x)) for branch in (block.master, block.aide))
        c_master, c_aide = block.from_master(master), block.from_aide(aide)
        if block.coefficients == "both":
            c_master, c_aide = (c_master + c_aide).unflatten(1, (block.capsules, 2)).unbind(2)
        elif block.coefficients == "other":
            c_master, c_aide = c_aide, c_master
        times = block.out_pose
        y = c_master.repeat_interleave(times, 1) * master + c_aide.repeat_interleave(times, 1) * aide
    if block.shortcut is not None:
        y = y + block.shortcut(x)
    if shortcut is not None:
        y = y + as_map(shortcut.poses)
    return Capsules(as_poses(_bn_relu_squash(block.activation, y), block.out_pose))


def _poses(capsules: Capsules | Tensor) -> Tensor:
    return capsules.poses if isinstance(capsules, Capsules) else capsules


def _bn_relu_squash(activation: Any, x: Tensor) -> Tensor:
    """Return batch normalization, ReLU, and `|s| s / (1 + |s|^2)` of each capsule s of a map."""
    s = activation.bn(x).relu().unflatten(1, (-1, activation.pose))
    length = s.norm(dim=2, keepdim=True)
    return (length / (1 + length**2) * s).flatten(1, 2)


def summed(layer: Any, capsules: Capsules | Tensor) -> Capsules:
    """BASELINE: the class capsules of Li et al. 2018: a matrix product for each feature, then squash."""
    children = _poses(capsules).flatten(1, -2)
    sums = torch.stack([children[..., h] @ layer.weight[h] for h in range(layer.pose)], -1)
    return Capsules(_squash(sums))


def routing_pool(pool: Any, x: Tensor) -> Tensor:
    """BASELINE: Zhao & Huang 2019, Algorithm 1, on a tensor of the unit children of all positions."""
    children = x.unflatten(1, (-1, pool.features)).flatten(3).transpose(2, 3)  # (b, groups, positions, features)
    unit = F.normalize(children, dim=-1)
    logits = torch.zeros_like(children[..., :1])
    for _ in range(pool.routing.iterations):
        parent = ((pool.routing.sharpness * logits).softmax(2) * children).sum(2, keepdim=True)
        logits = logits + (unit * F.normalize(parent, dim=-1)).sum(-1, keepdim=True)
    parent = ((pool.routing.sharpness * logits).softmax(2) * children).sum(2)
    return parent.flatten(1)[..., None, None]


def _squash(s: Tensor) -> Tensor:
    squared = (s**2).sum(-1, keepdim=True)
    return squared / (1 + squared) * s / squared.sqrt()
