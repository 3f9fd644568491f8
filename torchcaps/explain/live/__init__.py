"""A live page for a trained network, made with Gradio: used by `torchcaps show`, and from Python.

It stands above `torchcaps.deploy`, which reads networks, and `torchcaps.explain`, which computes what the page
shows.
"""

from torchcaps.utils.extras import needs

with needs("show"):
    from torchcaps.explain.live.app import app
    from torchcaps.explain.live.server import listen, serve

__all__ = ["app", "listen", "serve"]
