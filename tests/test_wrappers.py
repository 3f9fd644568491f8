"""What people do with modules: tracing, `torch.func`, ONNX, autocast, DataParallel, threads, pickle, copies, devices.

Every entry of `CASES` passes through every wrapper. All of this is on the default backend.
"""

import copy
import functools
import io
import math
import multiprocessing
import pickle
import sys
import threading
import warnings
from collections.abc import Callable

import onnxruntime
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from graphs import assert_compiles_for_a_gpu, needs_interpreter
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import replicate
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from torchcaps import (
    CapsNet,
    CapsuleBlock2d,
    CapsuleConv1d,
    CapsuleConv2d,
    CapsuleFC,
    CapsuleHead,
    CapsuleLinear,
    CapsuleRegressor,
    Capsules,
    CapsuleStack,
    DynamicRouting,
    EMRouting,
    FeedbackAgreement,
    HeinsenRouting,
    InvertedAttentionRouting,
    MaskedDecoder,
    PrimaryCapsules,
    RoutingPool2d,
    SelfRouting,
    VectorNormRouting,
    create_model,
    squash,
    use_backend,
)
from torchcaps.deploy.onnx import TRANSLATIONS
from torchcaps.ops import choose_backend
from torchcaps.routing import Routing


class ToCapsules(nn.Module):
    """Wraps a module that takes Capsules, so that it takes poses."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, poses: Tensor):
        return self.module(Capsules(poses))


class Tensors(nn.Module):
    """Wraps a module that returns Capsules or a Prediction, so that it returns their tensors."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.module(x)))


def tensors(out) -> list[Tensor]:
    """Return the tensors of an output, in order."""
    if isinstance(out, Tensor):
        return [out]
    return [x for field in out for x in tensors(field)] if isinstance(out, tuple) else []


def linear(routing: Callable[[], Routing]) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return lambda **kw: CapsuleLinear(4, 3, (2, 2), (2, 3), routing(), bias=True, **kw), (2, 4, 2, 2)


def stack(schedule) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    def build() -> CapsuleStack:
        conv = CapsuleConv2d(2, 3, 4, 4, 2, HeinsenRouting(3))
        return CapsuleStack(conv, CapsuleLinear(3 * 2 * 2, 3, 4, 4, HeinsenRouting(3)), schedule=schedule)

    return build, (2, 2, 3, 3, 4)


