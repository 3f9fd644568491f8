"""Networks as ONNX files and as PyTorch programs: every model, any batch, and what is refused."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from torchcaps import (
    CapsNet,
    CapsuleLinear,
    Capsules,
    VBRouting,
    create_model,
    use_backend,
)
from torchcaps.capsules import Prediction
from torchcaps.deploy import TARGETS, export, files
from torchcaps.deploy import onnx as onnx_files
from torchcaps.models import list_models

# Arguments that make the models small. The others are tested in the size of their papers.
SMALL = {
    "capnet_dynamic": {"types": 2, "grid": 4},
    "capnet_em": {"types": 2, "grid": 4},
    "encapnet_v1": {"image_size": 16, "capsules": 2, "depth": 1},
    "encapnet_v2": {"image_size": 16, "capsules": 2},
    "heinsen_images": {"layers": 3, "width": 8, "hidden": 4, "pose": 5, "classes": 7},
    "heinsen_sst": {"layers": 3, "width": 8, "features": 4, "parts": 4},
    "heinsen_texts": {"layers": 3, "width": 8, "hidden": 4, "pose": 5},
    "mean_pooled_sst": {"layers": 3, "width": 8},
    "shallow_encapnet": {"image_size": 16, "types": 2},
}


def image_shape(model: Any) -> tuple[int, ...]:
    """Return the shape of an image that a model takes; sizes that may be any are 3 channels and 32 pixels."""
    known = getattr(model, "image_shape", None) or (getattr(model, "in_channels", None), None, None)
    return tuple(size or default for size, default in zip(known, (3, 32, 32), strict=True))


def make(name: str) -> tuple[nn.Module, Tensor | tuple[Tensor, Tensor]]:
    """Build a model whose scores are not all alike, and an example of its inputs."""
    torch.manual_seed(0)
    model = create_model(name, **SMALL.get(name, {}))
    if name == "encapnet_v2":  # rounding grows in each layer with an aide: 76 of them give other scores in a batch
        for module in model.layers:
            del module.type2[2:]
    for parameter in model.parameters():
        parameter.data += 0.03 * torch.randn_like(parameter)
    if name.endswith("_sst") or name in ("heinsen_images", "heinsen_texts"):
        mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
        return model.eval(), (torch.randn(3, 7, 3, 8), mask.float())
    images = torch.rand(8, *image_shape(model))
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the statistics are those of the next batch, and no capsule is dead
    model.train()(images)
    return model.eval(), images[:3]


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    """Run an ONNX file with inputs by their names."""
    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(out) for out in session.run(None, given)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default:the network magnifies rounding")  # `export` has judged it by float64
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", list_models())
def test_every_model(name, to, tmp_path):
    """`export` checks the file on seven batches; here is one of another size, run by us."""
    model, example = make(name)
    path = tmp_path / f"model{TARGETS[to]}"
    difference = export(model, example, path, to)
    inputs = example if isinstance(example, tuple) else (example,)
    batch = tuple(torch.cat([x.flip(0)] * 2 + [x[:1]]) for x in inputs)
    exact = copy.deepcopy(model).double()
    with torch.no_grad(), use_backend("reference"):
        expected = exact(*(x.double() for x in batch)).evidence
        of_example = exact(*(x.double() for x in inputs)).evidence
    with torch.no_grad():
        rounded = (model(*inputs).evidence - of_example).abs().max().item()  # some networks magnify rounding
    largest = expected.abs().max().item()
    assert expected.std() > 0
    assert 0 <= difference <= 1e-4 * largest + rounded
    found = run(path, *batch)[0] if to == "onnx" else torch.export.load(path).module()(*batch)
    assert_close(found.double() / largest, expected / largest, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- one network of images and one of texts


def small_network() -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(
        image_size=12, classes=3, channels=4, kernel_size=3, primary_types=2, primary_kernel_size=5, decoder=(8,)
    )


IMAGES = torch.rand(3, 1, 12, 12)
FACTS = {"classes": ["Äpfel", "b", "c"], "temperature": 1.5}


@pytest.fixture(scope="module")
def images_file(tmp_path_factory) -> tuple[CapsNet, Path]:
    """A network and its ONNX file, with the decoder."""
    network, path = small_network(), tmp_path_factory.mktemp("onnx") / "new" / "small.onnx"
    network.class_capsules.backend = "tiled"  # a choice for training; the file takes none
    assert export(network.train(), IMAGES, path, decoder=True, facts=FACTS) < 1e-6
    assert network.training
    assert network.class_capsules.backend == "tiled"
    return network.eval(), path


def test_an_onnx_file_has_names_and_facts_and_no_path(images_file):
    _, path = images_file
    assert [x.name for x in path.parent.iterdir()] == ["small.onnx"]
    session = onnxruntime.InferenceSession(path)
    assert [(x.name, x.shape) for x in session.get_inputs()] == [("images", ["batch", 1, 12, 12])]
    outputs = [(x.name, x.shape[1:]) for x in session.get_outputs()]
    assert outputs == [("scores", [3]), ("reconstruction", [1, 12, 12])]
    metadata = session.get_modelmeta().custom_metadata_map
    assert {name: json.loads(metadata[name]) for name in FACTS} == FACTS
    assert json.loads(metadata["inputs"]) == {"images": ["batch", 1, 12, 12]}
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()
    assert {x.domain for x in onnx.load(path).opset_import} <= {"", "pkg.onnxscript.torch_lib"}


def test_an_onnx_file_takes_any_batch(images_file):
    network, path = images_file
    for size in (1, 3, 17):
        images = torch.rand(size, 1, 12, 12)
        with torch.no_grad():
            prediction = network(images)
            expected = [prediction.evidence, network.reconstruct(prediction.capsules)]
        assert_close(run(path, images), expected)


def test_texts_of_any_length(tmp_path):
    model, example = make("mean_pooled_sst")
    assert export(model, example, tmp_path / "texts.onnx") < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "texts.onnx")
    shapes = {x.name: x.shape for x in session.get_inputs()}
    assert shapes == {"embeddings": ["batch", "tokens", 3, 8], "mask": ["batch", "tokens"]}
    embeddings, mask = torch.randn(4, 11, 3, 8), torch.arange(11) < torch.tensor([11, 1, 6, 3])[:, None]
    with torch.no_grad():
        expected = model(embeddings, mask.float()).scores
    assert_close(run(tmp_path / "texts.onnx", embeddings, mask.float())[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_program_has_facts_and_no_path(tmp_path):
    network, images = small_network().eval(), torch.rand(7, 1, 12, 12)
    assert export(network, IMAGES, tmp_path / "small.pt2", "torch", facts=FACTS) < 1e-6
    assert [x.name for x in tmp_path.iterdir()] == ["small.pt2"]
    content = (tmp_path / "small.pt2").read_bytes()
    assert b"network.conv.weight" in content
    assert b"decoder" not in content
    assert str(Path(__file__).parents[2]).encode() not in content
    facts = {"facts.json": ""}
    program = torch.export.load(tmp_path / "small.pt2", extra_files=facts)
    assert_close(program.module()(images), network(images).evidence)
    assert json.loads(facts["facts.json"])["temperature"] == 1.5


def test_weights_too_large_for_one_file_are_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_files, "LARGEST", 1000)
    network = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    export(network, IMAGES, tmp_path / "large.onnx")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["large.onnx", "large.onnx.data"]
    assert (tmp_path / "large.onnx").stat().st_size < 4 * 144 * 3
    assert_close(run(tmp_path / "large.onnx", IMAGES)[0], network(IMAGES))


def test_a_network_with_a_backend_that_the_cpu_lacks(tmp_path):
    network = VariationalBayes()
    network.capsules.backend = "triton"
    assert export(network, IMAGES, tmp_path / "model.onnx") < 1e-5
    assert network.capsules.backend == "triton"


class Foreign(nn.Module):
    """A network with a decoder that its forward needs, and a part whose `backend` has nothing to do with capsules."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.backend = nn.Linear(144, 3), "doubled"

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(images.flatten(1)) * (2 if self.backend == "doubled" else 1)


