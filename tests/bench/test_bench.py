"""`torchcaps bench` gives numbers to ways that are right, and says why others have none."""

import copy
import json
import os
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from torchcaps import Capsules, CapsuleStack
from torchcaps.bench import MEASURED, NETWORKS, Rates, Request, baselines, measure, measurement
from torchcaps.bench.layers import LAYERS
from torchcaps.bench.report import table_rows
from torchcaps.bench.resources import count_launches, graphed, in_fresh_process, time_side_by_side
from torchcaps.bench.ways import by_samples, prepare
from torchcaps.cli import main
from torchcaps.routing import Routing

IN_FLOAT64 = {"encapnet": "values checked in float64"}
RATES = Rates(matrix=1e9, copy=1e9)
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def _no_subprocess(monkeypatch):
    """Save seconds in tests that are not about memory."""
    monkeypatch.setattr(measurement, "in_fresh_process", lambda *arguments: 1000)
    monkeypatch.setattr("torchcaps.bench.measure_rates", lambda device, dtype: RATES)


def measured(layer: str, *ways: str, factor: int = 1) -> list[measurement.Row]:
    return measure(Request(layer, factor, smoke=True), ("baseline", *ways), 2, RATES, lambda text: None)


def one_iteration_less(monkeypatch, of_way: str) -> None:
    """Break a way; in a network without iterations, its last weights differ."""

    def broken(way, case, backward):
        if way == of_way:
            case = replace(case, module=copy.deepcopy(case.module))
            routings = [module for module in case.module.modules() if isinstance(module, Routing)]
            for routing in routings:
                routing.iterations -= 1
            if not routings:
                list(case.module.parameters())[-1].data *= 1.1
        return prepare(way, case, backward)

    monkeypatch.setattr(measurement, "prepare", broken)


@pytest.mark.parametrize("iterations", [None, 1, 4])
@pytest.mark.parametrize("layer", MEASURED)
def test_baseline_and_layer_agree_in_float64(layer, iterations):
    if iterations and MEASURED[layer].iterations is None:
        with pytest.raises(ValueError, match="no iterations: leave out"):
            Request(layer, iterations=iterations, smoke=True).build()
        return
    case = Request(layer, iterations=iterations, smoke=True).build().to("cpu", torch.float64)
    assert case.iterations == (iterations or MEASURED[layer].iterations or 1)
    expected, reference = prepare("baseline", case, True)(), prepare("reference", case, True)()
    inputs = ["images"] if layer in NETWORKS else ["poses", "scores"] if LAYERS[layer].scores else ["poses"]
    assert inputs == [name for name in case.inputs if name != "labels"]
    names = [name for name, p in case.module.named_parameters() if p.requires_grad]
    results = inputs if layer in LAYERS else ["scores", "reconstruction"] if layer == "capsnet" else ["scores"]
    names += [] if layer in NETWORKS else inputs
    assert expected.keys() == {*results, *(f"gradient of {name}" for name in names)}
    for found in (reference, by_samples(case), prepare("tiled", case, True)()):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            torch.testing.assert_close(
                x, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
            )
    forward = prepare("baseline", case, False)()
    assert all(torch.equal(x, expected[name]) and not x.requires_grad for name, x in forward.items())


@pytest.mark.parametrize("network", NETWORKS)
def test_the_baseline_of_a_network_is_not_ours(network):
    """All modules of the authors' classes run their way, and ours again afterwards."""
    case = Request(network, smoke=True).build()
    ran = []

    def counted(run):
        return lambda part, *args, **options: (ran.append(part), run(part, *args, **options))[1]

    authors = {cls: counted(run) for cls, run in case.network.authors.items()}
    prepare("baseline", replace(case, network=replace(case.network, authors=authors)), False)()
    parts = [part for part in case.module.modules() if isinstance(part, tuple(authors))]
    assert len(ran) == len(parts) > 0
    assert not any("forward" in vars(part) for part in ran)


@pytest.mark.parametrize("network", ["tsai-resnet", "tsai-simple"])
def test_what_a_network_leaves_out_has_no_gradient(network):
    """In float64, parameters that a network leaves out do not change the loss."""
    for iterations in (1, 2):
        case = Request(network, iterations=iterations, smoke=True).build().to("cpu", torch.float64)
        frozen = {name: p.requires_grad_() for name, p in case.module.named_parameters() if not p.requires_grad}
        assert len(frozen) == (2 if iterations == 1 else 1)
        found = prepare("reference", case, True)()
        assert all(found[f"gradient of {name}"].abs().max() < 1e-15 for name in frozen)


