"""The first minutes on a GPU: are the kernels right, how fast can the device be, how fast are the layers?

    python -m torchcaps.bench.gpu selftest                   # needs no GPU
    python -m torchcaps.bench.gpu check --out build/gpu      # the kernels' tests, compute-sanitizer, captured graphs
    python -m torchcaps.bench.gpu ceilings --out build/gpu   # copies, matrix products, launches, time by kernel
    python -m torchcaps.bench.gpu layers --out build/gpu     # the papers' layers in every way
    python -m torchcaps.bench.gpu sweep --out build/gpu      # block sizes
    python -m torchcaps.bench.gpu profile --out build/gpu    # ncu
    python -m torchcaps.bench.gpu rows --out build/gpu       # print results as Markdown, on any machine

Run it in a clone of the repository, because `check` runs its tests. Each mode ends within --minutes (default: 9), and
the same command continues where it stopped: each result is written to FOLDER/MODE.json at once. A failure is kept there
in one line and is tried again with --retry. In a copy without .git, the commit comes from --commit or
$TORCHCAPS_COMMIT. A mode in which something failed ends with status 1.
"""

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import torchcaps
from torchcaps.bench import Request
from torchcaps.bench.items import Done, Item, Ledger, work_through
from torchcaps.bench.layers import LAYERS
from torchcaps.bench.markdown import to_markdown
from torchcaps.bench.measurement import PASSES, Row
from torchcaps.bench.memory import answer_of
from torchcaps.bench.passes import NoNumber, check_values
from torchcaps.bench.report import software_and_machine
from torchcaps.bench.script import script_parser
from torchcaps.files import write_text_whole
from torchcaps.machine import commit

ROOT = Path(__file__).resolve().parents[2]
ON: dict[str, Any] = {"device": "cuda", "way": "triton"}  # tests use others
TIMED = ("reference", "compiled-reference", "tiled", "triton", "triton-graph")
ROUNDS = 20
CASES = (  # (layer, batch)
    ("inverted-attention-conv", 32),
    ("inverted-attention-conv", 128),
    ("heinsen", 20),
    ("digit-capsules", 128),
    ("capnet-dynamic", 4),
    ("capnet-dynamic", 32),
    ("em-conv", 8),
    ("em-conv", 32),
)
HUGE = Request("heinsen", factor=410, batch=2)  # 2.1 million children: 2.2e9 numbers in the votes of a sample
PARENTS = (3, 32, 131)  # part of a block, one block, several blocks
KERNELS = "sums|normalize|grads|weight_grads|pack|merge"  # a kernel has the name of its function
METRICS = (
    "gpu__time_duration.sum",
    "launch__registers_per_thread",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
)

# ---------------------------------------------------------------- what each mode measures


def own(name: str, kind: str, seconds: float = 60, **arguments: Any) -> Item:
    """An item that measures one of the kinds of `torchcaps.bench.device`."""
    arguments = {"kind": kind, **arguments}
    command = [sys.executable, "-m", "torchcaps.bench.device", json.dumps(arguments)]
    return Item(name, arguments, command, seconds=seconds)


def around(item: Item, tool: Sequence[str], read: Callable[[Done], dict[str, Any]]) -> Item:
    """The same item, run under a tool that watches it."""
    named = [Path(tool[0]).name, *tool[1:]]
    return replace(item, arguments={"tool": named, **item.arguments}, command=[*tool, *item.command], read=read)


