"""OUT.partial, where a job works: beside OUT and on the same disk, so that what is finished gets its name in one move.

One job at a time has it. Whatever stops a job, OUT is whole or not there: a model that stood there before is set aside
for the moment of the move alone, and whoever finds it aside puts it back. The source is only read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import is_unfinished, sync_folder, take_lock, write_whole
from headwise.models.lineage import RECORD

SETTINGS = "heal.json"  # of the healing whose state lies beside it
STATE = "heal.safetensors"
LOCK, EXPORT, REPLACED, PROBE = "lock", "export", "replaced", "probe.safetensors"
OURS = (SETTINGS, STATE, LOCK, EXPORT, REPLACED, PROBE)


def check_out(source: Path, out: Path, force: bool) -> None:
    """Raise HeadwiseError where `out` must not be written."""
    here, there = source.resolve(), out.resolve()
    if here == there:
        raise HeadwiseError(f"--out {out} is the source itself, which is never changed; pass another folder")
    if here in there.parents:
        raise HeadwiseError(
            f"--out {out} lies inside the source {source}, which is never changed; pass a folder elsewhere"
        )
    if there in here.parents:
        raise HeadwiseError(f"--out {out} holds the source {source}, which is never changed; pass a folder elsewhere")
    if there == Path.cwd() or there in Path.cwd().parents:
        raise HeadwiseError(f"--out {out} is the folder you are in, or holds it; pass another")
    if out.is_symlink():
        raise HeadwiseError(f"--out {out} is a link; pass the folder itself")
    if not there.parent.is_dir():
        raise HeadwiseError(f"--out {out}: the folder {out.parent} does not exist")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise HeadwiseError(f"--out {out} is a file; pass a folder")
    if not (out / RECORD).exists():
        raise HeadwiseError(
            f"--out {out} exists already and has no {RECORD}: share or prune did not write it and will not replace it; "
            f"pass another folder"
        )
    if not force:
        raise HeadwiseError(f"--out {out} exists already; pass --force to replace it, or another folder")


class Workplace:
    """OUT.partial: held from entry to exit, and cleared away then unless a healing's state waits in it."""

    def __init__(self, source: Path, out: Path, force: bool) -> None:
        self.source, self.given, self.out, self.force = source, out, out.absolute(), force
        self.path = self.out.parent / f"{self.out.name}.partial"
        self.fresh, self.probe = self.path / EXPORT, self.path / PROBE
        self.done = False
        self.settings: dict[str, Any] = {}

    @property
    def has_state(self) -> bool:
        return (self.path / STATE).exists()

    def __enter__(self) -> Workplace:
        check_out(self.source, self.given, self.force)
        self._check_foreign()
        self.path.mkdir(exist_ok=True)
        self.held = take_lock(
            self.path / LOCK, f"another share or prune is at work in {self.path}; wait for it, or take another --out"
        )
        try:
            self._bring_back()
            check_out(self.source, self.given, self.force)  # again, for what came back
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._bring_back()
        shutil.rmtree(self.fresh, ignore_errors=True)
        (self.path / LOCK).unlink(missing_ok=True)
        if self.done or not self.has_state:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.held)

    def _check_foreign(self) -> None:
        if not self.path.exists() and not self.path.is_symlink():
            return
        names = [x.name for x in self.path.iterdir()] if self.path.is_dir() and not self.path.is_symlink() else [""]
        if not all(name in OURS or is_unfinished(name, OURS) for name in names):
            raise HeadwiseError(f"{self.path} is in the way: the work goes on there; move it, or take another --out")

    def claim(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Note what this healing is. Raises HeadwiseError where the state of another one lies here.

        May be called again with more settings, once they are known.
        """
        self.settings |= json.loads(json.dumps(settings))
        if not self.has_state:
            write_whole(self.path / SETTINGS, json.dumps(self.settings, indent=2) + "\n")
            return
        if not resume:
            raise HeadwiseError(
                f"{self.path} holds a healing that was stopped; pass --resume to go on with it, or remove that folder"
            )
        try:
            before = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
            differing = [_contrast(name, before[name], x) for name, x in self.settings.items() if before[name] != x]
        except (OSError, ValueError, TypeError, KeyError):
            raise HeadwiseError(f"{self.path / SETTINGS} is damaged; remove that folder to begin anew") from None
        if differing:
            raise HeadwiseError(
                f"the healing in {self.path} has other settings ({', '.join(differing)}); resume it with its own"
            )

    def finish(self) -> None:
        """Give the finished folder its name."""
        check_out(self.source, self.given, self.force)  # hours may have passed
        for path in self.fresh.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        aside = self.path / REPLACED
        if self.out.exists():
            self.out.rename(aside)
        self.fresh.rename(self.out)
        sync_folder(self.out.parent)
        self.done = True

    def _bring_back(self) -> None:
        """What was set aside returns where nothing took its place, and goes where something did."""
        aside = self.path / REPLACED
        if aside.exists() and not self.out.exists():
            aside.rename(self.out)
        shutil.rmtree(aside, ignore_errors=True)


def _contrast(name: str, there: object, here: object) -> str:
    """A setting that differs, with both values where they are short."""
    said = f"{name}: {there} there, {here} here"
    return said if len(said) < 60 else name
