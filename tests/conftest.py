"""Shared by all tests. That this file lies here also lets them import `helpers`: pytest puts its folder on the path."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import cases
import pytest
from browsing import Opener, opener, started
from hypothesis import settings
from invoking import invoke

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["invoke"]  # a fixture for all

# The same examples on every run: a red suite is red for everybody. Speed is not judged here, hence no deadline.
settings.register_profile("headwise", derandomize=True, database=None, deadline=None, max_examples=40)
settings.load_profile("headwise")
# Commands speak the language of the system where no other is asked for; the tests read English.
os.environ["LC_ALL"] = "C.UTF-8"
# A kernel that torch's compiler has kept for one kind of processor crashes under the settings of another.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    Path(tempfile.gettempdir()) / f"headwise-inductor-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'own')}"
)
# Tiny tensors, and sums in one order; a second thread would only wait for the core that another worker has.
os.environ["OMP_NUM_THREADS"] = "1"


LEFT_OUT = {"slow", "browser", "gpu"}  # markers of what --quick leaves out
LONG = 1.0  # seconds of such a test, roughly
# Of these files other rules guess too little: what each took of a processor, in seconds.
SECONDS = {"test_docs": 43, "test_cost_families": 35, "test_check": 30, "test_cli": 28, "test_works_with": 25}
SECONDS |= {"test_learn": 22, "test_course_forms": 18, "test_cost_models": 10, "test_look_served": 10}
SECONDS |= {"test_statistics": 10, "test_device": 20, "test_kinds": 12, "test_project_files": 12, "test_gpt": 8}
# Files that start processes or a browser, train to the end, or are alone in importing a library that is slow to import.
WORK = "cli train_call why heal learn"
WORK += r" own\.py run\.py leaks device onnx walk job functions \w*browser"
LONG_FILES = re.compile(rf"test_({'|'.join(WORK.split())})")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="no browser, no processes, nothing slow, and two cases of each test: what `make quick` runs",
    )


def is_long(item: pytest.Item) -> bool:
    return bool(LONG_FILES.match(item.path.name)) or any(mark.name in LEFT_OUT for mark in item.iter_markers())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """--quick does not even import a file of which it runs nothing."""
    return True if config.getoption("--quick") and LONG_FILES.match(collection_path.name) else None


def pytest_configure(config: pytest.Config) -> None:
    cases.quick = config.getoption("--quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # A browser and other processes depend on what else the machine does: one more try, which is named.
        if any(mark.name in ("browser", "clock") for mark in item.iter_markers()):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if not config.getoption("--quick"):
        # `--dist loadfile` hands files out in this order: with the short ones last no worker idles at the end.
        seconds = Counter[Path]()
        for item in items:
            seconds[item.path] += LONG if is_long(item) else 0.03
        items.sort(key=lambda item: -SECONDS.get(item.path.stem, seconds[item.path]))
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not is_long(item) and not re.search("compile|export", item.nodeid):
            tests[item.nodeid.split("[")[0]].append(item)
    chosen = {alike[place] for alike in tests.values() for place in (0, -1)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_runtest_logfinish() -> None:
    """A test that asks torch for more threads than one does not slow down all that follow."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """For files of which no test learns: `pytestmark = pytest.mark.usefixtures("no_gradients")`."""
    with sys.modules["torch"].no_grad():
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a process; skips where there is none."""
    with started() as chromium:
        yield chromium


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens pages; see `browsing.opener`."""
    with opener(browser) as opened:
        yield opened
