"""Wrong calls of the public API: every one must end in one line of ours, and none may compute something in silence.

Single wrong arguments are made from the signatures of all public functions and constructors, so that a new argument is
tested as soon as it exists.
"""

import math
import pickle

import calls
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchcaps import (
    CapsuleHead,
    CapsuleLinear,
    Capsules,
    CapsuleShared,
    HeinsenVectorRouting,
    MarginLoss,
    MaskedDecoder,
    Prediction,
    PrimaryCapsules,
    RoutingPool2d,
    SelfRouting,
    SlotAttention,
    SpreadLoss,
    create_model,
    squash,
)
from torchcaps.functional import margin_loss, sinkhorn_divergence, spread_loss, transport_cost
from torchcaps.ops import LinearVotes, SigmoidDot, Softmax, UnitDot
from torchcaps.routing import (
    DynamicRouting,
    EMRouting,
    HeinsenRouting,
    InvertedAttentionRouting,
    RandomRouting,
    Routing,
    VectorNormRouting,
)
from torchcaps.utils.arguments import (
    Count,
    CountOrZero,
    Device,
    FloatTensor,
    FloatType,
    Fraction,
    NotNegative,
    Positive,
    as_python,
    checked,
    kind_of,
)

PUBLIC = calls.public_callables(calls.MODULES + calls.EXTRAS)
# Building blocks of new algorithms, called in every iteration by code of this library.
BLOCKS = {"WeightedVotes", "presence", "register_model"}


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - BLOCKS))
def test_every_argument_of_the_public_api_is_checked(name):
    thing = PUBLIC[name]
    unchecked = set(calls.parameters(thing)) - set(calls.kinds(thing))
    assert not unchecked, f"{name} has arguments without an annotation that can be checked"
    for argument, kind in calls.kinds(thing).items():
        if argument not in calls.parameters(thing):
            continue  # *layers
        for value in (odd for odd in calls.ODD if not kind.fits(as_python(odd))):
            with pytest.raises((TypeError, ValueError)) as error:
                thing(**{argument: value})
            calls.assert_our_error(error.value, f"{argument} must be ")


nan, inf = math.nan, math.inf
FITS_AND_DOES_NOT = [
    (Count, [1, 3], [0, -1, 2.5, "3", True, None, nan, inf, (3, 3), torch.tensor(3), 3.0]),
    (Count | None, [None, 1], [0, "3", False]),
    (CountOrZero, [0, 2], [-1, 0.0, None, False]),
    (float, [1, -2.5], [nan, inf, -inf, "1", True, None, 1j, torch.tensor(1.0)]),
    (Positive, [1e-9, 1], [0, -1, nan, inf, "1", True]),
    (NotNegative, [0, 1.5], [-0.1, nan, inf]),
    (Fraction, [0, 0.5, 1], [-0.1, 1.1, nan, "0.5"]),
    (bool, [True, False], ["no", 0, 1, None, np.bool_(True)]),
    (str, ["a"], [3, None, b"a"]),
    (Softmax, ["parents", "children"], ["Parents", "", None, 0, ["parents"]]),
    (Softmax | None, ["parents", None], ["none"]),
    (tuple[Count, Count], [(1, 2), [3, 4]], [(1,), (1, 2, 3), (0, 1), 3, "12", (1, "2"), torch.Size([1])]),
    (tuple[Count, ...], [(), (1,), [1, 2]], [(1, 0), 3, (2.5,), "1"]),
    (Count | tuple[Count, Count], [3, (1, 2)], [0, (0, 1), (1, 2, 3), 2.5]),
    (FloatType, [torch.float32, torch.bfloat16], [torch.int64, torch.bool, torch.complex64, "float32", float]),
    (Device | None, ["cpu", "cuda:1", torch.device("meta"), None], ["cup", 0, "", True]),
    (FloatTensor, [torch.zeros(1)], [torch.zeros(1, dtype=torch.long), torch.zeros(1) > 0, [1.0], np.zeros(1)]),
    (Routing, [DynamicRouting()], [DynamicRouting, "dynamic", None, nn.Identity()]),
]


