"""Running a notebook in one kernel, from top to bottom."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_notebook(document: Mapping[str, Any], folder: Path | None = None) -> list[Any]:
    """The cells after a run, in `folder` where one is named. A cell that raises fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the notebook libraries
        import nbformat
        from nbclient import NotebookClient

        read = nbformat.reads(json.dumps(document), as_version=4)
        nbformat.validate(read)
        resources = {} if folder is None else {"metadata": {"path": str(folder)}}
        client = NotebookClient(read, timeout=300, kernel_name="python3", resources=resources)
        cells: list[Any] = client.execute().cells
        return cells


def outputs(cell: Any) -> str:
    """What a cell shows and prints, as plain text; warnings are left out."""
    shown = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    return "".join("".join(output.get("data", {}).get("text/plain", output.get("text", ""))) for output in shown)
