"""The page of a run: complete, by itself, safe whatever a run folder holds, and written for little time."""

import base64
import hashlib
import re
import time
from pathlib import Path

import pytest
from browser import DESKTOP_PX, PHONE_PX, Browser
from html_page import HtmlPage
from PIL import Image
from run_folders import ATTACK, full_folder, of_chart, write_rows

from diffsynth_lite.errors import DifferentRunError, RunInterrupted
from diffsynth_lite.report import page as page_module
from diffsynth_lite.report import previews
from diffsynth_lite.report.page import ReportWriter, duration, render, write_report
from diffsynth_lite.report.run_report import read_run
from diffsynth_lite.run_folder.folder import RunFolder

FILES = (
    *("status.json", "metrics.jsonl", "resolved.yaml", "lineage.json", "quarantine.jsonl", "items.jsonl"),
    *("item_losses.jsonl", "layers.jsonl", "scores.json", ".lock"),
)


def test_a_run_is_shown_with_all_that_it_left(tmp_path: Path) -> None:
    folder = RunFolder(full_folder(tmp_path / "mine"))
    folder.lora_folder.mkdir()
    (folder.lora_folder / "one #1.safetensors").write_bytes(b"\0" * 2048)
    text = write_report(folder.path).read_text()
    page = HtmlPage(text)
    shown = re.sub(r"\s+", " ", page.text)
    for words in (
        *("Failed", "LoRA: one #1.safetensors 2.0 KiB", "Step 200 of 300", "no memory for a circle"),
        "on training data: 0.9 at step 0, 0.3 at step 200",
        "backward pass 50 %, forward pass and loss 25 %, between steps 25 %",
        *("above 0.6 now. 2 of 3 got better, the median by -40.0 %", "2 a circle 8x8", "+20.0 %"),
        *("2 items with four samples and more; 80 samples.", "samples a circle 1.75 0.10 40"),
        *("0.0-0.1 25.0 % 0.4 0.3 0.2 -50.0 % -33.3 %", "0.5 1.167 1.033 -11.4 %"),
        "1 of 4 layers did not change at all: blocks.1.a circle",
        *("blocks.1.to_q 10 %", "6 run, 6 checkpointed, 6 recomputed", "2 tensors, 2.0 KiB"),
        *("900 bytes measured, 1000 bytes planned (-10.0 %)", "memory.auto chose memory.stream_blocks: 3"),
        *("a circle: a circle to 2", "no image: a circle", "Skipped items", "1 item ", "layers.jsonl"),
    ):
        assert words in shown, words
    assert page.tags.count("figure") == 12
    assert page.places.count("lora/one%20%231.safetensors") == 2
    assert "previews/" not in page.places
    sections = re.findall(r'<(?:header|section)[^>]* id="(\w+)"', text)
    assert re.findall(r'<li><a href="#(\w+)">', text) == sections
    assert sections[:4] == ["top", "previews", "scores", "charts"]


def test_what_others_wrote_is_text_and_no_script_but_ours_may_run(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine", text=ATTACK)
    page = HtmlPage(write_report(folder).read_text())
    harmless = HtmlPage(render([read_run(full_folder(tmp_path / "harmless"))]))
    assert page.tags == harmless.tags
    assert page.text.count(ATTACK) >= 8
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in page.scripts
    ]
    assert len(hashes) == 4
    assert f"default-src 'none'; script-src {' '.join(hashes)}" in " ".join(page.policy.split())


def test_nothing_is_fetched_from_elsewhere(tmp_path: Path) -> None:
    text = write_report(full_folder(tmp_path / "mine")).read_text()
    places = HtmlPage(text).places
    assert len(places) > 20
    assert [place for place in places if "//" in place and not place.startswith("data:")] == []
    # The one address is that of the chart library, in its first comment.
    assert re.findall(r"https?://[^\s\"')]+", text) == ["https://github.com/leeoniya/uPlot"]
    assert "@import" not in text
    assert "url(" not in text


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "3\n", '{"step": [], "state": []}\n', "\0\n\xff\n"])
def test_any_content_of_any_file_gives_a_page(tmp_path: Path, content: str) -> None:
    folder = full_folder(tmp_path / "mine")
    for name in FILES:
        (folder / name).write_text(content, encoding="latin-1")
    assert "Not started" in render([read_run(folder)])


@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing_or_torn(tmp_path: Path, missing: str) -> None:
    folder = full_folder(tmp_path / "mine")
    if (folder / missing).exists():
        (folder / missing).write_bytes((folder / missing).read_bytes()[:-20])
        render([read_run(folder)])
        (folder / missing).unlink()
    assert read_run(folder).problems == []
    assert "mine" in render([read_run(folder)])


