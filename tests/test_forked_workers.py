"""Tests in forked workers have the results that they have in one process, whatever happens to a worker."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parent
CONFTEST = """
import os, pathlib, pytest

@pytest.fixture(scope="session", autouse=True)
def session():
    yield
    with pathlib.Path("ended").open("a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.fixture(autouse=True)
def note(request):
    with pathlib.Path("ran").open("a") as file:
        file.write(f"{request.node.nodeid} {os.getpid()}\\n")
"""
FILES = {
    "test_a.py": """
import pytest

def test_passes(tmp_path):
    assert not [*tmp_path.iterdir()]
    print("not shown")

def test_fails():
    print("shown \\udc80")
    assert 1 == 2, "the reason"

@pytest.mark.skip(reason="not today")
def test_is_skipped(): ...

@pytest.mark.xfail
def test_is_expected_to_fail():
    assert not 1
""",
    "test_b.py": """
import pytest

@pytest.fixture
def broken():
    raise OSError("no fixture")

def test_has_an_error(broken): ...

@pytest.mark.parametrize("number", range(3))
def test_passes(number): ...
""",
    "test_c.py": "def test_of_c(): ...",
    "test_dies.py": """
import os, signal

def test_before(): ...

def test_kills():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after(): ...

def test_leaves():
    os._exit(0)
""",
    "test_hangs.py": """
import subprocess, sys, time

def test_hangs():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    open("hangs", "w").write(str(child.pid))
    time.sleep(600)
""",
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


def start(folder: Path, files: str, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    for name in files:
        (path,) = (path for path in FILES if path.startswith(f"test_{name}"))
        (folder / path).write_text(FILES[path])
    options = ("-p", "forked_workers", "-p", "no:hypothesispytest", "--basetemp", "temporary", *options)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        text=True,
        # A shell has its background jobs ignore Ctrl+C, and what they start inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def results(folder: Path, files: str, *options: str) -> tuple[int | None, str, list[str]]:
    """Exit code, output, and the tests that were run."""
    with start(folder, files, *options) as process:
        printed, _ = process.communicate(timeout=300)
    ran = (folder / "ran").read_text().split("\n")[:-1]
    return process.returncode, printed, ran


def summary(printed: str) -> list[str]:
    *_, closing = printed.strip().split("\n")
    lines = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", printed, re.M)
    return [*sorted(lines), re.sub(r" in [\d.]+s", "", closing).strip("= ")]


def test_workers_give_the_results_of_one_process(tmp_path: Path) -> None:
    found = {}
    for number in (0, 2):
        folder = tmp_path / str(number)
        code, printed, ran = results(folder, "abc", f"--workers={number}", "-ra", "--junitxml=results.xml")
        cases = ElementTree.parse(folder / "results.xml").iter("testcase")
        kinds = sorted(
            (case.get("classname"), case.get("name"), [child.tag for child in case]) for case in cases
        )
        found[number] = code, summary(printed), kinds, sorted(line.split()[0] for line in ran)
        assert "shown \\udc80" in printed
        assert "not shown" not in printed
        # A file stays in one process, and each process ends its fixtures.
        processes = {(test.partition("::")[0], pid) for test, pid in map(str.split, ran)}
        assert len(processes) == 3
        assert sorted((folder / "ended").read_text().split()) == sorted({pid for _, pid in processes})
        assert len({pid for _, pid in processes}) == max(1, number)
    assert found[0] == found[2]
    assert found[2][1][-1] == "1 failed, 5 passed, 1 skipped, 1 xfailed, 1 error"


def test_a_test_whose_process_dies_fails_and_those_after_it_run(tmp_path: Path) -> None:
    code, printed, ran = results(tmp_path, "acd", "--workers=2", "-k", "not fails", "-v")
    assert code == 1
    assert "the process of this test ended: SIGKILL" in printed
    assert "the process of this test ended: exit code 0" in printed
    assert "FAILED test_dies.py::test_kills" in printed
    assert "FAILED test_dies.py::test_leaves" in printed
    assert "test_dies.py::test_after PASSED" in printed
    assert summary(printed)[-1] == "2 failed, 4 passed, 1 skipped, 1 deselected, 1 xfailed"
    assert len(ran) == 7


def test_the_first_failure_ends_all_workers(tmp_path: Path) -> None:
    code, printed, ran = results(tmp_path, "ad", "--workers=1", "-x")
    assert code == 1
    assert "stopping after 1 failures" in printed
    assert len(ran) == 2
    _, printed, _ = results(tmp_path / "more", "adc", "--workers=1", "--maxfail=2")
    assert "stopping after 2 failures" in printed
    assert summary(printed)[-1].startswith("2 failed")


def test_an_interrupt_names_the_running_test_and_leaves_no_process(tmp_path: Path) -> None:
    with start(tmp_path, "ch", "--workers=2") as process:
        while not (hangs := tmp_path / "hangs").exists() or not hangs.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "interrupted in test_hangs.py::test_hangs" in printed
    assert "KeyboardInterrupt" in printed
    pids = [hangs.read_text(), *(line.split()[1] for line in (tmp_path / "ran").read_text().splitlines())]
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # of one whose end nobody has looked at