LAYERS = {  # each with the shape of an input
    "dynamic": linear(lambda: DynamicRouting(start="learned", learn_bias=True, leaky=True)),
    "dynamic over children": linear(lambda: DynamicRouting(softmax="children")),
    "vector norm": linear(lambda: VectorNormRouting(2, activation=squash, learn_sharpness=True)),
    "inverted attention": linear(InvertedAttentionRouting),
    "em": linear(lambda: EMRouting(inverse_temperature=1.0)),
    "heinsen": linear(lambda: HeinsenRouting(2)),
    "self-routing": linear(SelfRouting),
    "any number": (
        lambda **kw: CapsuleLinear(
            None, None, 3, 4, InvertedAttentionRouting(activations=True, start="learned"), bias=True, **kw
        ),
        (2, 4, 3),
    ),
    "on a grid": (
        lambda **kw: CapsuleLinear(2, 3, (2, 3), (2, 4), EMRouting(2), share_positions=True, coordinates=True, **kw),
        (2, 2, 3, 2, 2, 3),
    ),
    "conv1d": (
        lambda **kw: CapsuleConv1d(2, 3, (2, 2), (2, 3), 3, SelfRouting(), padding=1, bias=True, **kw),
        (2, 2, 6, 2, 2),
    ),
    "conv2d": (
        lambda **kw: CapsuleConv2d(2, 3, 4, 4, 3, DynamicRouting(start="learned", learn_bias=True), padding=1, **kw),
        (2, 2, 4, 5, 4),
    ),
    "pool": (lambda **kw: RoutingPool2d(2, 2.0, kernel_size=2, learn_sharpness=True, **kw), (2, 4, 4, 4)),
    "padded pool": (lambda **kw: RoutingPool2d(2, 2.0, kernel_size=3, padding=1, **kw), (2, 4, 4, 4)),
    "primary": (lambda **kw: PrimaryCapsules(3, 2, (2, 2), 3, scores=True, **kw), (2, 3, 5, 5)),
    "block": (lambda **kw: CapsuleBlock2d(2, 2, 4, 3, 2, skip=True, **kw), (2, 2, 4, 4, 2)),
    "block without an aide": (lambda **kw: CapsuleBlock2d(2, 2, 4, coefficients=None, **kw), (2, 2, 4, 4, 2)),
    "fully connected": (lambda **kw: CapsuleFC(4, 3, 2, **kw), (2, 4, 2)),
    "decoder": (lambda **kw: ToCapsules(MaskedDecoder(3, 4, (1, 5, 5), (6,), **kw)), (2, 3, 4)),
    "primary in a volume": (lambda **kw: PrimaryCapsules(3, 2, 4, 2, dims=3, **kw), (2, 3, 2, 3, 4)),
    "head": (lambda: CapsuleHead(3, 4, EMRouting(2), types=2, pose=4), (2, 3, 2, 3)),
    "head on a line": (lambda: CapsuleHead(3, 4, types=2, pose=4, dims=1), (2, 3, 3)),
    "regressor": (lambda **kw: CapsuleRegressor(3, 2, types=2, pose=4, **kw), (2, 3, 2, 3)),
    "regressor in a volume": (lambda **kw: CapsuleRegressor(3, 2, EMRouting(2), 2, 4, dims=3, **kw), (2, 3, 2, 3, 2)),
    "stack": stack("sequential"),
    "concurrent stack": stack("concurrent"),
}
NETWORKS = {
    "sabour2017": (
        lambda: CapsNet(
            image_size=12, classes=3, channels=4, kernel_size=3, primary_types=2, primary_kernel_size=5, decoder=(8,)
        ),
        (2, 1, 12, 12),
    ),
    "zhao2019 cnn": (lambda: create_model("pooling_cnn", channels=8, features=4), (2, 3, 18, 18)),
    "zhao2019 capsnet": (lambda: create_model("resnet_capsnet", image_size=8, decoder=False), (2, 1, 8, 8)),
    "tsai2020": (
        lambda: create_model("narrow_cifar10", routing=InvertedAttentionRouting(2), types=2, channels=8),
        (2, 3, 32, 32),
    ),
    "heinsen2019 images": (lambda: create_model("heinsen_smallnorb", parts=4, channels=4), (2, 2, 32, 32)),
    "heinsen2019 texts": (
        lambda: create_model("heinsen_sst", layers=3, width=8, features=4, parts=4),
        (2, 5, 3, 8),
    ),
    "li2018 encapnet": (lambda: create_model("encapnet_v1", image_size=16, capsules=2, depth=1), (2, 3, 16, 16)),
    "signals": (lambda: create_model("capsule_cnn", in_channels=3, dims=1, width=8, types=2, pose=4), (2, 3, 20)),
    "numbers of volumes": (
        lambda: create_model("capsule_cnn", numbers=2, dims=3, width=4, types=2, pose=4),
        (2, 1, 5, 6, 7),
    ),
    "li2018 em": (lambda: create_model("capnet_em", types=2, grid=4), (2, 3, 32, 32)),
}
CASES = LAYERS | NETWORKS
names = pytest.mark.parametrize("name", CASES)
layers = pytest.mark.parametrize("name", LAYERS)
# Untrained EM divides by variances near zero: rounding errors grow too large to compare anything.
exact_names = pytest.mark.parametrize("name", [name for name in CASES if name != "li2018 em"])


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """Build a module in evaluation mode, and an input."""
    build, shape = CASES[name]
    module, x = build().to(dtype), torch.rand(shape, dtype=dtype) + 0.1
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            part.momentum = None  # the statistics are those of the next batch, and no capsule is dead
    if name in NETWORKS:
        for parameter in module.parameters():
            parameter.data += 0.03 * torch.randn_like(parameter)
        module(torch.rand(16, *shape[1:], dtype=dtype) + 0.1)
    elif "stack" not in name:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
    return module.eval(), x


def other_batch(x: Tensor) -> Tensor:
    return torch.rand(5, *x.shape[1:], dtype=x.dtype) + 0.1


