"""What pages and pictures share: files of the package, the policy that lets nothing else run, and matplotlib."""

from __future__ import annotations

import base64
import hashlib
import io
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def package_text(*names: str) -> str:
    """Files of this room, one after the other."""
    room = resources.files("headwise.view")
    return "".join(room.joinpath(name).read_text(encoding="utf-8") for name in names)


def policy(style: str, script: str | None = None) -> str:
    """A content security policy: this style and this script by their hashes, images in the page, nothing loaded."""
    scripts = "" if script is None else f"script-src {_hash(script)}; "
    return f"default-src 'none'; style-src {_hash(style)}; {scripts}img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def figure_class() -> type[Figure]:
    """The class of matplotlib's figures. Raises HeadwiseError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise HeadwiseError("a PNG needs matplotlib: pip install 'headwise[all]'") from None
    return Figure


def write_figure(path: str | Path, figure: Figure) -> None:
    """Write a PNG, whole or not at all; the same figure gives the same bytes."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_whole(path, picture.getvalue())
