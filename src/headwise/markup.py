"""Pieces of HTML and of plain sentences that every room writes alike: escaping, small pictures, numbers."""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence

MISSING = "\u2013"  # an en dash
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


class Markup(str):
    """Text that is HTML or Markdown already, and is not escaped again."""


def escaped(text: str) -> str:
    """Safe in an element or a quoted attribute; half a surrogate pair, which UTF-8 cannot hold, becomes `?`."""
    return html.escape(text.encode("utf-8", "replace").decode())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: list[str], most: int) -> str:
    """The first names in a row, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def number(value: float | None, decimals: int, signed: bool = False) -> str:
    """A number for a column; a dash for what is not finite or was not measured. No zero has a sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = round(value, decimals) or 0.0
    text = f"{rounded:+,.{decimals}f}" if signed and rounded else f"{rounded:,.{decimals}f}"
    return text.replace("-", "\u2212")


def scaled(value: float, base: int, units: Sequence[str]) -> str:
    """A number with the unit that fits it, three digits: `scaled(327680, 1024, BINARY)` is `320 KiB`."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
    return f"{digits} {units[power]}".rstrip()


def amount(size: float) -> str:
    """Bytes, with the unit that fits them."""
    return scaled(size, 1024, BINARY)


def picture(values: Sequence[Sequence[float]], label: str, height: int = 96) -> Markup:
    """A matrix as a small picture: blue above zero, red below, white at zero; the largest magnitude is the darkest.

    An <img> whose pixels are inside the page, so that it needs no script and no network. `label` is its description.
    """
    top = max((abs(x) for row in values for x in row if math.isfinite(x)), default=0.0) or 1.0
    n_rows, n_columns = len(values), len(values[0]) if values else 0
    pixels = b""
    for row in values:
        pixels += b"\0" + b"".join(_colour(x / top) for x in row)  # 0: the row is stored as it is
    header = struct.pack(">IIBBBBB", n_columns, n_rows, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    width = max(1, round(height * n_columns / max(1, n_rows)))
    source = "data:image/png;base64," + base64.b64encode(data).decode()
    return Markup(
        f'<img src="{source}" alt="{escaped(label)}" title="{escaped(label)}" width="{width}" height="{height}" '
        f'style="image-rendering:pixelated">'
    )


def _colour(share: float) -> bytes:
    """-1 to 1 as red, white, blue; grey for what is not finite."""
    if not math.isfinite(share):
        return bytes((128, 128, 128))
    fade = round(255 * (1 - min(1.0, abs(share))))
    return bytes((fade, fade, 255)) if share >= 0 else bytes((255, fade, fade))
