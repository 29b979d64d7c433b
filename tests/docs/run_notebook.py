"""Runs a notebook and writes it with its outputs: ``run_notebook.py FROM TO``, where nbclient and ipykernel are. A
server is at KESTREL_SERVER. With the same file twice, this renews what docs/notebooks shows."""

import sys
from pathlib import Path

import nbclient
import nbformat

source, target = map(Path, sys.argv[1:])
notebook = nbformat.read(source, as_version=4)
client = nbclient.NotebookClient(
    notebook,
    timeout=120,
    kernel_name="python3",
    record_timing=False,
    resources={"metadata": {"path": str(source.parent)}},
)
client.execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if (
            "image/jpeg" in data
        ):  # Pillow's images come in both forms. One is enough, and this is small.
            data.pop("image/png", None)
notebook.metadata = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
nbformat.validate(notebook)
nbformat.write(notebook, target)
