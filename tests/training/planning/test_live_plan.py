"""The plan of a config that changes: part by part, counted once, and the newest question wins."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_memory_count import config_of

from diffsynth_lite.cli import plan
from diffsynth_lite.cli.main import main
from diffsynth_lite.core.gradient import KEEP
from diffsynth_lite.training.planning import choices
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.live_plan import LivePlan

PARTS = ["memory", "time", "phases", "choices"]


class Asked:
    """Requests that are there already; the next one comes during a count where it ``hurries``."""

    def __init__(self, *requests: dict[str, Any], hurries: bool = False) -> None:
        self.requests, self.answers, self.is_outdated = requests, list[dict[str, Any]](), False
        self._hurries = hurries

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place, request in enumerate(self.requests):
            self.is_outdated = self._hurries and place + 1 < len(self.requests)
            yield request

    def answer(self, request: dict[str, Any], state: str, **more: Any) -> None:
        self.answers.append({"id": request["id"], "state": state} | more)

    def of(self, name: int) -> list[str]:
        """The parts of an answer, then its state."""
        return [one.get("part", one["state"]) for one in self.answers if one["id"] == name]

    def whole(self, name: int) -> dict[str, Any]:
        (found,) = (one["plan"] for one in self.answers if one["id"] == name and one.get("part") == "choices")
        return dict(found)


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(choices, "_STRATEGIES", (KEEP,))
    config_of("qwen_image", tmp_path / "tiny")
    file = str(tmp_path / "tiny.yaml")
    return lambda name, *overrides, **more: {
        "id": name,
        "config": file,
        "overrides": list(overrides),
        "gpu": "RTX 4090",
        **more,
    }


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was counted."""
    names, of = list[str](), KeptCounts.of

    def noting(kept: KeptCounts, name: str, *more: Any) -> Any:
        names.append(name)
        return of(kept, name, *more)

    monkeypatch.setattr(KeptCounts, "of", noting)
    return names


def test_what_a_plan_does_not_read_is_answered_without_a_count(
    request_of: Callable[..., dict[str, Any]], counted: list[str]
) -> None:
    LivePlan(Asked(request_of(1)), None).serve()
    num_once = len(counted)
    other = "train.steps=5", "data.trigger=star"
    asked = Asked(request_of(1), request_of(2, *other), request_of(3, "lora.rank=5"), request_of(4))
    LivePlan(asked, None).serve()
    assert len(counted) == 3 * num_once  # of one and three
    assert [asked.of(name) for name in (1, 2, 3, 4)] == [[*PARTS, "done"]] * 4
    assert asked.whole(1) == asked.whole(4)
    assert asked.whole(2)["run_s"] == pytest.approx(5 * asked.whole(1)["step_s"])
    assert asked.whole(3)["needed_gib"] > 0
    memory, time, phases = (one["plan"] for one in asked.answers[:3])
    assert memory["limit_gib"] == 21.6
    assert time["configured_step_s"] == asked.whole(1)["step_s"]
    assert phases["fits"] is asked.whole(1)["fits"] is True


def test_a_newer_question_ends_a_count_and_a_wrong_one_is_answered(
    request_of: Callable[..., dict[str, Any]], counted: list[str], tmp_path: Path
) -> None:
    text = (tmp_path / "tiny.yaml").read_text().replace("steps: 4", "steps: 9")
    asked = Asked(request_of(1), request_of(2, text=text), hurries=True)
    LivePlan(asked, None).serve()
    assert asked.of(1) == ["dropped"]
    assert asked.of(2) == [*PARTS, "done"]
    wrong = Asked(request_of(1, "lora.rnk=5"), {"id": 2}, request_of(3, gpu="RTX 1"), request_of(4, gib=3))
    LivePlan(wrong, None).serve()
    assert [one["state"] for one in wrong.answers] == ["failed"] * 4
    for one, word in zip(wrong.answers, ("did you mean 'rank'", "config", "RTX 1", "gib"), strict=True):
        assert word in one["error"]


def test_the_command_serves_requests_and_takes_no_config_of_its_own(
    request_of: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = io.StringIO()

    @contextmanager
    def lines() -> Iterator[Any]:
        yield [json.dumps(request_of(1)).encode()], answers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(plan, "standard_lines", lines)
    assert main(["plan", "--serve"]) == 0
    states = [json.loads(line)["state"] for line in answers.getvalue().splitlines()]
    assert states == ["part"] * 4 + ["done"]
    assert main(["plan", "--serve", "1", "--config", "qwen_lora.yaml"]) == 2
    assert "--serve: takes configs" in caplog.text
    assert main(["plan", "--gpu=4090"]) == 2
    assert "--config: is missing" in caplog.text
