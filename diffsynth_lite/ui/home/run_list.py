"""This file chooses which runs Home shows: those that a filter lets through, a page at a time."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from diffsynth_lite.report.card import RunCard
from diffsynth_lite.report.page import duration
from diffsynth_lite.report.record import RunState

KINDS = {"all": "All", "finished": "Finished", "continue": "Can continue", "archived": "Archived"}
"""What runs may be filtered by, in words."""
LIVE = ("running", "starting")
"""Words of runs that train."""
PENDING = (*LIVE, "waiting")
"""Words of runs that cannot be archived."""
_A_PAGE = 48
_CAN_CONTINUE = ("killed", "interrupted", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class NamedCard:
    """A run in few words.

    Attributes:
        name: in the workspace.
        headline: what the person wants to know of a run that trains.
        steps: how far it got, or which of its steps is the best.
        word: the state of the run, or of its process where that has not come to it.
        is_archived: whether a person archived it, and it has not gone on since.
        kind: "finished", "continue" for one that can be continued, or "other".
    """

    name: str
    run: RunCard
    word: str
    is_archived: bool

    @property
    def state(self) -> RunState:
        return self.run.state

    @property
    def is_live(self) -> bool:
        return self.word in LIVE

    @property
    def about(self) -> str:
        return ", ".join(filter(None, (self.run.model, *self.run.details)))

    @property
    def headline(self) -> str:
        left = self.state.seconds_left
        if self.state.phase:
            return self.state.title
        return "Starting" if left is None else f"{duration(left)} left"

    @property
    def steps(self) -> str:
        total, best = self.state.total_steps, self.run.best_step
        if self.state.name == "finished":
            return f"{self.state.step:,} steps" + (f", best {best:,}" if best is not None else "")
        return f"{self.state.step:,} of {total:,} steps" if total else f"{self.state.step:,} steps"

    @property
    def kind(self) -> str:
        if self.state.name == "finished":
            return "finished"
        return "continue" if self.state.name in _CAN_CONTINUE else "other"

    def has(self, words: Iterable[str]) -> bool:
        """Whether its name, model, family, data set or state has all of these words, in small letters."""
        run = self.run
        text = " ".join((self.name, run.model, run.family, run.data, self.word)).lower()
        return all(word in text for word in words)


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The runs of a page of Home.

    Attributes:
        live: those that train, which no filter leaves out.
        shown: of the others those on this page.
        counts: of the others that have the words, by the names of ``KINDS``.
        first: number of the first one that is shown, from 1.
        total: of those that the filter lets through.
        newer: the query of the page before this one; empty where there is none, as is ``older``.
    """

    live: Sequence[NamedCard]
    shown: Sequence[NamedCard]
    counts: Mapping[str, int]
    first: int
    total: int
    newer: str
    older: str

    @classmethod
    def of(cls, cards: Sequence[NamedCard], query: Mapping[str, str]) -> "RunList":
        """The runs for a query: ``q``, words that a run has; ``show``, of ``KINDS``; ``page``, from 1."""
        cards = sorted(cards, key=lambda card: -(card.state.seen_at or math.inf))
        words = query.get("q", "").lower().split()
        rest = [card for card in cards if not card.is_live and card.has(words)]
        counts = Counter(kind for card in rest for kind in _kinds(card))
        show = query.get("show") if query.get("show") in KINDS else "all"
        chosen = [card for card in rest if show in _kinds(card)]
        last = max(0, len(chosen) - 1) // _A_PAGE + 1
        number = query.get("page", "")
        page = min(last, max(1, int(number))) if number.isdecimal() and len(number) < len("1000000") else 1
        start = (page - 1) * _A_PAGE

        def address(page: int) -> str:
            kept = {key: query[key] for key in ("q", "show") if query.get(key)}
            return f"?{urlencode({**kept, 'page': page})}" if 1 <= page <= last else ""

        return cls(
            live=[card for card in cards if card.is_live],
            shown=chosen[start : start + _A_PAGE],
            counts={kind: counts[kind] for kind in KINDS},
            first=start + 1,
            total=len(chosen),
            newer=address(page - 1),
            older=address(page + 1),
        )


def _kinds(card: NamedCard) -> tuple[str, ...]:
    """The filters that let a run through."""
    return ("archived",) if card.is_archived else ("all", card.kind)
