"""Own arrays from a folder to predictions: signals and volumes, classes, labels and numbers."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from commands import call, error_of
from signals import write_signals, write_volumes

from torchcaps.deploy.predict import predict_pictures
from torchcaps.runs import Run

QUICK = ["--data.num_workers", "0", "--data.batch_size", "8"]


@pytest.fixture(scope="session")
def signals(tmp_path_factory) -> Path:
    """A folder with signals, further signals, and a run on the signals."""
    folder = tmp_path_factory.mktemp("arrays")
    write_signals(folder / "signals", 40)
    write_signals(folder / "new", 10, seed=1)
    arguments = ["--data.folder", str(folder / "signals"), "--data.layout", "CL", "--runs", str(folder / "runs")]
    assert call("train", "own/arrays", *arguments, *QUICK, "--trainer.max_epochs", "12") == 0
    return folder


def predictions_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_signals_are_learned_and_new_ones_predicted(signals, capfd):
    summary = json.loads((signals / "runs" / "own" / "arrays" / "version_0" / "report" / "summary.json").read_text())
    assert summary["metrics"]["test/accuracy"] >= 0.8
    (signals / "runs").rename(signals / "kept")  # a run predicts without the folder of its training
    (signals / "signals").rename(signals / "elsewhere")
    try:
        out = ["--out", "p.csv", "--runs", str(signals / "kept")]
        assert call("predict", "own/arrays", str(signals / "new"), *out) == 0
    finally:
        (signals / "kept").rename(signals / "runs")
        (signals / "elsewhere").rename(signals / "signals")
    rows = predictions_of(Path("p.csv"))
    assert len(rows) == 20
    assert sum(row["prediction"] == Path(row["file"]).parent.name for row in rows) >= 16
    run = Run.find("own/arrays", runs=signals / "runs")
    ((_, row),) = predict_pictures(run, [signals / "new" / "slow" / "00.npy"])
    assert f"{float(row[1]):.6f}" == next(x["P(slow)"] for x in rows if x["file"].endswith("slow/00.npy"))


def test_files_that_cannot_be_predicted(signals, capfd):
    runs = ["--runs", str(signals / "runs")]
    np.save("good.npy", np.zeros((12, 128)))
    np.save("turned.npy", np.zeros((128, 12)))
    np.save("flat.npy", np.zeros(128))
    Path("text.npy").write_text("1,2,3")
    for name, said in (
        ("turned.npy", "by data.layout CL it has 128 channels, not 12): give arrays with the same channels"),
        ("flat.npy", "its shape is 128, and data.layout CL has 2 letters"),
        ("text.npy", "write it again with numpy.save or numpy.savez"),
    ):
        capfd.readouterr()
        assert call("predict", "own/arrays", "good.npy", name, *runs) == 2
        line = capfd.readouterr().err.strip().splitlines()[-1]
        assert f"torchcaps: {name} is not an array that can be read (" in line
        assert said in line
        assert line.endswith(", or leave such files out by --skip_bad")
    assert (
        call("predict", "own/arrays", "good.npy", "turned.npy", "flat.npy", "--skip_bad", "--out", "p.csv", *runs) == 0
    )
    assert [row["file"] for row in predictions_of(Path("p.csv"))] == ["good.npy"]
    Path("empty").mkdir()
    assert "empty: has no arrays: expected files that end in .npy, .npz" in error_of(
        capfd, "predict", "own/arrays", "empty", *runs
    )


def test_page_and_export_of_arrays(signals, capfd):
    runs = ["--runs", str(signals / "runs")]
    assert call("explain", "own/arrays", *runs, "--figures", "page") == 0
    page = Path("page/index.html").read_text(encoding="utf-8")
    assert "Drawn are the curves of a signal" in page
    assert re.search(r'"name":"position \d+"', page.replace('": "', '":"'))
    assert {path.name for path in Path("page").iterdir()} == {"index.html", "dynamics.png"}
    assert call("export", "own/arrays", *runs, "--to", "onnx", "--out", "n.onnx") == 0
    session = onnxruntime.InferenceSession("n.onnx")
    preparation = json.loads(session.get_modelmeta().custom_metadata_map["preparation"])
    assert preparation["layout"] == "CL"
    assert preparation["shape"] == [12, 128]
    assert len(preparation["means"]) == len(preparation["deviations"]) == 12


@pytest.mark.parametrize("command", ["evaluate", "show"])
def test_commands_for_images_say_so(signals, command, capfd):
    capfd.readouterr()
    assert call(command, "own/arrays", "--runs", str(signals / "runs")) == 2
    assert "networks of images" in capfd.readouterr().err.strip().splitlines()[-1]


def test_other_networks_and_data_do_not_fit(signals, capfd):
    folder = ["--data.folder", str(signals / "signals")]
    said = error_of(capfd, "train", "own/arrays", *folder)
    assert "give --data.layout CL or LC or HW" in said
    said = error_of(capfd, "train", "own/arrays", *folder, "--data.layout", "CL", "--model", "pooling_resnet")
    assert "pooling_resnet is a network of pictures, and the data has arrays: choose another --model" in said


def test_square_signals_are_read_as_their_layout_says(tmp_path):
    write_signals(tmp_path / "square", 12, (32, 32))
    for layout in ("CL", "LC"):
        arguments = ["--data.folder", str(tmp_path / "square"), "--data.layout", layout]
        assert call("train", "own/arrays", *arguments, *QUICK, "--trainer.max_epochs", "1") == 0
    first, second = (Run.find(f"runs/own/arrays/version_{k}") for k in (0, 1))
    path = tmp_path / "square" / "slow" / "00.npy"
    assert first.data().shape == second.data().shape == (32, 32)
    values = [run.data().form.values(path) for run in (first, second)]
    assert np.array_equal(values[0], values[1].T)


def test_volumes_are_learned(tmp_path):
    write_volumes(tmp_path / "volumes", 30)
    arguments = ["--data.folder", str(tmp_path / "volumes"), "--data.layout", "DHW"]
    assert call("train", "own/arrays", *arguments, *QUICK, "--trainer.max_epochs", "12") == 0
    assert Run.find("own/arrays").facts["metrics"]["test/accuracy"] >= 0.8


def test_labels_and_numbers_of_arrays(tmp_path):
    random = np.random.default_rng(0)
    rows = ["file,label,height"]
    for i in range(60):
        tall, wide = random.integers(2, size=2)
        height = 2.0 + 3 * tall + random.uniform()
        wave = height * np.sin(np.linspace(0, 6 + 20 * wide, 64)) + random.normal(0, 0.1, 64)
        np.save(tmp_path / f"{i:02}.npy", wave)
        rows.append(f"{i:02},{'|'.join(['tall'] * tall + ['wide'] * wide)},{height}")
    Path("table.csv").write_text("\n".join(rows))
    data = ["--data.folder", str(tmp_path), "--data.table", "table.csv", "--data.layout", "L", *QUICK]
    data += ["--trainer.max_epochs", "12"]
    assert call("train", "own/arrays", *data, "--data.separator", "|") == 0
    assert call("predict", "own/arrays", str(tmp_path / "00.npy"), "--out", "labels.csv") == 0
    assert list(predictions_of(Path("labels.csv"))[0]) == ["file", "prediction", "P(tall)", "P(wide)"]
    assert call("train", "own/arrays", *data, "--data.numbers", "[height]") == 0
    assert call("predict", "own/arrays", "table.csv", "--out", "numbers.csv") == 0
    predicted = [float(row["height"]) for row in predictions_of(Path("numbers.csv"))]
    true = [float(row.split(",")[2]) for row in rows[1:]]
    assert np.corrcoef(predicted, true)[0, 1] > 0.9
