"""The doctor as a command: what it prints, its page, and its exit codes."""

import json

import pytest
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main


def doctor(run: TinyRun, *arguments: str) -> int:
    return main(["doctor", "--config", str(run.config), "--page", str(run.root / "page.html"), *arguments])


def test_good_data_exit_with_0_and_have_a_page(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tiny_run) == 0
    printed = capsys.readouterr().out
    for words in (
        "none that is known",
        "5 images",
        "64x32",
        "one pass",
        "entries to make",
        "free disk",
        "torch",
        "all steps",
    ):
        assert words in printed
    page = (tiny_run.root / "page.html").read_text()
    assert page.count("data:image/jpeg") == 5
    assert "5 items for qwen_image" in page
    assert not tiny_run.folder.exists()


def test_a_terminal_of_80_columns_shows_every_column(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert doctor(tiny_run, "data.repeats=17") == 0
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    row = next(line for line in lines if "5 images" in line)
    assert any(line.endswith("times a pass") for line in lines)
    assert row.endswith(" 17")


def test_overrides_may_be_before_and_after_flags(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("data.width=32", "data.height=48")
    page = tiny_run.root / "other.html"
    arguments = ["doctor", size[0], "--config", str(tiny_run.config), size[1], "--page", str(page)]
    assert main([*arguments, "--sheet", "2", "train.steps=6000"]) == 0
    printed = capsys.readouterr().out
    assert "32x48" in printed
    assert "6000 steps are 4,800 passes" in printed
    assert page.read_text().count("data:image/jpeg") == 2
    assert "2 of 5 items" in page.read_text()


def test_bad_data_exit_with_2_after_everything_is_shown(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_run.root / "data" / "3.png").write_text("<html>")
    (tiny_run.root / "data" / "4.txt").unlink()
    assert doctor(tiny_run) == 2
    printed = capsys.readouterr().out
    assert "3.png: not a PNG" in printed
    assert "64x32" in printed
    assert "4.png: no caption: write 4.txt" in printed
    assert caplog.text.count("1 of 5 items cannot be used; they are listed above\n") == 2
    page = (tiny_run.root / "page.html").read_text()
    assert "no caption: write 4.txt" in page
    assert page.count("data:image/jpeg") == 3 + 1  # what has no caption is shown with its reason


def test_long_lists_are_cut_short_on_the_console(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(14):
        (tiny_run.root / "data" / f"bad {number:02}.png").write_text("<html>")
        (tiny_run.root / "data" / f"bad {number:02}.txt").write_text("a [bold]caption[/]")
    assert doctor(tiny_run) == 2
    printed = capsys.readouterr().out
    assert "What stops the run (14)" in printed
    assert "bad 09.png: " in printed
    assert "bad 10.png: " not in printed
    assert "and 4 more, on the page" in printed
    assert "[bold]caption[/]" in printed
    assert caplog.messages[-1].endswith("14 of 19 items cannot be used; they are listed above")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.path=nowhere", "nowhere: no such folder"),
        ("data.pth=x", "data.pth"),
        ("model.family=fluxx", "did you mean 'flux'?"),
        ("data.width=60", "60x32 is not divisible by 16"),
        ("model.path=./nowhere", "model.path"),
    ],
)
def test_wrong_settings_exit_with_2_and_one_line(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, change: str, message: str
) -> None:
    assert doctor(tiny_run, change) == 2
    [line] = caplog.messages
    assert message in line


def test_without_the_model_the_data_are_shown_all_the_same(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tiny_run, "model.path=./nowhere", "model.text_encoder_dtype=bfloat16") == 2
    assert caplog.messages[-1].startswith("model.path: there is no folder ./nowhere; ")
    printed = capsys.readouterr().out
    for words in ("5 images", "64x32", "not counted without the model", "by the settings of a release"):
        assert words in " ".join(printed.split())
    page = (tiny_run.root / "page.html").read_text()
    assert page.index("What stops the run") < page.index("there is no folder ./nowhere")
    assert page.count("data:image/jpeg") == 5


def test_a_page_that_cannot_be_written_is_an_error(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert doctor(tiny_run, "--page", str(tiny_run.root)) == 2
    assert f"--page {tiny_run.root}: cannot be written" in caplog.text


def test_json_is_all_that_is_printed_and_has_the_findings_of_each_item(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_run.root)
    assert main(["doctor", "--config", str(tiny_run.config), "--json", "--goal", "style"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["items"].keys() == {f"{number}.png" for number in range(5)}
    assert found["items"]["0.png"]["crops"][0]["bucket"] == "64x32"
    assert found["num_items"] == 5
    assert any("usual for --goal style" in line for line in found["advice"])
    assert found["held_out"] is None
    assert not (tiny_run.root / "doctor.html").exists()


def test_json_of_bad_data_has_the_same_exit_code_and_a_page_where_it_is_asked_for(
    tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_run.root / "data" / "3.png").write_text("<html>")
    assert doctor(tiny_run, "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert found["items"]["3.png"]["remarks"][0].startswith("cannot be used: ")
    assert (tiny_run.root / "page.html").exists()
