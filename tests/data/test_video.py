import pytest
from clip_corpus import CLIPS, Accepted, Refused
from clip_makers import decode_all, index_shown

from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError

GOOD = {name: case for name, case in CLIPS.items() if isinstance(case[1], Accepted)}
BAD = {name: case for name, case in CLIPS.items() if isinstance(case[1], Refused)}


@pytest.mark.parametrize("name", GOOD)
def test_an_odd_clip_is_read_frame_by_frame(tmp_path, name):
    make, expected = GOOD[name]
    path = tmp_path / name
    make(path)
    facts = check_video(path)
    assert facts.fps == pytest.approx(expected.fps, rel=1e-12)
    assert (facts.width, facts.height) == expected.size
    assert facts.num_frames == len(expected.shown)
    assert facts.duration_s == pytest.approx(len(expected.shown) / expected.fps, abs=0.001)
    assert facts.is_variable_rate == expected.is_variable_rate
    times = [float(time) for time, _ in decode_all(path)]
    images = read_frames(path, times)
    assert [index_shown(image) for image in images] == expected.shown
    assert {(image.mode, image.size) for image in images} == {("RGB", expected.size)}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_clip_is_refused_by_name(tmp_path, name):
    make, expected = BAD[name]
    path = tmp_path / name
    make(path)
    with pytest.raises(UserError) as error:
        check_video(path)
    assert str(error.value).startswith(f"{path}: ")
    assert expected.reason in str(error.value)
    assert "\n" not in str(error.value)
