"""The launch of each kernel, and the order of those of a backward pass."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchcaps.ops.children import Gradients
from torchcaps.ops.triton.problem import Problem, contiguous, view_parents_last
from torchcaps.ops.triton.sizes import ceil_div, power_of_2

# ---------------------------------------------------------------- forward


def sums(p: Problem) -> dict[str, Tensor | None]:
    """Return the results of `kernels.sums`: totals, masses, squares, benefits and peaks of each split of the children,
    and the origins of the means. Those that are not needed are None."""
    tile, (target, precision, prior) = p.tile("sums"), p.agreement_tensors
    one_block = tile.parents >= p.parents
    norms = None
    if not one_block and not p.over_children and not p.all_ones:
        norms = normalize(p, pack(p), with_grads=False)
    sizes = p.sizes(tile, p.samples)
    blocks = ceil_div(p.samples, sizes["block_n"]), ceil_div(p.parents, tile.parents)
    part = p.samples * p.parents * p.features * (1 + p.moments)
    splits, per_split = p.split(p.children, blocks[0] * blocks[1], tile, part)

    def features(wanted: bool, splits: int = splits) -> Tensor | None:
        return p.new(splits, p.samples, p.parents, p.features) if wanted else None

    def scores(wanted: bool) -> Tensor | None:
        return p.new(splits, p.samples, p.parents) if wanted else None

    results = {
        "totals": features(True),
        "masses": scores(p.moments or p.over_children),
        "squares": features(p.moments),
        "benefits": scores(p.betas is not None),
        "peaks": scores(p.over_children),
        "origins": features(p.moments and precision is None, 1),
    }
    p.launch(
        "sums", (*blocks, splits), norms=norms, target=target, precision=precision, prior=prior, one_block=one_block,
        per_split=per_split, **results, **p.windows(), **sizes,
    )  # fmt: skip
    return results


def merge(p: Problem, parts: dict[str, Tensor | None], center: Tensor | None = None, **results: Tensor | None) -> None:
    """Join the results of the splits."""
    nothing = dict.fromkeys(("result", "variance", "mass", "benefit", "lse"))
    parts = {name: parts[name] for name in ("totals", "squares", "masses", "benefits", "peaks")}
    totals = parts["totals"]
    assert totals is not None
    p.launch_pairs("merge", splits=len(totals), center=center, **parts, **(nothing | results))


def normalize(p: Problem, packed: Tensor, with_grads: bool) -> Tensor:
    """Return peak, mass and gate gradient of each child's softmax over the parents, `(3, samples, children)`."""
    tile = p.tile("normalize")
    sizes = p.sizes(tile, p.samples)
    blocks = ceil_div(p.samples, sizes["block_n"])
    splits, per_split = p.split(p.children, blocks, tile)
    norms = p.new(2, 3, p.samples, p.children)
    p.launch(
        "normalize", (blocks, splits), norms=norms, with_grads=with_grads, per_split=per_split,
        pack=packed, **p.windows(), **sizes,
    )  # fmt: skip
    return norms[(ceil_div(p.parents, tile.parents) - 1) % 2]  # the copy that the last block wrote


# ---------------------------------------------------------------- backward


def backward(p: Problem, into: Gradients, **results: Tensor | None) -> tuple[Tensor | None, ...]:
    """Add the gradients of the children; return those of target, precision, prior, offset and betas.

    Args:
        results: what :func:`pack` takes of the results of the forward pass and their gradients.
    """
    if p.empty:
        given = (*p.agreement_tensors, p.offset, p.betas)
        return tuple(None if x is None else torch.zeros_like(x) for x in given)
    packed = pack(p, **results)
    norms, parts = grads(p, packed, into)
    return *_split_parts(p, parts), *weight_grads(p, packed, into, norms)


def pack(
    p: Problem,
    lse: Tensor | None = None,
    grad: Tensor | None = None,
    grad_mass: Tensor | None = None,
    grad_variance: Tensor | None = None,
    grad_benefit: Tensor | None = None,
    **results: Tensor | None,
) -> Tensor:
    """Return what a kernel must know of each parent, in one tensor `(samples, size, parents)`."""
    target, precision, prior = p.agreement_tensors
    wide = target, precision, grad, grad_variance, grad_variance if precision is None else None
    narrow = prior, grad_benefit, lse, grad if p.over_children or p.moments else None
    size = sum(p.features for x in wide if x is not None) + sum(1 for x in narrow if x is not None)
    packed = p.new(p.samples, size, p.parents)
    inputs = {
        "target": target, "precision": precision, "prior": prior, "lse": lse, "grad": grad,
        "grad_mass": grad_mass, "grad_variance": grad_variance, "grad_benefit": grad_benefit,
        "sums": None, "mass": None, "variance": None,
    } | results  # fmt: skip
    inputs = {name: contiguous(x) for name, x in inputs.items()}
    p.launch_pairs("pack", packed=packed, size=size, **inputs)
    return packed


