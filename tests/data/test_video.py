import struct
from pathlib import Path

import pytest
from clip_corpus import CLIPS
from media_verdicts import assert_clip

from diffsynth_lite.data.video import check_video
from diffsynth_lite.errors import UserError


@pytest.mark.parametrize("name", CLIPS)
def test_an_odd_clip_is_read_frame_by_frame_and_a_bad_one_refused_by_name(tmp_path, name):
    make, expected = CLIPS[name]
    path = tmp_path / name
    make(path)
    assert_clip(path, expected)


def test_empty_chunks_of_audio_are_not_frames(tmp_path: Path) -> None:
    """A file that was cut off, with as many of them at its end as frames are missing."""
    make, _ = CLIPS["half_mp3.avi"]
    path = tmp_path / "clip.avi"
    make(path)
    path.write_bytes(path.read_bytes() + 6 * struct.pack("<4sI", b"01wb", 0))
    with pytest.raises(UserError, match="cut off: 20 of 26 frames"):
        check_video(path)
