"""The index of media files, and failures of the machine, which are not the fault of a file."""

import errno
import logging
import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from clip_makers import write_clip
from PIL import Image, ImageFile
from processes import FORKED

from diffsynth_lite.data.encoding import find_undecodable
from diffsynth_lite.data.images import check_image, load_image, load_layer, load_mask
from diffsynth_lite.data.media_index import (
    FileMemory,
    FileState,
    MediaIndex,
    PartMemory,
    adopt_parts,
    parts_folder,
)
from diffsynth_lite.data.records import WHOLE, Part
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError

STATE = FileState(5, 7)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "index.sqlite"


def test_what_is_remembered_is_recalled_only_for_the_same_state(path):
    with FileMemory(path) as memory:
        memory.remember("a", STATE, "value")
        assert memory.recall("a", STATE) == "value"
        assert memory.recall("a", FileState(6, 7)) is None
    with FileMemory(path) as memory:
        assert memory.recall("a", STATE) == "value"
        assert memory.recall("a", FileState(5, 8)) is None
        assert memory.recall("b", STATE) is None
        memory.remember("a", FileState(5, 8), "new")
        memory.flush()
        assert memory.recall("a", FileState(5, 8)) == "new"


def test_the_state_of_a_file_changes_with_its_size_and_its_time(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12")
    os.utime(file, ns=(0, 1))
    assert FileState.of(file) == FileState(2, 1)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100, None])
def test_a_file_that_is_no_index_or_one_of_another_layout_is_replaced(path, content):
    path.parent.mkdir()
    if content is None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE memory (other TEXT)")
    else:
        path.write_bytes(content)
    with FileMemory(path) as memory:
        memory.remember("a", STATE, "value")
    with FileMemory(path) as memory:
        assert memory.recall("a", STATE) == "value"


def test_no_damage_of_the_index_is_an_error_or_gives_a_wrong_value(path):
    names = [f"name {number}" for number in range(200)]
    with FileMemory(path) as memory:
        for name in names:
            memory.remember(name, STATE, f"value of {name}")
    content = path.read_bytes()
    num_known = []
    for place in range(0, len(content), 511):
        path.write_bytes(
            content[:place] + bytes(byte ^ 0xFF for byte in content[place : place + 9]) + content[place + 9 :]
        )
        with FileMemory(path) as memory:
            recalled = [memory.recall(name, STATE) for name in names]
        assert all(value in (None, f"value of {name}") for name, value in zip(names, recalled, strict=True))
        num_known.append(sum(value is not None for value in recalled))
    assert min(num_known) < 200
    for length in range(0, len(content), 2999):
        path.write_bytes(content[:length])
        with FileMemory(path) as memory:
            memory.remember("a", STATE, "value")
            memory.flush()
            assert memory.recall("a", STATE) == "value"


def test_where_no_index_can_be_kept_the_work_goes_on_without(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING), FileMemory(tmp_path / "file" / "index.sqlite") as memory:
        memory.remember("a", STATE, "value")
        assert memory.recall("a", STATE) == "value"
    assert "files are read again" in caplog.text


def _remember_many(path, start):
    with FileMemory(path) as memory:
        for number in range(start, start + 300):
            memory.remember(f"name {number}", STATE, str(number))
            if number % 10 == 0:
                memory.flush()


def test_processes_that_write_at_once_lose_nothing(path):
    other = FORKED.Process(target=_remember_many, args=(path, 0))
    other.start()
    _remember_many(path, 300)
    other.join()
    assert other.exitcode == 0
    with FileMemory(path) as memory:
        assert [memory.recall(f"name {number}", STATE) for number in range(600)] == list(map(str, range(600)))


def test_a_file_that_is_written_in_the_meantime_is_not_the_one_that_was_seen(path):
    with FileMemory(path) as memory:
        memory.remember("a", STATE, "value")
        memory.remember("a", FileState(1, 1), "later")
        assert memory.recall("a", STATE) is None