def test_parts_of_others_stay_as_they_are(tmp_path):
    network, path = nn.Sequential(Foreign(), nn.Dropout()), tmp_path / "model.onnx"
    export(network, IMAGES, path)
    assert all(part.training for part in network.modules())
    assert_close(run(path, IMAGES)[0], network.eval()(IMAGES))
    export(Foreign(), IMAGES, path)  # a decoder of its own


def test_the_file_is_compared_with_the_network_itself(tmp_path):
    class Unlike(Foreign):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            return Foreign()  # other weights

    with pytest.raises(ValueError, match="computes something else than the network"):
        export(Unlike(), IMAGES, tmp_path / "a.onnx")


# ---------------------------------------------------------------- nothing is left behind


class Logits(nn.Module):
    """Network of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(144, 3)

    def forward(self, images: Tensor) -> Prediction:
        return Prediction(self.linear(images.flatten(1)))


class ReadsNumbers(Logits):
    def forward(self, images: Tensor) -> Prediction:
        return super().forward(images if images.sum() > 0 else -images)


@pytest.mark.parametrize(
    ("to", "before"), [pytest.param("onnx", None, marks=pytest.mark.slow), ("torch", b"an older file")]
)
def test_a_file_that_computes_something_else_is_not_left(to, before, tmp_path, monkeypatch):
    path = tmp_path / f"model{TARGETS[to]}"
    if before:
        path.write_bytes(before)

    def doubled(run):
        return lambda path, batches: [(2 * scores,) for (scores,) in run(path, batches)]

    monkeypatch.setattr(files, "_run_torch", doubled(files._run_torch))
    monkeypatch.setattr(onnx_files, "run_onnx", doubled(onnx_files.run_onnx))
    with pytest.raises(ValueError, match=r"^the exported file computes something else .*: scores differ by 0\.\d+"):
        export(Logits(), IMAGES, path, to)
    assert [x.name for x in tmp_path.iterdir()] == ([path.name] if before else [])
    assert not before or path.read_bytes() == before


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (ReadsNumbers(), "ReadsNumbers cannot be exported: .*"),
    ],
)
def test_networks_that_cannot_be_exported(network, said, tmp_path):
    for to, end in TARGETS.items():
        with pytest.raises(ValueError, match=f"^{said}") as error:
            export(network, IMAGES, tmp_path / f"new/model{end}", to)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images).flatten(1)


def test_digamma(tmp_path):
    """ONNX has no digamma function, which variational Bayes routing takes of numbers from about 0.1 on."""
    images = torch.linspace(0.03, 50, 3 * 144, dtype=torch.float64).view(3, 1, 12, 12)
    export(Function(lambda x: x.abs().clamp_min(0.03).digamma()), images, tmp_path / "digamma.onnx")
    ((scores,),) = onnx_files.run_onnx(tmp_path / "digamma.onnx", [(images,)])
    assert_close(scores, images.flatten(1).digamma(), rtol=1e-9, atol=1e-9)


def test_functions_are_exact_everywhere(tmp_path):
    """The exporter's logsigmoid was -inf below -18, onnxruntime's sigmoid 0, and expm1 0 near 0."""

    def functions(x: Tensor) -> Tensor:
        return torch.cat([x.sigmoid(), F.logsigmoid(x), x.expm1()])

    def of_file(*batches: Tensor) -> list[Tensor]:
        return [x for (x,) in onnx_files.run_onnx(tmp_path / "functions.onnx", [(x,) for x in batches])]

    export(Function(functions), torch.rand(1, 1, 4, 5), tmp_path / "functions.onnx")
    tiny = torch.logspace(-30, 0, 1000)
    images = torch.cat([torch.linspace(-85, 85, 17_000), tiny, -tiny]).view(-1, 1, 4, 5)
    (values,) = of_file(images)
    assert_close(values.double(), functions(images.double()).flatten(1), rtol=4e-7, atol=0)
    images = torch.tensor([0, 100, 1e30, torch.inf]).repeat(5).view(1, 1, 4, 5)
    assert_close(of_file(images, -images), [functions(images).flatten(1), functions(-images).flatten(1)])


def test_a_file_that_is_right_on_the_example_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(onnx_files.TRANSLATIONS, torch.ops.aten.log_sigmoid.default)
    monkeypatch.delitem(onnx_files.TRANSLATIONS, torch.ops.aten.sigmoid.default)
    with pytest.raises(ValueError, match=r"computes something else than the network: scores differ by inf"):
        export(Function(F.logsigmoid), IMAGES, tmp_path / "a.onnx")
    export(Function(lambda x: 1e30 * x.exp()), IMAGES, tmp_path / "a.onnx")  # inf of 100 times the example


class Rounds(Logits):
    """A network whose scores for a single sample are far from those in float64, and those for a batch a little."""

    def forward(self, images: Tensor) -> Prediction:
        error = 0 if images.dtype == torch.float64 else 0.02 if images.shape[0] == 1 else 0.01
        return Prediction(super().forward(images).scores + error)


def test_a_network_whose_rounding_is_large(tmp_path, monkeypatch):
    differs = (
        r"magnifies rounding: from its outputs in float64 the file differs by 0\.01, and the network itself by 0\.02"
    )
    network = Rounds()
    with pytest.warns(UserWarning, match=differs) as warned:
        assert export(network, IMAGES, tmp_path / "a.pt2", "torch") == pytest.approx(0.01, rel=1e-4)
    assert len(warned) == 1
    wrong = lambda path, batches: [(Logits.forward(network, *x).scores + 1,) for x in batches]  # noqa: E731
    monkeypatch.setattr(files, "_run_torch", wrong)
    with pytest.raises(ValueError, match=r"scores differ by 0\.98, .* the file differs by 1, and the network by 0\.02"):
        export(network, IMAGES, tmp_path / "a.pt2", "torch")


class RoundsUpAndDown(Logits):
    """A network whose scores are a little above those in float64 for a single sample, and below them for a batch."""

    def forward(self, images: Tensor) -> Prediction:
        part = 0 if images.dtype == torch.float64 else 8e-5 if images.shape[0] == 1 else -8e-5
        return Prediction((1 + part) * super().forward(images).scores)


def test_a_file_that_rounds_to_the_other_side(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert export(RoundsUpAndDown(), IMAGES, tmp_path / "a.pt2", "torch") > 0


class OfSingles(Logits):
    """A network whose scores for a single sample are others than those for a batch, in any precision."""

    def forward(self, images: Tensor) -> Prediction:
        return Prediction(super().forward(images).scores + (0.01 if images.shape[0] == 1 else 0))


def test_a_file_that_is_right_for_several_samples_alone(tmp_path):
    with pytest.raises(ValueError, match=r"the file differs by 0\.01, and the network by 5?.*e-"):
        export(OfSingles(), IMAGES, tmp_path / "a.pt2", "torch")


def test_a_network_that_draws_random_numbers(tmp_path):
    export(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(144, 3)), IMAGES, tmp_path / "a.pt2", "torch")
    with pytest.raises(ValueError, match=r"^the network draws random numbers, in evaluation mode too, .*`start`$"):
        export(Function(lambda x: x + 1e-9 * torch.randn_like(x)), IMAGES, tmp_path / "b.pt2", "torch")
    assert [x.name for x in tmp_path.iterdir()] == ["a.pt2"]


def test_a_convolution_in_float64(tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()).double()
    with pytest.raises(
        ValueError, match=r"^onnxruntime cannot run the file \(.*Conv.*\): call .float\(\) on the network "
    ):
        export(network, IMAGES.double(), tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    export(network, IMAGES.double(), tmp_path / "a.pt2", "torch")  # as the message says


class VariationalBayes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.capsules = CapsuleLinear(6, 3, 24, 4, VBRouting(2))

    def forward(self, images: Tensor) -> Prediction:
        capsules = self.capsules(images.flatten(1).unflatten(1, (6, 24)))
        return Prediction(activations=capsules.activations, capsules=capsules)


def test_an_operator_that_onnx_has_not(tmp_path):
    class Bessel(Logits):
        def forward(self, images: Tensor) -> Prediction:
            return super().forward(torch.special.bessel_j0(images))

    with pytest.raises(ValueError, match=r"\(it has no operator for \S*bessel_j0\): export to 'torch' instead$"):
        export(Bessel(), IMAGES, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments(tmp_path):
    wrong = [
        ((small_network(), IMAGES, tmp_path / "a.pt2"), r"'onnx' has a name that ends in \.onnx, got .*a\.pt2$"),
        ((small_network(), IMAGES, tmp_path / "a.onnx", "tflite"), "to must be one of 'onnx', 'torch', got 'tflite'"),
        ((small_network(), IMAGES[:0], tmp_path / "a.onnx"), "example must be images, .* at least one sample"),
        ((small_network(), IMAGES[:, :, 1:], tmp_path / "a.onnx"), r"expected images of shape \(batch, 1, 12, 12\)"),
        ((Logits(), IMAGES, tmp_path / "a.onnx", "onnx", True), "this Logits has no decoder"),
        ((Logits().half(), IMAGES.half(), tmp_path / "a.onnx"), r"^expected .* float32, got torch.float16"),
        ((Logits().bfloat16(), IMAGES, tmp_path / "a.pt2", "torch"), r"got torch.bfloat16: call .float\(\) first$"),
    ]
    for arguments, said in wrong:
        with pytest.raises(ValueError, match=said):
            export(*arguments)
    model, (embeddings, mask) = make("mean_pooled_sst")
    with pytest.raises(ValueError, match="at least two tokens"):
        export(model, (embeddings[:, :1], mask[:, :1]), tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []


def test_operators_of_others_are_refused(tmp_path):
    @torch.library.custom_op("torchcaps_test_export::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)

    class Twice(Logits):
        def forward(self, images: Tensor) -> Prediction:
            return Prediction(twice(super().forward(images).scores))

    with pytest.raises(ValueError, match=r"PyTorch itself has no operator torchcaps_test_export.twice.default"):
        export(Twice(), IMAGES, tmp_path / "a.pt2", "torch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "said"), [(lambda x: x * np.nan, "differ by nan"), (lambda x: x[:, 1:], "shape")])
def test_a_file_with_other_outputs_is_refused(change, said, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_run_torch", lambda path, batches: [(change(Logits()(*x).scores),) for x in batches])
    with pytest.raises(ValueError, match=said):
        export(Logits(), IMAGES, tmp_path / "a.pt2", "torch")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_returns_capsules(tmp_path):
    class Poses(VariationalBayes):
        def forward(self, images: Tensor) -> Capsules:
            return super().forward(images).capsules

    said = "must return a torchcaps.Prediction or Segmentation, or a tensor .*got Capsules$"
    with pytest.raises(TypeError, match=said):
        export(Poses(), IMAGES, tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
