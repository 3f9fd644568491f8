"""A live page for a trained network, made with Gradio: used by `torchcaps show`, and from Python.

`torchcaps.deploy` reads the network, and `torchcaps.explain` computes what the page shows.
"""

from torchcaps.utils.extras import needs

with needs("show"):
    from torchcaps.live.app import app
    from torchcaps.live.server import listen, serve

__all__ = ["app", "listen", "serve"]
