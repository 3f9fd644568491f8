"""Run measurements one after the other, each in a process of its own, and keep their results in a file.

A kernel that touches a wrong address ends the CUDA context of its process, so no two measurements share a process. A
run can be stopped at any time and continues where it stopped. :mod:`torchcaps.bench.gpu` says what to measure.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchcaps.bench.memory import answer_of
from torchcaps.bench.passes import NoNumber, first_line
from torchcaps.files import write_text_whole

Done = subprocess.CompletedProcess[str]
SAME = ("commit", "device")  # a result counts as known only if these are the same as now
SAID = 4000  # characters kept of the end of a failed command's output


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        name: name in messages and tables.
        arguments: arguments that the result depends on, as JSON values.
        command: command that measures it.
        read: function that returns the result, as JSON values, from the ended command; it raises NoNumber if there is
            none.
        seconds: time without which the measurement is not begun.
    """

    name: str
    arguments: dict[str, Any]
    command: Sequence[str]
    read: Callable[[Done], dict[str, Any]] = answer_of
    seconds: float = 60


class Ledger:
    """Results of measurements, in a JSON file that is complete at any time.

    Args:
        path: path of the file.
        stamp: what each measurement depends on beside its arguments, such as commit and device.
    """

    def __init__(self, path: Path, stamp: Mapping[str, Any]):
        self.path, self.stamp = path, dict(stamp)
        self.entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    def find(self, item: Item) -> dict[str, Any] | None:
        """Return the entry of an item for this commit and device, or None."""
        return next((entry for entry in self.entries if self._is_of(entry, item)), None)

    def keep(self, item: Item, **found: Any) -> dict[str, Any]:
        """Write an entry in the place of the one with the same arguments, commit and device; return it."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"item": item.name, "arguments": item.arguments, **self.stamp, "date": date, **found}
        text = json.dumps(entry, allow_nan=False)  # raises before the old entry is lost
        self.entries = [*(e for e in self.entries if not self._is_of(e, item)), json.loads(text)]
        write_text_whole(self.path, json.dumps(self.entries, indent=1) + "\n")
        return entry

    def _is_of(self, entry: dict[str, Any], item: Item) -> bool:
        return entry["arguments"] == item.arguments and all(entry[name] == self.stamp[name] for name in SAME)


def work_through(
    items: Sequence[Item],
    ledger: Ledger,
    environment: Mapping[str, str],
    minutes: float,
    retry: bool,
    say: Callable[[str], None],
) -> tuple[int, list[str]]:
    """Measure the items that have no result yet, as long as there is time.

    Args:
        items: measurements, in order.
        ledger: file of results.
        environment: environment variables of the processes.
        minutes: time limit.
        retry: whether to measure again the items that failed before.
        say: function that is given a line of progress.

    Returns:
        How many failed now, and the names of those that are left.
    """
    end, failed, left = time.monotonic() + 60 * minutes, 0, []
    for item in items:
        known = ledger.find(item)
        if known and ("error" not in known or not retry):
            say(f"{item.name}: {known.get('error', 'known')}")
            continue
        begun = time.monotonic()
        if end - begun < item.seconds:
            left.append(item.name)  # a later, shorter one may fit
            continue
        say(f"{item.name} ...")
        done = None
        try:
            done = run_command(item.command, environment, end - begun)
            ledger.keep(item, result=item.read(done), took=round(time.monotonic() - begun, 1))
        except subprocess.TimeoutExpired:
            say(f"{item.name}: stopped after {time.monotonic() - begun:.0f} s, the time is up")
            left.append(item.name)
        except Exception as error:  # whatever it is, the other items are measured
            reason = str(error) if isinstance(error, NoNumber) else first_line(error)
            said = (done.stdout + done.stderr)[-SAID:] if done else ""
            ledger.keep(item, error=" ".join(reason.split()), said=said)
            say(f"{item.name}: failed: {reason}")
            failed += 1
    return failed, left


def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Done:
    """Run a command to its end. If time is up, or this process is stopped, it and its children are killed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", env=dict(environment), process_group=0
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
