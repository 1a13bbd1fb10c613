"""make torture: four campaigns against the package, for as long as one likes.

    python tests/torture --minutes 60                       # kills, files, differential, leaks, in that share
    python tests/torture --only files --seed 17 --cases 1   # one case again, as a failure names it

Every case is drawn from its seed. What fails is kept with its files under build/torture; summary.json and summary.txt
lie there, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process whose torch has run threads may hang
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import differential
import kills
import leaks
import mutations
import torch

import headwise.cli
import headwise.lab.compare.run
import headwise.models.hf
import headwise.reshape.share
import headwise.view.report  # noqa: F401  imported once, here: its children start in milliseconds

SHARES = {"kills": (kills, 0.4), "files": (mutations, 0.3), "differential": (differential, 0.2), "leaks": (leaks, 0.1)}
KEPT = 20  # failures of a campaign whose files are kept


def campaign(name: str, minutes: float, seed: int, cases: int | None, out: Path) -> dict[str, Any]:
    """Cases one after the other until the time is up; what they met, and what failed."""
    module, _ = SHARES[name]
    counts, failures, began = Counter[str](), [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        module.prepare(base)
        number = 0
        while number < cases if cases is not None else time.monotonic() - began < 60 * minutes:
            place = Path(temporary) / "case"
            place.mkdir()
            try:
                counts[module.case(seed + number, place, base)] += 1
            except Exception as error:
                again = f"python tests/torture --only {name} --seed {seed + number} --cases 1"
                failures.append({"seed": seed + number, "what": str(error) or repr(error), "again": again})
                print(f"  {again}: {failures[-1]['what'][:300]}", flush=True)
                if len(failures) <= KEPT:
                    kept = out / "failures" / f"{name}-{seed + number}"
                    shutil.copytree(place, kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                    (kept / "failure.txt").write_text(f"{again}\n{traceback.format_exc()}")
            shutil.rmtree(place)
            number += 1
    seconds = round(time.monotonic() - began, 1)
    return {
        "cases": number,
        "seed": seed,
        "seconds": seconds,
        "met": dict(sorted(counts.items())),
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9 % 10**9)
    parser.add_argument("--only", choices=SHARES)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--out", type=Path, default=Path("build") / "torture")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"date": date.today().isoformat(), "minutes": given.minutes, "campaigns": {}}
    for name in [given.only] if given.only else SHARES:
        print(f"{name}: seed {given.seed}", flush=True)
        minutes = given.minutes * (1 if given.only else SHARES[name][1])
        summary["campaigns"][name] = campaign(name, minutes, given.seed, given.cases, given.out)
    (given.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    lines = [f"{summary['date']}, {given.minutes:g} minutes"]
    for name, result in summary["campaigns"].items():
        lines.append(
            f"{name}: {result['cases']:,} cases in {result['seconds']:.0f} s, {len(result['failures'])} failed"
        )
        lines += [f"  {count:6,}  {label}" for label, count in result["met"].items()]
        lines += [f"  FAILED  {failure['again']}: {failure['what'][:300]}" for failure in result["failures"][:KEPT]]
    (given.out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(any(result["failures"] for result in summary["campaigns"].values()))


if __name__ == "__main__":
    main()
