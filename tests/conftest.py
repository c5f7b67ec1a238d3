"""Settings that every test runs under: no network, one thread, no trackers that phone home."""

import faulthandler
import gc
import os
import sys
import time
from collections.abc import Generator

os.environ.update(
    ACCELERATE_USE_CPU="true",  # also where there is a GPU; tests marked gpu take it back
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    TQDM_DISABLE="1",
    WANDB_MODE="offline",
)

import hypothesis
import pytest
import torch
from browser import browser  # noqa: F401

pytest_plugins = ["forked_workers"]

# A change is judged by the same examples each time; elsewhere new ones are tried.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("exploring", deadline=None)
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "exploring")

gc.disable()  # until all tests are imported, which makes no garbage

# No test loses power; a tiny run waits some forty times for the disk, 3 ms each.
os.fsync = lambda _descriptor: None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    parser.addoption("--all", action="store_true", help="run the tests marked nightly, too")
    parser.addoption(
        "--family",
        action="append",
        help="run the tests of families (tests/pipelines/test_family_*.py, tests/runs/test_run_families.py) "
        "on this one only, such as my_package.my_family (repeatable)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``nightly``; begin with files that have one marked ``slow``; look for a GPU."""
    if not config.option.all and (nightly := [item for item in items if item.get_closest_marker("nightly")]):
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    # At the end of the tests one process would else be left unchanged with minutes of work.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

    # Two OpenMP threads on a busy two-core machine made tiny models up to 60 times slower.
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only after the tests are imported, and not in what that made."""
    result = yield
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 10, 10)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_before_fork() -> Generator[None, object, object]:
    """Look for no garbage in what all workers share, which would copy its memory into each."""
    result = yield
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Forget what a test has imported, and what a file leaves to the next ones: both live to the end.

    The libraries import most models when they are first used, and a run looks for garbage some eight times:
    among the models of the families' tests, that took 11 of the 13 s of a test of previews.
    """
    num_imported = len(sys.modules)
    result = yield
    if len(sys.modules) > num_imported or nextitem is None or nextitem.path != item.path:
        # To look through all that is imported took most of a tiny run.
        gc.collect()
        gc.freeze()
    return result


class Alarm:
    """The clock, and the stacks that `faulthandler` would write as it moves.

    Attributes:
        num_dumps: how often the time that was set has come.
        limits_s: times that were set, in seconds.
    """

    def __init__(self) -> None:
        self.num_dumps, self.limits_s = 0, []
        self._now, self._due_at = 100.0, None

    def monotonic(self) -> float:
        return self._now

    def set(self, after_s: float, **_: object) -> None:
        self.limits_s.append(after_s)
        self._due_at = self._now + after_s

    def cancel(self) -> None:
        self._due_at = None

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        if self._due_at is not None and self._due_at < self._now:
            self.num_dumps += 1
            self._due_at = None


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Alarm:
    """A clock that moves when a test says so, for code that asks `time` and `faulthandler`."""
    alarm = Alarm()
    monkeypatch.setattr(time, "monotonic", alarm.monotonic)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", alarm.set)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", alarm.cancel)
    return alarm
