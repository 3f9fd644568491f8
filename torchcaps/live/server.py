"""The page on this machine alone: bound to the loopback address, and nothing is fetched from or sent to others."""

import os
import socket
import sys
import webbrowser

import gradio as gr
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchcaps.live.requests import OnlyThePage
from torchcaps.utils.arguments import checked

HOST = "127.0.0.1"
PORT = 7860  # Gradio's; the next free one if it is taken
CONNECTIONS = 100  # at once: a tab opens about six
# What a page may load: Gradio's scripts make functions of text.
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; frame-ancestors 'none'; "
    "base-uri 'self'; form-action 'none'"
)


class OnlyHere:
    """ASGI middleware that answers the page of this machine alone, and lets it load nothing from other hosts.

    A request with another name of a host, or from the page of another site, is refused: a site that a person visits in
    the same browser can send requests to this machine too. It may only link to the page. There are no WebSockets.

    Args:
        app: the application.
        port: its port.
    """

    @checked
    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        if not self._is_own(scope, Headers(scope=scope)):
            await PlainTextResponse("This page is for this machine alone.", 403)(scope, receive, send)
            return

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self.app(scope, receive, with_policy)

    def _is_own(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a request comes from the page itself, or opens it."""
        if headers.get("host") not in self.hosts:
            return False
        if headers.get("origin") not in {None, *(f"http://{host}" for host in self.hosts)}:
            return False
        # Browsers send no Origin with a GET that a page makes for a picture or a script, but from where it comes.
        if headers.get("sec-fetch-site") in (None, "none", "same-origin"):
            return True
        opens = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest", "document")) == ("navigate", "document")
        return opens and scope.get("method") == "GET" and scope["path"] == "/"


@checked
def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on the loopback address; without a port, on 7860 or another that is free.

    Raises:
        ValueError: there is no such port.
        OSError: the port is taken.
    """
    if port is not None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port must be from 1 to 65535, or 0 for any that is free, got {port}")
        return socket.create_server((HOST, port))
    try:
        return socket.create_server((HOST, PORT))
    except OSError:
        return socket.create_server((HOST, 0))


@checked
def server_of(blocks: gr.Blocks, port: int) -> uvicorn.Server:
    """Return a server of a page, from :func:`torchcaps.live.app`, on a port of the loopback address."""
    here = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    here.add_middleware(OnlyThePage, blocks=blocks)
    here.add_middleware(OnlyHere, port=port)  # the last one is asked first
    gr.mount_gradio_app(
        here,
        blocks,
        "/",
        HOST,
        port,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        # Fonts of this machine: none is loaded. The text is as large as in the parts that scripts draw.
        theme=gr.themes.Default(
            text_size="lg", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
    )
    config = uvicorn.Config(
        here,
        http="h11",  # it bounds the headers of a request
        ws="none",
        log_level="critical",
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,  # an open page keeps a connection, which would keep the server from ending
    )
    return uvicorn.Server(config)


@checked
def serve(blocks: gr.Blocks, listening: socket.socket, opens_browser: bool = False) -> None:
    """Serve a page until a signal such as Ctrl-C. Behind it, signals are handled as they were before.

    Args:
        blocks: the page, from :func:`torchcaps.live.app`.
        listening: socket from `listen`.
        opens_browser: whether to open the page in a browser, if this machine has a screen.
    """
    port = listening.getsockname()[1]
    server = server_of(blocks, port)
    if opens_browser and (sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(f"http://{HOST}:{port}/")  # it waits until the server answers
    server.run([listening])
