"""What the live page's server answers, asked by a socket as an attacker would, and what it refuses."""

import asyncio
import gc
import http.client
import json
import socket
import threading
import tracemalloc
from contextlib import ExitStack, suppress

import pytest
from live import wait_until
from runs import run_of

from torchcaps.data import Digits
from torchcaps.models import create_model

pytest.importorskip("gradio", reason='Gradio is not installed: pip install "torchcaps[show]"')

import gradio as gr

from torchcaps.live import app, listen
from torchcaps.live.requests import LARGEST_BODY, TOGETHER, WAITING, OnlyThePage
from torchcaps.live.server import CONNECTIONS, server_of

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves event loops

JOIN, DATA = "/gradio_api/queue/join", "/gradio_api/queue/data"
SECRET = "PRIVATE"
NOT_FOUND = "not found: open the page at /"
NO_INPUT = "this is no input of the page: reload the page"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The port of a page of digits, in a thread of this process."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("gradio")))
    with listen(0) as listening:
        port = listening.getsockname()[1]
        server = server_of(app(run_of(create_model("capsnet_digits", pretrained="digits"), Digits())), port)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        wait_until(lambda: ask(port, "GET", "/theme.css")[0] == 200, "the server")
        yield port
        server.should_exit = True
        thread.join(30)
    patch.undo()
    del server
    gc.collect()  # the loops, while their warnings are ignored


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "key"
    file.write_text(SECRET)
    return str(file)


