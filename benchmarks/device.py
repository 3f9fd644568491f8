"""Use a CUDA device for a short time: tests of the kernels and of resident steps, times, and trainings that are open.

    python benchmarks/device.py --seconds 540        # again, with the same folder: goes on with what is open
    python benchmarks/device.py --smoke              # every stage in tiny form on a CPU, to try this script itself

Run it in a clone, with pytest and the package's extra "train" installed. The stages come in order of their value: the
check that "auto" asks for and tests of the kernels, launches and times of layers, those of whole networks, trainings,
settings of the kernels. Each has a limit in seconds and starts only if a sensible part of it is left of `--seconds`;
one that takes longer is stopped. The folder `--out` has a log of each stage, its numbers (bench.json in a folder of the
stage's name, tiles/tiles.json, steps/steps.json, runs/results.csv), device.json, which says what is done for which code
on which device, and table.txt, the same as a table. All of them are whole whenever the script is cut. `--stages kernels
bench` runs some stages alone.

All combinations of the kernels' options are in `pytest tests/ops/test_kernels.py -m slow`, which spends minutes in the
compiler.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)  # the package reads it when it is imported

import torch  # noqa: E402

from torchcaps.bench import NETWORKS  # noqa: E402
from torchcaps.bench.layers import LAYERS  # noqa: E402
from torchcaps.ops import backend  # noqa: E402
from torchcaps.utils.checks import counted, one_line  # noqa: E402
from torchcaps.utils.files import read_json, write_text_whole  # noqa: E402
from torchcaps.utils.machine import commit, hardware  # noqa: E402
from torchcaps.utils.signals import Stopped, StopSignals  # noqa: E402

GRACE = 10.0  # seconds in which a stopped stage saves what it has, before it is killed
SIDE_BY_SIDE = 6  # trainings; more gain little on one GPU, see docs/reproducing.md
SMOKE_ROWS = ("zhao2019/table1/fashion-mnist-max", "zhao2019/table1/cifar10-max")  # on noise; the second has no data


@dataclass(frozen=True)
class Stage:
    """A part of the work.

    Attributes:
        name: its name, and that of its log.
        command: command that runs it in the root of the clone.
        limit: seconds after which it is stopped.
        problem: function that returns why a command that ended with status 0 did not pass, or None if it did. It takes
            the last line of the log.
        copies: number of processes that run the command side by side.
        least: share of the limit below which the stage does not start.
        closed: why the stage has nothing to run, or an empty text.
    """

    name: str
    command: list[str]
    limit: float
    problem: Callable[[str], str | None]
    copies: int = 1
    least: float = 0.5
    closed: str = ""


@dataclass
class Record:
    """What is known of a stage: its status (done, failed, cut, open), and for which code on which machine."""

    status: str = "open"
    detail: str = ""
    seconds: float = 0
    date: str = ""
    commit: str = ""
    code: str = ""
    machine: str = ""


@dataclass(frozen=True)
class Rows:
    """Rows of the plan that have no result yet: `ready` ones in their order, and those whose data is `missing`."""

    ready: list[str]
    runs: int
    missing: list[str]


def all_stages(out: Path, smoke: bool, rows: Rows, check_hashes: str) -> list[Stage]:
    """Return the stages in order of their value. A new one is one more entry."""
    tests = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), "--tb=short", "-p", "no:cacheprovider"]
    tests += ["-W", "default"]  # warnings of other versions of PyTorch are no errors here
    if importlib.util.find_spec("xdist") and not smoke:
        tests += ["-n", "8"]  # most time goes to the compiler
    torchcaps = [sys.executable, "-m", "torchcaps"]
    layers, networks = (["heinsen"], ["capsnet"]) if smoke else ([*LAYERS], [*NETWORKS])
    triton, compiled, graphed = ("tiled", "compiled", "tiled") if smoke else ("triton", "compiled", "compiled-graphs")
    replayed = () if smoke else ("--graphs",)  # a CPU has no graphs
    bfloat16 = ("--dtype", "bfloat16")

    def bench(name: str, limit: float, measured: Sequence[str], ways: Sequence[str], *options: str) -> Stage:
        size = ["--smoke", "--rounds", "1"] if smoke else ["--rounds", "9"]
        command = [*torchcaps, "bench", "--device", "cpu" if smoke else "cuda", *size, "--layer", *measured]
        command += ["--way", *dict.fromkeys(ways), *options, "--out", str(out / name)]
        return Stage(name, command, limit, partial(not_measured, out / name, measured, ways))

    runs = out / "runs"
    queue = [*torchcaps, "reproduce", *rows.ready, "--runs", str(runs), "--check_hashes", check_hashes]
    copies = min(SIDE_BY_SIDE, rows.runs, os.cpu_count() or 1)
    queue += ["--resident", "--threads", str(max((os.cpu_count() or 1) // max(copies, 1), 1))]

    def tiny(chosen: str, otherwise: str = "") -> list[str]:
        expression = chosen if smoke else otherwise
        return ["-k", expression] if expression else []

    return [
        # What "auto" asks for at the first use of a device.
        Stage(
            "check",
            [sys.executable, "-c", "from torchcaps.ops import backends; print(backends()['triton'])"],
            120,
            lambda last: None if smoke or last == "None" else "the kernels are not trusted",
        ),
        Stage(
            "kernels", [*tests, "tests/ops/test_kernels.py", *tiny("dilated and dot and children")], 180, tests_passed
        ),
        Stage(
            "layers",
            [*tests, "tests/ops/test_layers.py", "-m", "", *tiny("triton and dynamic-windows", "triton")],
            180,
            tests_passed,
        ),
        Stage(
            "operators",
            [*tests, "tests/ops/test_operators.py", *tiny("of_triton and 2", "triton")],
            90,
            tests_passed,
        ),
        Stage("parents", [*tests, "tests/ops/test_parents.py", *tiny("squash")], 90, tests_passed),
        Stage(
            "check-tests",
            [*tests, "tests/ops/test_device_check.py", *tiny("kernels_agree", "kernels_agree or wrong")],
            120,
            tests_passed,
        ),
        bench("bench", 180, layers, ("reference", triton)),
        bench("graphs", 120, layers, (triton,), *replayed),
        bench("compiled", 240, layers, (compiled, graphed)),
        bench("bench-bfloat16", 120, layers, (triton,), *bfloat16),
        bench("graphs-bfloat16", 120, layers, (triton,), *bfloat16, *replayed),
        bench("compiled-bfloat16", 180, layers, (graphed,), *bfloat16),
        bench("networks", 240, networks, (triton,)),
        bench("networks-graphs", 240, networks, (triton,), *replayed),
        bench("networks-compiled", 480, networks, (graphed,)),
        Stage(
            "resident",
            [*tests, "tests/training/test_resident.py", *tiny("a_graph_takes_the_same_steps and not cuda", "on_cuda")],
            120,
            tests_passed,
        ),
        Stage(
            "steps",
            [
                *(sys.executable, "benchmarks/steps.py", "--out", str(out / "steps")),
                *(("--small", "--steps", "1", "--rounds", "1", "--batch", "4") if smoke else ()),
            ],
            120,
            lambda last: None,
        ),
        Stage(
            "training",
            queue,
            600,
            partial(not_trained, runs, rows.ready, check_hashes),
            copies,
            least=0.1,  # it goes on where it was cut
            closed="" if rows.ready else "no row is left whose data is there",
        ),
        Stage(
            "tiles",
            [
                *(sys.executable, "benchmarks/tiles.py", "--out", str(out / "tiles")),
                *(("--smoke", "--rounds", "1", "--layers", "32-to-32") if smoke else ("--seconds", "240")),
            ],
            300,
            lambda last: None,
        ),
    ]


def tests_passed(last: str) -> str | None:
    """Return a problem unless the last line of pytest says that all tests passed."""
    return None if " passed" in last and "skipped" not in last else "not all tests ran"


def not_measured(folder: Path, layers: Sequence[str], ways: Sequence[str], last: str) -> str | None:
    """Return which layers or networks have no numbers of a way in the bench.json of a folder, and why."""
    file = folder / "bench.json"
    rows = read_json(file, dict)["rows"] if file.exists() else []
    ours = [row for row in rows if row["way"] in ways]
    wrong = [f"{row['layer']}, {row['way']}: {row['note']}" for row in ours if row["seconds"] is None]
    wrong += [f"{layer}: not measured" for layer in layers if layer not in {row["layer"] for row in ours}]
    return "; ".join(dict.fromkeys(wrong)) or None


def not_trained(runs: Path, ready: Sequence[str], check_hashes: str, last: str) -> str | None:
    """Return how many runs of the rows have no result."""
    from torchcaps.reproduce.plan import plan
    from torchcaps.reproduce.queue import missing

    left = missing(runs, plan(ready, check_hashes == "true"))
    return f"{counted(len(left), 'run')} without a result" if left else None


def open_rows(runs: Path, names: Sequence[str], check_hashes: str) -> Rows:
    """Return the rows that have no result yet; all of the plan if no names are given."""
    from torchcaps.reproduce.plan import plan
    from torchcaps.reproduce.queue import missing

    left = missing(runs, plan(names, check_hashes == "true"))
    problems = {run.recipe: data_problem(run) for run in left}
    ready = [row for row, problem in problems.items() if not problem]
    return Rows(ready, sum(run.recipe in ready for run in left), [row for row, problem in problems.items() if problem])


def data_problem(run: Any) -> str:
    """Return what is missing for a run on a machine without a network, or an empty text. Nothing is loaded."""
    from torchcaps.recipes.values import plain

    parts = [plain(run.load().values["data"]), *({"class_path": name} for name in run.tested_on)]
    problems = (problem_of(json.dumps(part), run.check_hashes) for part in parts)
    return next(filter(None, problems), "")


@cache
def problem_of(part: str, check_hashes: bool) -> str:
    """Return what is missing for the data of a recipe, whose values are given as JSON, or an empty text."""
    from torchcaps import data
    from torchcaps.data.files import DataError, forbid_downloads
    from torchcaps.data.published import Published
    from torchcaps.recipes.values import name_of

    arguments = json.loads(part).get("init_args", {})
    if "encoder" in arguments:
        return "an encoder"
    try:
        module = getattr(data, name_of(json.loads(part)))(**arguments)
        with forbid_downloads():
            module.prepare_data()
            for file in module.files() if isinstance(module, Published) and check_hashes else ():
                file.check(file.find(module.root))
    except DataError as error:
        return one_line(error)
    return ""


def why_not() -> str | None:
    """Return why the stages cannot run on this machine, or None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device: run it on a machine with an NVIDIA GPU, or with --smoke"
    reason = backend.why_no_triton(torch.device("cuda"))
    if reason is None and importlib.util.find_spec("pytest") is None:
        reason = 'the package pytest is not installed: pip install "torchcaps[train]" pytest'
    return reason