def loss_of(out) -> Tensor:
    """Return a loss in which every entry has a weight of its own."""
    return sum((x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in tensors(out))


# ---------------------------------------------------------------- every layer


@pytest.mark.parametrize("name", [name for name in LAYERS if "stack" not in name and "head" not in name])
def test_a_layer_is_built_in_a_precision_and_on_a_device(name):
    build, _ = LAYERS[name]
    assert {x.dtype for x in values_of(build()).values()} <= {torch.float32}
    assert {x.dtype for x in values_of(build(dtype=torch.float64)).values()} <= {torch.float64}
    assert all(x.is_meta for x in values_of(build(device="meta")).values())


@layers
def test_gradients_reach_all_parameters_and_the_input(name):
    module, x = make(name)
    loss_of(module.train()(x.requires_grad_())).backward()
    for key, value in [("input", x), *module.named_parameters()]:
        assert value.grad is not None, key
        assert value.grad.isfinite().all(), key
        assert value.grad.any(), key


QUICK = ("conv2d", "block", "decoder")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in LAYERS])
def test_compiled_whole(name):
    module, x = make(name)
    torch._dynamo.reset()
    outs = torch.compile(module, fullgraph=True, backend="aot_eager")(x.requires_grad_()), module(x)
    assert_close(*([*tensors(out), torch.autograd.grad(loss_of(out), x)[0]] for out in outs))


QUICK_FOR_A_GPU = ("conv1d", "conv2d", "pool", "padded pool", "primary", "block", "head", "regressor", "stack")


@needs_interpreter
@pytest.mark.parametrize(
    "name", [x if x in QUICK_FOR_A_GPU else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
def test_compiled_whole_for_a_gpu(name):
    assert_compiles_for_a_gpu(*make(name, torch.float32))


# ---------------------------------------------------------------- torch.jit.trace


deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@functools.cache
def traced(name: str) -> tuple[nn.Module, Tensor, torch.jit.ScriptModule]:
    """Return a module, an input, and what `torch.jit.trace` makes of both."""
    module, x = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit itself
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # about the checks of shapes
        return module, x, torch.jit.trace(Tensors(module).eval(), (x,), check_trace=False)


@names
def test_what_is_traced_is_the_same_for_other_batches(name):
    module, x, graph = traced(name)
    batch = other_batch(x)
    assert_close(graph(batch), Tensors(module)(batch))
    kinds = {node.kind().partition("::")[0] for node in graph.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("any number", (3, 7, 3)),
        ("on a grid", (3, 2, 5, 4, 2, 3)),
        ("conv1d", (3, 2, 9, 2, 2)),
        ("conv2d", (3, 2, 6, 6, 4)),
        ("padded pool", (3, 4, 7, 5)),
        ("head on a line", (3, 3, 7)),
        ("regressor", (3, 3, 5, 4)),
        ("regressor in a volume", (3, 3, 4, 5, 2)),
        ("signals", (3, 3, 33)),
        ("heinsen2019 texts", (3, 8, 3, 8)),
        ("heinsen2019 images", (3, 2, 40, 36)),
    ],
)
def test_what_is_traced_takes_other_sizes(name, shape):
    module, x, graph = traced(name)
    larger = torch.rand(shape, dtype=x.dtype)
    assert_close(graph(larger), Tensors(module)(larger))


# ---------------------------------------------------------------- torch.func and derivatives


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in module.named_parameters()}


@names
def test_gradients_of_each_sample(name):
    """`grad`, `vmap` and `functional_call` against ordinary gradients of the default backend."""
    module, x = make(name)
    parameters = parameters_of(module)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(functional_call(module, parameters, (x.unsqueeze(0),)))

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(parameters, x)
    for i in range(len(x)):
        sample = x[i : i + 1].clone().requires_grad_()
        loss_of(module(sample)).backward()
        assert_close(found[1][i], sample.grad[0])
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                assert_close(found[0][key][i], parameter.grad, msg=lambda text, key=key: f"{key}: {text}")
                parameter.grad = None


@names
@deprecated
def test_derivatives_in_forward_mode(name):
    """With J the Jacobian, u . (J v) = v . (J' u), where J' u is the gradient of the default backend. Without `no_grad`
    a backend with operators of its own would raise an error; within, it would lose the derivative."""
    module, x = make(name)
    direction, leaf = torch.randn_like(x), x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(module(leaf)), leaf)
    expected = (gradient * direction).sum()
    assert_close(torch.func.jvp(lambda x: loss_of(module(x)), (x,), (direction,))[1], expected)
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(loss_of(module(forward_ad.make_dual(x, direction)))).tangent
    assert_close(found, expected)


def gradient_of(module: nn.Module, x: Tensor, **options: bool) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(loss_of(module(leaf)), leaf, **options)[0]


