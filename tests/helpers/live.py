"""A live page in a process of its own."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CODE = "${Object.assign(window,{pwned:1})}"
NAMES = [
    *(CODE, "`{{images}}", "\\u{0}", "@children", "{{{value}}}", "<img src=x onerror=pwned=1>", '" b', "& c"),
    *("7", "9"),
]
TITLE = "pictures in <img src=x onerror=pwned=1> *${Object.assign(window,{pwned:1})}* ![](http://evil.example/)"


def trained(kind: str, place: str) -> Any:
    """Return a small network: "digits" with MNIST in the folder `place`, "texts" with an encoder there, "masks" of
    made pictures, or "names" of digits whose classes and data have names that look like code."""
    from runs import run_of

    from torchcaps.data import MNIST, Cells, Digits, TextTable
    from torchcaps.models import create_model

    if kind == "digits":
        return run_of(create_model("capsnet_small", pretrained="mnist"), MNIST(place, check_hashes=False))
    if kind == "names":
        data = type("Named", (Digits,), {"names": NAMES, "title": TITLE})()
        return run_of(create_model("capsnet_digits", pretrained="digits"), data)
    if kind == "masks":
        network = create_model("segcaps", classes=3, features=4, decoder=False)
        return run_of(network, Cells(size=32, train_size=4, test_size=12))
    network = create_model("heinsen_sst", classes=2, layers=7, width=384, parts=4, features=8)
    return run_of(network, TextTable(encoder=place, class_names=["bad {{#each}}", "good"]))


def main(kind: str, place: str) -> None:
    """Serve a page, print its address and then each address outside of this machine that this process calls."""
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in ("127.0.0.1", "localhost", "::1"):
            print(f"outside: {address}", flush=True)
        connect(self, address)

    socket.socket.connect = watched  # type: ignore[method-assign]
    from torchcaps.live import app, listen, serve

    with listen(0) as listening:
        page = app(trained(kind, place))
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
        serve(page, listening)


@contextmanager
def served(kind: str, place: str = "") -> Iterator[tuple[str, Path]]:
    """Serve a page in another process within this context; return its address and the file with what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said.txt"
        with said.open("w") as file:
            process = subprocess.Popen([sys.executable, __file__, kind, place], stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: "http" in said.read_text() or process.poll() is not None, "the page's address", 120)
            assert process.poll() is None, said.read_text()
            yield next(line for line in said.read_text().splitlines() if line.startswith("http")), said
        finally:
            process.terminate()
            process.wait(30)


def wait_until(condition: Any, what: str, seconds: float = 30) -> Any:
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(Exception):  # a part of the page is not there yet, or was just replaced
            if found := condition():
                return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:g} seconds")


if __name__ == "__main__":
    main(*sys.argv[1:])