def test_a_folder_that_is_not_there_gives_a_page(tmp_path: Path) -> None:
    page = render([read_run(tmp_path / "none")])
    assert "Not started" in page
    assert "<h2>Memory" not in page


def test_a_run_whose_trainer_is_gone_was_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.write_status("running", exit_code=None, step=30, message="training", progress={"time": 5.0})
        running = read_run(tmp_path).state
        assert (running.title, running.step, running.seen_at) == ("Running", 30, 5.0)
        for phase, counts, title in [
            ("encoding", {"done": 18, "of": 26}, "Encoding 18 of 26"),
            ("downloading", {"done": 3 * 2**30, "of": 2**35}, "Downloading 3.0 GiB of 32.0 GiB"),
            ("loading", {}, "Loading"),
            ("<b>", {"done": 1, "of": 2}, "Running"),
        ]:
            progress = {"phase": phase, **counts}
            folder.write_status("running", exit_code=None, step=30, message=phase, progress=progress)
            assert read_run(tmp_path).state.title == title
        assert 'class="pill running"' in render([read_run(tmp_path)])
        lock = tmp_path / ".lock"
        lock.write_text(re.sub(r"process \d+", "process 99999999", lock.read_text()))
        # It had no time to write its last status.
        (tmp_path / "metrics.jsonl").write_text('{"step": 30}\n{"step": 37}\n')
        killed = read_run(tmp_path).state
        assert (killed.title, killed.step) == ("Killed", 37)


def test_a_run_of_another_machine_shows_which(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_status("finished", exit_code=0, step=2, message="")
    assert "<dt>On</dt>" not in render([read_run(tmp_path)])
    (tmp_path / ".lock").write_text("process 7 on node-3, started then\n")
    assert "<dt>On</dt><dd>node-3</dd>" in render([read_run(tmp_path)])


def test_a_run_that_diverged_shows_the_last_step_that_was_tried(tmp_path: Path) -> None:
    RunFolder(tmp_path).write_status("diverged", exit_code=3, step=0, message="step 9: loss not finite")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 9, "loss": null}\n')
    state = read_run(tmp_path).state
    assert (state.title, state.step) == ("Diverged", 9)


