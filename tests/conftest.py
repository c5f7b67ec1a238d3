"""Settings that every test runs under: no network, one thread, no trackers that phone home."""

import gc
import os
import sys
from collections.abc import Generator

os.environ.update(
    ACCELERATE_USE_CPU="true",  # also where there is a GPU; tests marked gpu take it back
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

import hypothesis
import pytest
from browser import browser  # noqa: F401

# A change is judged by the same examples each time; elsewhere new ones are tried.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("exploring", deadline=None)
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "exploring")

gc.disable()  # until all tests are imported, which makes no garbage

# No test loses power; a tiny run waits some forty times for the disk, 3 ms each.
os.fsync = lambda _descriptor: None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests of all families run on families kept elsewhere."""
    parser.addoption(
        "--family",
        action="append",
        help="run the tests of families (tests/pipelines/test_family_*.py, tests/runs/test_run_families.py) "
        "on this one only, such as my_package.my_family (repeatable)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that have a test marked ``slow``; without a CUDA device skip those marked ``gpu``."""
    # At the end of the tests one process would else be left alone with minutes of work.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)

    import torch  # not above: the process of pytest-xdist that hands out the tests needs none of it

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
    return result


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Fork the server of the processes that tests start, while no test and no other hook has left a trace."""
    if "processes" in sys.modules:
        sys.modules["processes"].start_fork_server()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Forget what a test has imported, too: the libraries import most models when they are first used."""
    num_imported = len(sys.modules)
    result = yield
    if len(sys.modules) > num_imported:
        # To look through all that is imported took most of a tiny run.
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape characters that are none: pytest-xdist cannot send what a test of wrong texts has printed."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