def ask(port, method, path, body=None, chunked=False, **headers):
    """The status and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers, encode_chunked=chunked)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def event(value, **other):
    content = {"data": [value], "event_data": {}, "fn_index": 0, "trigger_id": 5, "session_hash": "abc"}
    return json.dumps({**content, **other}).encode()


def refusal(answer):
    """The status and the one line of a refusal."""
    status, content = answer
    assert "\n" not in content
    return status, json.loads(content)["detail"]


def stream_of(port, session="abc"):
    status, content = ask(port, "GET", f"{DATA}?session_hash={session}")
    assert status == 200
    return [json.loads(line.removeprefix("data: ")) for line in content.split("\n\n") if line]


def file_data(path):
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/config",
            "/config/",
            "/openapi.json",
            "/docs",
            "/redoc",
            "/monitoring",
            "/monitoring/summary",
            "/robots.txt",
        ),
        *("/login", "/logout", "/login/huggingface", "/svelte/svelte.js", "/pwa_icon", "/nothing", "//", "/./"),
        *(
            "/gradio_api/openapi.json",
            "/gradio_api/info",
            "/gradio_api/app_id",
            "/gradio_api/user",
            "/gradio_api/token",
        ),
        *("/gradio_api/runs", "/gradio_api/heartbeat/abc", "/gradio_api/startup-events", "/gradio_api/deep_link"),
        *("/gradio_api/proxy=http://127.0.0.1:1/", "/gradio_api/upload_progress?upload_id=1", "/gradio_api/vibe-code"),
        *("/gradio_api/file={}", "/gradio_api/file/{}", "/file={}", "//gradio_api/file={}", "/gradio_api//file={}"),
        *("/gradio_api%2Ffile={}", "/%67radio_api/file={}", "/gradio_api/./file={}", "/assets/../gradio_api/file={}"),
        *("/assets/../../../gradio/routes.py", "/assets/..%2f..%2froutes.py", "/assets/%2e%2e/index.html", "/assets/"),
        *(
            "/assets/.%2e/x",
            "/assets//etc/passwd",
            "/static/{}",
            "/assets/..",
            "/assets\\..",
            "/assets/a%00",
            "/assets/a%0a",
        ),
        *("/gradio_api/queue/join/", "/gradio_api/queue/join%0a", "/gradio_api/queue/data/x", "/GRADIO_API/queue/join"),
    ],
)
def test_there_is_no_other_address(page, secret, path):
    for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
        answer = ask(page, method, path.format(secret))
        assert answer[0] == 404, method
        assert method == "HEAD" or refusal(answer) == (404, NOT_FOUND)


@pytest.mark.parametrize(
    "path",
    [
        *("upload", "process_recording", "component_server", "run/predict", "api/predict", "call/look", "call/v2/look"),
        *("cancel", "reset", "stream/abc", "stream/abc/close", "run-history/connect", "vibe-edit"),
    ],
)
def test_nothing_else_is_posted(page, path):
    assert refusal(ask(page, "POST", f"/gradio_api/{path}", event({"test": 0}))) == (404, NOT_FOUND)


def test_methods(page):
    for method in ("POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"):
        for path in ("/", "/theme.css", f"{DATA}?session_hash=abc"):
            answer = ask(page, method, path)
            assert answer[0] == 405
            assert method == "HEAD" or refusal(answer) == (405, "expected GET")
    for method in ("GET", "PUT", "OPTIONS"):
        assert refusal(ask(page, method, JOIN)) == (405, "expected POST")


def test_the_page_and_its_scripts(page):
    status, content = ask(page, "GET", "/?deep_link=a&page=b&__theme=dark", **{"X-Forwarded-Host": "evil.example"})
    assert status == 200
    assert "evil.example" not in content
    assert '"analytics_enabled":false' in content.replace(" ", "")
    scripts = [part.partition('"')[0] for part in content.split('"./assets/')[1:]]
    assert len(scripts) > 1
    for path in ("theme.css", "manifest.json", "favicon.ico", *(f"assets/{name}" for name in scripts)):
        assert ask(page, "GET", f"/{path}")[0] == 200, path


def test_an_input_is_answered(page):
    status, content = ask(page, "POST", JOIN, event({"test": 3}))
    assert status == 200
    answer, end = stream_of(page)
    assert answer["event_id"] == json.loads(content)["event_id"]
    assert answer["output"]["data"][0]["example"]["title"].startswith("test image")
    assert end == {"msg": "close_stream"}
    # Each input is answered once.
    assert refusal(ask(page, "GET", f"{DATA}?session_hash=abc"))[0] == 404


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"test": 10**6}, "there is no test image 1000000: reload the page"),
        ({"test": -1}, "there is no test image -1: reload the page"),
        ({"drawing": "data:,"}, "the drawing cannot be read: reload the page"),
        ({"drawing": "/etc/passwd"}, "the drawing cannot be read: reload the page"),
        ({"file": "http://127.0.0.1:1/", "name": "a.png"}, "a.png is not a picture that can be read"),
        ({"file": "data:image/png;base64,bm8=", "name": "../\0\ud800\n"}, "is not a picture that can be read"),
    ],
)
def test_an_input_that_cannot_be_read(page, value, reason, capfd):
    assert ask(page, "POST", JOIN, event(value))[0] == 200
    answer, _ = stream_of(page)
    assert not answer["success"]
    assert reason in answer["output"]["error"]
    assert capfd.readouterr() == ("", "")


def test_no_file_is_read(page, secret, tmp_path_factory, capfd):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        here = f"http://127.0.0.1:{listening.getsockname()[1]}/a.png"
        named = [file_data(secret), file_data(here), {**file_data(""), "url": here}]
        for file in named:
            for value in (file, [file], {"drawing": file}, {"file": file, "name": "a"}, {"test": file}, {"a": [file]}):
                assert refusal(ask(page, "POST", JOIN, event(value))) == (422, NO_INPUT)
            for name in ("event_data", "session_hash", "fn_index", "trigger_id", "event_id", "request", "state"):
                assert refusal(ask(page, "POST", JOIN, event({"test": 0}, **{name: file}))) == (422, NO_INPUT)
            for data in ([], [{"test": 0}, file], file, {"0": file}):
                assert refusal(ask(page, "POST", JOIN, event(0, data=data))) == (422, NO_INPUT)
        with pytest.raises(TimeoutError):  # nobody has asked
            listening.accept()
    assert ask(page, "GET", f"/gradio_api/file={secret}")[0] == 404
    assert not list(tmp_path_factory.getbasetemp().glob("gradio*/**/key"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"null", b"0", b"[]", b"{}", b'"abc"', b"{", b"\xff", b"\xef\xbb\xbf{}", b"{\x00}", b"NaN", b'{"data":'),
        event({"test": 0}).decode().encode("utf-16"),
        b"[" * 100_000,
        b'{"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"9" * 100_000,
        b'{"data":[' + b"{}," * 10_000 + b"{}]}",
        b'"' * 100_001,
        b'"' + b'\\"' * 300_000,  # a search from each quote to the end would take hours
        b'"' + b"\\" * 100_001,
        event({"test": 0}, fn_index=1),
        event({"test": 0}, fn_index="0"),
        event({"test": 0}, session_hash=""),
        event({"test": 0}, session_hash="../a"),
        event({"test": 0}, session_hash="a" * 100),
        event({"test": 0}, session_hash=None),
        event({"test": 0}, oauth_token="a"),
        event({"test": 0}, simple_format=True),
        event({"test": 0}, batched=True),
        *(event({"test": index}) for index in (0.0, True, None, "0", [0])),
        *(event({"drawing": drawing}) for drawing in (0, None, [], {"a": "b"})),
        *(event({"file": file}) for file in ("data:,", 0)),
        event({"file": "data:,", "name": None}),
        event({"test": 0, "drawing": "data:,"}),
        *(event(value) for value in ("text", 0, None, [], {})),
    ],
    ids=lambda body: ascii(body)[:60],
)
def test_an_event_of_another_form(page, body, capfd):
    assert refusal(ask(page, "POST", JOIN, body)) == (422, NO_INPUT)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "query",
    ["", "?", "?session_hash", "?session_hash=", "?session_hash=nobody", "?session_hash=abc&session_hash=d", "?a=abc"],
)
def test_streams_of_nobody(page, query, capfd):
    assert ask(page, "POST", JOIN, event({"test": 0}))[0] == 200
    answer = refusal(ask(page, "GET", f"{DATA}{query}"))
    assert answer == (404, "no input waits for this stream: reload the page")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(page, chunked):
    """Ten times as large as is allowed: the server stops reading early."""
    part = b"a" * 1_000_000
    length = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(10 * LARGEST_BODY)}
    connection = http.client.HTTPConnection("127.0.0.1", page, timeout=60)
    connection.putrequest("POST", JOIN)
    for name, value in length.items():
        connection.putheader(name, value)
    connection.endheaders()
    sent = 0
    with suppress(ConnectionError):
        while sent < 10 * LARGEST_BODY:
            connection.send(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            sent += len(part)
    assert sent < 4 * LARGEST_BODY  # what the buffers of the system take is sent, too
    connection.close()
    assert ask(page, "GET", "/theme.css")[0] == 200


def test_no_websockets(page):
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
    for path, status in (("/", 200), ("/gradio_api/queue/join", 405), ("/ws", 404)):
        answer = ask(page, "GET", path, **headers, **{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="})
        assert answer[0] == status, path


def test_headers_are_bounded(page):
    with socket.create_connection(("127.0.0.1", page), 60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: ")
        with suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"a" * 100_000)
            pytest.fail("100 MB of headers were taken")


def test_connections_are_bounded(page):
    with ExitStack() as idle:
        for _ in range(CONNECTIONS):
            idle.enter_context(socket.create_connection(("127.0.0.1", page), 60))
        wait_until(lambda: ask(page, "GET", "/theme.css")[0] == 503, "a refusal")
    wait_until(lambda: ask(page, "GET", "/theme.css")[0] == 200, "an answer")


async def nothing(scope, receive, send):
    raise AssertionError("the application was asked")


def texts(look=len):
    """The middleware of a page of texts, which it looks at by a function."""
    with gr.Blocks(analytics_enabled=False) as blocks:
        box = gr.Textbox()
        box.input(look, box, box)
    return OnlyThePage(nothing, blocks)


def of(value, session):
    return event(value, session_hash=session)


async def messages(page, session):
    return [json.loads(line.removeprefix("data: ")) async for line in page._answer(session)]


def test_a_page_of_texts():
    page = texts()
    for value in ({"test": 0}, {"drawing": ""}, 0, None, ["a"], file_data("/etc/passwd")):
        with pytest.raises(Exception, match=NO_INPUT):
            page._join(event(value))
    page._join(event('{"[' * 10_000))
    assert asyncio.run(messages(page, "abc"))[0]["output"] == {"data": [30_000]}


def test_an_error_that_nobody_expects(capfd):
    def look(text):
        raise KeyError("a\nb")

    page = texts(look)
    page._join(event("text"))
    (answer, _) = asyncio.run(messages(page, "abc"))
    assert answer["output"]["error"] == "KeyError: 'a\\nb'"
    assert capfd.readouterr() == ("", "")


def test_inputs_whose_answers_nobody_fetches(monkeypatch):
    assert TOGETHER < 150_000_000
    monkeypatch.setattr("torchcaps.live.requests.TOGETHER", 20_000)
    page = texts()
    for session in range(10_000):
        page._join(of("text", f"s{session}"))
    assert list(page.waiting) == [f"s{session}" for session in range(10_000 - WAITING, 10_000)]
    page._join(of("text", f"s{10_000 - WAITING}"))  # a newer one of the oldest session
    page._join(of("text", "new"))
    assert f"s{10_000 - WAITING}" in page.waiting
    for session in range(WAITING):
        page._join(of("a" * 4_000, f"t{session}"))
    assert list(page.waiting) == ["t28", "t29", "t30", "t31"]
    page._join(of("text", "t31"))  # a session has one input
    assert page.waiting["t31"].value == "text"


def test_a_stream_whose_input_gave_way():
    page = texts()

    async def streams():
        page._join(event("text"))
        return await asyncio.gather(messages(page, "abc"), messages(page, "abc"))

    (first, _), (second, end) = asyncio.run(streams())
    assert first["output"] == {"data": [4]}
    assert (second["msg"], second["message"]) == ("unexpected_error", "too many inputs at once: try again")
    assert end["msg"] == "close_stream"


def test_a_slow_reader_holds_up_nobody():
    page = texts()

    async def streams():
        page._join(of("text", "slow"))
        page._join(of("text", "fast"))
        slow = page._answer("slow")
        await anext(slow)  # and reads no further
        answer = await asyncio.wait_for(messages(page, "fast"), 30)
        await slow.aclose()
        return answer

    assert asyncio.run(streams())[0]["success"]


def arriving(*parts, pause=None):
    """A function from which a request receives parts of its body, and after a pause that nothing more comes."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive():
        if messages:
            return messages.pop(0)
        if pause is not None:
            await pause.wait()
        return {"type": "http.disconnect"}

    return receive