def test_the_loss_of_capsnet_by_hand():
    """The margin loss of the mean image, and 0.0005 of the squared error of its pixels."""
    case = Request("capsnet", smoke=True).build().to("cpu", torch.float64)
    scores, reconstruction = (x.requires_grad_() for x in case.compute(case.module, case.inputs, False))
    of_scores, of_reconstruction = case.gradients((scores, reconstruction), [scores, reconstruction])
    label = case.inputs["labels"][0]
    expected = -2 * (0.9 - scores[0, label]).clamp(min=0) / 3
    torch.testing.assert_close(of_scores[0, label], expected)
    torch.testing.assert_close(of_reconstruction, 0.001 * (reconstruction - case.inputs["images"]) / 3)


def test_a_training_step():
    case = Request("tsai-resnet", smoke=True).build()
    before = {name: p.clone() for name, p in case.module.named_parameters()}
    run, other = prepare("tiled", case, True), prepare("tiled", case, True)
    first, second = run(), run()
    assert not torch.equal(first["scores"], second["scores"])
    torch.testing.assert_close(other(), first)  # each run takes its own steps
    assert all(torch.equal(p, before[name]) for name, p in case.module.named_parameters())
    module, optimizer = case.start()
    name, parameter = next(iter(module.named_parameters()))
    parameter.grad = first[f"gradient of {name}"]
    optimizer.step()
    torch.testing.assert_close(parameter, before[name] - 0.1 * (parameter.grad + 5e-4 * before[name]))


def test_the_papers_layers():
    children = {name: LAYERS[name].sizes(1, None, False).children for name in LAYERS}
    expected = {"inverted-attention-conv": 8192, "heinsen": 5184, "capnet-dynamic": 2048, "digit-capsules": 1152}
    assert children == {**expected, "em-conv": 3136}


def test_work_counted_by_hand():
    # 2 images x 2 x 2 windows of 18 children, 3 parents, votes of 4 features from 3 products each, 2 iterations.
    case = Request("inverted-attention-conv", smoke=True).build()
    w = case.work(False)
    votes = 8 * 18 * 3 * 4
    assert w.flops == 2 * votes * 3 + (2 * votes * 3 + 2 * votes + 2 * votes)
    assert w.bytes == 4 * (2 * 2 * 6 * 5 * 6 + (18 * 3 * 3 * 2 + 4 + 4) + 2 * 3 * 2 * 2 * 4)
    assert case.bytes_needed(baseline=True) == 2.5 * 2 * 4 * votes
    # 2 samples of 18 children in 3 types, 4 parents, 5 features from 4 each, 3 iterations: cheaper without votes.
    product = 2 * 2 * 3 * 4 * 5 * 4
    w = Request("capnet-dynamic", smoke=True).build().work(False)
    assert w.flops == product + 2 * (2 * product + 4 * 2 * 18 * 4 * 4)
    # 2 samples of 20 children that share weights, a Gaussian, 3 iterations.
    w = Request("heinsen", smoke=True).build().work(True)
    votes = 2 * 20 * 3 * 4
    assert w.flops == 3 * (2 * 2 * 3 * 4 * 3 + (6 + 4) * votes + 2 * (6 + 4 + 2 + 4) * votes)


def test_work_of_a_network_counted_by_hand():
    case = Request("tsai-simple", iterations=2, smoke=True).build()
    assert (case.batch, case.children) == (3, 2 * 16 * 16)
    convolution, primary = 2 * 16 * 16 * 3 * 9 * 8, 2 * 16 * 16 * 8 * 32
    # Two convolutions of 18 children per window, 2 parents, once; a linear layer of 50 children, 10 parents, twice.
    products = [2 * places * children * parents * 16 * 4 for places, children, parents in ((49, 18, 2), (25, 18, 2))]
    linear = 50 * 10 * 16
    capsules = sum(products) + 2 * linear * 4 + 2 * linear * 4 + 2 * linear + 2 * linear
    classifier = 2 * 10 * 16
    assert case.work(False).flops == 3 * (convolution + primary + capsules + classifier)
    # Backward, the first convolution needs no gradient of the images, and the classifier none of its bias.
    assert case.work(True).flops == 3 * (2 * convolution + 3 * (primary + capsules + classifier))
    parameters = sum(p.numel() for p in case.module.parameters())
    assert case.work(False).bytes == 4 * (3 * 3 * 32 * 32 + parameters)
    votes = 4 * 3 * 16 * (49 * 18 * 2 + 25 * 18 * 2 + 50 * 10)
    assert case.bytes_needed(baseline=True) == 2.5 * 2 * votes
    assert case.bytes_needed(baseline=False) == 2.5 * (votes + 4 * 3 * 16 * 50 * 10)


