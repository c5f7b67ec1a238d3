"""A pytest plugin that runs the tests in processes forked from the one that has imported them.

pytest-xdist has each of its processes import all tests, and torch with them; with ``--workers 3`` they are
imported once. A worker is handed the tests of one file after the other, in the order in which they were
collected, and sends back its reports, a test at a time. This process gives them to pytest's hooks, so that
``-x``, ``--maxfail``, ``--junitxml``, ``-v`` and the summary work as without workers. A test whose process
dies fails, by name, and another process runs those after it.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, wait

import pytest

_FORK = multiprocessing.get_context("fork") if sys.platform == "linux" else None
_POLL_S = 0.5
"""How often to look whether a worker has died whose own child processes keep its pipe open."""
_ENDING_S = 60.0
"""How long a worker may take to end once there are no more tests for it."""
_INTERRUPTED_S = 10.0
"""How long it may take when it is interrupted."""
_INTERRUPTED = int(pytest.ExitCode.INTERRUPTED)


class _Hooks:
    """Hooks of this plugin."""

    def pytest_before_fork(self, session: pytest.Session) -> None:
        """Make what tests of several files need, which each worker would make for itself."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(_Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="number of forked processes to run tests in (Linux)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.workers and _FORK and not config.option.usepdb:
        config.pluginmanager.register(_Distribution(config), "distribution")


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fork before another hook or a test leaves a trace."""
    distribution = session.config.pluginmanager.getplugin("distribution")
    if distribution is None:
        _start_fork_server()
        return (yield)
    is_run = session.items and not session.testsfailed and not session.config.option.collectonly
    if is_run:
        session.config.hook.pytest_before_fork(session=session)
        distribution.start(session)
    try:
        return (yield)
    finally:
        distribution.stop()


def _start_fork_server() -> None:
    """Of the processes that tests start."""
    if "processes" in sys.modules:
        sys.modules["processes"].start_fork_server()


class _Distribution:
    """Hands out the tests, and gives the reports to the hooks of this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._workers: list[_Worker] = []
        self._waiting: deque[list[int]] = deque()
        if terminal := config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # the files take turns

    def start(self, session: pytest.Session) -> None:
        by_file = groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._waiting.extend([*indexes] for _, indexes in by_file)
        # Each worker has its own folder in it.
        self._config._tmp_path_factory.getbasetemp()
        for _ in range(min(self._config.option.workers, len(self._waiting))):
            self._add_worker(session)

    def _add_worker(self, session: pytest.Session) -> None:
        worker = _Worker(session, [*(other.connection for other in self._workers)])
        self._workers.append(worker)
        worker.give(self._waiting.popleft())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not self._workers:
            return None
        while active := [worker for worker in self._workers if not worker.has_ended]:
            ready = wait([worker.connection for worker in active], _POLL_S)
            for worker in active:
                if worker.connection in ready:
                    self._receive(session, worker)
                elif not worker.process.is_alive() and not worker.connection.poll():
                    self._conclude(session, worker)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _receive(self, session: pytest.Session, worker: "_Worker") -> None:
        try:
            reports = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._conclude(session, worker)
            return
        if reports is not None:
            self._publish(session.items[worker.finish()], reports)
        elif self._waiting and not (session.shouldfail or session.shouldstop):
            worker.give(self._waiting.popleft())
        else:
            worker.give([])
        if session.shouldfail or session.shouldstop:
            for each in self._workers:
                each.withdraw()

    def _publish(self, item: pytest.Item, reports: list[dict[str, object]]) -> None:
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            hook.pytest_runtest_logreport(
                report=hook.pytest_report_from_serializable(config=self._config, data=data)
            )
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _conclude(self, session: pytest.Session, worker: "_Worker") -> None:
        """Of a worker that died the test fails that it was running; another worker runs those after it."""
        exit_code = worker.end()
        if exit_code == 0 and not (worker.given and not worker.is_withdrawn):
            return
        item = session.items[worker.finish() if worker.given else worker.last]
        by = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        failed = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"the process of this test ended: {by}", "call"
        )
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=failed)
        self._publish(item, [data])
        if worker.given:
            self._waiting.appendleft([*worker.given])
        if self._waiting and not (session.shouldfail or session.shouldstop):
            self._add_worker(session)

    def stop(self) -> None:
        """End the workers: at once where this process was interrupted, and their tests are still running."""
        active = [worker for worker in self._workers if not worker.has_ended]
        for worker in active:
            os.kill(worker.process.pid, signal.SIGINT)
        for worker in active:
            worker.end(_INTERRUPTED_S)
        if names := [worker.items[worker.given[0]].nodeid for worker in active if worker.given]:
            sys.stderr.write("".join(f"\ninterrupted in {name}" for name in names) + "\n")


class _Worker:
    """One process, as the process that hands out the tests sees it.

    Attributes:
        given: indexes of the tests that it has and has not finished; it is running the first.
        last: index of the test that it has finished last.
        is_withdrawn: whether it ends after the test that it is running.
    """

    def __init__(self, session: pytest.Session, others: list[Connection]) -> None:
        self.items = session.items
        self.given: deque[int] = deque()
        self.last = -1
        self.is_withdrawn = self.has_ended = False
        self.connection, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_work, args=(session, theirs, [*others, self.connection]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lance is not fork-safe")
            self.process.start()
        theirs.close()

    def give(self, indexes: list[int]) -> None:
        self.given.extend(indexes)
        try:
            self.connection.send(indexes)
        except BrokenPipeError:  # it has died, which `wait` reports next
            return

    def finish(self) -> int:
        """Index of the test that is now finished."""
        self.last = self.given.popleft()
        return self.last

    def withdraw(self) -> None:
        """Have it end after the test that it is running."""
        if not self.is_withdrawn and not self.has_ended:
            self.is_withdrawn = True
            self.give([])

    def end(self, limit_s: float = _ENDING_S) -> int:
        """Wait for it. If it fails, end it and the processes that it started. Returns the exit code."""
        self.has_ended = True
        self.connection.close()
        self.process.join(limit_s)
        if self.process.exitcode != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        return self.process.exitcode


class _Sender:
    """Collects the reports of a test, and sends them when it is finished."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._reports: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(self._reports)
        self._reports = []


def _work(session: pytest.Session, connection: Connection, inherited: list[Connection]) -> None:
    """In a worker: run the tests that are handed out."""
    os.setpgid(0, 0)  # Ctrl+C reaches the parent, which interrupts each worker once
    for other in inherited:
        other.close()
    config = session.config
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / f"worker-{os.getpid()}"
    folders._basetemp.mkdir()
    plugins = config.pluginmanager
    plugins.unregister(plugins.getplugin("terminalreporter"))
    plugins.register(_Sender(config, connection))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into a file that all would share
    capture.start_global_capturing()
    capture.suspend_global_capture()
    _start_fork_server()
    try:
        for item, following in pairwise(chain(_handed_out(session, connection), [None])):
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            # The parent withdraws the other tests, or has ended.
            if session.shouldfail or session.shouldstop or connection.poll():
                break
        session._setupstate.teardown_exact(None)
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
        sys.exit(_INTERRUPTED)


def _handed_out(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    """The tests, file after file; the next file is asked for when the last test of one is about to run."""
    while indexes := connection.recv():
        yield from (session.items[index] for index in indexes)
        connection.send(None)
