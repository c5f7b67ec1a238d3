"""A machine that fails makes no bad item: its run would train on less than it was given."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from clip_makers import write_clip
from PIL import Image, ImageFile

from diffsynth_lite.data.encoding import Shard, find_undecodable
from diffsynth_lite.data.images import check_image, load_image, load_layer, load_mask
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError


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
        find_undecodable({"0" * 64: Planned()}, memory=memory, shard=Shard())
