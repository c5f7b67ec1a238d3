from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.data.video import clip_starts, clip_times, max_frames
from diffsynth_lite.errors import UserError


def never(index):
    raise AssertionError("nothing is drawn")


def starts(duration_s, clip_s, where, count, draw=never, fps=10.0):
    return clip_starts(duration_s, clip_s, fps=fps, where=where, count=count, draw=draw)


@pytest.mark.parametrize(
    ("duration_s", "fps", "expected"),
    [
        (1.0, 25, 25),
        (1.0, 24, 24),
        (0.98, 24, 23),
        (0.04, 25, 1),
        (0.0, 25, 0),
        (10.010, 30000 / 1001, 300),
        (1.334, 30000 / 1001, 39 + 1),  # 1.33467 s, rounded to a millisecond
        (1.32, 30000 / 1001, 39),
        (5.0, 16, 80),
    ],
)
def test_frames_that_fit(duration_s, fps, expected):
    assert max_frames(duration_s, fps) == expected


@given(
    st.integers(1, 5000), st.sampled_from([Fraction(24000, 1001), 24, 25, Fraction(30000, 1001), 30, 60, 120])
)
def test_a_clip_has_as_many_frames_as_it_has(num_frames, fps):
    assert max_frames(float(num_frames / fps), float(fps)) == num_frames


@given(st.floats(0.05, 500), st.floats(1, 120))
def test_all_frames_that_fit_begin_before_the_end(duration_s, fps):
    times = clip_times(0.0, num_frames=max_frames(duration_s, fps), fps=fps)
    assert all(0 <= time < duration_s for time in times)


def test_times_are_equally_far_apart():
    assert clip_times(2.0, num_frames=3, fps=4) == [2.0, 2.25, 2.5]


def test_places_of_clips():
    assert starts(3.0, 1.0, "start", 1) == [0.0]
    assert starts(3.0, 1.0, "center", 1) == [1.0]
    assert starts(3.0, 1.0, "uniform", 1) == [1.0]
    assert starts(3.0, 1.0, "uniform", 2) == [0.0, 2.0]
    assert starts(3.0, 1.0, "uniform", 3) == [0.0, 1.0, 2.0]
    assert starts(3.0, 1.0, "random", 3, draw=[0.999, 0.0, 0.5].__getitem__) == [0.0, 1.0, 2.0]


def test_a_file_as_long_as_a_clip_gives_it_once():
    for where in ("uniform", "random"):
        assert starts(1.0, 1.0, where, 4, draw=lambda index: index / 4) == [0.0]


def test_the_rounding_of_a_container_makes_no_file_too_short():
    assert starts(1.334, 40 * 1001 / 30000, "start", 1) == [0.0]


def test_a_file_that_is_too_short_is_refused():
    with pytest.raises(UserError, match=r"0\.9 s are too short for a clip of 1 s"):
        starts(0.9, 1.0, "start", 1)


@pytest.mark.parametrize("where", ["start", "center"])
def test_several_clips_cannot_be_at_one_place(where):
    with pytest.raises(UserError, match=f"2 clips .* {where}; use random or uniform"):
        starts(9.0, 1.0, where, 2)


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([24000 / 1001, 25.0, 60.0]),
    st.sampled_from(["start", "center", "random", "uniform"]),
    st.integers(1, 9),
    st.floats(0, 1, exclude_max=True),
)
def test_every_clip_lies_within_the_file(more, num_frames, fps, where, count, drawn):
    count = 1 if where in ("start", "center") else count
    duration_s, clip_s = (num_frames + more) / fps, num_frames / fps
    found = starts(duration_s, clip_s, where, count, draw=lambda index: (drawn + index / 7) % 1, fps=fps)
    assert found == sorted(set(found))
    assert 1 <= len(found) <= count
    assert found[0] >= 0
    assert found[-1] + clip_s <= duration_s + 0.001
    assert all(abs(start * fps - round(start * fps)) < 1e-6 for start in found)
