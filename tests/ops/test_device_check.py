"""The check of the Triton kernels on a device: what it sees, when it runs, and how its answer is kept."""

import inspect
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchcaps.ops import device_check
from torchcaps.ops.device_check import OF_PARENTS, OF_VOTES, differences, why_not_trusted

pytest.importorskip("triton")
from torchcaps.ops.triton import formulas, kernels, problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def small(monkeypatch):
    """The sums over votes alone, and few samples and children: the interpreter would take a minute for those of a
    device."""
    monkeypatch.setattr(device_check, "FAMILIES", OF_VOTES)
    if INTERPRETED:
        monkeypatch.setattr(device_check, "SAMPLES", 2)
        monkeypatch.setattr(device_check, "SHARING", 2)
        monkeypatch.setattr(problem, "PROGRAMS", 1)


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A CUDA device without an answer, which gives the answers in the list that is returned, the last one again and
    again. An entry that is an error is raised."""
    answers = [[]]
    monkeypatch.setattr(device_check, "_answers", {})
    monkeypatch.setattr(device_check, "nvidia_driver", lambda: "550.54.15")
    monkeypatch.setattr(device_check, "_is_alive", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answer(device):
        assert device == CUDA
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(device_check, "differences", answer)
    return answers


def in_a_new_process():
    device_check._answers.clear()
    return why_not_trusted(CUDA)


def kept(tmp_path):
    return list((tmp_path / "cache").rglob("*.json"))


# ---------------------------------------------------------------- what it sees


def test_the_kernels_agree(small, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(device_check, "SAMPLES", 3)
        monkeypatch.setattr(problem, "PROGRAMS", 2)
    before = torch.get_rng_state()
    assert differences(DEVICE) == []
    assert torch.equal(torch.get_rng_state(), before)


class Lying:
    """A kernel that writes a wrong tensor: in each launch, or in those for whose arguments `family` returns True."""

    def __init__(self, kernel, name, family, factor):
        self.kernel, self.name, self.family, self.factor = kernel, name, family, factor

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.kernel[grid](*arguments, **options)
            given = inspect.signature(self.kernel.fn).bind(*arguments).arguments
            if given[self.name] is not None and self.family(given):
                given[self.name].mul_(self.factor)

        return launch


def lie(monkeypatch, kernel, name, family=lambda given: True, factor=1.001, module=kernels):
    monkeypatch.setattr(module, kernel, Lying(getattr(module, kernel), name, family, factor))


def of(lines):
    """Return the family and the names of the wrong tensors in each line."""
    return {
        line.partition(" (relative errors: ")[0]: [
            part.rpartition(" by ")[0] for part in line[:-1].split(": ")[1].split(", ")
        ]
        for line in lines
    }


def test_wrong_values(small, monkeypatch):
    lie(monkeypatch, "sums", "totals")
    found = of(differences(DEVICE))
    assert list(found) == list(OF_VOTES)
    assert "sums" in found["weighted_sum by UnitDot"]
    assert "mean" in found["moments by Gaussian"]


@pytest.mark.parametrize(("kernel", "what"), [("grads", "query"), ("row_grads", "weight"), ("row_grads", "bias")])
def test_wrong_gradients_alone(small, monkeypatch, kernel, what):
    lie(monkeypatch, kernel, f"grad_{what}")
    found = of(differences(DEVICE))
    assert list(found) == [name for name, (tensors, _) in OF_VOTES.items() if what in tensors]
    assert all([x.replace("one_", "") for x in tensors] == [f"gradient of {what}"] for tensors in found.values())


IS_OF = {
    "weighted_sum by Dot over the parents": lambda layer, x: not (layer.unit or layer.over_children or x["squares"]),
    "weighted_sum by UnitDot": lambda layer, x: layer.unit,
    "weighted_sum by Dot over the children": lambda layer, x: layer.over_children,
    "moments by Dot": lambda layer, x: x["squares"] and not x["parents"].precision,
    "moments by Gaussian": lambda layer, x: x["parents"].precision,
}


@pytest.mark.parametrize("family", IS_OF)
def test_one_family_is_wrong(small, monkeypatch, family):
    def is_of(given):
        there = {name: x is not None for name, x in given.items()}
        there["parents"] = given["parents"]._replace(precision=given["parents"].precision is not None)
        return IS_OF[family](given["layer"], there)

    lie(monkeypatch, "sums", "totals", is_of)
    assert list(of(differences(DEVICE))) == [family]


def test_numbers_that_are_not_finite(small, monkeypatch):
    lie(monkeypatch, "grads", "grad_query", factor=float("nan"))
    assert "gradient of query by nan" in differences(DEVICE)[0]


OF_KERNELS = {
    "squash": ("scale_by_length", "out"),
    "EMRouting": ("fit", "precisions"),
    "HeinsenRouting": ("fit_grads", "grad_variance"),
    "VBRouting": ("posterior", "precisions"),
    "SelfRouting": ("share_logits", "scores"),
    "VectorNormRouting": ("scale_by_length", "out"),
}


@pytest.mark.parametrize("family", OF_PARENTS)
def test_what_routings_compute_of_the_parents(small, monkeypatch, family):
    monkeypatch.setattr(device_check, "FAMILIES", {family: OF_PARENTS[family]})
    before = torch.get_rng_state()
    assert differences(DEVICE) == []
    assert torch.equal(torch.get_rng_state(), before)
    lie(monkeypatch, *OF_KERNELS[family], module=formulas)
    assert list(of(differences(DEVICE))) == [family]


# ---------------------------------------------------------------- the answer


def test_an_answer_is_kept(device, tmp_path):
    device[:] = [[], ["a second check"]]
    assert in_a_new_process() is None
    assert in_a_new_process() is None
    (file,) = kept(tmp_path)
    key = json.loads(file.read_text())["key"]
    assert (key["device"], key["capability"], key["driver"]) == ("NVIDIA L4", "8.9", "550.54.15")
    assert list(key) == ["device", "capability", "driver", "torch", "triton", "torchcaps", "kernels"]


def test_what_differs_is_said_until_the_file_is_removed(device, tmp_path):
    device[:] = [["moments by Dot (relative errors: mean by 2.0e-01)"], []]
    for _ in range(2):
        reason = in_a_new_process()
        (file,) = kept(tmp_path)
        assert reason == (
            "the Triton kernels fail their check on NVIDIA L4: moments by Dot (relative errors: mean by 2.0e-01) "
            f"(remove {file} to check again)"
        )
    file.unlink()
    assert in_a_new_process() is None


@pytest.mark.parametrize("name", ["nvidia_driver", "_hash_of_kernels"])
def test_another_driver_or_kernel_is_checked_again(device, monkeypatch, name):
    device[:] = [[], ["different"]]
    assert in_a_new_process() is None
    monkeypatch.setattr(device_check, name, lambda: "another")
    assert "different" in in_a_new_process()


def test_the_hash_is_that_of_every_file_of_the_kernels(monkeypatch, tmp_path):
    here = device_check.Path(device_check.__file__).parent
    for path in (here / "device_check.py", *(here / "triton").glob("*.py")):
        copy = tmp_path / path.relative_to(here)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    expected = device_check._hash_of_kernels()
    monkeypatch.setattr(device_check, "__file__", str(tmp_path / "device_check.py"))
    assert device_check._hash_of_kernels() == expected
    with (tmp_path / "triton" / "tiles.py").open("a") as file:
        file.write("\n")
    assert device_check._hash_of_kernels() != expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": {}, "differences": ["of another"]}',
        '{"key": KEY, "differences": [1]}',
        '{"key": KEY}',
        "\udcff",
    ],
)
def test_a_file_that_is_damaged_or_foreign(device, tmp_path, content):
    device[:] = [["the first check"], []]
    in_a_new_process()
    (file,) = kept(tmp_path)
    key = json.dumps(json.loads(file.read_text())["key"])
    file.write_bytes(content.replace("KEY", key).encode(errors="surrogateescape"))
    assert in_a_new_process() is None
    assert json.loads(file.read_text())["differences"] == []


def test_a_folder_that_cannot_be_written(device, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    device[:] = [["first"], []]
    assert in_a_new_process() == "the Triton kernels fail their check on NVIDIA L4: first"
    assert in_a_new_process() is None


@pytest.mark.parametrize("given", ["", "relative"])
def test_the_folder_for_caches(device, monkeypatch, tmp_path, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    why_not_trusted(CUDA)
    assert len(list((tmp_path / "home" / ".cache" / "torchcaps" / "kernels").iterdir())) == 1
    monkeypatch.setattr(device_check, "user_path", device_check.Path)  # a user without a home
    assert in_a_new_process() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_an_error_is_not_kept(device, tmp_path):
    device[:] = [RuntimeError("no C compiler:\nset CC"), []]
    assert in_a_new_process() == "the Triton kernels fail their check on NVIDIA L4: no C compiler: set CC"
    assert kept(tmp_path) == []
    assert in_a_new_process() is None


def test_an_error_that_ends_the_device_is_kept(device, monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "_is_alive", lambda device: False)
    device[:] = [RuntimeError("an illegal memory access"), []]
    for _ in range(2):
        assert "NVIDIA L4: an illegal memory access (remove" in in_a_new_process()


def test_a_full_memory_is_no_answer(device):
    device[:] = [torch.OutOfMemoryError("full"), []]
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        why_not_trusted(CUDA)
    assert why_not_trusted(CUDA) is None


def test_each_device_has_its_answer(device, monkeypatch):
    names = ["NVIDIA L4", "NVIDIA A100"]
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(device_check, "differences", lambda device: ["different"] * device.index)
    assert why_not_trusted(torch.device("cuda")) is None  # the current device
    assert "NVIDIA A100: different" in why_not_trusted(torch.device("cuda", 1))
    assert why_not_trusted(CUDA) is None


# ---------------------------------------------------------------- when it runs


def test_none_runs_while_a_graph_is_captured(device, monkeypatch):
    device[:] = [[], ["a second check"]]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "captured" in why_not_trusted(CUDA)
    assert "call torchcaps.ops.backends() before" in why_not_trusted(CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert why_not_trusted(CUDA) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert why_not_trusted(CUDA) is None  # known
    assert in_a_new_process() is None  # kept


def test_none_runs_in_a_backward_pass(device):
    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            reasons.append(why_not_trusted(CUDA))
            return grad

    reasons = []
    First.apply(torch.ones(1, requires_grad=True)).backward()
    assert "gradients are computed" in reasons[0]
    assert why_not_trusted(CUDA) is None


def test_threads_share_one_check(device, monkeypatch):
    started, checks = threading.Barrier(4), []

    def check(device):
        checks.append(device)
        return []

    def first(_):
        started.wait()
        return why_not_trusted(CUDA)

    monkeypatch.setattr(device_check, "differences", check)
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(first, range(4))) == [None] * 4
    assert len(checks) == 1


@contextmanager
def set_for_all_threads():
    """What no thread can leave: another default precision, and fresh memory that is filled with NaN."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


