"""A hook of mkdocs, for `make docs`: each notebook of docs/ as a page of the site, with what its cells gave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def on_files(files: Any, config: Any) -> Any:
    """Add researcher.md, made of researcher.ipynb, to what the site is built of."""
    from mkdocs.structure.files import File

    for path in sorted(Path(config["docs_dir"]).glob("*.ipynb")):
        page = page_of(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, path.with_suffix(".md").name, content=page))
    return files


def page_of(notebook: Mapping[str, Any]) -> str:
    """The cells as Markdown: code in blocks, and below each what it showed, pictures where there are some."""
    pieces = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(text)
            continue
        pieces.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            shown = output.get("data", {})
            if "image/png" in shown:
                png = "".join("".join(shown["image/png"]).split())
                pieces.append(f'<img alt="{"".join(shown["text/plain"])}" src="data:image/png;base64,{png}">')
            elif "text/html" in shown:
                html = "".join(shown["text/html"])
                pieces.append(f'<div style="overflow-x: auto">{" ".join(html.split())}</div>')
            else:
                plain = "".join(shown.get("text/plain", output.get("text", "")))
                pieces.append(f"```text\n{plain.rstrip()}\n```")
    return "\n\n".join(pieces) + "\n"
