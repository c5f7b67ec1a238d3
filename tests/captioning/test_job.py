"""Writing the captions of a folder, with a captioner that answers by the colour of an image."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from colour_captioner import COLOURS, NAMES, REFUSAL, Colours, captions_in, job_in, status_of, write
from PIL import Image
from processes import FORKED, LIMIT_S

from diffsynth_lite.captioning import job as job_module
from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.captioning.choice import choose
from diffsynth_lite.captioning.contents import read_contents
from diffsynth_lite.captioning.instructions import CaptionRequest, plainer
from diffsynth_lite.captioning.job import MAX_SIDE, MAX_SIDE_OF_MANY, finish_parts, write_captions
from diffsynth_lite.captioning.report import CaptionReport, is_by_model
from diffsynth_lite.data.records import Part
from diffsynth_lite.data.video import write_video
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.run_folder.lock import open_lock

SIZE = (48, 32)
ALL = [f"A {colour} square.\n" for colour in COLOURS.values()]


def interrupt(_: Question) -> str:
    raise RunInterrupted("SIGTERM: stopped")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", SIZE, colour).save(folder / name)
    return folder


def test_each_item_without_a_caption_gets_one_and_the_others_stay(folder: Path) -> None:
    (folder / "b.txt").write_text("mine")
    (folder / "c.caption").write_text("mine, too\n")
    (folder / "d.txt").write_text(" \n")
    outcome = write(folder)
    assert captions_in(folder) == {
        "a.txt": "A red square.\n",
        "b.txt": "mine",
        "c.caption": "mine, too\n",
        "d.txt": "A yellow square.\n",
        "e.txt": "A magenta square.\n",
    }
    assert (list(outcome.made), outcome.kept, outcome.failed) == (["a.png", "d.png", "e.png"], 2, {})
    report = CaptionReport(folder)
    rows = report.rows()
    assert rows.keys() == outcome.made.keys()
    assert all(is_by_model(row, outcome.made[file].text) for file, row in rows.items())
    assert (rows["a.png"].model, rows["a.png"].num_tokens) == ("colours", 3)
    status = status_of(folder)
    assert not status.is_running
    assert (status.state, status.phase, status.done, status.total) == ("finished", "captioning", 3, 3)
    assert (status.model, status.arguments, status.message) == ("colours", ("pictures",), outcome.summary)
    assert status.seconds_per_item > 0
    assert outcome.summary.startswith("3 written, 2 kept, in ")


def test_nothing_is_opened_where_every_item_has_a_caption(folder: Path) -> None:
    write(folder)
    before = captions_in(folder)

    def fail() -> Colours:
        pytest.fail("the model was loaded")

    outcome = write_captions(job_in(folder), fail)
    assert (outcome.made, outcome.kept, captions_in(folder)) == ({}, 5, before)


@pytest.mark.parametrize(
    ("replaced", "only", "changed"),
    [
        ("none", [], []),
        ("model", [], ["a.txt", "b.txt", "c.caption"]),
        ("all", [], ["a.txt", "b.txt", "c.caption", "d.txt"]),
        ("all", ["d.png"], ["d.txt"]),
        ("model", ["d.png", "a.png"], ["a.txt"]),
    ],
)
def test_only_what_may_be_replaced_is_written_again(
    folder: Path, replaced: str, only: list[str], changed: list[str]
) -> None:
    (folder / "c.caption").touch()
    write(folder)
    (folder / "d.txt").write_text("changed by hand")
    (folder / "e.png").unlink()
    (folder / "e.txt").unlink()
    (folder / "f.txt").write_text("several")
    (folder / "f.1.txt").write_text("captions")
    Image.new("RGB", SIZE, "red").save(folder / "f.png")
    before = captions_in(folder)
    again = Colours(dict.fromkeys(NAMES.values(), "Another one."))
    outcome = write(folder, again, replaced=replaced, only=only)
    after = captions_in(folder)
    assert {name for name in after if after[name] != before[name]} == set(changed)
    assert after.keys() == before.keys()
    assert outcome.locked == (["f.png"] if replaced != "none" and not only else [])


def test_what_somebody_writes_while_a_model_answers_stays(folder: Path) -> None:
    write(folder, only=["b.png", "c.png"])

    def meanwhile(_: Question) -> str:
        (folder / "a.caption").write_text("mine")
        (folder / "b.txt").write_text("mine now")
        (folder / "c.txt").unlink()
        return "A red square."

    outcome = write(folder, Colours({"red": meanwhile}, batch_size=8), replaced="model")
    assert (outcome.appeared, list(outcome.made)) == (["a.png", "b.png"], ["c.png", "d.png", "e.png"])
    found = captions_in(folder)
    assert (found["a.caption"], found["b.txt"], found["c.txt"]) == ("mine", "mine now", "A blue square.\n")
    assert "a.txt" not in found
    assert outcome.summary.startswith("3 written, 2 kept, in ")


def test_two_items_that_share_a_caption_file_are_asked_about_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", SIZE, "blue").save(folder / "a.jpg")
    captioner = Colours()
    outcome = write(folder, captioner)
    assert (len(captioner.asked), outcome.kept) == (5, 1)
    assert "share the caption file of another item; " in caplog.text
    assert caplog.text.endswith(": a.png (a.jpg)\n")


def test_a_file_that_cannot_be_read_is_named_and_the_rest_goes_on(folder: Path) -> None:
    (folder / "a.png").write_bytes(b"damaged")
    (folder / "c.png").write_bytes((folder / "c.png").read_bytes()[:-30])
    (folder / "f.mp4").write_bytes(b"damaged")
    (folder / "g.png").symlink_to(folder.parent / "elsewhere.png")
    outcome = write(folder)
    assert list(outcome.made) == ["b.png", "d.png", "e.png"]
    assert outcome.failed.keys() == {"a.png", "c.png", "f.mp4", "g.png"}
    assert outcome.failed["a.png"].startswith("not a PNG, JPEG")
    status = status_of(folder)
    assert (status.failed, status.done) == (outcome.failed, 6)


def test_a_refusal_is_asked_once_more_and_never_written(folder: Path) -> None:
    asked = []

    def first_refused(question: Question) -> str:
        asked.append(question.instruction)
        return REFUSAL if len(asked) == 1 else "A lime square."

    answers = {
        "red": REFUSAL,
        "lime": first_refused,
        "blue": "",
        "yellow": Answer(problem="the server refuses it"),
        "magenta": "```\n \n```",
    }
    captioner = Colours(answers, batch_size=5)
    outcome = write(folder, captioner)
    assert captions_in(folder) == {"b.txt": "A lime square.\n"}
    assert asked == [asked[0], plainer(asked[0])]
    assert CaptionReport(folder).rows()["b.png"].instruction == plainer(asked[0])
    assert len(captioner.asked) == 7
    assert list(outcome.failed) == ["a.png", "c.png", "d.png", "e.png"]
    assert outcome.failed["a.png"].startswith("the model refused: I'm sorry")
    assert outcome.failed["d.png"] == "the server refuses it"
    assert all(outcome.failed.values())


def test_the_trigger_is_put_in_front_and_what_is_not_read_is_cut(folder: Path) -> None:
    def eight_words(text: str) -> bool:
        return len(text.split()) <= 8

    answers = {"red": "The OHWX cat sits. It has a long tail which nobody reads.", "lime": "A cat."}
    request = CaptionRequest(trigger="ohwx cat")
    outcome = write(
        folder, Colours(answers), request=request, limit=lambda: eight_words, only=["a.png", "b.png"]
    )
    assert captions_in(folder) == {"a.txt": "The ohwx cat sits.\n", "b.txt": "ohwx cat, a cat.\n"}
    row = CaptionReport(folder).rows()["a.png"]
    assert (row.cut.strip(), outcome.made["a.png"].cut) == ("It has a long tail which nobody reads.", row.cut)
    assert "2 written, 0 kept, 1 cut, in " in outcome.summary
    outcome = write(folder, request=request, limit=lambda: lambda _: False, only=["c.png"])
    assert outcome.failed == {"c.png": "nothing of the answer fits what the text encoder reads"}


def test_in_json_the_trigger_is_put_into_the_first_sentence(folder: Path) -> None:
    parts = {"background": "a room", "elements": [{"type": "obj", "desc": "a tail"}]}
    answer = json.dumps({"high_level_description": "A cat.", "compositional_deconstruction": parts})
    request = CaptionRequest(trigger="ohwx cat", format="json")
    write(folder, Colours({"red": f"```json\n{answer}\n```"}), request=request, only=["a.png"])
    found = json.loads(captions_in(folder)["a.txt"])
    assert found == {"high_level_description": "ohwx cat, A cat.", "compositional_deconstruction": parts}


def test_rules_of_cleaning_can_be_switched_off(folder: Path) -> None:
    answers = dict.fromkeys(NAMES.values(), "The image shows a square.")
    outcome = write(folder, Colours(answers), only=["a.png"])
    assert outcome.made["a.png"].removed == ("openings",)
    assert CaptionReport(folder).rows()["a.png"].removed == ("openings",)
    write(folder, Colours(answers), only=["b.png"], kept_rules=["openings"])
    assert captions_in(folder) == {"a.txt": "A square.\n", "b.txt": "The image shows a square.\n"}


def test_images_are_upright_opaque_and_small_and_clips_a_few_frames(tmp_path: Path) -> None:
    sideways = Image.new("RGB", (3000, 1500), "red")
    exif = sideways.getexif()
    exif[0x0112] = 6
    sideways.save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(tmp_path / "b.png")
    frames = [Image.new("RGB", (640, 320), (10 * number, 0, 0)) for number in range(20)]
    write_video(tmp_path / "c.mp4", frames, fps=10)
    captioner = Colours()
    write(tmp_path, captioner, num_frames=4)
    upright, opaque, clip = (question.images for question in captioner.asked)
    assert [image.size for image in upright] == [(MAX_SIDE // 2, MAX_SIDE)]
    assert (opaque[0].mode, opaque[0].getpixel((0, 0))) == ("RGB", (255, 255, 255))
    assert [frame.size for frame in clip] == [(MAX_SIDE_OF_MANY, MAX_SIDE_OF_MANY // 2)] * 4
    reds = [frame.getpixel((9, 9))[0] for frame in clip]  # type: ignore[index]
    assert reds == pytest.approx([20, 70, 120, 170], abs=8), "in the middle of each quarter; the codec rounds"
    write(tmp_path, captioner, num_frames=99, replaced="all", only=["c.mp4"])
    assert len(captioner.asked[-1].images) == 20


def test_the_inputs_of_an_edit_come_before_its_result(folder: Path, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for name in list(COLOURS)[1:]:
        Image.new("RGB", SIZE, "white").save(before / name)
    captioner = Colours(batch_size=1)
    outcome = write(folder, captioner, inputs=[before], request=CaptionRequest(goal="edit"))
    assert [len(question.images) for question in captioner.asked] == [2] * 4
    assert captioner.asked[0].images[0].getpixel((0, 0)) == (255, 255, 255)
    assert outcome.made["b.png"].text == "A lime square."
    assert list(outcome.failed) == ["a.png"]


def test_a_table_is_never_written(folder: Path) -> None:
    (folder / "metadata.csv").write_text("file_name,text\na.png,mine\n")
    with pytest.raises(UserError, match=r"its captions are in metadata\.csv, which is never written"):
        write(folder, replaced="all")
    assert (folder / "metadata.csv").read_text() == "file_name,text\na.png,mine\n"
    assert captions_in(folder) == {}


def test_items_are_asked_for_by_their_names_or_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    report = CaptionReport(folder)

    def chosen(*only: str) -> list[str]:
        job = job_in(folder, only=only)
        return [item.file for item in choose(job, read_contents(job.source), report).items]

    assert chosen("b.png", str(folder / "a.png"), "pictures/c.png") == ["a.png", "b.png", "c.png"]
    (folder / "sub dir").mkdir()
    (folder / "b.png").rename(folder / "sub dir" / "deep.png")
    with pytest.raises(UserError, match=r"--only deep\.png: .*; did you mean 'sub dir/deep\.png'\?"):
        chosen("deep.png")
    (folder / "sub dir" / "deep.png").rename(folder / "b.png")
    with pytest.raises(UserError, match=r"--only b\.pgn: is not an item of .*; did you mean 'b\.png'\?"):
        chosen("a.png", "b.pgn")
    assert not report.folder.exists()


def test_a_dry_run_writes_no_caption_and_no_row(folder: Path) -> None:
    outcome = write(folder, num_shown=3)
    assert {name: made.text for name, made in outcome.made.items()} == {
        "a.png": "A red square.",
        "c.png": "A blue square.",
        "e.png": "A magenta square.",
    }
    report = CaptionReport(folder)
    status = status_of(folder)
    assert status.preview == {name: made.text for name, made in outcome.made.items()}
    assert (captions_in(folder), report.rows(), report.page_file.exists()) == ({}, {}, False)
    shutil.rmtree(report.folder)
    report.folder.touch()  # so that nothing can be written there
    assert write(folder, num_shown=3).made == outcome.made
    with pytest.raises(UserError, match="cannot be written to"):
        write(folder)


def test_a_captioner_that_fails_leaves_the_captions_so_far(folder: Path) -> None:
    def fail(_: Question) -> str:
        raise UserError("the server is gone")

    last = Answer(problem="the server is gone", is_last=True)
    for answers in ({"blue": fail}, {"blue": last, "magenta": fail}):
        with pytest.raises(UserError, match="the server is gone"):
            write(folder, Colours(answers))
        status = status_of(folder)
        assert (status.state, status.message) == ("failed", "the server is gone")
        assert status.failed == {}
    assert list(captions_in(folder)) == ["a.txt", "b.txt", "d.txt"]
    write(folder)
    assert len(captions_in(folder)) == 5


def test_a_full_disk_stops_the_job_and_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write_two(path: Path, text: str) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written.append(path)
        path.write_text(text)

    monkeypatch.setattr(job_module, "write_text", write_two)
    with pytest.raises(
        RunStoppedError, match=r"no space left on the disk .*c\.txt.*; captions already written"
    ):
        write(folder)
    status = status_of(folder)
    assert status.state == "failed"
    monkeypatch.undo()
    write(folder)
    assert list(captions_in(folder).values()) == ALL


def test_a_caption_that_cannot_be_written_is_named_and_the_rest_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.png").rename(folder / f"{'a' * 250}.png")
    outcome = write(folder)
    assert list(outcome.failed.values()) == ["its caption cannot be written: File name too long"]
    assert len(captions_in(folder)) == 4


def test_a_report_that_cannot_be_written_is_an_error_in_a_line(folder: Path) -> None:
    (folder / ".captions" / "report.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match=r"report\.jsonl: cannot be written: Is a directory"):
        write(folder)
    assert captions_in(folder) == {}


@pytest.mark.parametrize("replaced", ["none", "model", "all"])
def test_a_job_that_is_interrupted_goes_on_where_it_was(folder: Path, replaced: str) -> None:
    if replaced != "none":
        write(folder, Colours(dict.fromkeys(NAMES.values(), "As before.")))

    with pytest.raises(RunInterrupted):
        write(folder, Colours({"yellow": interrupt}, batch_size=1), replaced=replaced)
    assert "A lime square." in CaptionReport(folder).page_file.read_text()
    status = status_of(folder)
    assert (status.state, status.message, status.done) == ("stopped", "SIGTERM: stopped", 3)
    captioner = Colours()
    write(folder, captioner, replaced=replaced)
    assert len(captioner.asked) == 2
    assert list(captions_in(folder).values()) == ALL
    again = Colours()
    write(folder, again, replaced=replaced)
    assert len(again.asked) == (0 if replaced == "none" else 5), "it was finished, so this is a new job"


def test_what_somebody_made_of_a_caption_stays_when_an_interrupted_job_goes_on(folder: Path) -> None:
    before, later = time.time() - 9, time.time() + 9
    for name in ("b.txt", "d.txt"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (before, before))
    with pytest.raises(RunInterrupted):
        write(folder, Colours({"yellow": interrupt}, batch_size=1), replaced="all")
    (folder / "a.txt").write_text("changed by hand")
    os.utime(folder / "a.txt", (later, later))
    (folder / "b.txt").write_text("as after a kill between the row and the caption")
    os.utime(folder / "b.txt", (before, before))
    write(folder, replaced="all")
    assert list(captions_in(folder).values()) == ["changed by hand", *ALL[1:]]


def write_slowly(folder: Path, is_asked: object) -> None:
    """Write captions until the fourth item, and wait there."""

    def wait(_: Question) -> str:
        is_asked.set()  # type: ignore[attr-defined]
        time.sleep(LIMIT_S)
        return ""

    write(folder, Colours({"yellow": wait}, batch_size=1))


def test_a_second_command_is_refused_until_the_first_is_killed_and_then_goes_on(folder: Path) -> None:
    is_asked = FORKED.Event()
    first = FORKED.Process(target=write_slowly, args=(folder, is_asked))
    first.start()
    report = CaptionReport(folder)
    try:
        assert is_asked.wait(LIMIT_S)
        status = status_of(folder)
        assert status.is_running
        assert (status.state, status.done, status.total) == ("running", 3, 5)
        with pytest.raises(UserError, match=rf"pictures is in use by process {first.pid} on "):
            write(folder)
    finally:
        first.kill()
        first.join()
    assert list(captions_in(folder)) == ["a.txt", "b.txt", "c.txt"]
    status = status_of(folder)
    assert not status.is_running
    (report.folder / ".tmp-status.json-0123abcd").touch()
    old, young = folder / ".tmp-d.txt-0123abcd", folder / ".tmp-e.txt-0123abcd"
    for path, age_s in ((old, 90_000), (young, 0)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    write(folder)
    assert (old.exists(), young.exists()) == (False, True)
    assert {path.name for path in report.folder.iterdir()} == {
        *(".lock", "report.jsonl", "status.json", "captions.html")
    }
    assert list(captions_in(folder).values()) == ALL
    assert report.rows().keys() == COLOURS.keys()


@pytest.mark.parametrize("name", [".captions", ".captions/.lock", ".captions/report.jsonl"])
def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir() if name == ".captions" else target.write_text("as it was")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(target)
    with pytest.raises(UserError, match="is a link, through which nothing is written"):
        write(folder)
    assert captions_in(folder) == {}
    assert list(target.iterdir()) == [] if target.is_dir() else target.read_text() == "as it was"


def test_the_page_shows_every_item_and_runs_nothing(folder: Path) -> None:
    hostile = '<script>alert(1)</script> & "quotes"'
    (folder / "b.txt").write_text(hostile)
    write(folder, only=["c.png"])
    answers = {
        "red": f"A red square {hostile}.",
        "yellow": REFUSAL,
        "magenta": "The image shows a pink square.",
    }
    write(folder, Colours(answers))
    page = CaptionReport(folder).page_file.read_text()
    for heading in ("Without a caption (1)", "Written now (2)", "Written by a model before (1)", "Yours (1)"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count('src="data:image/jpeg;base64,') == 5
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "default-src 'none'" in page
    for text in ("the model refused: I&#39;m sorry", "by colours", "cleaned: openings", "A pink square."):
        assert text in page


def test_parts_write_what_one_command_does_with_files_of_their_own_that_are_joined_at_the_end(
    folder: Path,
) -> None:
    parts = [Part(index, 3) for index in range(3)]
    outcomes = [write(folder, part=part) for part in parts]
    assert captions_in(folder) == dict(zip(("a.txt", "b.txt", "c.txt", "d.txt", "e.txt"), ALL, strict=True))
    assert [list(outcome.made) for outcome in outcomes] == [
        [name for name in COLOURS if part.owns(name)] for part in parts
    ]
    report = CaptionReport(folder)
    assert not report.page_file.exists()
    rows = report.rows()
    assert rows.keys() == COLOURS.keys()
    # One that is still written keeps its files.
    busy = CaptionReport(folder, parts[0])
    with open_lock(busy.lock_file, place="").file:
        finish_parts(job_in(folder), outcomes[0])
        assert busy.rows_file.exists()
    finish_parts(job_in(folder), outcomes[0])
    assert report.rows() == rows
    assert sorted(path.name for path in report.folder.iterdir()) == [
        *(".lock", "captions.html", "report.jsonl", "status.json")
    ]
    assert status_of(folder).message == outcomes[0].summary