def curvature(module: nn.Module, x: Tensor) -> Tensor:
    """Return the Hessian times a vector of ones, by differences of gradients of the default backend."""
    step = 1e-6  # few enough for no ReLU to change its side
    return (gradient_of(module, x + step) - gradient_of(module, x - step)) / (2 * step)


@deprecated
@pytest.mark.parametrize("name", ["em", "pool", "block"])
def test_jacobians_and_hessians(name):
    module, x = make(name)
    x = x[:1]
    leaf = x.clone().requires_grad_()
    out = tensors(module(leaf))[0]
    rows = [torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in out.flatten()]
    assert_close(torch.func.jacrev(lambda x: tensors(module(x))[0])(x), torch.stack(rows).view(*out.shape, *x.shape))
    hessian = torch.func.hessian(lambda x: loss_of(module(x)))(x)
    assert_close(hessian.reshape(x.numel(), -1).sum(1).view_as(x), curvature(module, x), rtol=1e-5, atol=1e-6)


@exact_names
def test_second_derivatives(name):
    """The reference has them; the default backend says so in one line where it has not."""
    module, x = make(name)
    leaf = x.clone().requires_grad_()
    with use_backend("reference"):
        (gradient,) = torch.autograd.grad(loss_of(module(leaf)), leaf, create_graph=True)
    if gradient.grad_fn is None:  # the loss is linear in x
        return
    (second,) = torch.autograd.grad(gradient.sum(), leaf)
    assert_close(second, curvature(module, x), rtol=1e-4, atol=1e-5)
    try:
        (again,) = torch.autograd.grad(loss_of(module(leaf)), leaf, create_graph=True)
    except RuntimeError as error:
        assert "second derivatives (create_graph=True): use" in str(error)  # noqa: PT017
        assert "'reference'" in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert_close(torch.autograd.grad(again.sum(), leaf)[0], second)


@names
def test_activation_checkpointing(name):
    """A module that is computed again in the backward pass has the same gradients."""
    build, shape = CASES[name]
    module, x, gradients = build().double().eval(), torch.rand(shape, dtype=torch.float64), []
    leaves = [x.requires_grad_(), *module.parameters()]
    for again in (lambda x: module(x), functools.partial(checkpoint, module, use_reentrant=False)):
        gradients.append(torch.autograd.grad(loss_of(again(x)), leaves, allow_unused=True))
    assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@layers
def test_batched_gradients(name):
    """The same as for second derivatives."""
    module, x = make(name)
    leaf = x.clone().requires_grad_()
    out = tensors(module(leaf))[0]
    directions = torch.randn(2, *out.shape, dtype=out.dtype)
    expected = torch.stack([torch.autograd.grad(out, leaf, d, retain_graph=True)[0] for d in directions])
    try:
        (found,) = torch.autograd.grad(out, leaf, directions, is_grads_batched=True)
    except RuntimeError as error:
        assert "no batched gradients (" in str(error)  # noqa: PT017
        with use_backend("reference"):
            out = tensors(module(leaf))[0]
        (found,) = torch.autograd.grad(out, leaf, directions, is_grads_batched=True)
    assert_close(found, expected)


def test_transforms_compile():
    module, x = make("em")
    torch._dynamo.reset()
    transform = torch.func.grad(lambda x: loss_of(module(x)))
    assert_close(torch.compile(transform, fullgraph=True, backend="eager")(x), gradient_of(module, x))


def test_a_backend_that_was_asked_for_is_not_replaced():
    module, x = make("em")
    module.backend = "tiled"
    with pytest.raises(ValueError, match="^backend='tiled' does not run under .*: use .*'reference'$"):
        torch.func.grad(lambda x: loss_of(module(x)))(x)
    module.backend = "auto"
    with use_backend("tiled"), pytest.raises(ValueError, match="backend='tiled' does not run"):
        torch.vmap(lambda x: module(x.unsqueeze(0)).poses)(x)


# ---------------------------------------------------------------- ONNX


def operators(exported: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target).partition(".")[0] for node in exported.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", ["dynamic", "pool"])
def test_export_to_onnx_takes_the_reference(name, monkeypatch):
    """PyTorch exports to ONNX in two steps; this is the first one. It takes no packages."""
    module, x = make(name)
    sizes = ({0: torch.export.Dim("batch")},)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    exported = torch.export.export(Tensors(module), (x,), dynamic_shapes=sizes)
    assert "torchcaps" not in operators(exported)
    batch = other_batch(x)
    assert_close(exported.module()(batch), Tensors(module)(batch))