def test_a_run_took_the_time_from_its_start_to_its_end_without_that_between_starts(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine")
    folder.joinpath("lineage.json").write_text(
        '[{"at": "1970-01-01T00:00:50+00:00"}, {"at": "1970-01-01T00:03:20+00:00"}]'
    )
    rows = '{"step": 1, "time": 100}\n{"step": 2, "time": 210}\n'
    folder.joinpath("metrics.jsonl").write_text(rows)
    RunFolder(folder).write_status("finished", exit_code=0, step=2, message="", progress={"time": 260.0})
    state = read_run(folder).state
    assert (state.seconds_taken, state.seen_at) == (50 + 60, 260.0)
    # A start that failed before it came to the lineage adds none of the time since the one before it.
    RunFolder(folder).write_status("failed", exit_code=2, step=2, message="", progress={"time": 900.0})
    state = read_run(folder).state
    assert (state.seconds_taken, state.seen_at) == (50 + 10, 900.0)


def test_times_that_no_calendar_knows_are_left_out(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1e20}\n{"step": 2, "time": -1}\n')
    (folder / "status.json").write_text('{"state": "failed", "time": 1e20, "found_at": {}}')
    assert read_run(folder).state.seen_at is None


def test_secrets_are_masked(tmp_path: Path) -> None:
    token = "hf_abcdefghijklmnopqrstuvwxyz"
    text = render([read_run(full_folder(tmp_path / "mine", text=token))])
    assert token not in text
    assert text.count("REDACTED") > 5


def test_a_page_holds_so_many_bytes_of_previews_and_links_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = full_folder(tmp_path / "mine", steps=range(0, 2000, 100))
    prompts = read_run(folder).prompts
    assert [[each.step for each in prompt.previews] for prompt in prompts] == [
        [0, 200, 300, 500, 700, 900, 1000, 1200, 1400, 1600, 1700, 1900]
    ] * 2
    monkeypatch.setattr(previews, "MAX_EMBEDDED_BYTES", 1000)
    embedded = previews.embedded(folder, prompts)
    assert 0 < sum(map(len, embedded.values())) <= 1000
    assert list(embedded) == [
        *("previews/step-00001900-prompt-00-aa0.png", "previews/step-00001900-prompt-01-aa1.png"),
        *("previews/step-00001900-prompt-01-aa1.mp4", "previews/step-00000000-prompt-00-aa0.png"),
        *("previews/step-00000000-prompt-01-aa1.png", "previews/step-00000000-prompt-01-aa1.mp4"),
    ]
    page = HtmlPage(render([read_run(folder)]))
    assert "previews/step-00000900-prompt-00-aa0.png" in page.places
    assert "12 of 20 steps are shown" in page.text


def test_large_images_are_made_smaller_and_broken_ones_left_out(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine", steps=(0, 100))
    noise = Image.effect_noise((1200, 900), 60)
    noise.save(folder / "previews" / "step-00000100-prompt-00-aa0.png")
    (folder / "previews" / "step-00000000-prompt-00-aa0.png").write_bytes(b"\x89PNG" + b"\0" * 2**17)
    embedded = previews.embedded(folder, read_run(folder).prompts)
    assert "previews/step-00000000-prompt-00-aa0.png" not in embedded
    url = embedded["previews/step-00000100-prompt-00-aa0.png"]
    (tmp_path / "small.jpg").write_bytes(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))
    with Image.open(tmp_path / "small.jpg") as small:
        assert small.size == (768, 576)


def test_a_changed_prompt_shows_the_previews_of_its_latest_form(tmp_path: Path) -> None:
    folder = full_folder(tmp_path / "mine", steps=(0, 100))
    Image.new("RGB", (8, 8)).save(folder / "previews" / "step-00000200-prompt-00-bbb.png")
    assert [each.step for each in read_run(folder).prompts[0].previews] == [200]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (75, "1 min 15 s"), (7260, "2 h 1 min"), (180_000, "2 d 2 h")]
)
def test_times_are_written_in_their_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP_PX, False), (PHONE_PX, True)])
def test_a_browser_draws_it_and_keeps_in_its_address_what_was_chosen(
    tmp_path: Path, browser: Browser, width: int, dark: bool
) -> None:
    path = write_report(full_folder(tmp_path / "mine", text=ATTACK))
    url = path.as_uri()
    with browser.page(f"{url}#prompt=0&step=100&sort=name-up", width=width, dark=dark) as page:
        # The clips are not clips: that they do not play is all that it may complain about.
        assert [each for each in page.complaints if "media" not in each.lower()] == []
        assert page.requests == [url]
        assert page.overflow_px() <= 0
        assert page.evaluate("document.title") == "mine"
        assert page.nameless() == []
        assert page.evaluate("document.querySelectorAll('.plot canvas').length") == 12
        band = page.evaluate(
            of_chart("score_total", "chart.bands[0].series.map(line => chart.data[line][1])")
        )
        assert band == sorted(band, reverse=True)
        assert band[0] > band[1]
        assert page.text(".viewer .label-after") == "step 100"
        assert page.text(".items tbody b").startswith("0 ")
        page.click(".items th[data-sort=change] button")
        assert page.text(".items tbody b").startswith("0 ")
        page.click(".items th[data-sort=change] button")
        assert page.text(".items tbody b").startswith("2 ")
        page.click(".prompt:nth-of-type(1) a[data-step='200']")
        assert page.text(".viewer .label-after") == "step 200"
        page.click(".index a[href='#hard']")
        assert page.evaluate("document.querySelector('#hard .drawer').open")
        page.wait_for("document.querySelector('.index [aria-current]').innerText === 'Hard items'")
        page.click("#theme")
        assert page.text("#theme").split() == ["Theme", "light"]
        chosen = dict(pair.split("=") for pair in page.evaluate("location.hash.slice(1)").split("&"))
        assert chosen == {"prompt": "0", "step": "200", "sort": "change-down", "theme": "light"}
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_charts_have_their_axes_and_lines_and_what_a_reader_zoomed_into_stays(
    tmp_path: Path, browser: Browser
) -> None:
    folder = full_folder(tmp_path / "mine")
    with RunFolder(folder).metrics_file.open("a") as metrics:
        for step, loss in ((0, 0.9), (50, 0.6), (100, 0.4), (150, 0.5), (200, 0.6)):
            metrics.write(f'{{"step": {step}, "time": 401.0, "validation_loss": {loss}}}\n')
    measured = [{"step": step, "losses": [0.5 + step / 500, 1.0, 2.0]} for step in range(0, 250, 50)]
    write_rows(RunFolder(folder).item_losses_file, measured)
    with browser.page(write_report(folder)) as page:
        assert "held-out data fell by 56 % until step 100, has not improved since" in page.text("header")
        page.click("header [data-show-step]")
        assert page.text(".viewer .label-after") == "step 100"
        assert "1 of 3 images is worse than at the start." in page.text("header")
        assert page.text(".items tbody b").startswith("2 ")
        page.click("header [data-sort-by]")
        assert page.text(".items tbody b").startswith("0 ")
        # Equal ratios take equal room on a logarithmic axis, equal differences on any other.
        distances = "[1, 2, 4, 7].map(x => chart.valToPos(x / 10, 'y')).map((x, i, all) => x - all[i + 1])"
        ratio_1, ratio_2, _, _ = page.evaluate(of_chart("update", distances))
        _, difference_1, difference_2, _ = page.evaluate(of_chart("fixed_noise_loss", distances))
        assert ratio_1 == pytest.approx(ratio_2)
        assert 3 * difference_1 == pytest.approx(2 * difference_2)
        lines = "chart.series.slice(1).map(line => [line.label, line.width, line.stroke()])"
        (raw, thin, pale), (smoothed, thick, strong) = page.evaluate(of_chart("loss", lines))
        assert (raw, thin, smoothed, thick) == ("each logged step", 1, "smoothed", 2)
        assert pale.startswith(strong.removesuffix(")"))
        assert pale != strong
        both = page.evaluate(of_chart("fixed_noise_loss", lines))
        assert [label for label, *_ in both] == ["on training data", "on held-out data"]
        assert len({colour for *_, colour in both}) == 2

        shown = "[chart.scales.x.min, chart.scales.x.max]"
        page.evaluate(of_chart("loss", "chart.setScale('x', {min: 50, max: 100})"))
        page.click("#theme")
        assert page.evaluate(of_chart("loss", shown)) == [50, 100]
        page.evaluate(
            "(text => { const data = JSON.parse(text.textContent);"
            "for (const [steps, values] of Object.values(data.runs[0].series))"
            "  { steps.push(300); values.push(values.at(-1)); }"
            "text.textContent = JSON.stringify(data);"
            "document.dispatchEvent(new Event('renewed')); })(document.getElementById('data'))"
        )
        assert page.evaluate(of_chart("loss", shown)) == [50, 100]
        assert page.evaluate(of_chart("grad_norm", shown)) == [10, 300]


