"""What the doctor finds in the data that are held out, in tables, on the page and as a reason to stop."""

import shutil
from pathlib import Path

import pytest
from messy_data import Workplace, add_images, findings, scene
from PIL import Image
from rich.console import Console

from diffsynth_lite.cli.doctor import print_findings
from diffsynth_lite.doctor.examination import examine
from diffsynth_lite.doctor.findings import Findings
from diffsynth_lite.doctor.page import write_page
from diffsynth_lite.errors import UserError


def separate(workplace: Workplace, count: int = 2) -> tuple[str, str]:
    """Settings of images to train on, and of others that are held out."""
    return (
        f"data.path={add_images(workplace, 'trained', 3)}",
        f"validation.data={add_images(workplace, 'held', count)}",
    )


def held_out(found: Findings) -> Findings:
    assert found.held_out is not None
    return found.held_out


def test_without_held_out_data_nothing_is_found_in_them(workplace: Workplace) -> None:
    assert findings(workplace.config(separate(workplace)[0])).held_out is None


def test_they_are_read_planned_and_shown_as_the_training_data_are(workplace: Workplace) -> None:
    settings = separate(workplace)
    workplace.add("held/flat.png", scene(2, (300, 60)), "word " * 600)
    crops = ("data.crop=random", "data.crops_per_item=4", "data.repeats=3", "validation.loss_items=2")
    examination = examine(workplace.config(*settings, *crops), sheet_size=50)
    examination.require_usable()
    found = held_out(examination.findings)
    # Once each, from the middle, however often the training crops and repeats.
    assert (found.num_items, examination.findings.num_items) == (3, 12)
    assert [(source.place, source.contents, source.passes) for source in found.sources] == [
        (f"{workplace.root}/held", "3 images", 1.0)
    ]
    assert found.facts["measured on"] == "2 of 3 items"
    assert found.facts["width"] == "96 to 300, median 96"
    assert "one pass" not in found.facts
    assert sum(row.samples_per_pass for row in found.buckets) == 3
    assert {entry.name: entry.remarks for entry in found.sheet}["flat.png"] == [
        "67% of 300x60 is cropped",
        "a caption of 2405 tokens, of which the model sees 512",
    ]
    assert [line for line in found.advice if "flat.png" in line] == found.advice
    assert len(found.advice) == 2  # cropped, and a caption too long
    assert examination.findings.captions.remarks["too_long"] == {}


def test_a_bad_one_stops_the_run_and_is_named(workplace: Workplace) -> None:
    settings = separate(workplace)
    workplace.add("held/page.png", scene(8)).write_text("<!doctype html>")
    examination = examine(workplace.config(*settings), sheet_size=0)
    assert held_out(examination.findings).dropped.keys() == {"page.png"}
    assert examination.findings.dropped == {}
    with pytest.raises(UserError, match=r"1 of 3 items cannot be used: page\.png"):
        examination.require_usable()


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("nowhere", "validation.data: .*nowhere: no such folder"),
        ("trained/inner", "validation.data: 1 of its 1 items are also trained on, such as inside.png"),
    ],
)
def test_what_is_wrong_with_all_of_them_is_a_problem_of_the_run(
    workplace: Workplace, place: str, problem: str
) -> None:
    trained, _ = separate(workplace)
    workplace.add("trained/inner/inside.png", scene(5))
    examination = examine(
        workplace.config(trained, f"validation.data={workplace.root / place}"), sheet_size=5
    )
    assert examination.findings.num_items == 4
    with pytest.raises(UserError, match=problem):
        examination.require_usable()


def test_copies_of_training_items_are_listed_separately_from_those_that_only_look_alike(
    workplace: Workplace,
) -> None:
    settings = separate(workplace)
    shutil.copy(workplace.root / "trained/0.png", workplace.root / "held/copy.png")
    (workplace.root / "held/copy.txt").write_text("a copy")
    workplace.add("held/again.jpg", Image.open(workplace.root / "trained/1.png"), "one more")
    # Equal among themselves only, which is not a leak.
    shutil.copy(workplace.root / "held/1.png", workplace.root / "held/twin.png")
    (workplace.root / "held/twin.txt").write_text("a twin")
    found = held_out(findings(workplace.config(*settings)))
    assert found.trained == [["copy.png", "trained on: 0.png"]]
    assert found.like_trained == [["again.jpg", "trained on: 1.png"]]
    assert found.equal == [["1.png", "twin.png"]]
    equal, alike, _ = found.advice
    assert "are equal to items that are trained on" in equal
    assert "copy.png" in equal
    assert "look like items that are trained on" in alike
    assert "again.jpg" in alike


def test_console_and_page_separate_them_from_the_training_data(
    workplace: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = separate(workplace)
    shutil.copy(workplace.root / "trained/0.png", workplace.root / "held/copy.png")
    (workplace.root / "held/copy.txt").write_text("a copy")
    workplace.add("held/page.png", scene(8)).write_text("<!doctype html>")
    found = findings(workplace.config(*settings))
    print_findings(Console(width=200), found)
    printed = capsys.readouterr().out
    assert printed.index("Data") < printed.index("Held out") < printed.index("What stops the run (1)")
    assert "copy.png = trained on: 0.png" in printed
    write_page(tmp_path / "page.html", found, title="run", lead="3 items")
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/jpeg") == 3 + 3
    assert "3 of 3 items" not in page.split("<h1>Held out</h1>")[0]
    assert "3 of 3 items" in page.split("<h1>Held out</h1>")[1]
    assert "1 item cannot be used. Repair or remove them" in page.split("<h1>Held out</h1>")[1]
    assert "trained on: 0.png" in page


def test_a_share_of_the_data_is_shown_as_held_out_and_the_rest_as_trained_on(workplace: Workplace) -> None:
    path = add_images(workplace, "photos", 6)
    found = findings(workplace.config(f"data.path={path}", "data.hold_out=0.4", "data.repeats=3"))
    measured = held_out(found)
    assert (found.num_items, measured.num_items) == (4, 2)
    assert (found.facts["trained on"], measured.facts["measured on"]) == ("4 items", "2 of 2 items")
    assert measured.sources[0].passes == 1
    assert measured.items.keys().isdisjoint(found.items)
    # The first of them is in the cache that a run fills, and so is its caption.
    whole = findings(workplace.config(f"data.path={path}"))
    of_one = workplace.config(f"data.path={path}", "data.hold_out=0.4", "validation.loss_items=1")
    entries = [one.facts["cache"].partition(" ")[0] for one in (whole, findings(of_one))]
    assert entries == ["12", "10"]


def test_one_item_cannot_be_held_out_of_one(workplace: Workplace) -> None:
    path = add_images(workplace, "photos", 1)
    examination = examine(workplace.config(f"data.path={path}", "data.hold_out=0.4"), sheet_size=0)
    assert [line for line in examination.problems if "data.hold_out: 0.4 holds nothing out" in line]
