"""OUT.partial, where a job works: beside OUT and on the same disk, so that what is finished gets its name in one move.

One job at a time has it. Whatever stops a job, OUT is whole or not there: a model that stood there is set aside for the
move alone, and whoever finds it aside puts it back. What a killed job left is cleared away by the next one for the same
OUT; a healing that was stopped waits.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.files import LOCK, Kept, is_unfinished, read_json, remove_unfinished, sync_folder, write_whole
from headwise.models.lineage import RECORD
from headwise.words import refusal

# What may lie in OUT.partial, beside the file that locks it.
STATE = "heal.safetensors"  # of a healing that waits
SETTINGS = "heal.json"  # of the healing whose state lies beside it
SPENT = "spent.safetensors"  # that state, while the folder that came of it gets its name
SCRATCH = "headwise-"  # begins the names of folders with the changed layers of a streamed model
EXPORT = "export"  # the folder that becomes OUT
REPLACED = "replaced"  # the folder that was OUT before, set aside for the move
PROBE = "probe.safetensors"  # what the process gets that verifies the export
# Names that a job writes there, beside those of SCRATCH; anything else is the user's.
OURS = (SETTINGS, STATE, SPENT, LOCK, EXPORT, REPLACED, PROBE)


def check_place(source: Path, out: Path) -> None:
    """Raise HeadwiseError where no model may be written, whatever lies there now."""
    here, there = source.resolve(), out.resolve()
    # Keys of `[refused]` in words.toml, and whether each holds. A folder with a RECORD is one that a job has written.
    for key, wrong in (
        ("out_is_source", here == there),
        ("out_in_source", here in there.parents),
        ("out_holds_source", there in here.parents),
        ("out_is_here", there == Path.cwd() or there in Path.cwd().parents),
        ("out_is_link", out.is_symlink()),
        ("out_is_file", out.exists() and not out.is_dir()),
        ("out_nowhere", not there.parent.is_dir()),
        ("out_foreign", out.is_dir() and any(out.iterdir()) and not (out / RECORD).exists()),
    ):
        if wrong:
            raise refusal(key, folder=repr(str(out)), source=source, parent=out.parent, record=RECORD)


def check_free(out: Path, force: bool) -> None:
    """Raise HeadwiseError where a folder lies that must not be replaced, for lack of `force`; an empty one may be."""
    if out.exists() and any(out.iterdir()) and not force:
        raise refusal("out_exists", folder=repr(str(out)))


class Workplace:
    """OUT.partial: held from entry to exit, and cleared away then unless a healing's state waits in it.

    source   the folder of the model that is reshaped
    shown    OUT as it was asked for, which messages name; `out` is its absolute path
    force    may a folder that share or prune wrote be replaced?
    """

    def __init__(self, source: Path, out: Path, force: bool) -> None:
        self.source, self.shown, self.out, self.force = source, out, out.absolute(), force
        self.path = self.out.parent / f"{self.out.name}.partial"
        self.fresh, self.probe = self.path / EXPORT, self.path / PROBE
        self.settings: dict[str, Any] = {}  # of the healing, as far as it is known

    @property
    def has_state(self) -> bool:
        return (self.path / STATE).exists()

    def __enter__(self) -> Workplace:
        check_place(self.source, self.shown)
        if self.path.exists() or self.path.is_symlink():
            is_folder = self.path.is_dir() and not self.path.is_symlink()
            # A folder with a name in it that no job writes is the user's. So is a file or a link, which "" stands for
            # here.
            for name in [entry.name for entry in self.path.iterdir()] if is_folder else [""]:
                if name not in OURS and not name.startswith(SCRATCH) and not is_unfinished(name, OURS):
                    raise HeadwiseError(
                        f"{self.path} is in the way: the work goes on there; move it, or take another out="
                    )
        busy = f"another share or prune is at work in {self.path}; wait for it, or take another out="
        self.kept = Kept(self.path, busy=busy)  # makes the folder, and locks it
        try:
            self._settle()
            check_free(self.shown, self.force)
        except BaseException:  # Ctrl-C, too: `with` calls __exit__ only after an entry that went well
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()  # also after a job that failed in the midst of `finish`
        # PROBE is not among them: whoever writes it removes it, and that of a killed job is written over.
        for leftover in (self.fresh, *self.path.glob(f"{SCRATCH}*")):
            shutil.rmtree(leftover, ignore_errors=True)
        if not self.has_state:
            shutil.rmtree(self.path, ignore_errors=True)
        self.kept.close()

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Note what determines this healing; HeadwiseError where the state of a healing with other settings lies here.

        It is called again when more settings are known, which are added.
        """
        self.settings |= json.loads(json.dumps(settings))  # as the file gives it back: lists for tuples
        if not self.has_state:
            write_whole(self.path / SETTINGS, json.dumps(self.settings, indent=2) + "\n")
            return
        try:
            before = read_json(self.path / SETTINGS)
            differing = []
            for name, here in self.settings.items():
                there = before.get(name, "nothing")  # share and prune have settings of their own
                if there != here:
                    contrast = f"{name}: {there} there, {here} here"
                    # A long contrast, such as that of two digests, is not shown.
                    differing.append(contrast if len(contrast) < 60 else name)
        except (OSError, ValueError, TypeError, AttributeError):  # there is no file, no JSON in it, or no table
            raise HeadwiseError(f"{self.path / SETTINGS} is damaged; remove that folder to begin anew") from None
        if differing:
            raise HeadwiseError(
                f"the healing that was stopped in {self.path} has other settings ({', '.join(differing)}); go on with "
                f"its own, or remove that folder to begin anew"
            )

    def finish(self) -> None:
        """Give the folder `fresh`, which is written and verified, the name OUT."""
        check_place(self.source, self.shown)  # hours may have passed
        check_free(self.shown, self.force)
        # On the disk before they get their name: a machine that loses its power may otherwise keep the name alone. No
        # folder lies among them. Their own names are there since `write_whole`, which syncs its folder, wrote RECORD.
        for path in self.fresh.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # The order of the moves tells `_settle` how far they came: `fresh` is there until the last one.
        if self.has_state:
            (self.path / STATE).rename(self.path / SPENT)
        if self.out.exists():
            self.out.rename(self.path / REPLACED)
        self.fresh.rename(self.out)
        sync_folder(self.out.parent)

    def _settle(self) -> None:
        """Finish, or take back, the moves of `finish` where it was cut short, and clear away what has served its turn.

        A state is spent once the folder that came of it has its name.
        """
        # Moves of `finish`: STATE to SPENT, OUT to REPLACED, EXPORT to OUT.
        aside, spent = self.path / REPLACED, self.path / SPENT
        if spent.exists() and self.fresh.exists():  # the folder did not get its name: the healing may go on
            spent.rename(self.path / STATE)
        spent.unlink(missing_ok=True)
        # OUT had been set aside, and the new folder did not get its name.
        if aside.exists() and not self.out.exists():
            aside.rename(self.out)
        shutil.rmtree(aside, ignore_errors=True)
        remove_unfinished(self.path, OURS)
