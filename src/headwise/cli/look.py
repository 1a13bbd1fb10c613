"""`headwise look`."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from headwise.cli.app import Progress, command, err, in_words, language, needs_torch, out, print_json, wants_json
from headwise.cli.early import check_model
from headwise.cli.heads import REPORT, write_report_of
from headwise.errors import HeadwiseError
from headwise.families import RUN, check_reads_tokens, is_own, read_config
from headwise.words import refusal

TOKENIZERS = "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.txt", "vocab.json", "spiece.model"


@command()
def look(
    model: Path,
    text: str | None = None,
    live: bool = False,
    port: int | None = None,
    browser: bool = True,
    dtype: str = "auto",
    device: str = "cpu",
) -> None:
    """Touch the heads of a model in the browser.

    The page of a finished run, with the model in it; of any other model a page behind which it runs here until Ctrl-C.
    """
    if live or text is not None or (not (model / RUN).exists() and (model / "config.json").exists()):
        _live(model, text, port or 0, browser, dtype, device)
        return
    if port is not None:
        raise refusal("port_look", port=port)
    report = _report_of(model)
    address = report.resolve().as_uri()
    opened = _opened(address, browser)
    if wants_json():
        print_json("look", {"run": str(model), "report": str(report), "address": address, "opened": opened})
        return
    out.print(in_words("tell.report", path=report) + f"\n{address}")
    if browser and not opened:
        err.print(in_words("tell.no_display"), soft_wrap=True)


def _report_of(run: Path) -> Path:
    """The report of a finished run, written where it is missing."""
    if not run.is_dir():
        raise refusal("no_run_folder", run=run)
    report = run / REPORT
    if report.exists():
        return report
    with needs_torch():
        from headwise.gpt.run import read_run
    record = read_run(run)
    if record is None:
        raise refusal("no_run_no_model", run=run)
    if record.status != "finished":
        raise refusal("look_unfinished", run=run)
    return write_report_of(run)


def _live(model: Path, text: str | None, port: int, browser: bool, dtype: str, device: str) -> None:
    """Serve the page of a model, and answer it until Ctrl-C."""
    check_model(model)
    sound = Path(text) if text is not None and text.lower().endswith(".wav") else None
    _check_reads(model, sound)
    with needs_torch():
        from headwise.gpt.run import example_of
        from headwise.heads.look import Desk
        from headwise.models.open import open_folder
    from headwise.view.look import Served

    with Progress("opening the model"):
        desk = Desk(open_folder(model, dtype=dtype, device=device), sound)
    example = desk.example or text or (example_of(model) if is_own(model) else None)
    served = Served(desk, port, example, language())
    try:
        opened = _opened(served.address, browser)
        if wants_json():
            print_json("live", {"model": str(model), "address": served.address, "opened": opened})
            sys.stdout.flush()  # whoever reads it opens the page, while this goes on
        else:
            out.print(served.address)
        err.print(in_words("tell.at_address", name=desk.folder.name), soft_wrap=True)
        served.work()
    except KeyboardInterrupt:
        err.print(in_words("tell.page_closed"), soft_wrap=True)
    finally:
        served.close()


def _check_reads(model: Path, sound: Path | None) -> None:
    """Refuse by its files a model that reads no text, and one that hears and is given no sound."""
    check_reads_tokens(model, [] if sound is None else [str(sound)])
    if {"vision_config", "patch_size"} & read_config(model).keys():
        raise HeadwiseError(f"{model} reads images; hw.look(hw.open({str(model)!r}), ...) shows its heads on your own")
    if not any((model / name).exists() for name in TOKENIZERS):
        raise refusal("look_no_tokenizer", model=model)


def _opened(address: str, browser: bool) -> bool:
    """Open an address where there is somewhere a window could appear, else `webbrowser` may take the terminal."""
    display = sys.platform in ("win32", "darwin") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return browser and display and webbrowser.open(address)
