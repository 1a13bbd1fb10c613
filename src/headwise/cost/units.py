"""Sizes with units: number formats and their bits, memory, bandwidth."""

from __future__ import annotations

import re
from decimal import Decimal

from headwise.errors import HeadwiseError, unknown

# Bits of one number. Formats that share a scale among a block of numbers take a little more; it is not counted.
BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}
LONG_NAMES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16"}
UNITS = {"b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
LARGEST = 2**63


def number_format(name: str) -> str:
    """The short name of a number format."""
    long = name.lower().removeprefix("torch.")
    short = LONG_NAMES.get(long) or re.sub(r"float(\d+)(_e\dm\d(fn)?)?", r"fp\1", long)
    if short in BITS:
        return short
    raise unknown(f"no number format {name!r}", short, BITS)


def bytes_of(count: int, dtype: str) -> int:
    """Bytes of that many numbers, rounded up to whole ones."""
    return -(-count * BITS[dtype] // 8)


def read_bytes(name: str, text: str | int, per_second: bool = False) -> int:
    """24GiB, 80 GB, a number of bytes, or with `per_second` 900GB/s, as bytes; errors call the value `name`."""
    if isinstance(text, int):
        value = Decimal(text)
    else:
        ending = r"\s*/\s*s" if per_second else ""
        size = re.fullmatch(rf"\s*(\d{{1,20}}(?:\.\d{{1,20}})?)\s*([A-Za-z]{{1,3}}){ending}\s*", text, re.ASCII)
        if not size or size[2].lower() not in UNITS:
            example = "900GB/s or 3.35TB/s" if per_second else "24GiB or 80GB"
            raise HeadwiseError(f"{name}={text!r} is no size; write a number and a unit, such as {example}")
        value = Decimal(size[1]) * UNITS[size[2].lower()]
    if not 1 <= value <= LARGEST:
        raise HeadwiseError(f"{name}={text!r} is outside 1 B to {LARGEST:,} B; write a size such as 24GiB")
    return int(value)
