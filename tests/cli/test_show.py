"""`torchcaps show`: a page for this machine alone, which ends on Ctrl-C, and bad input."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call, checkpoint, error_of
from live import wait_until


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """The command sets these if they are not set; afterwards they are as before."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")


@pytest.fixture
def started(trained, tmp_path):
    """The command in a process of its own: the process, the page's port and the file with what it prints."""
    pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')
    said = tmp_path / "said.txt"
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "torchcaps", "show", "quickstart", "--runs", str(trained), "--no_browser"]
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: "page: " in said.read_text() or process.poll() is not None, "the page's address", 120)
        assert process.poll() is None, said.read_text()
        port = int(said.read_text().partition("127.0.0.1:")[2].partition("/")[0])
        wait_until(lambda: status(port) == 200, "an answer", 60)
        yield process, port, said
    finally:
        process.kill()
        process.wait()


def answer(port, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def status(port, **headers):
    return answer(port, **headers)[0].status


def test_a_page_for_this_machine_alone(started):
    process, port, said = started
    response, content = answer(port)
    assert "default-src 'self'" in response.headers["Content-Security-Policy"]
    assert b"capsnet_digits on Digits" in content
    assert status(port, Host=f"localhost:{port}") == 200
    assert status(port, Host=f"evil.example:{port}") == 403
    assert status(port, Origin="http://evil.example") == 403
    assert status(port, Origin=f"http://127.0.0.1:{port}") == 200
    for site, mode, path, expected in (
        ("cross-site", "no-cors", "/", 403),  # a picture or a script on the page of another site
        ("cross-site", "no-cors", "/theme.css", 403),
        ("same-site", "cors", "/theme.css", 403),  # another port of this machine
        ("cross-site", "navigate", "/theme.css", 403),
        ("cross-site", "navigate", "/", 200),  # a link
        ("same-origin", "cors", "/theme.css", 200),
        ("none", "navigate", "/", 200),  # an address that was typed
    ):
        fetch = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
        assert answer(port, path, **fetch)[0].status == expected, (site, mode, path)
    framed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    assert status(port, **framed) == 403
    for other in others():
        with pytest.raises((ConnectionError, TimeoutError)):
            socket.create_connection((other, port), 1).close()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert said.read_text().splitlines()[-1] == "torchcaps: stopped by SIGINT"
    assert len(said.read_text().splitlines()) == 5  # three lines on its work before the page is there
    assert not list((said.parent / "temporary").rglob("*.*"))


def others() -> list[str]:
    """Addresses of this machine that other machines can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [probe.getsockname()[0]]


def test_a_port_that_is_taken(trained, capfd):
    pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = error_of(capfd, "show", "quickstart", "--runs", str(trained), "--port", port)
    assert f"port {port} cannot be used" in said
    assert "give another one, or leave out --port" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--port", "70000"], "--port must be from 1 to 65535, got 70000"),
        (["--ckpt_path", "text.ckpt"], "text.ckpt is damaged, or not a checkpoint"),
    ],
)
def test_bad_input(given, said, capfd):
    Path("text.ckpt").write_text("no checkpoint")
    assert said in error_of(capfd, "show", "quickstart", *given)


def test_a_missing_extra(trained, capfd, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torchcaps.live")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert call("show", "quickstart", "--ckpt_path", str(checkpoint(trained))) == 2
    assert 'gradio is missing: pip install "torchcaps[show]"' in capfd.readouterr().err