CONTEXTS = {
    "set for all threads": set_for_all_threads,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: None),
}


@pytest.fixture
def run_on_the_cpu(small, device, monkeypatch):
    """The device computes one family as Triton's interpreter does."""
    monkeypatch.setattr(device_check, "FAMILIES", {"moments by Gaussian": OF_VOTES["moments by Gaussian"]})
    monkeypatch.setattr(device_check, "differences", lambda device: differences(DEVICE))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("context", CONTEXTS)
def test_no_context_reaches_it(run_on_the_cpu, context):
    before = torch.get_rng_state()
    with CONTEXTS[context]():
        states = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        assert why_not_trusted(CUDA) is None
        assert states == (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        )
    assert torch.equal(torch.get_rng_state(), before)


def one_more(x):
    return x + (1 if why_not_trusted(CUDA) is None else 2)


class OneMore(torch.nn.Module):
    def forward(self, x):
        return one_more(x)


TRACERS = {
    "compile": lambda: torch.compile(one_more, backend="eager", fullgraph=True)(torch.zeros(1)),
    "inductor graph": lambda: torch.compile(one_more, backend="aot_eager", fullgraph=True)(torch.zeros(1)),
    "make_fx": lambda: make_fx(one_more, tracing_mode="fake")(torch.zeros(1))(torch.zeros(1)),
    "export": lambda: torch.export.export(OneMore(), (torch.zeros(1),), strict=False).module()(torch.zeros(1)),
    "strict export": lambda: torch.export.export(OneMore(), (torch.zeros(1),), strict=True).module()(torch.zeros(1)),
    "func": lambda: torch.func.vmap(one_more)(torch.zeros(2, 1))[0],
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_the_first_use_in_traced_code(run_on_the_cpu, tracer, tmp_path):
    torch.compiler.reset()
    assert TRACERS[tracer]() == 1
    assert len(kept(tmp_path)) == 1