@pytest.mark.parametrize(
    ("network", "children"),
    [
        ("capsnet", 1152),
        ("tsai-resnet", 32 * 16 * 16),
        ("smallnorb", 5184),
        ("encapnet", 32 * 32 * 32),
        ("resnet-pool", 4 * 8 * 8),
        ("vit-head", 16 * 14 * 14),
    ],
)
def test_the_papers_networks(network, children):
    case = Request(network, batch=2).build()
    assert case.children == children
    votes = {"capsnet": 1152 * 10 * 16, "smallnorb": (5184 * 64 + 64 * 5) * 16, "vit-head": 3136 * 10 * 16}
    if network in votes:
        times = 9 if network == "smallnorb" else 2.5
        assert case.bytes_needed(baseline=True) == times * 3 * 2 * 4 * votes[network]


def test_float32_is_exact_on_a_gpu(monkeypatch):
    """It is neither left on for others nor off while something is measured."""
    cudnn = torch.backends.cudnn
    seen = []
    monkeypatch.setattr(measurement, "_truth", lambda *arguments: seen.append(cudnn.allow_tf32) or ([], {}, {}))
    before = cudnn.allow_tf32
    measure(Request("heinsen", smoke=True), (), 1, RATES, lambda text: None)
    assert (seen, cudnn.allow_tf32) == ([False], before)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_training_step_needs_no_value_on_the_host(network):
    """As in a CUDA graph. The device meta has no values."""
    case = Request(network, smoke=True).build().to("meta", torch.float32)
    assert all(x.is_meta for x in prepare("tiled", case, True)().values())


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_compiled_networks_are_one_graph(network, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    case = Request(network, smoke=True).build().to("cpu", torch.float64)
    expected, found = prepare("reference", case, True)(), prepare("compiled", case, True)()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10)


def test_ways_take_turns():
    order = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    taken = time_side_by_side(runs, 2)
    assert order == list("abcabc")
    assert all(len(seconds) == 2 and min(seconds) >= 0 for seconds in taken.values())


def test_launches_are_counted():
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "aten::add", "cudaMemcpyAsync", "add_kernel"]
    assert count_launches(names) == 3


def test_a_table_on_a_gpu():
    """It has milliseconds, launches and times the bound."""
    row = measurement.Row("x", 1, 5, 3, 2, "triton", "forward", 1e-3, 4e-3, [4e-3], 0.5, 7, 1000, 0.5)
    base = replace(row, way="baseline", seconds=8e-3, launches=1, ratio=1, bytes_ratio=1)
    backward = [replace(x, pass_="forward+backward", seconds=None, launches=None, bytes=None) for x in (base, row)]
    lines = table_rows([base, backward[0], row, backward[1]], on_cuda=True)
    assert lines[1][3:7] == ("triton", "4 ms 2x (7 launches)", "1 kB (2x)", "4")
    assert lines[0][4] == "8 ms 1x (1 launch)"
    assert lines[2][3:5] == ("bound", "1 ms 8x")


