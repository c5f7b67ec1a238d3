import pytest
from clip_corpus import CLIPS
from media_verdicts import assert_clip


@pytest.mark.parametrize("name", CLIPS)
def test_an_odd_clip_is_read_frame_by_frame_and_a_bad_one_refused_by_name(tmp_path, name):
    make, expected = CLIPS[name]
    path = tmp_path / name
    make(path)
    assert_clip(path, expected)
