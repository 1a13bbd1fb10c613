"""All about the package stands in pyproject.toml. Here its README becomes the page of a package index.

That page lies in no folder: what the README leads to beside itself is not there. Pictures are left out, and of other
links the words stay.
"""

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)")


def index_page(readme: str) -> str:
    """The README without what is relative to its folder."""
    return LINK.sub(r"\1", PICTURE.sub("", readme))


setup(
    long_description=index_page(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