def test_a_body_that_ends_early():
    page = texts()
    with pytest.raises(Exception, match="400: the input did not arrive whole: try again"):
        asyncio.run(page._body(arriving(b"{", b'"data"')))
    assert page.arriving == 0


def test_bodies_that_arrive_together():
    page, part = texts(), b"a" * (LARGEST_BODY - 1)

    async def together():
        pause = asyncio.Event()
        tasks = [asyncio.create_task(page._body(arriving(part, pause=pause))) for _ in range(TOGETHER // len(part))]
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="503: too many inputs at once: try again"):
            await page._body(arriving(part))
        pause.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(together())
    assert page.arriving == 0


def test_a_body_that_never_ends(monkeypatch):
    monkeypatch.setattr("torchcaps.live.requests.SECONDS", 0.01)
    page = texts()

    async def forever():
        await page._body(arriving(b"{", pause=asyncio.Event()))

    with pytest.raises(Exception, match="408: the input took too long to arrive: try again"):
        asyncio.run(forever())
    assert page.arriving == 0


def test_small_parts_of_a_large_body_are_no_objects():
    """A body of a few megabytes could be a million objects, a hundred times as large."""
    page = texts()
    body = b'{"data":[' + b"{}," * 1_000_000 + b"{}]}"
    tracemalloc.start()
    with pytest.raises(Exception, match=NO_INPUT):
        page._join(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(body)
