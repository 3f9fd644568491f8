"""Open a page on this machine to see inside a trained network: draw a digit, drop a picture or type a sentence."""

import argparse
import os

from torchcaps.cli.arguments import add_checkpoint, add_recipe_name, find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchcaps show`."""
    add_recipe_name(parser)
    add_checkpoint(parser)
    parser.add_argument("--port", type=int, metavar="N", help="port of the page (default: 7860, or another if taken)")
    parser.add_argument("--no_browser", action="store_true", help="print the page's address and open no browser")
    parser.epilog = "The page is for this machine alone, and nothing that is drawn or typed on it leaves the machine."


def run(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    if options.port is not None and not 1 <= options.port <= 65535:
        raise ValueError(f"--port must be from 1 to 65535, got {options.port}")
    # Read when Gradio and huggingface_hub are imported.
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    if not any(str(source).startswith("hub:") for source in (options.recipe, options.ckpt_path)):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _say(f"reading {options.recipe}")
    trained = find_run(options)
    trained.network()  # an error now, and not after a wait
    _say(f"starting Gradio for {trained.path}")
    from torchcaps.live import app, listen, serve

    try:
        listening = listen(options.port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"port {options.port} cannot be used ({reason}): give another one, or leave out --port"
        ) from None
    _say("making the page, with test images if they are on this machine")
    with listening:
        try:
            page = app(trained)
        except TypeError as error:
            raise ValueError(str(error)) from error
        print(f"page: http://127.0.0.1:{listening.getsockname()[1]}/ (Ctrl-C ends it)", flush=True)
        serve(page, listening, not options.no_browser)


def _say(text: str) -> None:
    """Say what is done, in the long time before the page is there."""
    print(f"torchcaps: {text}", flush=True)