def grads(p: Problem, packed: Tensor, into: Gradients) -> tuple[Tensor | None, Tensor | None]:
    """Add the gradients of poses and gates. Return peak, mass and gate gradient of each child, which the softmax over
    the parents needs again, and the gradients of the agreement's tensors, a row for each split."""
    tile, launches = p.tile("grads"), p.windows_apart()
    one_block, most = tile.parents >= p.parents, launches[0]["n_samples"]
    sizes = p.sizes(tile, most)
    part = sum(x.numel() for x in p.agreement_tensors if x is not None)
    splits, per_split = p.split(p.children, ceil_div(most, sizes["block_n"]), tile, max(1, part))
    parts = p.new(splits, part) if part else None
    norms = None
    if not p.over_children and not p.all_ones:
        norms = p.new(3, p.samples, p.children) if one_block else normalize(p, packed, with_grads=True)
    with _in_place(into.poses) as grad_poses, _in_place(into.gates) as grad_gates:
        wanted = any(x is not None for x in (grad_poses, grad_gates, norms, parts))
        for windows in launches if wanted else ():
            p.launch(
                "grads", (ceil_div(windows["n_samples"], sizes["block_n"]), splits), grad_poses=grad_poses,
                grad_gates=grad_gates, norms=norms, parts=parts, one_block=one_block, per_split=per_split,
                pack=packed, **windows, **sizes,
            )  # fmt: skip
    return norms, parts


def _split_parts(p: Problem, parts: Tensor | None) -> Iterator[Tensor | None]:
    """Yield the gradients of target, precision and prior."""
    whole, first = None if parts is None else _total(parts), 0
    for x in p.agreement_tensors:
        if x is None or whole is None:
            yield None
        else:
            own = whole[first : first + x.numel()].view(x.shape)
            yield own.clone() if first else own  # results of an operator must not share memory, and must be aligned
            first += x.numel()


def weight_grads(
    p: Problem, packed: Tensor, into: Gradients, norms: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Add the gradients of weight and bias; return those of offset and betas. One launch per number of groups."""
    tile = p.tile("weight_grads")
    sizes, whole_d = p.sizes(tile, p.samples), power_of_2(p.depth)
    n_blocks, j_blocks = ceil_div(p.samples, sizes["block_n"]), ceil_div(p.parents, tile.parents)
    # Views with the parents last, the order in which the kernel writes. Of offset and betas only the shapes count.
    views = {
        name: None if x is None else view_parents_last(x)
        for name, x in (
            ("grad_weight", into.weight), ("grad_bias", into.bias), ("grad_betas", p.betas), ("grad_offset", p.offset),
        )
    }  # fmt: skip
    added, shared = ("grad_weight", "grad_bias"), {"grad_bias": p.shared_bias, "grad_betas": p.shared_betas}
    found: dict[str, Tensor] = {}
    for groups in sorted({x.shape[0] for x in views.values() if x is not None}):
        own = {name: x for name, x in views.items() if x is not None and x.shape[0] == groups}
        rows, per_group = groups * p.places, p.types // groups
        part = sum(x.numel() for x in own.values())
        splits, per_split = p.split(per_group * n_blocks, rows * j_blocks, tile, part)
        # The kernel adds in place if one program alone adds to each number.
        add = all(
            splits == 1 and x.is_contiguous() and not (shared.get(name) and j_blocks > 1)
            for name, x in own.items()
            if name in added
        )
        parts = {
            name: x
            if add and name in added
            else p.new(splits, *x.shape[:-1], j_blocks if shared.get(name) else x.shape[-1])
            for name, x in own.items()
        }
        p.launch(
            "weight_grads", (rows, j_blocks, splits), add=add, norms=norms, whole_d=whole_d,
            by_row=whole_d * sizes["block_n"] <= tile.loads, own_weight=groups == p.groups,
            one_child=per_group == 1, per_group=per_group, per_split=per_split,
            **(dict.fromkeys(views) | parts), pack=packed, **p.windows(), **sizes,
        )  # fmt: skip
        for name, x in own.items():
            if parts[name] is not x:
                total = _total(parts[name])
                found[name] = total.sum(-1, keepdim=True) if shared.get(name) else total
    for name in added:
        view = views[name]
        if view is not None and name in found:
            view.add_(found[name])
    grad_offset, grad_betas = (
        found[name].movedim(-1, 3).contiguous() if name in found else None for name in ("grad_offset", "grad_betas")
    )
    return grad_offset, grad_betas


@contextlib.contextmanager
def _in_place(x: Tensor | None) -> Iterator[Tensor | None]:
    """Return a contiguous tensor for a kernel to add to: x, or a buffer that is added to x afterwards."""
    if x is None or x.is_contiguous():
        yield x
    else:
        buffer = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        yield buffer
        x += buffer


def _total(parts: Tensor) -> Tensor:
    """Return the sum over the splits."""
    return parts[0] if len(parts) == 1 else parts.sum(0)