def test_a_graph_keeps_the_tensors_it_reads(monkeypatch):
    """A CUDA graph has the addresses of a network's parameters, but does not hold them."""
    for name in ("Stream", "stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    module = torch.nn.Linear(1, 1)
    alive = weakref.ref(module)
    replay = graphed(lambda module=module: module)
    del module
    assert alive() is not None
    del replay
    assert alive() is None


def test_memory_of_known_allocations():
    """Runs in its own process: after other tests, memory may be freed or used again at any time."""
    code = """
import torch
from torchcaps.bench import resources
from torchcaps.bench.resources import peak_resident

MB = 2**20
kept = torch.ones(32 * MB // 4)  # does not count


def run():
    torch.ones(64 * MB // 4)  # freed, but counts for the peak
    return torch.ones(16 * MB // 4)


print(peak_resident(run), peak_resident(lambda: kept.sum()))


def refuse(*arguments):  # stands for a system on which the peak cannot be reset
    raise PermissionError


resources.Path.write_text = refuse
torch.ones(100 * MB // 4)  # the highest peak so far is above the memory in use
hidden = resources._highest_ever() - resources.bytes_of("/proc/self/status", "VmRSS")
assert hidden > 80 * MB
print(peak_resident(lambda: torch.ones((hidden + 64 * MB) // 4)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, peak_of_nothing, above = (int(line) for line in run.stdout.split())
    assert peak == pytest.approx(64 * 2**20, rel=0.2)
    assert peak_of_nothing < 6 * 2**20
    assert above == pytest.approx(64 * 2**20, rel=0.2)


def test_a_process_that_dies_or_fails():
    with pytest.raises(MemoryError, match="was killed"):
        in_fresh_process(os._exit, 9)
    with pytest.raises(ValueError, match="'x'"):
        in_fresh_process(int, "x")


@pytest.mark.usefixtures("_no_subprocess")
@pytest.mark.parametrize("layer", MEASURED)
def test_a_wrong_implementation_gets_no_numbers(layer, monkeypatch):
    one_iteration_less(monkeypatch, "tiled")
    rows = {(row.way, row.pass_): row for row in measured(layer, "tiled", "reference")}
    for way in ("baseline", "reference"):
        assert all(
            rows[way, name].ratio and rows[way, name].note == IN_FLOAT64.get(layer) for name in measurement.PASSES
        )
    for name in measurement.PASSES:
        wrong = rows["tiled", name]
        assert wrong.note.startswith("values disagree: ")
        assert max(wrong.errors.values()) > 1e-4
        assert (wrong.seconds, wrong.rounds, wrong.ratio, wrong.bytes, wrong.bytes_ratio) == (
            None,
            [],
            None,
            None,
            None,
        )


@pytest.mark.usefixtures("_no_subprocess")
@pytest.mark.parametrize("layer", ["digit-capsules", "tsai-resnet", "encapnet", "resnet-pool"])
def test_a_wrong_baseline_leaves_no_ratios(layer, monkeypatch):
    one_iteration_less(monkeypatch, "baseline")
    rows = measured(layer, "tiled")
    assert all("values disagree" in row.note for row in rows if row.way == "baseline")
    assert all(row.seconds and row.ratio is None and row.bytes_ratio is None for row in rows if row.way == "tiled")


@pytest.mark.usefixtures("_no_subprocess")
def test_a_baseline_that_routes_layer_by_layer_is_found_out(monkeypatch):
    """A sequential baseline differs from a concurrent one in the children of one layer of three, in the second pass."""

    def sequential(stack, children, **options):
        poses = children.poses
        for layer in stack.layers:
            (poses,) = baselines.inverted_attention_conv(layer, poses, None)
        return Capsules(poses)

    wrong = replace(NETWORKS["tsai-simple"], authors={CapsuleStack: sequential})
    monkeypatch.setitem(MEASURED, "tsai-simple", wrong)
    rows = measured("tsai-simple", "tiled")
    assert [bool(row.note and row.note.startswith("values disagree")) for row in rows] == [True, True, False, False]


@pytest.mark.usefixtures("_no_subprocess")
def test_what_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(measurement, "free_bytes", lambda device: 1000)
    rows = measured("digit-capsules", "reference", "tiled", factor=2)
    for row in rows:
        if row.way == "tiled":
            assert row.seconds
            assert row.note == "values checked for 12 children"
        else:
            assert row.seconds is None
            assert row.note.startswith("not run: needs about ")
            assert row.note.endswith("1 kB are free")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside Inductor
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # Dynamo reads .grad
@pytest.mark.parametrize("layer", ["heinsen", "resnet-pool"])
def test_compiled_ways(layer):
    rows = measured(layer, "compiled-reference", "compiled")
    notes = [None, None] + 4 * ["values checked in float64" if layer in NETWORKS else None]
    assert [row.note for row in rows] == notes
    assert all(row.seconds for row in rows)


@pytest.mark.usefixtures("_no_subprocess")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("layer", ["heinsen", "capsnet"])
def test_compiled_ways_without_a_compiler(layer, monkeypatch):
    """The whole network is one graph, whose values in float64 are right; a wrong one has no number."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    *_, forward, backward = measured(layer, "compiled")
    assert forward.note == backward.note == (None if layer in LAYERS else "values checked in float64")
    assert forward.seconds
    assert backward.seconds
    one_iteration_less(monkeypatch, "compiled")
    *_, wrong = measured(layer, "compiled")
    assert wrong.note.startswith("values disagree")


@pytest.mark.slow
def test_command_line_end_to_end(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "new" / "folder"
    options = ["--layer", "digit-capsules", "--way", "tiled", "--children", "2", "1", "--rounds", "3", "--batch", "40"]
    assert main(["bench", "--smoke", *options, "--device", "cpu", "--out", str(folder)]) == 0
    printed = capfd.readouterr()
    assert [path.name for path in folder.iterdir()] == ["bench.json"]
    written = json.loads((folder / "bench.json").read_text())
    for name in ("date", "commit", "torch", "python", "device", "cores", "threads", "dtype", "matrix_flops_per_second"):
        assert written[name], name
    assert written["copy_bytes_per_second"] > 1e7
    assert {"triton", "opt_einsum", "smoke"} <= written.keys()
    rows = written["rows"]
    assert [(row["factor"], row["way"], row["pass"]) for row in rows] == [
        (factor, way, name) for factor in (1, 2) for way in ("baseline", "tiled") for name in measurement.PASSES
    ]
    for row in rows:
        assert row["batch"] == 40
        assert row["children"] == 12 * row["factor"]
        assert row["seconds"] == sorted(row["rounds"])[1]
        assert row["bytes"] >= 0
        assert 0 < row["bound_seconds"] < row["seconds"]
        assert row["note"] is None
        assert max(row["errors"].values()) < 1e-5
        assert "ratio" in row if row["way"] == "tiled" else row["ratio"] == 1
    lines = printed.out.splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("digit-capsules")] == [
        ["digit-capsules", n, "3", way] for n in ("12", "24") for way in ("baseline", "tiled", "bound")
    ]
    assert " ms" not in printed.out  # only ratios
    assert "backend tiled: there\n" in printed.err
    assert "digit-capsules, 24 children, 3 iterations: tiled, forward+backward: memory" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "hinsen"], "layer 'hinsen'.* heinsen"),
        (["--way", "triton", "--device", "cpu"], "--way triton .*--device cpu"),
        (["--graphs", "--device", "cpu"], "--graphs needs a CUDA device.*leave it out"),
        (["--children", "1", "0"], r"--children: .* 0\b"),
        (["--layer", "tsai-resnet", "--children", "2"], "--children .*tsai-resnet"),
        (["--layer", "encapnet", "--iterations", "2"], "--iterations .*encapnet has none: leave one out"),
        (["--way", "compiled-graphs", "--device", "cpu"], "--way compiled-graphs .*--device cpu"),
    ],
)
def test_bad_input(arguments, message, capfd, monkeypatch):
    monkeypatch.setattr("torchcaps.bench.measure_rates", None)  # bad input must be refused before anything is measured
    assert main(["bench", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f"torchcaps: .*{message}", line)


@pytest.mark.usefixtures("_no_subprocess")
def test_rows_are_kept_when_a_later_layer_fails(tmp_path, monkeypatch, capfd):
    def failing(request, *arguments):
        if request.layer == "heinsen":
            assert (tmp_path / "bench.json").exists()  # before anything can go wrong with this layer
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure(request, *arguments)

    monkeypatch.setattr("torchcaps.bench.measure", failing)
    options = ["--layer", "digit-capsules", "heinsen", "--way", "tiled", "--rounds", "1", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(["bench", "--smoke", "--device", "cpu", *options])
    assert "digit-capsules" in capfd.readouterr().out
    assert {row["layer"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]} == {"digit-capsules"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(capfd):
    assert main(["bench", "--device", "cuda"]) == 2
    assert capfd.readouterr().err.startswith("torchcaps: --device cuda ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "li2018_table1.py --narrow --batch 2 --rounds 1",
        "pooling.py --iterations 1 --batch 2 --rounds 1",
        "sequences.py --lengths 10 --rounds 1",
        "sizes.py --small --seed 7 --cells 2 --rounds 1 --compiled",
        "sequences.py --layer heinsen2022 --lengths 10 --rounds 1",
        "learning_rates.py compare/clutter --rates 0.003 0.01 --rows uniform --held-out 100 --jobs 1",
    ],
)
def test_the_studies_run(command, tmp_path):
    script, *options = command.split()
    run = subprocess.run([sys.executable, BENCHMARKS / script, *options], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 1
