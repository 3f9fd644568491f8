"""Makes the outputs of the notebooks anew, in a minute each.

    python docs/notebooks.py [docs/notebooks/head.ipynb ...]

Run it after every change of a notebook, and look at the figures. `make test-notebooks` compares the outputs with
the sources.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"


def remake(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False, coalesce_streams=True)
    client.execute(cwd=str(FOLDER))
    notebook.metadata.language_info = {"name": "python"}  # without the version
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                output.metadata = {}
            if "data" in output and "image/png" in output.data:
                output.data["image/png"] = output.data["image/png"].replace("\n", "")
    nbformat.write(notebook, path)


if __name__ == "__main__":
    # tqdm, which other libraries import, asks for a progress bar that these notebooks do not need.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    for path in map(Path, sys.argv[1:]) if len(sys.argv) > 1 else sorted(FOLDER.glob("*.ipynb")):
        print(path)
        remake(path)