@pytest.mark.parametrize(("annotation", "fits", "does_not"), FITS_AND_DOES_NOT, ids=lambda x: str(x)[:40])
def test_annotations(annotation, fits, does_not):
    kind = kind_of(annotation)
    assert [x for x in fits if not kind.fits(x)] == []
    assert [x for x in does_not if kind.fits(x)] == []


@checked
def layer(features: Count, *sizes: CountOrZero, scale: Positive | None = None, routing: Routing | None = None) -> str:
    """A docstring."""
    return f"{features} {sizes} {scale}"


def test_messages():
    assert layer(2, 0, 1, scale=0.5) == "2 (0, 1) 0.5"
    assert layer(np.int64(2), np.uint8(0), 1, scale=np.float32(0.5)) == "2 (0, 1) 0.5"
    for call, error, message in [
        (lambda: layer(0), ValueError, "features must be an int of at least 1, got 0"),
        (lambda: layer("3"), TypeError, "features must be an int of at least 1, got '3' (str)"),
        (lambda: layer(features=2.5), TypeError, "features must be an int of at least 1, got 2.5 (float)"),
        (lambda: layer(1, 2, -1), ValueError, "sizes must be an int of at least 0, got -1"),
        (lambda: layer(1, scale=nan), ValueError, "scale must be a finite number of at least 1e-30, or None, got nan"),
        (
            lambda: layer(torch.zeros(2, 3)),
            TypeError,
            "features must be an int of at least 1, got a tensor of shape (2, 3) and type torch.float32",
        ),
        (
            lambda: layer(1, routing=DynamicRouting),
            TypeError,
            "routing must be a Routing, or None, got the class DynamicRouting: create an instance, DynamicRouting(...)",
        ),
    ]:
        with pytest.raises(error) as found:
            call()
        assert str(found.value) == message
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'features'"):
        layer()
    with pytest.raises(TypeError, match="layer has no argument 'size'; did you mean scale"):
        layer(1, size=2)


def test_a_checked_function_is_the_same_otherwise():
    assert layer.__doc__ == "A docstring."
    assert pickle.loads(pickle.dumps(layer)) is layer
    compiled = torch.compile(lambda x: squash_all(x, 1), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).shape == (2,)


@checked
def squash_all(x: Tensor, times: Count) -> Tensor:
    return x * times


# ------------------------------------------------------------ inputs of layers and networks

# Layers of a list of children take grids and sequences too. A pool has no weights whose device and precision its input
# needs.
RIGHT = {
    ("CapsuleLinear", "one dimension more"),
    ("CapsuleLinear, matrices", "one dimension more"),
    ("CapsuleShared", "one dimension more"),
    ("CapsuleShared, vectors", "one dimension more"),
    ("CapsuleHead, tokens", "no batch"),  # tokens alone are vectors in a batch
    ("RoutingPool2d", "double"),
    ("RoutingPool2d", "another device"),
}


@pytest.mark.filterwarnings("ignore:std_mean")  # of no sample
@pytest.mark.parametrize("name", calls.CASES)
def test_wrong_inputs(name):
    case = calls.CASES[name]
    layer, x = calls.build(case).eval(), torch.rand(case.shape)
    for batch in (x, x[:1], x[:0]):
        outputs = calls.tensors(layer(batch))
        assert len(outputs[0]) == len(batch)
        assert all(y.isfinite().all() for y in outputs)
    for what, wrong in calls.wrong_inputs(x).items():
        if (name, what) in RIGHT:
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            print(what, layer(wrong))
        calls.assert_our_error(error.value)
    if name != "RoutingPool2d":
        with pytest.raises(TypeError, match=r"float64.*float32"):
            layer(x.double())
        with pytest.raises(ValueError, match="on meta and .*on cpu"):
            layer(x.to("meta"))


