"""Run the benchmarks, print each table as text on standard error and all of them as one JSON document."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import attention, check, generate, heads, peer_maps, share
from benchmarks.machine import machine

BENCHMARKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "attention": attention.run,
    "masks": attention.masks,
    "decode": attention.decode,
    "generate": generate.run,
    "heads": heads.run,
    "peer": peer_maps.run,
    "share": share.run,
    "check": check.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, in turn; the median counts (default 3)")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {sorted(unknown)[0]!r}; there are {', '.join(BENCHMARKS)}")
    results = {}
    for name in options.names or BENCHMARKS:
        results[name] = BENCHMARKS[name](options.runs)
        print(f"\n{name}\n{results[name]['table']}", file=sys.stderr)
    json.dump({"machine": machine(), "results": results}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
