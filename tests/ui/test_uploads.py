"""Files that a browser sends to a data set: which are taken, up to which size, and never over another."""

import errno
import io
import os
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from screens import Screen

from diffsynth_lite.ui.data_sets import uploads


@pytest.fixture
def folder(screen: Screen) -> Path:
    """A data set with one file, and a link that leads out."""
    made = screen.workspace.data_folder / "mug"
    made.mkdir()
    (made / "taken.png").write_bytes(b"mine")
    (made / "out").symlink_to(screen.workspace.configs_folder)
    return made


def add(screen: Screen, name: str, content: bytes = b"new") -> Any:
    answer = screen.client.post(
        "/data/mug/add",
        params={"name": name},
        content=content,
        headers=screen.cookie | screen.secret | {"origin": "http://127.0.0.1:8713"},
    )
    return answer.json()


def zipped(*members: str | zipfile.ZipInfo, content: bytes = b"new") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, content)
    return file.getvalue()


def names(screen: Screen) -> set[str]:
    """Files below the workspace, but those of the screen itself."""
    root = screen.workspace.path
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return {name.removeprefix("data/mug/") for name in found if not name.startswith(".ui/")}


@pytest.mark.parametrize(
    "name",
    ["a.png", "B.JPEG", "c.mp4", "a.txt", "a.1.caption", "metadata.jsonl", "sub/folder/a b.webp", "ü.gif"],
)
def test_what_a_run_reads_is_added(screen: Screen, folder: Path, name: str) -> None:
    killed = folder / ".tmp-big.mp4-0123abcd"
    killed.touch()
    os.utime(killed, (0, 0))
    assert add(screen, name) == {"added": [name], "taken": [], "unread": []}
    assert (folder / name).read_bytes() == b"new"
    assert names(screen) == {"taken.png", name}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x.py", "is not an image, clip, caption or zip"),
        ("page.svg", "is not an image, clip, caption or zip"),
        ("png", "is not an image, clip, caption or zip"),
        ("taken.png", "there is a file of this name already"),
        ("taken.png/a.png", "there is a file of this name already"),
        ("../a.png", "is not the name of a file below"),
        ("/a.png", "is not the name of a file below"),
        ("..\\a.png", "is not the name of a file below"),
        ("C:a.png", "is not the name of a file below"),
        ("a\n.png", "is not the name of a file below"),
        ("", "is not the name of a file below"),
        (".hidden.png", "is a hidden file"),
        (".ui/a.png", "is a hidden file"),
        ("a" * 200 + ".png", "has a name of more than 200 bytes"),
        ("a/" * 2_500 + "a.png", "is in more than 99 folders"),
        (f"{'a' * 199}/" * 50 + "a.png", "File name too long"),
        ("out/a.png", "is behind a link that leaves the folder"),
        ("out/new/a.png", "is behind a link that leaves the folder"),
    ],
)
def test_anything_else_is_refused_and_nothing_is_left_of_it(
    screen: Screen, folder: Path, name: str, reason: str
) -> None:
    assert reason in add(screen, name)["error"]
    assert names(screen) == {"taken.png"}
    assert (folder / "taken.png").read_bytes() == b"mine"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_name_is_taken_in_one_step_where_the_disk_has_links(
    screen: Screen, folder: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def killed(*_: object) -> None:
        raise AssertionError("between the two steps")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if has_links:
        monkeypatch.setattr(Path, "replace", killed)
    else:
        monkeypatch.setattr("os.link", refuse)
    assert add(screen, "a.png")["added"] == ["a.png"]
    assert "there is a file of this name already" in add(screen, "a.png", b"other")["error"]
    assert (folder / "a.png").read_bytes() == b"new"
    assert names(screen) == {"taken.png", "a.png"}


def test_a_file_beyond_the_limit_or_the_disk_is_refused_while_it_comes(
    screen: Screen, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MOST_BYTES", 10)
    assert add(screen, "a.png", b"x" * 10)["added"] == ["a.png"]
    assert "larger than 10 bytes" in add(screen, "b.png", b"x" * 11)["error"]
    assert "larger than 1,048,576 bytes" in add(screen, "a.txt", b"x" * (1 << 20) + b"x")["error"]
    assert "larger than 10 bytes" in add(screen, "b.zip", b"x" * 11)["error"]

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uploads, "_place", full)
    assert add(screen, "c.png")["error"] == "c.png: the disk is full"
    monkeypatch.setattr(uploads, "free_disk_bytes", lambda folder: 2)
    assert add(screen, "d.png")["error"] == "d.png: takes 3 bytes, and 2 are free on the disk"
    assert names(screen) == {"taken.png", "a.png"}


def test_a_zip_is_unpacked_without_the_folder_around_it_and_what_no_run_reads(
    screen: Screen, folder: Path
) -> None:
    link = zipfile.ZipInfo("set/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    members = ("set/", "set/a.png", "set/sub/a.txt", "set/taken.png", "set/metadata.csv")
    odd = ("set/x.py", "set/.DS_Store", "__MACOSX/set/._a.png")
    answer = add(screen, "set.zip", zipped(*members, *odd, link))
    assert answer == {
        "added": ["a.png", "sub/a.txt", "metadata.csv"],
        "taken": ["taken.png"],
        "unread": [*odd, "set/link.png"],
    }
    assert names(screen) == {"taken.png", "a.png", "sub/a.txt", "metadata.csv"}
    assert (folder / "taken.png").read_bytes() == b"mine"


def bomb() -> bytes:
    """A zip whose list claims ten bytes for a file of two million."""
    content = zipped("a.png", content=bytes(2 << 20))
    return content.replace(struct.pack("<I", 2 << 20), struct.pack("<I", 10))


def damaged_lzma() -> bytes:
    """A zip with a file whose compressed content is not LZMA."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", bytes(range(256)) * 9)
    content = bytearray(file.getvalue())
    content[50:250] = b"\xff" * 200
    return bytes(content)


def new_set(screen: Screen, content: bytes, *, name: str = "cup", file: str = "set.zip") -> Any:
    headers = screen.cookie | screen.secret | {"origin": "http://127.0.0.1:8713"}
    params = {"name": name, "file": file}
    return screen.client.post("/data/zip", params=params, content=content, headers=headers).json()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (zipped("a.png", "../b.png"), "'../b.png': is not the name of a file below"),
        (zipped("a.png", "/etc/x.py"), "'/etc/x.py': is not the name of a file below"),
        (zipped("a.png", "b\\..\\..\\c.txt"), "is not the name of a file below"),
        (zipped("a.png", "C:\\c.png"), "is not the name of a file below"),
        (zipped(*"abcd"), "holds 4 files, and 3 are the most"),
        (zipped(*(f"{number}.png" for number in range(60))), "set.zip: cannot be unpacked: its list has 3,"),
        (
            zipped("a.png", "b.png", content=bytes(2 << 20)),
            "unpacked it has 4,194,304 bytes; 3,145,728 are the most",
        ),
        (zipped("a.txt", content=bytes((1 << 20) + 1)), "1,048,576 for a caption"),
        (bomb(), "cannot be unpacked: Bad CRC-32"),
        (damaged_lzma(), "cannot be unpacked: "),
        (zipped("\u00fc.png").replace(b"\xc3\xbc", b"\xff\xff"), "cannot be unpacked: 'utf-8' codec"),
        (zipped("a.png")[:-30], "cannot be unpacked: File is not a zip file"),
        (b"#!/bin/sh", "cannot be unpacked: File is not a zip file"),
        (b"", "cannot be unpacked: File is not a zip file"),
    ],
    ids=[
        *("up", "absolute", "backslash", "drive", "members", "list"),
        *("bytes", "caption", "bomb", "lzma", "name", "damaged", "script", "empty"),
    ],
)
def test_a_zip_that_leads_out_is_too_large_or_damaged_adds_nothing(
    screen: Screen, folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    monkeypatch.setattr(uploads, "MOST_MEMBERS", 3)
    monkeypatch.setattr(uploads, "MOST_UNPACKED_BYTES", 3 << 20)
    monkeypatch.setattr(uploads, "_MOST_LIST_BYTES", 3000)
    assert reason in add(screen, "set.zip", content)["error"]
    assert reason in new_set(screen, content)["error"]
    assert names(screen) == {"taken.png"}
    assert [path.name for path in screen.workspace.data_folder.iterdir()] == ["mug"]


def test_a_data_set_is_made_of_a_zip_and_what_was_left_out_is_named(screen: Screen, folder: Path) -> None:
    link = zipfile.ZipInfo("set/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    content = zipped("set/a.png", "set/sub/a.txt", "set/metadata.csv", "set/x.py", link)
    killed = screen.workspace.data_folder / ".tmp-cup-0123abcd"
    killed.mkdir()
    os.utime(killed, (0, 0))
    assert new_set(screen, content) == {
        "go": "/data/cup/",
        "message": "3 files of set.zip added; not read: set/x.py, set/link.png.",
    }
    found = screen.workspace.data_folder / "cup"
    assert not killed.exists()
    assert {path.name for path in found.rglob("*") if path.is_file()} == {"a.png", "a.txt", "metadata.csv"}
    many = zipped("a.png", *(f"{number}.py" for number in range(8)))
    assert (
        "not read: 0.py, 1.py, 2.py, 3.py, 4.py and 3 more." in new_set(screen, many, name="pot")["message"]
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "mug"}, "there is a data set mug already"),
        ({"name": "../out"}, "use a to z, digits"),
        ({"name": ""}, "none given"),
        ({"file": "set.tar"}, "set.tar: is not a zip"),
        ({"content": zipped("x.py")}, "holds no image, clip, caption or table; not read: x.py"),
        ({"content": zipped()}, "set.zip: holds no image, clip, caption or table"),
    ],
)
def test_a_data_set_of_a_zip_needs_a_free_name_and_files_that_are_read(
    screen: Screen, folder: Path, options: dict[str, Any], reason: str
) -> None:
    assert reason in new_set(screen, **{"content": zipped("a.png"), **options})["error"]
    assert [path.name for path in screen.workspace.data_folder.iterdir()] == ["mug"]
    assert names(screen) == {"taken.png"}