# Arguments that are right one by one and wrong together, or for the input.
TOGETHER = [
    ("CapsuleLinear", {"in_pose": (2, 2, 2)}, "a pose is an int .* or .rows, features."),
    ("CapsuleLinear", {"share_positions": True}, "share_positions=True takes children on a grid"),
    ("CapsuleLinear", {"coordinates": True}, "coordinates=True .* needs share_positions=True"),
    ("CapsuleLinear", {"expected_children": 2}, "expected_children=2 is for layers that take any number of children"),
    ("CapsuleLinear, matrices", {"share_positions": True}, "share_positions=True needs in_capsules"),
    ("CapsuleLinear, matrices", {"routing": SelfRouting()}, "SelfRouting needs a number of parents"),
    ("RoutingPool2d", {"features": 3}, "a multiple of features=3"),
    ("RoutingPool2d", {"stride": 1}, "stride and padding need windows"),
    ("RoutingPool2d", {"kernel_size": 1, "padding": 2}, "padding must be at most half of kernel_size=1"),
    ("CapsNet", {"image_size": 1}, "too small for convolutions"),
    ("compare", {"routing": SlotAttention(2)}, "random slots are the same for all classes"),
    ("compare", {"channels": 1}, "in_features must be at least 2"),
    ("CapsuleRegressor", {"routing": SlotAttention(2)}, "random slots are the same for all classes"),
    ("CapsuleRegressor", {"dims": 1}, r"make the head with dims=2 for such maps"),
    ("efficient_capsnet", {"image_size": 20}, "image_size must be at least 27"),
    ("heinsen_sst", {"width": 3}, "expected embeddings of shape"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), TOGETHER)
def test_arguments_that_do_not_fit_together(name, arguments, said):
    case = calls.CASES[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=said) as error:
        calls.build(case, **arguments)(torch.rand(case.shape))
    calls.assert_our_error(error.value)


@pytest.mark.parametrize("name", ["CapsuleLinear", "CapsuleConv2d", "CapsuleConv1d", "CapsuleLinear, matrices"])
def test_scores_and_masks(name):
    case = calls.CASES[name]
    layer, poses = calls.build(case), torch.rand(case.shape)
    shape = case.shape[: -2 if "matrices" in name else -1]
    mask = torch.rand(shape) > 0.3
    expected = layer(Capsules(poses, torch.where(mask, torch.inf, -torch.inf)))
    torch.testing.assert_close(layer(Capsules(poses, mask)).poses, expected.poses)
    for wrong in (mask.int(), mask.tolist(), mask.numpy(), "mask", torch.zeros(shape, device="meta"), 1.0):
        with pytest.raises((TypeError, ValueError)) as error:
            layer(Capsules(poses, wrong))
        calls.assert_our_error(error.value, "scores")
    for wrong in (mask[:1], mask[..., None], mask[0], torch.zeros(())):
        with pytest.raises(ValueError, match="scores of shape"):
            layer(Capsules(poses, wrong))
    with pytest.warns(UserWarning, match="as in a mask, but scores are logits"):
        layer(Capsules(poses, mask.float()))
    layer(Capsules(poses, torch.zeros(shape)))  # logits that are all 0 are usual
    assert Capsules(poses, mask).activations.tolist() == mask.float().tolist()


