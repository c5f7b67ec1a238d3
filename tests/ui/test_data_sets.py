"""What the screen of a data set shows, and what it changes: captions, the trash, and both taken back."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE_PX, Browser
from PIL import Image
from processes import wait_for
from screens import Screen, server_process

from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.data.video import write_video

Data = dict[str, Any]


def image(path: Path, size: tuple[int, int] = (600, 600), colour: str = "teal", caption: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    if caption:
        path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
    return path


@pytest.fixture
def mug(screen: Screen) -> Path:
    """A data set of two images and a clip, each with a caption."""
    folder = screen.workspace.data_folder / "mug"
    image(folder / "a.png", caption="a mug")
    image(folder / "b.jpg", colour="gold", caption="a cup")
    write_video(folder / "c.mp4", [Image.new("RGB", (64, 32), "navy")] * 3, fps=8)
    (folder / "c.txt").write_text("a clip\n")
    return folder


def shown(screen: Screen, name: str = "mug", query: str = "") -> dict[str, Data]:
    items = screen.get(f"/data/{name}/items{query}").json()["items"]
    return {item["file"]: item for item in items}


def write(screen: Screen, **captions: tuple[str, str]) -> Any:
    changes = [
        {"file": name.replace("_", "."), "was": was, "caption": caption}
        for name, (was, caption) in captions.items()
    ]
    return screen.post("/data/mug/captions", {"changes": changes})


def undo(screen: Screen) -> str:
    return str(screen.post("/data/mug/undo").json()["message"])


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        *[(name, True) for name in ("cats", "my_set-2.1", "A" * 64)],
        *[(name, False) for name in ("", ".hidden", "..", "a/b", "a b", "a\\b", "a.", "ä", "A" * 65, "mug")],
    ],
)
def test_a_data_set_is_made_under_a_name_that_every_system_takes(
    screen: Screen, mug: Path, name: str, is_taken: bool
) -> None:
    answer = screen.post("/data", {"name": name})
    assert answer.status_code == (200 if is_taken else 422)
    folders = {folder.name for folder in screen.workspace.data_folder.iterdir()}
    assert folders == ({"mug", name} if is_taken else {"mug"})
    if is_taken:
        assert "Drop images or clips here" in screen.get(answer.json()["go"]).text


def test_the_screen_shows_what_a_run_trains_on_and_why_it_would_refuse_the_rest(
    screen: Screen, mug: Path, tmp_path: Path
) -> None:
    image(mug / "more" / "d.png", caption="in a subfolder")
    image(mug / "several.png", caption="first")
    (mug / "several.1.txt").write_text("second")
    image(mug / "latin.png").with_suffix(".txt").write_bytes(b"caf\xe9")
    image(mug / "blank.png").with_suffix(".txt").write_text(" \n")
    image(mug / "none.png")
    outside = image(tmp_path / "secret.png")
    (mug / "link.png").symlink_to(outside)
    (mug / "orphan.txt").write_text("of nothing")
    (mug / "phone.HEIC").write_bytes(b"a photo")
    (mug / "b.txt").write_text("</script><script>pwned()</script>")
    assert "<script>pwned" not in screen.get("/data/mug/").text
    items = shown(screen)
    found = find_records([Source(path=str(mug))], media_store=mug, on_bad_item="skip")
    trained = {record.name: "\n\n".join(record.captions) for record in found.records}
    assert {name: items[name]["caption"] for name in trained} == trained
    assert set(items) == {*trained, *found.unread}
    assert items["several.png"]["locked"] == "Captions are in several.txt, several.1.txt"
    assert {name: items[name].get("problem", "") for name in found.unread} == {
        "blank.png": "",
        "none.png": "",
        "latin.png": "latin.txt: not UTF-8 text; save it as UTF-8",
        "link.png": "is a link that leaves the folder; copy the file in, or set allow_outside",
    }
    assert screen.get("/data/mug/items").json()["problems"] == [
        "caption files that belong to no image or clip: orphan.txt",
        "skipped files: 1 heic; save heic as png or jpg to train on them",
    ]
    assert items["link.png"]["version"] == ""
    assert "link.png" not in screen.get("/data/mug/findings").json()
    assert screen.get("/data/mug/thumbnails/link.png").status_code == 404


def test_captions_of_a_table_are_shown_with_their_file_and_not_changed(screen: Screen) -> None:
    folder = screen.workspace.data_folder / "mug"
    for name in ("0.png", "1.png"):
        image(folder / name)
    (folder / "metadata.csv").write_text("file_name,text\n0.png,zero\n1.png,\n")
    items = shown(screen)
    assert [items[name]["caption"] for name in ("0.png", "1.png")] == ["zero", ""]
    assert {item["locked"] for item in items.values()} == {"Captions are in metadata.csv"}
    assert screen.get("/data/mug/items").json()["problems"] == ["row 2: no text in 'text' but ''"]
    for answer in (
        write(screen, **{"1_png": ("", "one")}),
        screen.post("/data/mug/trash", {"files": ["0.png"]}),
    ):
        assert "metadata.csv has the captions of this data set" in answer.json()["error"]
    assert sorted(path.name for path in folder.iterdir()) == ["0.png", "1.png", "metadata.csv"]


def test_a_config_adds_its_masks(screen: Screen, mug: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        image(screen.workspace.data_folder / "masks" / name)
    config = screen.workspace.configs_folder / "mine.yaml"
    config.write_text("extends: chroma_lora.yaml\ndata:\n  path: data/mug\n  mask_dir: data/masks\n")
    (screen.workspace.configs_folder / "other.yaml").write_text("data:\n  path: data/mug_2\n")
    page = screen.get("/data/mug/?config=mine").text
    assert "<option selected>mine</option>" in page
    assert "<option>other" not in page
    (screen.workspace.configs_folder / "large.yaml").write_text("# data/mug\n" + "#" * (1 << 20))
    assert "<option>large" not in screen.get("/data/mug/").text
    (mask,) = shown(screen, query="?config=mine")["b.jpg"]["companions"]
    assert (mask["what"], mask["where"]) == ("Mask", "masks/b.png")
    assert screen.get(f"/data/{mask['set']}/thumbnails/{mask['file']}").status_code == 200
    facts = screen.get("/data/mug/findings?config=mine").json()
    assert {name for name, each in facts.items() if each.get("is_small")} == {"c.mp4"}
    config.write_text("data:\n  path: data/mug\n  resolution: 3\n")
    assert "mine" in screen.get("/data/mug/items?config=mine").json()["problems"][0]


def test_a_folder_elsewhere_is_taken_off_the_screen_and_one_of_the_workspace_is_not(
    screen: Screen, mug: Path, tmp_path: Path
) -> None:
    shutil.copytree(mug, elsewhere := tmp_path / "elsewhere" / "cup")
    screen.workspace.add("data", elsewhere)
    assert "/data/cup/forget" in screen.get("/data/cup/").text
    assert "/data/mug/forget" not in screen.get("/data/mug/").text
    assert screen.post("/data/cup/forget").json()["go"] == "/#data-sets"
    assert list(screen.workspace.data_sets) == ["mug"]
    assert (elsewhere / "a.png").exists()
    assert screen.post("/data/mug/forget").status_code == 422


def test_findings_name_equal_bytes_and_files_that_cannot_be_read(screen: Screen, mug: Path) -> None:
    shutil.copy(mug / "a.png", mug / "again.png")
    (mug / "broken.png").write_bytes(b"\x89PNG")
    facts = screen.get("/data/mug/findings").json()
    assert {name: each["equal"] for name, each in facts.items() if "equal" in each} == {"again.png": "a.png"}
    assert "not a PNG" in facts["broken.png"]["problem"]
    assert (facts["c.mp4"]["width"], facts["c.mp4"]["height"]) == (64, 32)


def test_thumbnails_are_small_and_kept_by_the_browser_until_the_file_changes(
    screen: Screen, mug: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, item in shown(screen).items():
        address = f"/data/mug/thumbnails/{name}?version={item['version']}"
        answer = screen.get(address)
        assert (answer.headers["content-type"], answer.content[:2]) == ("image/jpeg", b"\xff\xd8")
        assert "immutable" in answer.headers["cache-control"]
        assert screen.get(address, **{"if-none-match": answer.headers["etag"]}).status_code == 304
    assert "no-cache" in screen.get("/data/mug/thumbnails/a.png?version=old").headers["cache-control"]
    monkeypatch.setattr("diffsynth_lite.data.images.MAX_PIXELS", 100)
    placeholder = screen.get("/data/mug/thumbnails/a.png")
    assert placeholder.headers["content-type"] == "image/svg+xml"
    damaged = mug / "a.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    monkeypatch.undo()
    assert ">image file is truncated</text>" in screen.get("/data/mug/thumbnails/a.png").text
    monkeypatch.setattr("diffsynth_lite.data.images.MAX_PIXELS", 100)
    assert "at most 100 in all" in screen.get("/data/mug/findings").json()["a.png"]["problem"]


def test_a_clip_is_sent_in_the_pieces_that_a_player_asks_for(screen: Screen, mug: Path) -> None:
    piece = screen.get("/data/mug/clips/c.mp4", range="bytes=4-7")
    assert (piece.status_code, piece.content) == (206, b"ftyp")
    for name in ("a.png", "a.txt", "%2e%2e/mug/c.mp4", "..%2fmug%2fc.mp4", "none.mp4", "%2fetc%2fpasswd"):
        assert screen.get(f"/data/mug/clips/{name}").status_code == 404


def test_captions_are_written_where_a_run_reads_them(screen: Screen, mug: Path) -> None:
    image(mug / "more" / "new.png")
    (mug / "b.txt").rename(mug / "b.caption")
    changes = {"a_png": ("a mug", " a *new* mug\r\nin two lines "), "b_jpg": ("a cup", "")}
    assert write(screen, **changes, **{"more/new_png": ("", "ein Krug, größer")}).json()["stale"] == {}
    assert {name: item["caption"] for name, item in shown(screen).items()} == {
        "a.png": "a *new* mug\nin two lines",
        "b.jpg": "",
        "c.mp4": "a clip",
        "more/new.png": "ein Krug, größer",
    }
    assert not (mug / "b.caption").exists()
    for name, caption in (("a_png", "a\0b"), ("gone_png", "x"), ("a_txt", "x")):
        assert write(screen, **{name: ("", caption)}).status_code == 422
    assert screen.post("/data/mug/captions", {"changes": "all"}).json()["stale"] == {}


def test_a_caption_that_somebody_else_changed_is_not_overwritten(screen: Screen, mug: Path) -> None:
    (mug / "a.txt").write_text("theirs")
    answer = write(screen, a_png=("a mug", "mine"), b_jpg=("a cup", "mine, too"))
    assert answer.json()["stale"] == {"a.png": "theirs"}
    assert (mug / "a.txt").read_text() == "theirs"
    assert (mug / "b.txt").read_text() == "mine, too\n"


def test_undo_takes_back_only_what_is_still_as_the_change_left_it(screen: Screen, mug: Path) -> None:
    write(screen, a_png=("a mug", "one"), b_jpg=("a cup", "two"))
    for was, caption in (("a clip", "t"), ("t", "ty"), ("ty", "typed")):
        write(screen, c_mp4=(was, caption))
    assert undo(screen) == "1 caption as before."  # all pauses of typing are one change
    assert (mug / "c.txt").read_text() == "a clip\n"
    (mug / "a.txt").write_text("theirs")
    assert undo(screen) == "1 caption as before. 1 caption changed since and left alone."
    assert [(mug / name).read_text() for name in ("a.txt", "b.txt")] == ["theirs", "a cup\n"]
    assert undo(screen) == "Nothing to undo."


def test_edits_of_a_caption_with_a_long_pause_between_are_taken_back_one_by_one(
    screen: Screen, mug: Path
) -> None:
    write(screen, a_png=("a mug", "yesterday"))
    (entry,) = (screen.workspace.path / ".ui" / "undo" / "mug").iterdir()
    before = time.time() - 61
    os.utime(entry, (before, before))
    write(screen, a_png=("yesterday", "today"))
    for caption in ("yesterday\n", "a mug\n"):
        assert undo(screen) == "1 caption as before."
        assert (mug / "a.txt").read_text() == caption


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "1", "[" * 9_999, '{"captions": 1}', '{"captions": {}}', '{"captions": [{}]}'),
        *('{"trash": "../..", "count": 1}', '{"trash": 1}', '{"trash": "20260101-000000"}'),
    ],
)
def test_a_damaged_entry_is_in_the_way_of_no_change_and_of_no_undo(
    screen: Screen, mug: Path, content: str
) -> None:
    write(screen, a_png=("a mug", "one"))
    history = screen.workspace.path / ".ui" / "undo" / "mug"
    (history / "00000002.json").write_text(content)
    (history / "3a.json").write_text("")
    assert write(screen, a_png=("one", "two")).json()["stale"] == {}
    for caption in ("one\n", "a mug\n"):
        assert undo(screen) == "1 caption as before."
        assert (mug / "a.txt").read_text() == caption
    assert undo(screen) == "Nothing to undo."


def test_a_change_that_was_cut_short_leaves_whole_files_and_can_be_taken_back(
    screen: Screen, mug: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffsynth_lite import files

    def full_at_b(path: Path, content: bytes) -> None:
        if "b.txt" in path.name:
            path.write_bytes(content[:3])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_synced", full_at_b)
        answer = write(screen, a_png=("a mug", "one"), b_jpg=("a cup", "two"))
    assert "No space left" in answer.json()["error"]
    assert [(mug / name).read_text() for name in ("a.txt", "b.txt")] == ["one\n", "a cup\n"]
    assert not list(mug.glob(".*"))
    assert undo(screen).startswith("1 caption as before.")
    assert [(mug / name).read_text() for name in ("a.txt", "b.txt")] == ["a mug\n", "a cup\n"]


def test_what_is_moved_to_the_trash_goes_with_all_that_belongs_to_it_and_comes_back(
    screen: Screen, mug: Path
) -> None:
    image(mug / "more" / "d.png", caption="d")
    (mug / "more" / "d.1.txt").write_text("another")
    image(mug / "b.png", caption="a cup")  # shares the caption with b.jpg
    masks = screen.workspace.data_folder / "masks"
    for name in ("a", "b", "c", "more/d"):
        image(masks / f"{name}.png")
    (screen.workspace.configs_folder / "mine.yaml").write_text(
        "extends: quickstart.yaml\ndata:\n  path: data/mug\n  mask_dir: data/masks\n"
    )
    before = sorted(screen.workspace.data_folder.rglob("*.*"))
    given = {"files": ["b.jpg", "more/d.png", "nothing.png"], "config": "mine"}
    place = (
        screen.post("/data/mug/trash", given).json()["message"].removeprefix("2 items moved to trash/mug/")
    )
    moved = {"mug/b.jpg", "mug/more/d.png", "mug/more/d.txt", "mug/more/d.1.txt", "masks/more/d.png"}
    data, trash = screen.workspace.data_folder, screen.workspace.trash_folder
    assert {path for path in before if not path.exists()} == {data / name for name in moved}
    stored = {f"{name.partition('/')[0]}/{place[:-1]}/{name.partition('/')[2]}" for name in moved}
    assert {path.relative_to(trash).as_posix() for path in trash.rglob("*.*") if path.is_file()} == stored
    image(data / "mug" / "b.jpg", colour="red")
    assert undo(screen) == (
        "2 items back from the trash. 1 file left in the trash: there are new ones of these names."
    )
    assert sorted(data.rglob("*.*")) == before
    assert Image.open(data / "mug" / "b.jpg").getpixel((0, 0))[0] > 200


@pytest.mark.parametrize("path", ["", "items", "findings", "examined", "thumbnails/a.png", "clips/a.mp4"])
def test_no_other_data_set_is_there(screen: Screen, path: str) -> None:
    for name in ("nothing", "%2e%2e", "..%2fconfigs", ".ui"):
        assert screen.get(f"/data/{name}/{path}").status_code == 404


def test_undo_after_a_refusal_puts_there_all_that_was_typed_meanwhile(
    screen: Screen, mug: Path, browser: Browser
) -> None:
    later = (
        "(post => { ui.post = (...all) => new Promise((go) => { window.go = () => go(post(...all)); }); })"
    )
    with (
        server_process(screen.workspace.path) as server,
        browser.page(server.address.replace("/?", "/data/mug/?"), width=1280) as page,
    ):
        page.await_control("textbox", "Caption of a.png")
        page.evaluate(f"{later}(ui.post)")
        (mug / "a.txt").write_text("theirs\n")
        page.fill("textbox", "Caption of a.png", "mine")
        page.wait_for("window.go !== undefined")
        page.fill("textbox", "Caption of a.png", "mine, and more")
        page.evaluate("window.go()")
        page.wait_for("document.querySelector('#message button') !== null")
        page.evaluate("window.go = undefined")
        page.click("#message button")
        page.wait_for("window.go !== undefined")
        page.evaluate("window.go()")
        wait_for(lambda: (mug / "a.txt").read_text() == "mine, and more\n")


def test_a_message_is_not_over_the_buttons_for_what_is_chosen(
    browser: Browser, screen: Screen, mug: Path
) -> None:
    with (
        server_process(screen.workspace.path) as server,
        browser.page(server.address.replace("/?", "/data/mug/?"), width=PHONE_PX) as page,
    ):
        page.press("checkbox", "Choose a.png")
        page.evaluate("ui.report('A message. '.repeat(20), { undo() {} })")
        for button in ("clear", "choose-all", "trash"):
            box = f"document.getElementById('{button}').getBoundingClientRect()"
            middle = f"({box}.left + {box}.right) / 2, ({box}.top + {box}.bottom) / 2"
            assert page.evaluate(f"document.elementFromPoint({middle}).id") == button
