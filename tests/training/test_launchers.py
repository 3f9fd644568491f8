"""Trainings of two processes as users start them: by Lightning, spawned, by torchrun, SLURM and Kubernetes."""

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import free_port

from torchcaps.cli import parser
from torchcaps.recipes import list_recipes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "distributed"
BIN = Path(sys.executable).parent
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
SHORT = ["quickstart", *QUIET, "--data.batch_size=50", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO = ["--trainer.devices=2"]
STARTED = {
    "Lightning": [sys.executable, "-m", "torchcaps", "train", *SHORT, *TWO, "--trainer.strategy=ddp"],
    "spawn": [sys.executable, "-m", "torchcaps", "train", *SHORT, *TWO, "--trainer.strategy=ddp_spawn"],
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node=2", "-m", "torchcaps", "train", *SHORT, *TWO],
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH")]))
    for name, value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, value)


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True, **pipes)


def ended(process: subprocess.Popen[str], seconds: float = 300) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        with_group(process, signal.SIGKILL)
    return process.returncode, out, err


def with_group(process: subprocess.Popen[str], number: int) -> bool:
    """Send a signal to a process and those that it has started; return whether there is any."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("torchcaps: ")]


def assert_one_run(out: str, runs: str = "runs") -> dict[str, str]:
    """Assert that a run has one folder and each result one line; return the results."""
    found = re.findall(r"^(test/\w+): (\S+)$", out, re.MULTILINE)
    assert len(found) == len(dict(found)) == 3, out
    (folder,) = (Path(runs) / "quickstart").iterdir()
    assert out.splitlines()[-1] == f"run: {folder}"
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert len(list(folder.glob("config.yaml"))) == len(list(folder.glob("metrics.csv"))) == 1
    return dict(found)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """Results of one process with the whole batch."""
    runs = str(tmp_path_factory.mktemp("alone"))
    command = [sys.executable, "-m", "torchcaps", "train", *SHORT, "--data.batch_size=100", "--runs", runs]
    status, out, err = ended(start(command, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)))
    assert status == 0, err
    return assert_one_run(out, runs)


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTED)
def test_two_processes_leave_one_run_and_the_results_of_one_process(by, alone):
    status, out, err = ended(start(STARTED[by]))
    assert status == 0, err
    assert assert_one_run(out) == alone
    assert lines(err) == []


@pytest.mark.slow
def test_two_machines(alone):
    """Two torchruns with a process each, as on two machines."""
    common = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    train = ["-m", "torchcaps", "train", *SHORT, "--trainer.num_nodes=2", "--trainer.devices=1"]
    machines = [start([*TORCHRUN, *common, f"--node_rank={node}", *train]) for node in range(2)]
    (status, out, err), (other, silent, more) = [ended(machine) for machine in machines]
    assert (status, other) == (0, 0), err + more
    assert assert_one_run(out) == alone
    assert silent == ""


INTERRUPT = ["--allow_code", "--trainer.callbacks+=interruptions.Interrupt", "--trainer.callbacks.step=3"]


def without_stops(err: str, by: str) -> list[str]:
    """Our lines; without those of the processes that torchrun has stopped, which it does when another one fails."""
    return [line for line in lines(err) if by != "torchrun" or "stopped by SIGTERM" not in line]


@pytest.mark.slow
@pytest.mark.parametrize(("by", "rank"), [("Lightning", "1"), ("spawn", "null"), ("torchrun", "1")])
def test_an_error_of_a_process_ends_all_with_one_line(by, rank):
    given = [*INTERRUPT, "--trainer.callbacks.by=error", f"--trainer.callbacks.rank={rank}"]
    process = start([*STARTED[by], *given])
    status, out, err = ended(process, 120)
    assert status == (1 if by == "torchrun" else 2)
    assert "test/" not in out
    assert without_stops(err, by) == ["torchcaps: nothing can be learned from this"], err
    assert "Traceback" not in err or by == "torchrun"


@pytest.mark.slow
@pytest.mark.parametrize("by", STARTED)
def test_a_process_that_is_killed_ends_all(by):
    given = [*INTERRUPT, *(f"--trainer.callbacks.{x}" for x in ("by=SIGKILL", "rank=1", "real=true"))]
    status, _, err = ended(start([*STARTED[by], *given]), 120)
    assert status not in (0, 124), err
    assert len(lines(err)) == 1 or by == "torchrun", (status, err)  # torchrun may be the first to end the other process
    assert all("one of 2 processes has ended" in line for line in without_stops(err, by))


def wait_for_checkpoint(process: subprocess.Popen[str]) -> None:
    """Wait until a training has ended its first epoch."""
    limit = time.monotonic() + 120
    while not list(Path("runs").rglob("last.ckpt")):
        if time.monotonic() > limit or process.poll() is not None:
            pytest.fail(f"no epoch has ended: {ended(process, 1)}")
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "number", "to"),
    [
        ("Lightning", signal.SIGINT, "the group"),
        ("spawn", signal.SIGTERM, "the first"),
        ("torchrun", signal.SIGTERM, "the first"),
    ],
)
def test_a_signal_stops_all_and_says_how_to_go_on(by, number, to):
    """Ctrl-C goes to all processes of a terminal's group; `kill` and a cluster's signal to the one that was started."""
    process = start([*STARTED[by], "--trainer.max_epochs=1000"])
    wait_for_checkpoint(process)
    with_group(process, number) if to == "the group" else process.send_signal(number)
    status, _, err = ended(process, 120)
    assert status == 128 + number or (by == "torchrun" and status)
    (line,) = [line for line in lines(err) if "stopped by" in line]
    assert re.search(r"stopped by SIG\w+; to continue: torchcaps train quickstart .* --ckpt_path \S+/last.ckpt$", line)
    assert len(list(Path("runs/quickstart").iterdir())) == 1


# The files for SLURM and Kubernetes

SRUN = """#!{python}
import os, subprocess, sys
given = sys.argv[1:]
assert given.pop(0) == "--kill-on-bad-exit=1"
assert given.pop(0) == "--cpus-per-task=1"
tasks = int(os.environ["SLURM_NTASKS"])
started = []
for task in range(tasks):
    own = dict(SLURM_PROCID=str(task), SLURM_LOCALID=str(task), SLURM_NODEID="0", SLURM_STEP_NODELIST="localhost")
    started.append(subprocess.Popen(given, env=dict(os.environ, **own)))