def code_hash() -> str:
    """Return a hash of the code, which a copy without git has, too."""
    digest = hashlib.sha256()
    for folder in ("torchcaps", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".yaml"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Report:
    """The records of all stages, written whole after each change: device.json and table.txt."""

    def __init__(self, out: Path, names: Sequence[str], smoke: bool, missing: Sequence[str]) -> None:
        self.out, self.names, self.missing = out, names, missing
        self.now = {"commit": commit(), "code": code_hash(), "machine": "smoke" if smoke else hardware()}
        file = out / "device.json"
        known = read_json(file, dict) if file.exists() else {}
        self.records = {name: Record(**record) for name, record in known.items()}

    def __getitem__(self, name: str) -> Record:
        """Return the record of a stage with this code on this machine."""
        record = self.records.get(name, Record())
        return record if (record.code, record.machine) == (self.now["code"], self.now["machine"]) else Record()

    def write(self, name: str, status: str, detail: str, seconds: float = 0) -> None:
        """Write down what is known of a stage from now on."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.records[name] = Record(status, detail, round(seconds, 1), date, **self.now)
        text = json.dumps({name: asdict(record) for name, record in self.records.items()}, indent=1)
        write_text_whole(self.out / "device.json", f"{text}\n")
        write_text_whole(self.out / "table.txt", self.table())

    def table(self) -> str:
        """Return a line for each stage, and one for the rows whose data is missing."""
        lines = [f"{'stage':<17} {'status':<7} {'seconds':>7}  the last line of its log"]
        for name in self.names:
            record = self[name]
            lines.append(f"{name:<17} {record.status:<7} {record.seconds or '':>7}  {record.detail}".rstrip())
        if self.missing:
            lines.append(f"open: data missing: {counted(len(self.missing), 'row')}: {', '.join(self.missing)}")
        return "\n".join([*lines, ""])


def run_stage(stage: Stage, log: Path, seconds: float, signals: StopSignals) -> tuple[str, str]:
    """Run a stage with its output in a log, for at most so many seconds; return its status and a line of detail."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    cut = False
    with log.open("ab") as file:
        start = file.tell()
        end = time.monotonic() + seconds
        try:
            signals.waits = True  # no process starts unseen
            for _ in range(stage.copies):
                processes.append(
                    subprocess.Popen(
                        stage.command, stdout=file, stderr=file, cwd=ROOT, env=environment, process_group=0
                    )
                )
            signals.waits = False
            if signals.received is not None:
                raise Stopped(signals.received)
            for process in processes:
                process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            cut = True
        finally:
            signals.waits = True  # a second signal does not keep this from its end
            stop(processes)
            signals.waits, signals.received = False, None
    content = log.read_bytes()[start:].decode(errors="replace")
    last = (content.strip().splitlines() or ["no output"])[-1].strip("= ")
    if cut:
        return "cut", f"stopped after {seconds:.0f} s: {last}"
    status = next((process.returncode for process in processes if process.returncode), 0)
    if status:
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return "failed", f"{ended}: {last}"
    problem = stage.problem(last)
    return ("failed", f"{problem}: {last}") if problem else ("done", last)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes and those that they have started: they may save what they have for GRACE seconds."""
    end = time.monotonic() + GRACE
    for process in processes:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
        _signal(process, signal.SIGKILL)  # also what an ended process has left behind
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def run_stages(stages: Sequence[Stage], report: Report, seconds: float) -> None:
    """Run the stages that are not done, as far as the seconds since the start of this script reach."""
    with StopSignals() as signals:
        for stage in stages:
            done = report[stage.name].status == "done"
            if stage.closed and not done:
                report.write(stage.name, "open", stage.closed)
            if stage.closed or (done and stage.name != "training"):  # more rows may be open than before
                print(f"{stage.name}: {stage.closed or 'done before'}", flush=True)
                continue
            left = BEGAN + seconds - time.monotonic() - GRACE
            if left < stage.least * stage.limit:
                print(f"{stage.name}: not started, {max(left, 0):.0f} s are left", flush=True)
                continue
            log, began = report.out / f"{stage.name}.log", time.monotonic()
            print(f"{stage.name} ... (see {log})", flush=True)
            report.write(stage.name, "cut", "this script was killed")  # stands if it is killed now
            try:
                if report["resident"].status != "done":  # whose steps are not known to be right
                    stage = replace(stage, command=[word for word in stage.command if word != "--resident"])
                status, detail = run_stage(stage, log, min(stage.limit, left), signals)
            except Stopped as stopped:
                report.write(stage.name, "cut", stopped.message, time.monotonic() - began)
                raise
            report.write(stage.name, status, detail, time.monotonic() - began)
            print(f"{stage.name}: {status}: {detail}", flush=True)


def seconds_of(text: str) -> float:
    """Return a number of seconds that somebody gave."""
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise ValueError
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; return 0 if those that were chosen and can run are done, 1 if one is not, 2 if none can run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in all_stages(Path(), False, Rows([], 0, []), "true")]
    parser.add_argument("--seconds", type=seconds_of, default=540, metavar="N", help="in all (default: %(default)s)")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="stages to run (default: all)")
    parser.add_argument("--out", type=Path, help="folder (default: build/device; with --smoke, build/device-smoke)")
    parser.add_argument(
        "--check_hashes", choices=("true", "false"), default="true", help="of data, see torchcaps reproduce"
    )
    parser.add_argument("--smoke", action="store_true", help="run every stage in tiny form on a CPU")
    options = parser.parse_args(arguments)
    reason = None if options.smoke else why_not()
    if reason is not None:
        print(f"device: {reason}", file=sys.stderr)
        return 2
    out = (options.out or Path("build", "device-smoke" if options.smoke else "device")).resolve()
    rows = Rows([], 0, [])
    if options.smoke:
        options.check_hashes = "false"
        os.environ.update(CUDA_VISIBLE_DEVICES="", TORCHCAPS_DATA=str(out / "data"))
        sys.path.append(str(ROOT / "tests" / "helpers"))
        if not (out / "data").exists():
            from noise import write_idx_files

            write_idx_files(out / "data" / "fashion-mnist")
    if "training" in options.stages:
        rows = open_rows(out / "runs", SMOKE_ROWS if options.smoke else (), options.check_hashes)
    try:
        report = Report(out, names, options.smoke, rows.missing)
    except (TypeError, ValueError) as error:
        print(f"device: {one_line(error)}: remove {out / 'device.json'} to begin again", file=sys.stderr)
        return 2
    stages = [
        stage for stage in all_stages(out, options.smoke, rows, options.check_hashes) if stage.name in options.stages
    ]
    out.mkdir(parents=True, exist_ok=True)
    try:
        run_stages(stages, report, options.seconds)
    finally:
        table = report.table()
        write_text_whole(out / "table.txt", table)
        print(f"\n{table}", end="", flush=True)
    return 0 if all(stage.closed or report[stage.name].status == "done" for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
