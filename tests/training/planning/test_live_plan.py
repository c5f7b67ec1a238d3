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
from diffsynth_lite.errors import RunInterrupted
from diffsynth_lite.serving import Requests
from diffsynth_lite.training.planning import choices
from diffsynth_lite.training.planning.kept_counts import KeptCounts
from diffsynth_lite.training.planning.live_plan import LivePlan, PlanRequest

PARTS = ["memory", "time", "phases", "choices"]


class Asked(Requests[PlanRequest]):
    """Requests that are there already; the next one comes during a count where it ``hurries``."""

    def __init__(self, *requests: dict[str, Any], hurries: bool = False) -> None:
        self.answers = list[dict[str, Any]]()
        self._requests, self._hurries = [PlanRequest.model_validate(one) for one in requests], hurries

    def __iter__(self) -> Iterator[PlanRequest]:
        for place, request in enumerate(self._requests):
            self._is_newest = not self._hurries or place + 1 == len(self._requests)
            yield request

    def require_wanted(self) -> None:
        if not self._is_newest:
            raise RunInterrupted

    def answer(self, request: PlanRequest | None, state: str, **more: Any) -> None:
        self.answers.append({"id": request and request.id, "state": state} | more)

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
    wrong = Asked(request_of(1, "lora.rnk=5"), request_of(3, gpu="RTX 1"))
    LivePlan(wrong, None).serve()
    assert [one["state"] for one in wrong.answers] == ["failed"] * 2
    for one, word in zip(wrong.answers, ("did you mean 'rank'", "RTX 1"), strict=True):
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
        yield [json.dumps(given).encode() for given in (request_of(1, gib=3), request_of(2))], answers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(plan, "standard_lines", lines)
    assert main(["plan", "--serve"]) == 0
    wrong, *parts = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert wrong["error"].startswith("not a request: gib: ")
    assert [one["state"] for one in parts] == ["part"] * 4 + ["done"]
    for words in (
        *("--config=qwen_lora.yaml", "--preset=character", "--gpu=4090", "--device-gib=24", "--host-gib=32"),
        *("--processes=2", "--all", "--json", "--require-fit", "lora.rank=8"),
    ):
        caplog.clear()
        assert main(["plan", words, "--serve=1"]) == 2
        assert "--serve: takes all else from requests" in caplog.text
    assert main(["plan", "--gpu=4090"]) == 2
    assert "--config: is missing" in caplog.text
