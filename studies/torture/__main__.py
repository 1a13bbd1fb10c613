"""Three campaigns against the package: random calls, damaged files, and watching again and again.

    python studies/torture --minutes 10                       # a third of the time each
    python studies/torture --only files --seed 17 --cases 1   # one case again, as a failure names it

Every case is drawn from its seed. The figures are printed at the end; a failure is printed as it comes.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process whose torch has run threads may hang

import calls
import cycles
import files
import torch

CAMPAIGNS = {"calls": calls.case, "files": files.case, "cycles": cycles.case}


def campaign(name: str, seed: int, seconds: float, cases: int | None, place: Path) -> tuple[Counter[str], int]:
    """What its cases met, and how many of them failed, until the time or the number of cases is over."""
    met, failed, began = Counter[str](), 0, time.monotonic()
    for number in range(10**9 if cases is None else cases):
        if cases is None and time.monotonic() - began > seconds:
            break
        folder = place / "case"
        folder.mkdir()
        try:
            met[CAMPAIGNS[name](seed + number, folder)] += 1
        except Exception as error:
            failed += 1
            again = f"python studies/torture --only {name} --seed {seed + number} --cases 1"
            print(f"FAILED {again}: {str(error)[:600] or repr(error)}", flush=True)
        shutil.rmtree(folder)
    return met, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9 % 10**9)
    parser.add_argument("--only", choices=CAMPAIGNS)
    parser.add_argument("--cases", type=int, help="as many of each campaign, however long they take")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [given.only] if given.only else list(CAMPAIGNS)
    print(f"seed {given.seed}", flush=True)
    failures = 0
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            seconds = 60 * given.minutes / len(names)
            met, failed = campaign(name, given.seed, seconds, given.cases, Path(place))
            failures += failed
            print(f"{name}: {sum(met.values())} cases, {failed} failed; {dict(sorted(met.items()))}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
