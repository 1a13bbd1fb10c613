"""What the HTML pages share: files of the package, and the policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources


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
