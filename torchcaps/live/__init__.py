"""A live page for a trained network, made with Gradio: used by `torchcaps show`, and from Python.

It stands above `torchcaps.inference`, which reads networks, and `torchcaps.explain`, which computes what the page
shows.
"""

from torchcaps.extras import needs

with needs("show"):
    from torchcaps.live.app import app
    from torchcaps.live.server import listen, serve

__all__ = ["app", "listen", "serve"]
