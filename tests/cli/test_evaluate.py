"""`torchcaps evaluate`: runs side by side, the file in each run, and bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, checkpoint, error_of

from torchcaps.cli import main
from torchcaps.evaluate import PROTOCOLS
from torchcaps.evaluate.subject import Outcome

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

QUIET = ["--images", "40", "--seed", "3"]


def test_two_runs_side_by_side(trained, capfd):
    run = checkpoint(trained).parent.parent
    assert call("evaluate", str(run), str(checkpoint(trained)), "--protocols", "affine", "viewpoint", *QUIET) == 0
    out = capfd.readouterr().out
    assert "accuracy as they are (%)" in out
    assert f"does not apply to {run}: the data has no viewpoints" in out
    assert "published: CapsNet 79 % and a CNN 66 % on affNIST" in out
    (figure,) = Path().rglob("affine.png")
    assert str(figure) in out
    results = json.loads((run / "evaluate.json").read_text())
    assert list(results) == ["affine", "viewpoint"]
    assert results["affine"]["images"] == 40
    assert len(results["affine"]["curves"]["rotation"]["points"]) == 7
    assert call("evaluate", str(run), "--protocols", "overlap", *QUIET) == 0
    assert list(json.loads((run / "evaluate.json").read_text())) == ["affine", "viewpoint", "overlap"]


def test_help_and_docs_name_every_protocol(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[2] / "docs/evaluate.md").read_text(encoding="utf-8")
    for name in PROTOCOLS:
        assert name in said
        assert f"| `{name}` | " in page


def test_two_checkpoints_of_one_run(trained, capfd):
    last = checkpoint(trained)
    other = last.with_name("other.ckpt")
    other.write_bytes(last.read_bytes())
    options = ["--protocols", "affine", *QUIET, "--data.batch_size=9"]
    assert call("evaluate", str(last), str(other), *options) == 0
    for path in (last, other):
        found = json.loads((last.parent.parent / f"evaluate-{path.stem}.json").read_text())["affine"]
        assert found["checkpoint"] == str(path)
        assert found["overrides"] == ["--data.batch_size=9"]


def test_numbers_without_curves_are_no_figure(trained, capfd, monkeypatch):
    one = PROTOCOLS["affine"]._replace(run=lambda subject: Outcome({"accuracy (%)": 12.5}, {}))
    monkeypatch.setitem(PROTOCOLS, "affine", one)
    assert call("evaluate", str(checkpoint(trained)), "--protocols", "affine", *QUIET) == 0
    out = capfd.readouterr().out
    assert "12.5" in out
    assert "figure" not in out


def test_a_file_that_is_no_file_of_results_is_left_as_it_is(trained, capfd):
    path = checkpoint(trained).parent.parent / "evaluate.json"
    for content in ("", '{"affine": {"images": 4', "[1]", "[" * 100_000):
        path.write_text(content)
        line = error_of(capfd, "evaluate", str(path.parent), "--protocols", "affine", *QUIET)
        assert line.startswith(f"torchcaps: {path} cannot be ")
        assert line.endswith(": move the file away")
        assert path.read_text() == content
    path.unlink()
    os.mkfifo(path)  # nobody writes to it
    assert "it is not a regular file" in error_of(capfd, "evaluate", str(path.parent), "--protocols", "affine", *QUIET)
    path.unlink()


def test_results_of_several_processes_are_all_kept(tmp_path):
    code = """
import sys
from pathlib import Path
from torchcaps.cli.evaluate import _merge
for number in range(20):
    _merge(Path("evaluate.json"), {f"{sys.argv[1]} {number}": {"images": number}})
"""
    processes = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(json.loads(Path("evaluate.json").read_text())) == 60


def test_a_training_on_few_images(trained, capfd):
    run = checkpoint(trained).parent.parent
    options = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--trainer.limit_train_batches=2"]
    assert call("evaluate", str(run), "--protocols", "few", *QUIET, *options) == 0
    found = json.loads((run / "evaluate.json").read_text())["few"]
    assert list(found["numbers"]) == [f"{count} images per class: accuracy (%)" for count in (10, 50, 100)]
    assert found["notes"] == ["500 images per class: one class has 139 training images."]
    assert call("evaluate", str(run), "--protocols", "few", *QUIET, "--trainer.limit_train_batches=0.0001") == 2
    assert "Please increase the `limit_train_batches` argument" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstart", "--protocols", "afine"], "--protocols: there is no 'afine': choose some of affine, "),
        (["quickstart", "--images", "0"], "argument --images: expected an integer of at least 1, got 0"),
        (["quickstart", "--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["nowhere"], "no recipe 'nowhere'"),
        (["quickstart", "runs/mine", "--ckpt_path", "mine.ckpt"], "--ckpt_path FILE is for one run"),
    ],
)
def test_bad_input(trained, capfd, arguments, said):
    assert said in error_of(capfd, "evaluate", *arguments)