@pytest.mark.slow
@names
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_files(name):
    """The file is the same as the module, for another batch too."""
    module, x = make(name, torch.float32)
    sizes = ({0: torch.export.Dim("batch")},)
    options = {"verbose": False, "custom_translation_table": TRANSLATIONS}
    program = torch.onnx.export(Tensors(module), (x,), dynamo=True, dynamic_shapes=sizes, **options)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    batch = other_batch(x)
    found = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
    exact = Tensors(copy.deepcopy(module).double())(batch.double())
    for ours, theirs in zip(exact, found, strict=True):
        scale = ours.abs().max().clamp_min(1)
        assert_close(torch.from_numpy(theirs).double() / scale, ours / scale, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- precision

HALF = [torch.bfloat16, torch.float16]
# Modules that consist of PyTorch's own layers and return what autocast makes of these. The others return the precision
# of the poses that they are given.
PRIMARY, HEADS = {"primary", "primary in a volume"}, {"head", "head on a line"}
OF_OWN_LAYERS = {*PRIMARY, *HEADS, "block", "block without an aide", "fully connected", "decoder", *NETWORKS}


def errors(found, exact) -> list[float]:
    """Return the largest error of each tensor, relative to its largest number or to 1."""
    pairs = zip(tensors(found), tensors(exact), strict=True)
    return [((x.double() - y).abs().max() / y.abs().max().clamp_min(1)).item() for x, y in pairs]


@exact_names
@pytest.mark.parametrize("dtype", HALF)
def test_autocast(name, dtype):
    """Forward and backward, both within the context."""
    module, x = make(name, torch.float32)
    exact = copy.deepcopy(module).double()(x.double())
    x.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = module(x)
        loss_of(tuple(y.float() for y in tensors(out))).backward()
    expected = {dtype if name in OF_OWN_LAYERS else torch.float32}
    if "numbers" in name:  # which are float32 in the units of their targets, but not their capsules
        expected = {dtype, torch.float32}
    assert {y.dtype for y in tensors(out)} == expected
    assert max(errors(out, exact)) < 0.05
    assert all(y.grad.isfinite().all() for y in (x, *module.parameters()) if y.grad is not None)
    assert x.grad.dtype == torch.float32


@exact_names
@pytest.mark.parametrize("dtype", HALF)
def test_precision(name, dtype):
    module, x = make(name, torch.float32)
    exact = copy.deepcopy(module).double()(x.double())
    module, x = module.to(dtype), x.to(dtype).requires_grad_()
    out = module(x)
    assert {y.dtype for y in tensors(out)} == {dtype}
    assert max(errors(out, exact)) < 0.05
    loss_of(out).backward()
    assert {y.grad.dtype for y in (x, *module.parameters()) if y.grad is not None} == {dtype}
    assert all(y.grad.isfinite().all() for y in (x, *module.parameters()) if y.grad is not None)


# ---------------------------------------------------------------- several devices, threads and processes


def in_threads(functions: list[Callable[[], object]]) -> list:
    """Call functions at the same time, each in a thread of its own."""
    results: list = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@names
def test_replicas_in_threads(name, monkeypatch):
    """What `nn.DataParallel` does on two devices, with copies on the CPU in place of those on GPUs."""

    def broadcast(values, devices, detach=False):
        return [[x.detach().clone() if detach else x.clone() for x in values] for _ in devices]

    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", broadcast)
    module, x = make(name)
    x = torch.cat([x, x.flip(0)])
    replicas = replicate(module, [0, 1])
    calls = [functools.partial(replica, part) for replica, part in zip(replicas, x.chunk(2), strict=True)]
    parts = [tensors(out) for out in in_threads(calls)]
    results = [torch.cat(pair) for pair in zip(*parts, strict=True)], tensors(module(x))
    assert_close(*results)
    leaves = list(module.parameters())
    if leaves:
        assert_close(*(torch.autograd.grad(loss_of(tuple(r)), leaves, allow_unused=True) for r in results))


def test_threads_share_modules():
    made = {name: make(name) for name in CASES}

    def run() -> list[list[Tensor]]:
        results = []
        for module, x in made.values():
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            results.append([*tensors(out), torch.autograd.grad(loss_of(out), leaf)[0]])
        return results

    expected = run()
    for found in in_threads([run] * 4):
        assert_close(found, expected, rtol=0, atol=1e-12)


def test_threads_leave_their_backends_in_any_order():
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> str:
        with use_backend("reference"):
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()
        return choose_backend("auto", torch.device("cpu"))

    def second() -> str:
        assert first_is_in.wait(60)
        with use_backend("tiled"):
            assert choose_backend("auto", torch.device("cpu")) == "tiled"  # the last one entered
            second_is_in.set()
            assert first_is_out.wait(60)
            return choose_backend("auto", torch.device("cpu"))

    before = choose_backend("auto", torch.device("cpu"))
    assert in_threads([first, second])[1] == "tiled"
    assert choose_backend("auto", torch.device("cpu")) == before


def test_a_context_in_compiled_code_is_left():
    module, x = make("dynamic")

    @torch.compile(fullgraph=True, backend="eager")
    def run(x: Tensor) -> Tensor:
        with use_backend("reference"):
            return module(x).poses

    assert_close(run(x), module(x).poses)
    assert choose_backend("auto", torch.device("cpu")) != "reference"


def test_another_process_takes_modules():
    modules = [make(name) for name in ("conv2d", "conv1d", "pool", "sabour2017")]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for module, x in modules:
            module.requires_grad_(False)
            assert_close(tensors(pool.apply(module, (x,))), tensors(module(x)))


# ---------------------------------------------------------------- pickle and copies


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, copy.copy, pickled, saved]