def test_votes_and_their_scores():
    votes, mask = torch.rand(2, 3, 4, 5), torch.tensor([[True, True, False], [True, False, True]])
    expected = DynamicRouting()(votes, torch.where(mask, torch.inf, -torch.inf))
    torch.testing.assert_close(DynamicRouting()(votes, mask).poses, expected.poses)
    zeros = torch.zeros(4)

    def run(routing: Routing, **values):
        return lambda: routing.with_values(**values)(votes)

    attention, bias = InvertedAttentionRouting(), DynamicRouting(learn_bias=True)
    for call in (
        lambda: DynamicRouting()(votes.long()),
        lambda: DynamicRouting()(votes[:, :0]),
        lambda: DynamicRouting()(votes, mask.long()),
        lambda: DynamicRouting()(votes, torch.zeros(2, 3, device="meta")),
        run(bias, bias=torch.zeros(3, 5)),
        run(bias, bias=torch.zeros(4, 5, dtype=torch.long)),
        run(DynamicRouting(), bias=torch.zeros(4, 5)),
        run(DynamicRouting(start="learned"), first_logits=torch.zeros(2, 4)),
        run(attention, weight=torch.ones(4), bias=torch.ones(5)),
        run(attention, weight=torch.ones(5), bias=torch.ones(2, 5)),
        run(InvertedAttentionRouting(layer_norm=False), beta_a=zeros, beta_u=zeros),
        run(EMRouting(), beta_a=torch.zeros(3), beta_u=zeros),
        run(HeinsenRouting(), beta_use=torch.zeros(2, 4), beta_ignore=torch.zeros(2, 4)),
        run(VectorNormRouting(learn_sharpness=True), learned_sharpness=torch.ones(2)),
        lambda: transport_cost(votes[0, 0], votes[0, 0].to("meta")),
        lambda: sinkhorn_divergence(votes, votes.double()),
        lambda: squash(torch.tensor(3.0)),
        lambda: spread_loss(votes[0, 0], torch.zeros(4).long(), torch.ones(3)),
        lambda: margin_loss(votes[0, 0][:0], torch.zeros(0).long()),
        lambda: squash(votes, 4),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        calls.assert_our_error(error.value)
    for routing in (EMRouting(), HeinsenRouting(), bias, InvertedAttentionRouting(activations=True)):
        with pytest.raises(RuntimeError, match="set values by with_values") as error:
            routing(votes)
        calls.assert_our_error(error.value)


@pytest.mark.parametrize("of_votes", [torch.float16, torch.float32])
def test_values_are_converted_as_the_error_says(of_votes):
    votes, values = torch.rand(2, 6, 3, 4).to(of_votes), torch.zeros(6, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r": convert logits by .to\(torch.float32\)$"):
        RandomRouting().with_values(logits=values)(votes)
    assert RandomRouting().with_values(logits=values.to(torch.float32))(votes).poses.dtype == of_votes


def test_weights_of_votes_are_converted_as_the_error_says():
    for poses, weight, needed in (
        (torch.float16, torch.float64, torch.float32),
        (torch.float32, torch.float64, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float64, torch.float16, torch.float64),
    ):
        x, w = torch.rand(2, 6, 1, 4).to(poses), torch.rand(6, 3, 4, 5).to(weight)
        with pytest.raises(TypeError, match=rf": convert weight by .to\({needed}\)$"):
            LinearVotes(x, w, None, (5,))
        assert DynamicRouting()(LinearVotes(x, w.to(needed), None, (5,))).poses.shape == (2, 3, 5)


def test_what_the_moments_of_an_agreement_are_replaced_by():
    votes = LinearVotes(torch.rand(2, 6, 1, 4), torch.rand(6, 3, 4, 5), None, (5,), backend="tiled")
    for agreement, use in (
        (UnitDot(torch.rand(2, 3, 5)), "weighted_sum"),
        (SigmoidDot(torch.rand(2, 3, 5), torch.rand(6, 3), torch.ones(2)), "net_sum"),
    ):
        with pytest.raises(ValueError, match=f"use Dot or Gaussian, or {use}$"):
            votes.moments(agreement)


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64])
def test_inputs_are_converted_to_the_weights(given, weights):
    """As the error says; NumPy's numbers are float64."""
    for module, x in (
        (PrimaryCapsules(2, 2, 4), torch.rand(2, 2, 3, 3)),
        (CapsuleLinear(3, 2, 4, 4, DynamicRouting()), torch.rand(2, 3, 4)),
        (CapsuleShared(None, 2, 4, HeinsenVectorRouting()), torch.rand(2, 3, 4)),
        (CapsuleHead(4, 3), torch.rand(2, 4, 3, 3)),
        (create_model("capsnet_digits", decoder=False), torch.rand(2, 1, 8, 8)),
    ):
        module, x = module.to(weights), x.to(given)
        is_layer = isinstance(module, (CapsuleLinear, CapsuleShared))
        takes_half = is_layer and given == torch.float16 and weights != torch.float64
        if given != weights and not takes_half:
            said = rf"^the (.*) are {given} and the weights {weights}: convert the \1 by \.to\({weights}\)$"
            with pytest.raises(TypeError, match=said):
                module(x)
            x = x.to(weights)
        module(x)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (
            torch.zeros(2, 3).long(),
            r"int64: give token ids to an nn.Embedding first, and convert other .* by .float\(\)$",
        ),
        (torch.zeros(2, 3).int(), "int32: give token ids to an nn.Embedding first"),
        (torch.zeros(2, 3, 4, 4).byte(), r"uint8: convert bytes by .float\(\) / 255$"),
        (torch.zeros(2, 3).bool(), r"bool: convert them by .float\(\)$"),
        (
            torch.zeros(2, 3) * 1j,
            r"complex64: give real numbers, such as torch.view_as_real\(x\).flatten\(-2\) or x.abs",
        ),
    ],
)
def test_inputs_of_other_kinds(x, said):
    for module in (CapsuleHead(3, 2), CapsuleLinear(2, 2, 3, 4, DynamicRouting())):
        with pytest.raises(TypeError, match=f"^(features|poses) must be floating-point numbers, got torch.{said}"):
            module(x)
    with pytest.raises(TypeError, match=r"^images must be .*, got torch.int64: convert them by .float\(\)$"):
        create_model("capsnet_digits")(torch.zeros(2, 1, 8, 8).long())
    with pytest.raises(
        TypeError, match="^embeddings must be .*: give the hidden states of an encoder, not its tokens$"
    ):
        create_model("heinsen_sst", layers=2, width=4)(torch.zeros(2, 3).long())
    with pytest.raises(TypeError, match=r"^labels must be .*, got torch.float32: convert whole numbers by .long\(\)$"):
        margin_loss(torch.rand(2, 3), torch.ones(2))