sys.exit(max(process.wait() for process in started))
"""
TORCHCAPS = """#!/bin/sh
exec {python} -m torchcaps "$@"
"""


def program(name: str, text: str) -> None:
    """Write a program into a folder `bin`."""
    path = Path("bin") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def slurm(tasks: int) -> dict[str, str]:
    """Return the variables of a job of SLURM on one machine."""
    return {
        "PATH": os.pathsep.join([str(Path("bin").resolve()), str(BIN), os.environ["PATH"]]),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "torchcaps",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "MASTER_PORT": str(free_port()),
    }


def assert_known(arguments: list[str]) -> None:
    """Assert that `torchcaps` knows a recipe, and the options that it takes from it."""
    options, overrides = parser().parse_known_args(arguments)
    assert options.recipe in list_recipes()
    assert overrides
    assert all(re.match(r"--(trainer|data|model)\.\w+", name) for name in overrides if name.startswith("--"))


def test_the_file_for_slurm_is_a_script_with_known_options():
    script = PAGE / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert text.count("#SBATCH") == len(options)
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("USR1@")
    (line,) = re.findall(r"^srun .*$", text.replace("\\\n", ""), re.MULTILINE)
    words = shlex.split(line.replace("$SLURM_NNODES", "2").replace("$SLURM_NTASKS_PER_NODE", "4"))
    assert words[3:6] == ["torchcaps", "train", "$@"]
    assert_known(["train", "quickstart", *words[6:]])


@pytest.mark.slow
def test_the_file_for_slurm_trains(alone):
    program("srun", SRUN)
    program("torchcaps", TORCHCAPS)
    status, out, err = ended(start(["bash", str(PAGE / "slurm.sbatch"), *SHORT], **slurm(2)))
    assert status == 0, err
    assert assert_one_run(out) == alone


def kubernetes() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the Service and the Job of the file for Kubernetes, and the container of its pods."""
    service, job = yaml.safe_load_all((PAGE / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    assert all(isinstance(item["value"], str) for item in container["env"])  # Kubernetes refuses numbers
    return {item["name"]: item["value"] for item in container["env"]}


def test_the_file_for_kubernetes_agrees_with_itself():
    service, job, container = kubernetes()
    name, spec, given = job["metadata"]["name"], job["spec"], variables_of(container)
    pod = spec["template"]["spec"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(given["PODS"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert given["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["GPUS"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert_known(["train", *container["args"]])


@pytest.mark.slow
def test_the_file_for_kubernetes_trains(alone):
    """Its command, in two processes in place of two pods."""
    _, _, container = kubernetes()
    own = {"GPUS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = {**variables_of(container), **own, "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]])}
    del given["TORCHCAPS_DATA"]
    pods = [start([*container["command"], *SHORT], **given, JOB_COMPLETION_INDEX=str(pod)) for pod in range(2)]
    (status, out, err), (other, silent, more) = [ended(pod) for pod in pods]
    assert (status, other) == (0, 0), err + more
    assert assert_one_run(out) == alone
    assert silent == ""