def test_what_parts_remember_is_theirs_until_it_is_taken_into_the_index(path):
    with FileMemory(path) as memory:
        memory.remember("old", STATE, "value")
    index = path.read_bytes()
    for part in (Part(0, 2), Part(1, 2)):
        with PartMemory(path, part) as memory:
            assert memory.recall("old", STATE) == "value"
            memory.remember(f"of {part}", STATE, "value")
    with PartMemory(path, Part(0, 2)) as memory:
        assert memory.recall("of 0/2", STATE) == "value"
        assert memory.recall("of 0/2", FileState(6, 7)) is None
        assert memory.recall("of 1/2", STATE) is None
        memory.remember("of 0/2", FileState(6, 7), "new")
        assert memory.recall("of 0/2", FileState(6, 7)) == "new"
    assert path.read_bytes() == index
    [*_, last] = sorted(parts_folder(path).iterdir())
    last.write_bytes(last.read_bytes()[:-9] + b'\n[1]\nno json\n{"of": 1, "a": 2, "b": 3, "c": 4, "d": 5}\n')
    adopt_parts(path)
    assert list(parts_folder(path).iterdir()) == []
    with FileMemory(path) as memory:
        assert memory.recall("old", STATE) == "value"
        assert memory.recall("of 0/2", FileState(6, 7)) == "new"
        assert memory.recall("of 1/2", STATE) is None  # the line that was cut


def test_parts_work_where_no_file_can_be_written_or_locked(path, caplog):
    path.parent.mkdir()
    path.write_bytes(b"no database at all" * 100)
    parts_folder(path).write_text("a file in the place of the folder")
    with caplog.at_level(logging.WARNING), PartMemory(path, Part(0, 2)) as memory:
        memory.remember("a", STATE, "value")
        memory.flush()
        assert memory.recall("a", STATE) == "value"
        assert memory.recall("b", STATE) is None
    assert path.read_bytes() == b"no database at all" * 100
    assert "so that files are read again" in caplog.text


def test_an_index_that_cannot_be_kept_leaves_the_parts_what_they_know(path):
    with PartMemory(path, Part(0, 2)) as memory:
        memory.remember("a", STATE, "value")
    path.mkdir()
    left = list(parts_folder(path).iterdir())
    adopt_parts(path)
    assert list(parts_folder(path).iterdir()) == left != []


@contextmanager
def no_file_can_be_opened() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return write_clip(tmp_path / "clip.mp4")


def test_too_many_open_files_are_no_fault_of_an_image_or_clip(write_image, tmp_path, clip):
    image = write_image("a.png")
    load_image(image, background="white")  # what is imported when it is first needed, now is
    check_video(clip)
    with FileMemory(tmp_path / "index.sqlite") as memory:
        index = MediaIndex(memory)
        for read in (
            lambda: check_image(image),
            lambda: load_image(image, background="white"),
            lambda: index.facts(image),
            lambda: index.content(image),
            lambda: check_video(clip),
            lambda: read_frames(clip, [0.0]),
            lambda: index.facts(clip),
        ):
            with no_file_can_be_opened(), pytest.raises(OSError, match="Too many open files") as caught:
                read()
            assert caught.value.errno == errno.EMFILE
            read()  # and nothing else was wrong


@pytest.mark.parametrize("read", [partial(load_image, background="white"), load_layer, load_mask])
@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        OSError(errno.EIO, "Input/output error"),
        OSError(ImageFile.ERRORS[-9] + " when reading"),
    ],
)
def test_a_failure_while_pixels_are_decoded_is_passed_on_with_the_name_of_the_file(
    write_image, monkeypatch, failure, read
):
    def fail(*_):
        raise failure

    image = write_image("a.png")
    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises((MemoryError, OSError)) as caught:
        read(image)
    assert str(image) in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert isinstance(caught.value, MemoryError) == (failure.args[:1] != (errno.EIO,))


def test_what_is_not_there_and_what_is_cut_off_are_bad_items(write_image, tmp_path):
    cut_off = write_image("a.png", size=(64, 64))
    cut_off.write_bytes(cut_off.read_bytes()[:-30])
    with FileMemory(tmp_path / "index.sqlite") as memory:
        for read in (
            lambda: load_image(cut_off, background="white"),
            lambda: load_image(tmp_path / "gone.png", background="white"),
            lambda: load_image(tmp_path, background="white"),
            lambda: MediaIndex(memory).facts(tmp_path / "gone.png"),
            lambda: check_video(tmp_path / "gone.mp4"),
        ):
            with pytest.raises(UserError):
                read()


def test_an_error_of_the_machine_ends_the_search_for_bad_items(tmp_path):
    class Planned:
        has_media = True

        def load(self):
            raise MemoryError

    with FileMemory(tmp_path / "index.sqlite") as memory, pytest.raises(MemoryError):
        find_undecodable({"0" * 64: Planned()}, memory=memory, share=WHOLE)