def test_fields_that_are_expected():
    poses, mask = torch.rand(2, 3, 4), torch.ones(2, 3).bool()
    for call, said in (
        (lambda: CapsuleHead(4, 2)(Capsules(poses)), "got Capsules: give its poses$"),
        (lambda: CapsuleLinear(3, 2, 4, 4, DynamicRouting())(Prediction(poses, Capsules(poses))), "its capsules$"),
        (lambda: CapsuleHead(4, 2)(Capsules(poses, mask)), "got Capsules: give its poses or its scores$"),
        (lambda: CapsuleLinear(3, 2, 4, 4, Capsules(poses)), "routing must be a Routing, got Capsules$"),
    ):
        with pytest.raises(TypeError, match=said):
            call()


def test_losses():
    lengths, labels = torch.rand(3, 4), torch.tensor([3, 0, 1])
    for loss in (margin_loss, spread_loss, MarginLoss(), SpreadLoss()):
        for wrong in (lengths.long(), lengths[0], lengths[:, :0], lengths.numpy(), None, lengths[..., None]):
            with pytest.raises((TypeError, ValueError)) as error:
                loss(wrong, labels)
            calls.assert_our_error(error.value)
        for wrong in (
            *(labels + 1, labels - 1, labels.float(), labels > 0, labels[:2], labels[:, None], labels.tolist()),
            *(labels.to("meta"), None, 2, lengths + 1, lengths.log()),
        ):
            with pytest.raises((TypeError, ValueError)) as error:
                loss(lengths, wrong)
            calls.assert_our_error(error.value)
        loss(lengths, labels.int())
        with pytest.raises(TypeError, match="got a Prediction: give its scores$"):
            loss(Prediction(lengths), labels)
    with pytest.raises(ValueError, match="lengths must be from 0 to 1, got -"):
        margin_loss(torch.randn(3, 4), labels)
    with pytest.raises(ValueError, match="negative_margin must be below positive_margin, got 0.9 and 0.1"):
        margin_loss(lengths, labels, 0.1, 0.9)
    capsules = CapsuleLinear(6, 4, 3, 8, InvertedAttentionRouting())(torch.rand(3, 6, 3))
    with pytest.raises(ValueError, match="all lengths are about 2.83, as after a LayerNorm"):
        margin_loss(capsules.activations, labels)
    lengths = 4 - 0.006 * torch.rand(3, 4)  # a LayerNorm adds eps to its variance
    with pytest.raises(ValueError, match="all lengths are about 4, as after a LayerNorm"):
        margin_loss(lengths, labels)


