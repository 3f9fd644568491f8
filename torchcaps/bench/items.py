"""Measurements one after the other, each in a process of its own, and a file that keeps what is known.

An address that a kernel must not touch ends the CUDA context of its process, so no two measurements share one. They may
be stopped at any time, and go on where they were.
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
SAME = ("commit", "device")  # what makes a measurement of the same arguments another one
SAID = 4000  # last characters that are kept of a command that failed


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        name: what it is called where it is spoken of.
        arguments: what it depends on, in JSON.
        command: measures it.
        read: what is to be kept, in JSON, of the command that has ended; NoNumber if there is nothing.
        seconds: with less time than this it is not begun.
    """

    name: str
    arguments: dict[str, Any]
    command: Sequence[str]
    read: Callable[[Done], dict[str, Any]] = answer_of
    seconds: float = 60


class Ledger:
    """What was measured, in a JSON file that is whole at any time.

    Args:
        path: the file.
        stamp: what each measurement depends on beside its arguments.
    """

    def __init__(self, path: Path, stamp: Mapping[str, Any]):
        self.path, self.stamp = path, dict(stamp)
        self.entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    def find(self, item: Item) -> dict[str, Any] | None:
        return next((entry for entry in self.entries if self._is_of(entry, item)), None)

    def keep(self, item: Item, **found: Any) -> dict[str, Any]:
        """In the place of what was there of the same arguments, commit and device."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"item": item.name, "arguments": item.arguments, **self.stamp, "date": date, **found}
        text = json.dumps(entry, allow_nan=False)  # before anything is lost
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
    """Measure what is not known yet, as long as there is time.

    Args:
        retry: also what has failed before.

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
            left.append(item.name)  # and a shorter one may fit
            continue
        say(f"{item.name} ...")
        done = None
        try:
            done = run_command(item.command, environment, end - begun)
            ledger.keep(item, result=item.read(done), took=round(time.monotonic() - begun, 1))
        except subprocess.TimeoutExpired:
            say(f"{item.name}: stopped after {time.monotonic() - begun:.0f} s, the time is up")
            left.append(item.name)
        except Exception as error:  # whatever it is, the others go on
            reason = str(error) if isinstance(error, NoNumber) else first_line(error)
            said = (done.stdout + done.stderr)[-SAID:] if done else ""
            ledger.keep(item, error=" ".join(reason.split()), said=said)
            say(f"{item.name}: failed: {reason}")
            failed += 1
    return failed, left


def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Done:
    """A command that has ended; if the time is up before, or this process is stopped, it and its own are killed."""
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
