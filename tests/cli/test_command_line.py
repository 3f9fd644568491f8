"""What all commands share: quick help, completion, and a process that is left as it was."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import lightning.pytorch  # noqa: F401  # sets filters of its own when it is imported
import pytest
from lightning.pytorch.loggers import CSVLogger

import torchcaps
from torchcaps.cli import COMMANDS, main, run
from torchcaps.utils.quiet import quiet_lightning

SABOUR = ("apsnet", "apsnet-1-iteration", "apsnet-1-iteration-no-decoder", "apsnet-no-decoder", "apsnet-short", "nn")


def python(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return run.stdout


def test_help_does_not_wait_for_pytorch():
    code = "import sys; from torchcaps.cli import parser; print(parser().format_help()); print('torch' in sys.modules)"
    out = python(code)
    assert out.endswith("False\n")
    for command in COMMANDS:
        what = (command.__doc__ or "").splitlines()[0].partition(":")[0].rstrip(".")
        assert what in " ".join(out.split())


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: torchcaps {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchcaps tr", ["train "]),
        ("torchcaps train zhao2019/table2/resnet20", [f"zhao2019/table2/resnet20-{x}" for x in ("average", "routing")]),
        ("torchcaps explain quickstart --sam", ["--samples "]),
        ("torchcaps reproduce sabour2017/table1/c", [f"sabour2017/table1/c{x}" for x in SABOUR]),
    ],
)
def test_completion(line, expected, tmp_path):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "|"}
    python("from torchcaps.cli import run; run()", **asked, _ARGCOMPLETE_STDOUT_FILENAME=str(answer))
    assert answer.read_text().split("|") == expected


def test_without_argcomplete_nothing_is_completed_and_nothing_runs(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit) as ended:
        run()
    assert (ended.value.code, *capfd.readouterr()) == (1, "", "")


def test_warnings_and_logging_are_as_before_after_a_command():
    logger = logging.getLogger("lightning.pytorch")
    filters, level = list(warnings.filters), logger.level
    with quiet_lightning():
        assert warnings.filters != filters
        assert logger.level == logging.WARNING
    assert (warnings.filters, logger.level) == (filters, level)
    main(["models", "vgg*"])
    assert (warnings.filters, logger.level) == (filters, level)


def test_no_warning_of_messages_is_shown(tmp_path, monkeypatch):
    """What raises each of them is done here: without one of the filters, its warning is in the list."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["torchcaps", "train"])
    for name in ("cpu_count", "process_cpu_count"):
        monkeypatch.setattr(os, name, lambda: 8, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    run = ["train", "quickstart", "--data.batch_size=400", *quiet]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("always", ".*LeafSpec.*")
        assert main([*run, "--trainer.max_steps=2"]) == 0
        assert main([*run, "--trainer.max_steps=4", "--ckpt_path", "last"]) == 0
        (tmp_path / "version_0").mkdir()
        (tmp_path / "version_0" / "config.yaml").touch()
        with quiet_lightning():
            CSVLogger(tmp_path, "", version=0).log_metrics({"loss": 1.0})
    assert [str(warning.message) for warning in shown] == []


@pytest.mark.slow
def test_a_new_process_prints_what_is_for_the_user(tmp_path):
    """Lightning sets its loggers' levels when it is imported, which is after the command has begun."""
    code = f"import os; os.chdir({str(tmp_path)!r}); from torchcaps.cli import main; main(['train', 'quickstart', "
    code += "'--smoke', '--trainer.enable_progress_bar=false'])"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    first, *metrics, last = run.stdout.splitlines()
    assert first.startswith("trains capsnet_digits with DynamicRouting: ")
    assert all(line.startswith("test/") for line in metrics)
    assert last == "run: runs/quickstart/smoke_0"


def test_names_of_the_package_are_imported_when_they_are_used():
    """They are what type checkers see."""
    source = Path(torchcaps.__file__).read_text(encoding="utf-8")
    seen = source.partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    namespace: dict = {}
    exec("\n".join(line.removeprefix("    ") for line in seen.splitlines()), namespace)
    for name in torchcaps.__all__:
        assert getattr(torchcaps, name) is namespace[name]
    with pytest.raises(AttributeError, match="module 'torchcaps' has no attribute 'Capsule'"):
        _ = torchcaps.Capsule
    modules = python(
        "import torchcaps; print(torchcaps.nn.__name__, torchcaps.routing.__name__, torchcaps.models.__name__)"
    )
    assert modules.split() == ["torchcaps.nn", "torchcaps.routing", "torchcaps.models"]


def test_a_reader_that_stops_reading(tmp_path):
    """As `torchcaps ... | head` does."""
    line = f"{sys.executable} -m torchcaps recipes | head -n 1"
    run = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_name_that_is_not_in_utf_8(tmp_path):
    (tmp_path / "\udcff").mkdir()
    (tmp_path / "\udcff" / "mine.yaml").write_text("extends: quickstart\n")
    command = [sys.executable, "-m", "torchcaps", "recipes", "\udcff/mine.yaml"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 2
    assert run.stderr.endswith("\\udcff/mine.yaml' is a name that is not in UTF-8: rename it\n")
    assert len(run.stderr.splitlines()) == 1


def test_warnings_are_one_line_without_code():
    warn = "warnings.warn('the network magnifies\\nrounding')"
    code = (
        f"import warnings\nfrom torchcaps.cli import main, models\nmodels.run = lambda *given: {warn}\nmain(['models'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr == "torchcaps: the network magnifies rounding\n"
