"""What the page may ask its server for: its own files, and what the network does with one input."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from uuid import uuid4

import gradio as gr
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from torchcaps.live.drawings import LARGEST
from torchcaps.utils.arguments import checked
from torchcaps.utils.checks import one_line

JOIN, DATA = "/gradio_api/queue/join", "/gradio_api/queue/data"
# The page, and what lies in the folders of Gradio's scripts; no part of a path begins with a dot.
FILE_PATHS = re.compile(r"/|/theme\.css|/favicon\.ico|/manifest\.json|/(assets|static)(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
HEADERS = {b"host", b"accept-encoding", b"if-none-match", b"if-modified-since"}  # that Gradio gets

KEYS = {"data", "event_data", "fn_index", "trigger_id", "session_hash"}
PICTURES = ({"drawing": str}, {"file": str, "name": str}, {"test": int})  # what the field of images gives
SESSION = re.compile(r"[a-z0-9]{1,20}")
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # of JSON; one without an end goes to the end
FRAME = 300  # bytes of an event outside of its strings: no deep nesting, no long lists

LARGEST_BODY = LARGEST * 4_000_000 // 3 + 100_000  # a picture in base64, with its name
TOGETHER = 4 * LARGEST_BODY  # bytes that are kept of all bodies
WAITING = 32  # inputs that wait for a stream
SECONDS = 60  # for a body to arrive


class Waiting(NamedTuple):
    """An input that waits until the page opens the stream of its answer."""

    event_id: str
    value: Any
    size: int


class OnlyThePage:
    """ASGI middleware that answers what the page asks for, and nothing else.

    Gradio gets requests for the page and its scripts, without their query and most of their headers. It never gets an
    input, because it reads the files and addresses that an input can name: the two requests of its protocol that bring
    an input and fetch the answer are answered here. A session has one input at a time, as on the page.

    Args:
        app: the application.
        blocks: the page, from :func:`torchcaps.live.app`, with its one event.
    """

    @checked
    def __init__(self, app: ASGIApp, blocks: gr.Blocks) -> None:
        self.app = app
        ((self.index, event),) = blocks.fns.items()
        self.look: Any = event.fn
        self.takes = _is_text if isinstance(event.inputs[0], gr.Textbox) else _is_picture
        self.waiting: dict[str, Waiting] = {}  # by session, the oldest first
        self.arriving = 0  # bytes of bodies that are being read
        self.lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        method = "POST" if path == JOIN else "GET"
        response: ASGIApp
        try:
            if path not in (JOIN, DATA) and not FILE_PATHS.fullmatch(path):
                raise HTTPException(404, "not found: open the page at /")
            if scope["method"] != method:
                raise HTTPException(405, f"expected {method}", {"Allow": method})
            if path == JOIN:
                response = JSONResponse({"event_id": self._join(await self._body(receive))})
            elif path == DATA:
                response = StreamingResponse(self._answer(self._session(scope)), media_type="text/event-stream")
            else:
                kept = [(name, value) for name, value in scope["headers"] if name in HEADERS]
                scope, response = {**scope, "query_string": b"", "headers": kept}, self.app
        except HTTPException as refused:
            response = JSONResponse({"detail": refused.detail}, refused.status_code, refused.headers)
        await response(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        """Return the body of a request, if it is not too large by itself or together with others that arrive."""
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(SECONDS):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise HTTPException(400, "the input did not arrive whole: try again")
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body += part
                    self.arriving += len(part)
                    if len(body) > LARGEST_BODY:
                        raise HTTPException(413, f"larger than {LARGEST} MB: give less", {"Connection": "close"})
                    if self.arriving > TOGETHER:
                        raise HTTPException(503, "too many inputs at once: try again", {"Connection": "close"})
        except TimeoutError:
            raise HTTPException(408, "the input took too long to arrive: try again") from None
        finally:
            self.arriving -= len(body)
        return bytes(body)

    def _join(self, body: bytes) -> str:
        """Keep the input in a body until its answer is fetched, and return the name of the event."""
        try:
            frame = STRING.sub(b"", body)
            event: Any = json.loads(body.decode()) if len(frame) <= FRAME else None
        except ValueError:
            event = None
        match event:
            case {"data": [value], "fn_index": self.index, "session_hash": str(session)} if (
                event.keys() <= KEYS
                and event.get("event_data") in (None, {})
                and type(event.get("trigger_id", 0)) in (int, type(None))
                and SESSION.fullmatch(session)
                and self.takes(value)
            ):
                self.waiting.pop(session, None)
                self.waiting[session] = Waiting(uuid4().hex, value, len(body))
                while len(self.waiting) > WAITING or sum(waiting.size for waiting in self.waiting.values()) > TOGETHER:
                    del self.waiting[next(iter(self.waiting))]
                return self.waiting[session].event_id
        raise HTTPException(422, "this is no input of the page: reload the page")

    def _session(self, scope: Scope) -> str:
        """Return the session whose stream is asked for, if an input of it waits."""
        name, _, session = scope["query_string"].decode("latin-1").partition("=")
        if name != "session_hash" or session not in self.waiting:
            raise HTTPException(404, "no input waits for this stream: reload the page")
        return session

    async def _answer(self, session: str) -> AsyncIterator[str]:
        """Return the messages of a stream: what the network does with an input, or why it does nothing."""
        async with self.lock:  # not while somebody reads, who may be slow
            waiting = self.waiting.pop(session, None)
            answer = await run_in_threadpool(self._completed, waiting) if waiting else LOST
        yield answer
        yield _message("close_stream")

    def _completed(self, waiting: Waiting) -> str:
        try:
            answer = {"success": True, "output": {"data": [self.look(waiting.value)]}}
        except Exception as error:  # whatever is wrong with an input, the page says it
            reason = error.message if isinstance(error, gr.Error) else f"{type(error).__name__}: {one_line(error)}"
            output = {"error": reason, "visible": True, "duration": 10, "title": "Error"}
            answer = {"success": False, "output": output, "title": "Error"}
        return _message("process_completed", event_id=waiting.event_id, **answer)


def _message(kind: str, **content: Any) -> str:
    return f"data: {json.dumps({'msg': kind, **content})}\n\n"


# Newer inputs took the place of this one, or another stream took it.
LOST = _message("unexpected_error", message="too many inputs at once: try again")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_picture(value: Any) -> bool:
    return isinstance(value, dict) and any(
        value.keys() == form.keys() and all(type(value[name]) is kind for name, kind in form.items())
        for form in PICTURES
    )