def find_tool(name: str) -> str | None:
    """Path of a tool, or None with a line that says that it is missing."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        print(f"{name} is missing, and left out: it is neither on the PATH nor in /usr/local/cuda/bin")
    return found


def check(out: Path) -> list[Item]:
    items = [own("environment", "environment", **ON)]
    for name, chosen in (("kernels", []), ("layers", ["-k", "triton"]), ("library", ["-k", "triton"])):
        # Warnings of other PyTorch versions are no errors here. Most time goes to the compiler: use several processes.
        arguments = [f"tests/ops/test_{name}.py", *chosen, "-W", "default", "-p", "no:cacheprovider", "--tb=short"]
        arguments += ["-n", "8"] if importlib.util.find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "--rootdir", str(ROOT), str(ROOT / arguments[0]), *arguments[1:]]
        items.append(Item(f"tests of the {name}", {"pytest": arguments}, command, read_tests, seconds=120))
    items.append(own("the same digits twice", "twice", **ON))
    for layer in ("digit-capsules", "heinsen"):
        items.append(own(f"captured training step, {layer}", "training", layer=layer, how="graph", **ON))
        items.append(own(f"compiled training step, {layer}", "training", 120, layer=layer, how="compiled", **ON))
    sanitizer = find_tool("compute-sanitizer")
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        for parents in PARENTS:
            item = own(f"{tool}, {parents} parents", "tiny", 90, parents=parents, **ON)
            # API errors are left out: PyTorch's calls that ask what a driver has may fail without harm.
            watch = [str(sanitizer), "--tool", tool, "--error-exitcode", "9"]
            watch += ["--report-api-errors", "no"] if tool == "memcheck" else []
            items.append(around(item, watch, read_sanitizer))
    return items


def read_tests(done: Done) -> dict[str, Any]:
    """Return the summary line of pytest; raise it with the first failures if tests failed."""
    lines = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise NoNumber("; ".join([lines[-1], *failed][:3]))
    return {"said": lines[-1]}


def read_sanitizer(done: Done) -> dict[str, Any]:
    """Return the answer with the summary of compute-sanitizer; raise the summary if it found errors."""
    summary = re.search(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout + done.stderr)
    if done.returncode == 9 and summary:
        raise NoNumber(summary[1])
    answer = answer_of(done)
    if summary is None:
        raise NoNumber("compute-sanitizer printed no summary")
    return {"said": f"{answer['said']}; {summary[1]}"}


def ceilings(out: Path) -> list[Item]:
    by_kernel = [own(f"kernels of {layer}, batch {n}", "kernels", layer=layer, batch=n, **ON) for layer, n in CASES]
    return [own("rates", "rates", **ON), own("launches", "launches", **ON), *by_kernel]


def all_layers(out: Path) -> list[Item]:
    items = []
    for dtype, autocast in (("float32", False), ("bfloat16", True)):
        for layer, batch in CASES:
            request = Request(layer, batch=batch, device=ON["device"], dtype=dtype, autocast=autocast)
            name = f"{layer}, batch {batch}, {dtype}"
            items.append(own(name, "layers", 100, request=asdict(request), ways=list(TIMED), rounds=ROUNDS))
        if not autocast:
            request = replace(HUGE, device=ON["device"])
            items.append(own("more than 2^31 numbers", "huge", request=asdict(request), way=ON["way"]))
    return items


def sweep(out: Path) -> list[Item]:
    file = out / "tune.json"
    command = [sys.executable, "-m", "torchcaps", "bench", "--tune", str(file)]

    def read(done: Done) -> dict[str, Any]:
        if done.returncode:
            raise NoNumber(done.stderr.strip().rpartition("\n")[2])
        return {"said": f"{file.name} is written", "tune": json.loads(file.read_text(encoding="utf-8"))}

    return [Item("block sizes", {"command": command[2:-1]}, command, read, seconds=120)]


def profile(out: Path) -> list[Item]:
    items, ncu = [], find_tool("ncu")
    for layer in LAYERS if ncu else ():
        file = out / f"profile-{layer}.csv"
        watch = [
            str(ncu),
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--kernel-name",
            f"regex:^({KERNELS})$",
        ]
        watch += ["--csv", "--metrics", ",".join(METRICS), "--page", "raw"]

        def read(done: Done, file: Path = file) -> dict[str, Any]:
            answer_of(done)
            table = [line for line in done.stdout.splitlines() if line.startswith('"')]
            if len(table) < 2:
                raise NoNumber(f"ncu saw no kernel: {done.stdout.strip().rpartition(chr(10))[2]}")
            write_text_whole(file, "\n".join(table) + "\n")
            return {"said": f"{file.name}"}

        items.append(around(own(f"ncu, {layer}", "one_pass", layer=layer, **ON), watch, read))
    return items


MODES = {"check": check, "ceilings": ceilings, "layers": all_layers, "sweep": sweep, "profile": profile}


# ---------------------------------------------------------------- without a GPU

# Stamp of invented measurements.
MADE = {"commit": "c0ffee", "device": "made", "capability": "9.0", "driver": "1", "torch": "2", "triton": "3"}


def made_rows(*ways: tuple[str, float, float]) -> str:
    """What a process prints that has measured ways: (name, seconds, error), where an error of 1e-6 is allowed."""
    rows = []
    for way, seconds, error in ways:
        for name in PASSES:
            row = Row("made", 1, 7, 2, 3, way, name, bound_seconds=1e-5, errors={"poses": error})
            try:
                check_values(row.errors, {"poses": 1e-6})
                row.seconds, row.bytes = seconds, 12_000_000
            except NoNumber as reason:
                row.note = str(reason)
            rows.append(row.json())
    return json.dumps({"rows": rows})


def made_item(name: str, code: str, seconds: float = 0) -> Item:
    """An item that runs Python code."""
    arguments = {"name": name, "request": {"dtype": "float32", "autocast": False}}
    return Item(name, arguments, [sys.executable, "-I", "-c", code], seconds=seconds)


def selftest() -> int:
    """Check on invented measurements that results are judged, kept, continued and printed; return a status."""
    printed = made_rows(("compiled-reference", 3e-4, 1e-7), ("triton", 1e-4, 2e-7), ("tiled", 5e-5, 1e-3))
    items = [
        made_item("right", f"print({printed!r})"),
        made_item("broken", "raise ValueError('one line\\nand another')"),
        made_item("endless", "import time; time.sleep(60)"),
        made_item("long", "print({})", seconds=600),
    ]
    wrong = []

    def expect(what: str, is_so: bool) -> None:
        wrong.extend([] if is_so else [what])

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "layers.json"

        def call(count: int, retry: bool = False, **changed: str) -> tuple[int, list[str], list[str]]:
            said: list[str] = []
            failed, left = work_through(
                items[:count], Ledger(file, MADE | changed), os.environ, 2 / 60, retry, said.append
            )
            return failed, left, said

        failed, left, _ = call(4)
        entries = json.loads(file.read_text(encoding="utf-8"))
        expect("one fails, and two are left", (failed, left) == (1, ["endless", "long"]))
        expect("what is measured and what failed is kept", [e["item"] for e in entries] == ["right", "broken"])
        expect("an error is one line", entries[1].get("error") == "and another")
        before = file.read_bytes()
        expect("nothing is measured twice", call(2)[0] == 0 and file.read_bytes() == before)
        expect("what failed is tried again", call(2, retry=True)[0] == 1)
        text = rows(Path(folder))
        line = next((line for line in text.splitlines() if line.startswith("| triton ")), "")
        expect("numbers are printed", "| 100 µs | 3x | 12 MB |" in line)
        line = next((line for line in text.splitlines() if line.startswith("| tiled ")), "")
        expect("wrong values have no numbers", line == "| tiled | values disagree | - | - | values disagree | - | - |")
        expect("machine and commit are printed", "made, capability 9.0, driver 1" in text and "commit c0ffee" in text)
        call(1, commit="another")
        expect("another commit is another measurement", len(json.loads(file.read_text(encoding="utf-8"))) == 3)
        expect("no other file is left", [path.name for path in Path(folder).iterdir()] == [file.name])
    print("selftest: " + ("; not true: ".join(["failed", *wrong]) if wrong else "passed"))
    return 1 if wrong else 0


# ---------------------------------------------------------------- the command


def children_environment(out: Path) -> dict[str, str]:
    """Environment of the measuring processes: caches kept between calls, and the package of this process."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(Path(torchcaps.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return inherited | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(out / "cache" / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "cache" / "inductor"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def stamp(given: str | None) -> dict[str, Any]:
    """What all measurements of this call depend on beside their arguments."""
    found = commit()
    copied_commit = os.environ.get("TORCHCAPS_COMMIT", "unknown")
    here = software_and_machine("cuda")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(command, capture_output=True, text=True).stdout if shutil.which(command[0]) else ""
    return {
        "commit": given or (copied_commit if found.startswith("torchcaps ") else found),
        "device": here["device"],
        "capability": ".".join(str(n) for n in torch.cuda.get_device_capability()),
        "driver": driver.strip().partition("\n")[0] or "unknown",
        **{name: here[name] for name in ("torch", "triton", "python")},
    }


