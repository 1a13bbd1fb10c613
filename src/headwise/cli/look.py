"""`headwise look`."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from headwise.cli.app import Debug, Json, command, err, needs_torch, out, print_json
from headwise.cli.heads import REPORT, write_report_of
from headwise.errors import HeadwiseError


@command()
def look(
    run: Path,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Open the page of a finished run in the browser.

    It is written first where it is missing.
    """
    if not run.is_dir():
        raise HeadwiseError(f"{run} is no folder; pass the run folder that `headwise train` printed")
    report = run / REPORT
    if not report.exists():
        with needs_torch():
            from headwise.gpt.run import read_run
        record = read_run(run)
        if record is None:
            raise HeadwiseError(f"{run} holds no run of `headwise train`; pass the folder that it printed")
        if record["status"] != "finished":
            raise HeadwiseError(f"the run in {run} has not finished; go on with `headwise train --resume --out {run}`")
        report = write_report_of(run)
    address = report.resolve().as_uri()
    opened = _display() and webbrowser.open(address)
    if as_json:
        print_json({"run": str(run), "report": str(report), "address": address, "opened": opened})
        return
    out.print(f"report: {report}\n{address}")
    if not opened:
        err.print("there is no display here to open it on; open the file in a browser", soft_wrap=True)


def _display() -> bool:
    """Is there somewhere a window could appear? Without one, `webbrowser` may start a browser in the terminal."""
    return sys.platform in ("win32", "darwin") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
