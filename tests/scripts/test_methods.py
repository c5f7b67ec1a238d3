"""The table of ways to learn trains each as it says, and measures what came of it."""

import methods
import pytest
import taught_colours


def test_ways_to_learn_are_trained_and_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(taught_colours.comparison, "NUM_STEPS", 2)
    for name in ("NEW", "KNOWN"):
        monkeypatch.setattr(taught_colours, name, getattr(taught_colours, name)[:2])
    methods.main(["--method", "schedule-free", "--steps", "1", "--seeds", "0", "--preserve"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in table] == ["method", *table[1][:1], "before training", "schedule-free, 0.016"]
    column = table[0].index("moved")
    assert table[2][column] == "0"
    assert int(table[3][column]) > 0