def test_decoder():
    decoder = MaskedDecoder(3, 4, (1, 5, 5), (6,))
    capsules, labels = Capsules(torch.rand(2, 3, 4)), torch.tensor([2, 0])
    assert decoder(capsules, labels).shape == (2, 1, 5, 5)
    for wrong in (
        (capsules.poses, labels),
        (Capsules(capsules.poses[:, :2]), labels),
        (Capsules(capsules.poses.double()), labels),
        (capsules, labels + 1),
        (capsules, labels[:1]),
        (capsules, labels.float()),
        (capsules, 2),
        (Prediction(torch.rand(2, 3), capsules), labels),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            decoder(*wrong)
        calls.assert_our_error(error.value)


def test_functions_that_change_the_shape():
    for layer, x in (
        (PrimaryCapsules(2, 2, 4, normalization=lambda poses: poses.sum(-1)), torch.rand(2, 2, 4, 4)),
        (RoutingPool2d(2, activation=torch.Tensor.tolist), torch.rand(2, 4, 4, 4)),
        (CapsuleLinear(3, 2, 4, 4, VectorNormRouting(activation=lambda s: s[:1])), torch.rand(2, 3, 4)),
    ):
        with pytest.raises(ValueError, match="(normalization|activation) must return a tensor of the shape"):
            layer(x)


# ------------------------------------------------------------ changes after the construction


def test_options_of_a_routing_that_are_changed_later():
    class Own(DynamicRouting):
        def __init__(self, temperature: str = "x"):  # not checked, as in own code
            super().__init__(2)
            self.temperature = 1.0

    for routing, name, wrong in (
        (Own(), "iterations", 2.5),
        (Own(), "gradient", "x"),
        (DynamicRouting(), "iterations", 0),
        (DynamicRouting(), "iterations", 2.5),
        (DynamicRouting(), "gradient", "x"),
        (DynamicRouting(), "leaky", 2),
        (DynamicRouting(), "start", "x"),
        (EMRouting(), "schedule", "x"),
        (HeinsenRouting(), "model", "x"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be "):
            setattr(routing, name, wrong)
    layer = CapsuleLinear(3, 2, 4, 2, DynamicRouting(3))
    layer.routing.iterations = 2
    layer.routing.gradient = "last"
    assert layer(torch.rand(2, 3, 4)).poses.shape == (2, 2, 2)


def test_scores_in_another_precision_have_the_same_gradients():
    layer, poses = CapsuleLinear(5, 3, 4, 2, DynamicRouting(2)), torch.randn(2, 5, 4)
    gradients = []
    for scores in (torch.linspace(-1, 1, 10).view(2, 5), torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)):
        layer.zero_grad()
        scores.requires_grad_()
        layer(Capsules(poses, scores)).poses.square().sum().backward()
        gradients.append((layer.weight.grad.clone(), scores.grad.float()))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_capsules():
    mask = torch.tensor([[True, False, True]])  # stays a mask in another precision
    for moved in (Capsules(torch.rand(1, 3, 4), mask).to(torch.float64), Capsules(torch.rand(1, 3, 4), mask).to("cpu")):
        assert moved.activations.tolist() == [[1, 0, 1]]
    for wrong in (
        Capsules(torch.rand(1, 3, 4), torch.rand(7)),
        Capsules(torch.rand(1, 3, 4), pose_dims=3),
        Capsules(None),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            print(wrong.activations)
        calls.assert_our_error(error.value)
