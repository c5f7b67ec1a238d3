"""This file keeps the pages of runs, and what lists show of them, for a server that is asked repeatedly.

No path is made of what a request names but by a known run and the form that names of previews have.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from diffsynth_lite.errors import UserError
from diffsynth_lite.report.card import RunCard, read_card
from diffsynth_lite.report.charts import NO_TABLE
from diffsynth_lite.report.page import Served, render
from diffsynth_lite.report.previews import is_preview
from diffsynth_lite.report.run_report import RunReport, read_any_run
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

_RUN_PATH = re.compile(r"/runs/([^/]+)/(.*)")
_TYPES = {".png": "image/png", ".mp4": "video/mp4"}
_KEPT_RUNS = 8
"""Runs whose content and page are kept for those who look at single ones: each takes some megabytes."""
_WAITED_MULTIPLE = 10
"""Pause before a run is read again, in times of the last reading's duration: a trainer may need the CPU."""


@dataclass(frozen=True)
class Answer:
    """The answer to a path.

    Attributes:
        kind: media type of the content.
    """

    content: bytes
    kind: str


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A run as it was read.

    Attributes:
        state: of its folder at that time.
        good_until: when it may be read again.
    """

    state: object
    report: RunReport
    good_until: float


class RunPages:
    """The pages of runs, made again where a run folder has changed.

    Args:
        find: the run folders of now, each by a name of its own.
        clock: returns seconds.
    """

    def __init__(
        self, find: Callable[[], Mapping[str, Path]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _Read] = {}
        self._cards: dict[str, tuple[object, RunCard]] = {}
        self._pages: dict[str | tuple[str, ...] | None, tuple[list[RunReport], Served, Answer]] = {}

    def answer(self, path: str) -> Answer | None:
        """The content at the path of a request, as it was sent; None if there is none."""
        if path == "/":
            return self.overview()
        match = _RUN_PATH.fullmatch(path)
        if match is None:
            return None
        name, file = os.fsdecode(unquote_to_bytes(match[1])), match[2]
        return self.file(name, file) if file else self.page(name)

    def overview(self) -> Answer:
        """The page of all runs, side by side."""
        with self._lock:
            folders = self._find()
            self._runs = {name: self._up_to_date(name, folder) for name, folder in folders.items()}
            return self._page(None, [each.report for each in self._runs.values()], Served())

    def page(self, name: str, served: Served | None = None) -> Answer | None:
        """The page of one run; None if there is no run of this name."""
        with self._lock:
            report = self._read(name)
            if report is None:
                return None
            self._runs[name] = self._runs.pop(name)  # The latest one is the last.
            if None not in self._pages:  # The overview needs all of them.
                for old in list(self._runs)[:-_KEPT_RUNS]:
                    del self._runs[old]
                    self._pages.pop(old, None)
            return self._page(name, [report], served or Served())

    def report(self, name: str) -> RunReport | None:
        """What one run left, which may be some seconds old; None if there is no run of this name."""
        with self._lock:
            return self._read(name)

    def several(self, names: Sequence[str], served: Served) -> Answer | None:
        """The page of some runs side by side; None if there is no run of one of these names."""
        with self._lock:
            reports = [report for name in names if (report := self._read(name)) is not None]
            if len(reports) < len(names):
                return None
            key = tuple(names)
            for old in [each for each in self._pages if isinstance(each, tuple) and each != key]:
                del self._pages[old]
            return self._page(key, reports, served)

    def file(self, name: str, file: str) -> Answer | None:
        """A preview of a run, by its path in the run folder; None for any other file."""
        with self._lock:
            folder = self._find().get(name)
        if folder is None or not is_preview(folder, file):
            return None
        try:
            return Answer(read_run_file(folder / file), _TYPES[Path(file).suffix])
        except (OSError, UserError):  # The run has removed it, or somebody has put something else there.
            return None

    def cards(self, folders: Mapping[str, Path] | None = None) -> dict[str, RunCard]:
        """What a list shows of each run.

        Args:
            folders: of all runs of now, where they are known already.
        """
        with self._lock:
            folders = self._find() if folders is None else folders
            self._cards = {name: held for name, held in self._cards.items() if name in folders}
            return {name: self._card(name, folder) for name, folder in folders.items()}

    def card(self, name: str) -> RunCard | None:
        """The same of one run; None if there is no run of this name."""
        with self._lock:
            folder = self._find().get(name)
            return None if folder is None else self._card(name, folder)

    def _card(self, name: str, folder: Path) -> RunCard:
        run, known = RunFolder(folder), self._cards.get(name)
        state = run.card_changes()
        is_gone = known is not None and known[1].state.is_running and run.is_abandoned()
        if known is None or known[0] != state or is_gone:
            known = self._cards[name] = state, read_card(folder)
        return known[1]

    def _read(self, name: str) -> RunReport | None:
        folder = self._find().get(name)
        if folder is None:
            self._runs.pop(name, None)
            return None
        self._runs[name] = self._up_to_date(name, folder)
        return self._runs[name].report

    def _up_to_date(self, name: str, folder: Path) -> _Read:
        state, known, began_at = RunFolder(folder).changes(), self._runs.get(name), self._clock()
        if known is not None and (known.state == state or began_at < known.good_until):
            return known
        report = read_any_run(folder, base=f"/runs/{quote(os.fsencode(name), safe='')}/")
        # Its other files are not shown, so they are not listed either.
        report = replace(report, name=name, files=NO_TABLE)
        now = self._clock()
        return _Read(state=state, report=report, good_until=now + _WAITED_MULTIPLE * (now - began_at))

    def _page(self, key: str | tuple[str, ...] | None, runs: list[RunReport], served: Served) -> Answer:
        known = self._pages.get(key)
        # By identity: comparing their content takes long.
        if known is not None and list(map(id, runs)) == list(map(id, known[0])) and served == known[1]:
            return known[2]
        answer = Answer(render(runs, served=served).encode(), "text/html")
        self._pages[key] = (runs, served, answer)
        return answer