def test_a_page_that_nobody_writes_any_more_shows_that(tmp_path: Path, browser: Browser) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", exit_code=None, step=3, message="", progress={"time": time.time()})
    with browser.page(write_report(tmp_path)) as page:
        note = "document.querySelector('[data-silent-since]')"
        assert page.evaluate(f"{note}.hidden")
        page.evaluate(f"{note}.dataset.silentSince -= 700; document.dispatchEvent(new Event('renewed'))")
        assert "No sign of the trainer" in page.text("header")


class Pages:
    """Writes no pages, which takes seconds of a clock that it moves itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float, error: Exception | None) -> None:
        self.now, self.written_at = 1000.0, []
        self._seconds, self._error = seconds, error
        monkeypatch.setattr(page_module, "write_report", self._write)

    def writer(self, *, is_main: bool = True) -> ReportWriter:
        return ReportWriter(Path(), is_main=is_main, clock=lambda: self.now)

    def _write(self, folder: Path) -> None:
        assert folder == Path()
        self.written_at.append(self.now)
        self.now += self._seconds
        if self._error:
            raise self._error


@pytest.mark.parametrize(("cost", "first"), [(0.5, [20.0, 70.5, 121.0]), (0.0, [20.0, 40.0, 60.0])])
def test_a_page_is_renewed_every_20_seconds_and_takes_a_hundredth_of_the_time_at_most(
    monkeypatch: pytest.MonkeyPatch, cost: float, first: list[float]
) -> None:
    pages = Pages(monkeypatch, seconds=cost, error=None)
    writer, began = pages.writer(), pages.now
    for _ in range(1000):
        pages.now += 1.0
        writer.refresh()
    assert [at - began for at in pages.written_at[:3]] == first
    assert cost * len(pages.written_at) <= 0.01 * (pages.now - began)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TypeError("a bug")])
def test_a_page_that_cannot_be_written_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=error)
    writer = pages.writer()
    with writer.concluded():
        for _ in range(3):
            pages.now += 100
            writer.refresh()
    assert len(pages.written_at) == 4
    [line] = caplog.messages
    assert str(error) in line
    assert bool(caplog.records[0].exc_info) == isinstance(error, TypeError)


def test_a_run_that_fails_has_a_page_and_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=OSError("no page either"))
    with pytest.raises(RunInterrupted, match="asked to"), pages.writer().concluded():
        raise RunInterrupted("asked to")
    assert len(pages.written_at) == 1


def test_who_must_not_write_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch, seconds=0.0, error=None)
    with pytest.raises(DifferentRunError), pages.writer().concluded():
        raise DifferentRunError("other data")
    other_process = pages.writer(is_main=False)
    with other_process.concluded():
        pages.now += 100
        other_process.refresh()
    assert pages.written_at == []


def test_the_page_of_a_run_that_has_ended_is_written_where_it_is_missing_or_old(tmp_path: Path) -> None:
    writer, file = ReportWriter(tmp_path, is_main=True), tmp_path / "report.html"
    writer.restore()
    written = file.read_text()
    writer.restore()
    assert file.read_text() == written
    file.write_text(written.replace("diffsynth_lite", "another", 1))
    writer.restore()
    assert "diffsynth_lite" in file.read_text()[:1000]