@names
def test_copies(name):
    """Of a module as built, and after a forward and a backward pass."""
    build, shape = CASES[name]
    module, x = build().eval(), torch.rand(shape)
    for _ in range(2):
        expected = module(x)
        for copied in (way(module) for way in COPIES):
            assert_close(tensors(copied(x)), tensors(expected), rtol=0, atol=0)
        x.requires_grad_()
        loss_of(module(x)).backward()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin = build().eval()
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert_close(tensors(twin(x)), tensors(expected))
    for copied in (pickled(expected), saved(expected), copy.deepcopy(expected.detach())):
        assert type(copied) is type(expected)
        assert_close(tensors(copied), tensors(expected))


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_not_watched(way):
    module, x = make("heinsen")
    seen = []
    with module.routing.watched(seen.append):
        copied = way(module.routing)
        assert copied._watchers == []
        copied(torch.rand(2, 4, 3, 6, dtype=x.dtype))
        assert not seen
        module(x)
        assert len(seen) == 2


@pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved])
def test_a_copy_of_feedback_has_a_network_of_its_own(way):
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    feedback = FeedbackAgreement(network, [("0", "2")], (1, 8, 8))
    x = torch.rand(3, 1, 8, 8)
    feedback(x)[1].backward()
    twin = way(feedback)
    torch.manual_seed(0)
    expected = feedback(x)
    torch.manual_seed(0)
    assert_close(twin(x), expected)
    nn.init.zeros_(network[2].weight)
    assert_close(twin(x)[0], expected[0])
    assert not network[0]._forward_hooks


# ---------------------------------------------------------------- devices


def values_of(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {key: value for key, value in named if value.is_floating_point()}


@names
def test_a_module_built_without_values_is_given_some(name):
    build, shape = CASES[name]
    torch.set_default_device("meta")  # also while the values are given
    try:
        with torch.device("meta"):
            module = build()
        assert all(x.is_meta for x in module.parameters())
        module.to_empty(device="cpu")
        for value in values_of(module).values():
            value.data.fill_(math.nan)
        for part in reversed(list(module.modules())):  # children first, as the docs say
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    finally:
        torch.set_default_device(None)
    assert [key for key, value in values_of(module).items() if not value.isfinite().all()] == []
    assert all(x.isfinite().all() for x in tensors(module.eval()(torch.rand(shape))))


def test_a_device_that_is_named_counts_more_than_the_default():
    with torch.device("meta"):
        layer = CapsuleLinear(4, 3, 2, 2, DynamicRouting(learn_bias=True), device="cpu")
    assert {str(x.device) for x in layer.parameters()} == {"cpu"}
    assert (layer.routing.bias == 0.1).all()


@names
def test_a_module_is_moved_after_use(name):
    module, x = make(name)
    expected = [y.shape for y in tensors(module(x))]
    module.to("meta")
    assert all(value.is_meta for value in values_of(module).values())
    out = tensors(module(x.to("meta")))
    assert all(y.is_meta for y in out)
    assert [y.shape for y in out] == expected