def run_mode(mode: str, out: Path, minutes: float, retry: bool, stamped: dict[str, Any]) -> int:
    """Measure what a mode still lacks; return the status of the process."""
    ledger, say = Ledger(out / f"{mode}.json", stamped), functools.partial(print, flush=True)
    failed, left = work_through(MODES[mode](out), ledger, children_environment(out), minutes, retry, say)
    if left:
        print(f"{mode}: {len(left)} left, the same command continues: {'; '.join(left)}")
    if failed:
        print(f"{mode}: {failed} failed, see {ledger.path}; --retry tries again")
    return 1 if failed else 0


def rows(out: Path) -> str:
    """The measurements of all modes in a folder, as Markdown."""
    files = [out / f"{mode}.json" for mode in MODES if (out / f"{mode}.json").is_file()]
    return to_markdown(entry for file in files for entry in json.loads(file.read_text(encoding="utf-8")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser("gpu", __doc__)
    parser.add_argument("mode", choices=(*MODES, "rows", "selftest"), help="what to do, see above")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("build/gpu"), help="folder of results (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default: %(default)s)")
    parser.add_argument("--commit", help="commit of a copy without .git")
    parser.add_argument("--retry", action="store_true", help="try again what failed before")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if options.mode == "selftest":
        return selftest()
    if options.mode == "rows":
        text = rows(out)
        if not text.strip():
            print(f"gpu: there are no measurements in {out}: give their folder with --out", file=sys.stderr)
            return 2
        print(text, end="")
        return 0
    if not torch.cuda.is_available():
        print("gpu: there is no CUDA device: the modes selftest and rows run without one", file=sys.stderr)
        return 2
    return run_mode(options.mode, out, options.minutes, options.retry, stamp(options.commit))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes that it started
    sys.exit(main())
