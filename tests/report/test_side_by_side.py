"""Several runs on one page: in what their settings differ, what came of each, and their previews."""

import json
from pathlib import Path

import pytest
from browser import DESKTOP_PX, PHONE_PX, Browser
from run_folders import ATTACK, full_folder, of_chart

from diffsynth_lite.cli.main import main
from diffsynth_lite.report.page import Served, differing_settings, render, results, shared_prompts
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.run_folder.folder import RunFolder


def run(folder: Path, **settings: object) -> RunReport:
    full_folder(folder)
    file = folder / "resolved.yaml"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return read_run(folder)


def test_settings_that_differ_are_shown_and_those_of_the_place_are_not() -> None:
    rows = differing_settings(
        [
            "lora: {rank: 8, alpha: 4}\noutput: {dir: a}\ntrain: {steps: 10}",
            "lora: {rank: 16, alpha: 4}\noutput: {dir: b}\ntrain: {steps: 10, ema_decay: 0.9}",
            "",
        ]
    )
    assert rows == {
        "lora.rank": ["8", "16", ""],
        "lora.alpha": ["4", "4", ""],
        "train.steps": ["10", "10", ""],
        "train.ema_decay": ["", "0.9", ""],
    }
    assert differing_settings(["output: {dir: a}", "output: {dir: b}"]) == {}


def test_last_and_lowest_losses_are_shown_where_there_are_any(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    rows = [
        {"step": step, "time": 0.0, "validation_loss": loss} for step, loss in ((1, 0.3), (2, 0.2), (3, 0.4))
    ]
    (second.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = results([first, read_run(second.folder)])
    assert found["loss on fixed noise"] == ["0.3", ""]
    assert found["loss on held-out data"] == ["", "0.4"]
    assert found["lowest loss on held-out data"] == ["", "0.2 at step 2"]


def test_previews_of_the_same_prompt_are_in_columns_of_their_steps(tmp_path: Path) -> None:
    first = run(tmp_path / "first", validation={"prompts": ["a circle", "alone"]})
    second = full_folder(tmp_path / "second", steps=(0, 150))
    [prompt] = shared_prompts([first, read_run(second)])
    assert prompt.prompt == "a circle"
    assert prompt.steps == [0, 100, 150, 200]
    assert [[preview is not None for preview in row] for row in prompt.previews] == [
        [True, True, False, True],
        [True, False, True, False],
    ]
    long = read_run(full_folder(tmp_path / "long", steps=range(0, 1200, 100)))
    steps = shared_prompts([first, long])[0].steps
    assert (len(steps), steps[0], steps[-1], 200 in steps) == (8, 0, 1100, True)


def test_previews_of_different_prompts_are_shown_run_by_run(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second", validation={"prompts": ["one", "two"]})
    page = render([first, second])
    assert "No prompt is in two of these runs" in page
    assert 'alt="second, step 200: two"' in page
    places = [page.index(f'id="{part}"') for part in ("settings", "charts", "previews", "same")]
    assert places == sorted(places)  # what differs is on top, the rest is folded
    assert '<details class="drawer"><summary>' in page[places[-1] :]


def test_an_open_page_of_a_run_is_loaded_again_while_the_run_continues(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine")
    assert 'data-renewal="none"' in render([read_run(folder)])
    RunFolder(folder).write_status("running", exit_code=None, step=9, message="training")
    assert 'data-renewal="reload"' in render([read_run(folder)])
    assert 'data-renewal="ask"' in render([read_run(folder)], served=Served())


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP_PX, True), (PHONE_PX, False)])
def test_a_browser_shows_runs_side_by_side(tmp_path: Path, browser: Browser, width: int, dark: bool) -> None:
    for name in ("first", "second", "third of a long name" + "_x" * 40):
        full_folder(tmp_path / name, text=ATTACK)
    out = tmp_path / "all.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    with browser.page(out, width=width, dark=dark) as page:
        assert page.complaints == []
        assert page.requests == [out.as_uri()]
        assert page.overflow_px() <= 0
        assert page.text("h1") == "3 runs side by side"
        assert page.nameless() == []
        assert ATTACK in page.text(".shared")
        loss = page.text("[data-chart=loss] .u-legend")
        assert "first" in loss
        assert "smoothed" not in loss
        data = "JSON.parse(document.getElementById('data').textContent)"
        series = page.evaluate(f"{data}.runs.map(run => run.series.loss_smoothed[1])")
        assert page.evaluate(of_chart("loss", "chart.data.slice(1)")) == series
        assert page.evaluate("[...document.images].every(image => image.naturalWidth === 32)")
        links = page.evaluate("[...document.querySelectorAll('.side-by-side a')].map(link => link.href)")
        assert links[:2] == [(tmp_path / name / "report.html").as_uri() for name in ("first", "second")]
