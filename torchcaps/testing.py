"""Laws that every routing must obey, as assertions to call on your own.

They are never enough alone: a softmax over the wrong axis obeys all but `assert_coefficients_sum_to_one`. Give a
new algorithm a case worked out by hand and an oracle in plain loops as well.

Each function takes `route(votes, scores) -> Capsules`, with votes `(batch, children, parents, *pose)` and scores
`(batch, children)` or None, e.g. `lambda votes, scores: dynamic_routing(votes, scores=scores)`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.testing import assert_close

from torchcaps.capsules import Capsules
from torchcaps.ops import Over

Route = Callable[[Tensor, Tensor | None], Capsules]


def assert_routing_laws(route: Route, votes: Tensor, over: Over = "parents") -> None:
    """All laws below, on votes of at least two children and two parents."""
    assert_coefficients_sum_to_one(route(votes, None), over)
    assert_children_have_no_order(route, votes)
    assert_parents_have_no_order(route, votes)
    assert_samples_are_independent(route, votes)
    assert_padding_changes_nothing(route, votes)


def assert_coefficients_sum_to_one(capsules: Capsules, over: Over = "parents") -> None:
    """Coefficients are not negative, and sum to one over the parents of each child (or the children of each parent)."""
    coefficients = capsules.coefficients
    if coefficients is None:
        raise AssertionError("there are no coefficients: ask for them with return_coefficients=True")
    if not (coefficients >= 0).all():
        raise AssertionError(f"a coefficient is negative: {coefficients.min().item()}")
    sums = coefficients.sum(-1 if over == "parents" else -2)
    assert_close(sums, torch.ones_like(sums), msg=lambda m: f"coefficients do not sum to one over the {over}: {m}")


def assert_children_have_no_order(route: Route, votes: Tensor) -> None:
    """Listing the children in another order changes no parent."""
    order = torch.arange(votes.shape[1]).roll(1)
    expected, actual = route(votes, None), route(votes[:, order], None)
    assert_close(actual.poses, expected.poses, msg=lambda m: f"the order of children matters: {m}")


def assert_parents_have_no_order(route: Route, votes: Tensor) -> None:
    """Listing the parents in another order lists the result in that order. Only for parents that have no
    parameters of their own, or equal ones."""
    order = torch.arange(votes.shape[2]).roll(1)
    expected, actual = route(votes, None), route(votes[:, :, order], None)
    assert_close(actual.poses, expected.poses[:, order], msg=lambda m: f"the order of parents matters: {m}")


def assert_samples_are_independent(route: Route, votes: Tensor) -> None:
    """Each sample of a batch is routed as if it were alone."""
    together = route(votes, None).poses
    alone = torch.cat([route(sample, None).poses for sample in votes.split(1)])
    assert_close(together, alone, msg=lambda m: f"samples of a batch affect each other: {m}")


def assert_padding_changes_nothing(route: Route, votes: Tensor) -> None:
    """Children with score -inf might as well not be there, for the parents and for all gradients."""
    votes = votes.detach().requires_grad_()
    padding = torch.full_like(votes[:, :2], 1e4)  # votes that would drown all others
    padded = torch.cat([votes, padding], dim=1)
    scores = votes.new_zeros(votes.shape[:2])
    padded_scores = torch.cat([scores, scores.new_full((votes.shape[0], padding.shape[1]), -torch.inf)], dim=1)
    expected, actual = route(votes, scores), route(padded, padded_scores)
    for field in ("poses", "scores", "variances"):
        a, e = getattr(actual, field), getattr(expected, field)
        if e is not None:
            assert_close(a, e, msg=f"padding changes the {field}")
    wanted, found = (torch.autograd.grad(c.poses.square().sum(), votes)[0] for c in (expected, actual))
    assert_close(found, wanted, msg=lambda m: f"padding changes the gradients: {m}")
