"""`headwise windows`."""

from __future__ import annotations

from pathlib import Path

from headwise.cli.app import (
    Progress,
    as_options,
    command,
    err,
    needs_torch,
    out,
    print_json,
    running_options,
    wants_json,
)
from headwise.cli.early import check_model, check_texts, in_words, language
from headwise.files import write_whole
from headwise.folders import check_next
from headwise.plan import check_format
from headwise.words import refusal, said


@command()
def windows(
    model: Path,
    text: list[str] | None = None,
    tokens: int | None = None,
    documents: int = 32,
    sinks: int = 4,
    plan: Path | None = None,
    tolerance: float | None = None,
    cache: float | None = None,
    format: str = "headwise",
    html: Path | None = None,
    png: Path | None = None,
    csv: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Measure how far back key/value heads look: what to remember."""
    from headwise.heads.reach import check_plan
    from headwise.table import Table
    from headwise.view.windows import print_windows, windows_html, windows_png

    if plan is None and (tolerance, cache) != (None, None):
        raise refusal("plan_needed")
    check_plan(tolerance, cache, sinks)
    check_format(format)
    check_model(model)
    check_next(model, "`headwise heads` says how far its heads look, by their distance")
    check_texts(model, text)
    with needs_torch():
        from headwise.heads.texts import read_texts
        from headwise.heads.windows import forecast
        from headwise.heads.windows import windows as measure
        from headwise.models.open import open_folder
    folder = open_folder(model, device=device)
    with Progress("reading the text") as progress:
        read = read_texts(folder, text or None, tokens, documents)
        if line := forecast(folder.model, read):
            err.print(as_options(said(line, language()), running_options()), soft_wrap=True)
        reach = measure(folder.model, read, seed=seed, progress=progress)
    chosen = None if plan is None else reach.plan(tolerance, cache, sinks)
    if plan is not None and chosen is not None:
        chosen.export(plan, format)
    if html is not None:
        write_whole(html, windows_html(reach, language()))
    if png is not None:
        windows_png(png, reach, sinks)
    if csv is not None:
        write_whole(csv, Table.of(reach.rows()).csv())
    share = None if chosen is None else chosen.share(reach.longest)
    if wants_json():
        print_json("windows", {**reach.document(), "plan": None if plan is None else str(plan), "share": share})
        return
    print_windows(out, reach, sinks, language())
    if chosen is not None:
        full = sum(layer.count(None) for layer in chosen.keep)
        facts = {"full": full, "count": len(reach.heads), "share": f"{share:.3f}", "tokens": f"{reach.longest:,}"}
        out.print(in_words("windows.plan", plan=plan, **facts))
        if full == len(reach.heads):
            out.print(in_words("windows.nothing_saved"))
        else:
            out.print(in_words("windows.try_it", model=model, plan=plan))
    for what, path in (("page", html), ("picture", png), ("table", csv)):
        if path is not None:
            out.print(in_words(f"tell.{what}", path=path))
