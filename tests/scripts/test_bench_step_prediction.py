"""The benchmark sets what is predicted of a step beside a step, at a speed that it measures."""

from dataclasses import replace

import pytest
import step_prediction


def test_settings_are_shown_by_prediction_and_by_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ("none", "every block", "none, int8")
    settings = {name: step_prediction.SETTINGS[name] for name in shown}
    monkeypatch.setattr(step_prediction, "SETTINGS", settings)
    monkeypatch.setattr(step_prediction, "NUM_BLOCKS", 1)
    monkeypatch.setattr(step_prediction, "BEYOND_CACHES", 1)
    monkeypatch.setattr(step_prediction, "SHORTEST_SECONDS", 0.0)
    small = replace(step_prediction.SUBJECTS["qwen"], pixels=(64, 64, 1), num_prompt_tokens=8)
    step_prediction.compare(small, num_rounds=1)
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in shown)
    assert printed.count("1.000 [1.000, 1.000]") == 1
    assert "nan" not in printed
