"""Pictures drawn by matplotlib, which is asked for only where a PNG is wanted."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
