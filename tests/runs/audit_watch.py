"""Notes what Python itself reports of a process: names that pickles look up, files that are opened."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class AuditWatch:
    """Notes the arguments of events; make it once, for Python has no way to remove an audit hook."""

    def __init__(self, events: Collection[str]) -> None:
        self._events = frozenset(events)
        self._noted: list[tuple[object, ...]] = []
        self._is_on = False
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event in self._events:
            self._noted.append(arguments)

    @contextmanager
    def on(self) -> Iterator[list[tuple[object, ...]]]:
        """Scope in which events are noted, each by its arguments."""
        self._noted.clear()
        self._is_on = True
        try:
            yield self._noted
        finally:
            self._is_on = False


def watched_pickles() -> AuditWatch:
    """Notes module and name that pickles look up in this process; a pickle that does harm needs one."""
    return AuditWatch({"pickle.find_class"})


def watched_files() -> AuditWatch:
    """Notes files and folders that are opened, and connections, each by what is opened."""
    return AuditWatch({"open", "os.scandir", "os.listdir", "socket.connect", "socket.getaddrinfo"})
