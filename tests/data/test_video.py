"""Videos are read frame by frame at exact times, refused by name where they are damaged, and written."""

import random
import struct
import weakref
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clip_corpus import CLIPS, QUIET, Accepted
from clip_makers import (
    BT601,
    BT709,
    FULL,
    LIMITED,
    decode_all,
    index_shown,
    packets_of,
    pattern,
    remux,
    write_clip,
)
from hypothesis import given
from hypothesis import strategies as st
from media_verdicts import assert_clip, mutated
from PIL import Image

from diffsynth_lite.data import video
from diffsynth_lite.data.video import (
    check_video,
    clip_starts,
    clip_times,
    max_frames,
    read_frames,
    write_video,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio

TIMES = "0 3 4 9 10 30 31 33 40 41 42 60 62 63 70 71 90 95 96 99 100 101 120 125 126"
VARYING = [int(time) for time in TIMES.split()]

LONG_CLIPS = {
    "cfr.mp4": {},
    "cfr.mkv": {},
    "no_b.mp4": {"options": {"bf": "0"}},
    "open_gop.mp4": {"options": {"x264-params": "open-gop=1:bframes=3:b-adapt=0:b-pyramid=normal"}},
    "open_gop.mkv": {"options": {"x264-params": "open-gop=1:bframes=3:b-adapt=0"}},
    "hevc.mp4": {"codec": "libx265", "options": QUIET},
    "hevc.mkv": {"codec": "libx265", "options": QUIET},
    "vp8.webm": {"codec": "libvpx"},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12", "svtav1-params": "lp=1"}},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"b": "4000000"}},
    "ntsc.mkv": {"rate": Fraction(30000, 1001)},
    "late.mp4": {"times": range(1000, 1048)},
    "turned.mp4": {"turn": (90, False, True)},
    "fragments.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "varying.mp4": {"times": [t * 10 + t % 7 for t in range(48)], "time_base": Fraction(1, 250)},
    "varying.mkv": {"times": [t * 10 + t % 7 for t in range(48)], "time_base": Fraction(1, 250)},
    "intra_refresh.mp4": {"options": {"x264-params": "intra-refresh=1"}},
}


@pytest.mark.parametrize("name", LONG_CLIPS)
def test_any_times_give_what_decoding_everything_gives(tmp_path, name):
    path = write_clip(tmp_path / name, num_frames=48, **LONG_CLIPS[name])
    reference = [(time, index_shown(pixels)) for time, pixels in decode_all(path)]
    assert [index for _, index in reference] == list(range(48))
    draw = random.Random(0)
    for _ in range(12):
        times = [draw.uniform(0, float(reference[-1][0])) for _ in range(draw.choice([1, 2, 5]))]
        times += [float(draw.choice(reference)[0])]
        shown = [index_shown(image) for image in read_frames(path, times)]
        expected = [[i for at, i in reference if at <= time + Fraction("0.001001")][-1] for time in times]
        earlier = [[i for at, i in reference if at <= time][-1] for time in map(Fraction, times)]
        assert all(index in pair for index, *pair in zip(shown, expected, earlier, strict=True))
        assert shown[-1] == expected[-1]


def test_frames_at_the_rate_of_the_clip_are_all_its_frames_once(tmp_path):
    for name in ("ntsc.mkv", "ntsc.mp4", "ntsc.webm"):
        codec = "libvpx-vp9" if name.endswith("webm") else "libx264"
        path = write_clip(tmp_path / name, num_frames=48, codec=codec, rate=Fraction(30000, 1001))
        fps = check_video(path).fps
        for start in range(0, 48, 5):
            times = clip_times(start / fps, num_frames=48 - start, fps=fps)
            assert [index_shown(image) for image in read_frames(path, times)] == list(range(start, 48))


def test_a_lower_rate_leaves_frames_out_and_a_higher_one_repeats_them(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", num_frames=30, rate=30)
    lower = read_frames(path, clip_times(0, num_frames=24, fps=24))
    assert [index_shown(image) for image in lower] == [index * 30 // 24 for index in range(24)]
    higher = read_frames(path, clip_times(0, num_frames=60, fps=60))
    assert [index_shown(image) for image in higher] == [index // 2 for index in range(60)]


def test_a_frame_of_a_varying_clip_is_shown_until_the_next(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", times=VARYING, time_base=Fraction(1, 100))
    seconds = [index / 100 for index in range(126)]
    expected = [[i for i, time in enumerate(VARYING) if time <= second][-1] for second in range(126)]
    assert [index_shown(image) for image in read_frames(path, seconds)] == expected


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """One second of 25 frames, which tests only read."""
    return write_clip(tmp_path_factory.mktemp("clip") / "clip.mp4")


def test_times_may_come_in_any_order_and_repeat_and_outside_of_the_clip_nothing_is_shown(clip):
    assert [index_shown(image) for image in read_frames(clip, [0.9, 0.0, 0.9, 0.4])] == [22, 0, 22, 10]
    assert index_shown(read_frames(clip, [0.999])[0]) == 24
    assert read_frames(clip, []) == []
    for time in (1.0, 1.5, 100.0):
        with pytest.raises(UserError, match=rf"clip\.mp4: a frame at {time:g} s .* ends before"):
            read_frames(clip, [0.5, time])
    with pytest.raises(UserError, match=r"clip\.mp4: a frame at -0\.1 s"):
        read_frames(clip, [-0.1, 0.5])


def test_frames_are_made_smaller_one_by_one_so_that_no_two_whole_ones_are_held(clip):
    whole = []

    def smaller(image):
        assert [reference for reference in whole if reference() is not None] == []
        whole.append(weakref.ref(image))
        return image.resize((2, 2))

    images = read_frames(clip, [0.0, 0.0, 0.4, 0.8], each=smaller)
    assert [image.size for image in images] == [(2, 2)] * 4
    assert len(whole) == 3


def damage(path, index):
    packets = packets_of(path)
    broken = bytearray(packets[index]["data"])
    broken[4:] = bytes(len(broken) - 4)
    packets[index]["data"] = bytes(broken)
    target = path.with_name(f"damaged_{path.name}")
    return remux(path, target, packets)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv"])
def test_only_what_is_needed_is_decoded_and_damage_within_it_is_an_error(tmp_path, name):
    path = write_clip(tmp_path / name, num_frames=48, options={"bf": "0", "sc_threshold": "0"})
    damaged = damage(path, 20)  # keyframes are 0, 8, 16, 24, ...
    for start, stop in [(1, 16), (16, 18), (24, 48), (40, 48)]:
        times = [index / 25 for index in range(start, stop)]
        assert [index_shown(image) for image in read_frames(damaged, times)] == list(range(start, stop))
    for index in (21, 23):
        with pytest.raises(UserError, match=name):
            read_frames(damaged, [index / 25])
    with pytest.raises(UserError, match=name):
        read_frames(damaged, [0.0, 47 / 25])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip.mp4", {"container": {"movflags": "faststart"}}),
        ("clip.mkv", {}),
        ("clip.webm", {"codec": "libvpx-vp9"}),
        ("clip.avi", {"codec": "mpeg4"}),
    ],
)
def test_damage_is_an_error_or_harmless_but_never_gives_too_few_frames(tmp_path, name, options):
    content = write_clip(tmp_path / name, **options).read_bytes()
    path = tmp_path / f"damaged_{name}"
    draw = random.Random(0)
    times = clip_times(0, num_frames=25, fps=25)
    refusals = []
    for _ in range(100):
        path.write_bytes(mutated(content, draw))
        try:
            images = read_frames(path, times)
        except UserError as error:
            refusals.append(str(error))
            continue
        assert [image.size for image in images] == [(64, 48)] * 25
    assert len(refusals) > 30
    assert [message for message in refusals if not message.startswith(f"{path}: ")] == []


@pytest.mark.parametrize("name", [name for name, case in CLIPS.items() if isinstance(case[1], Accepted)])
def test_reading_twice_gives_the_same_pixels(tmp_path, name):
    path = tmp_path / name
    CLIPS[name][0](path)
    once, twice = ([np.asarray(image) for image in read_frames(path, [0.0])] for _ in range(2))
    assert np.array_equal(once, twice)


COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 100, 50)]


@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p", "yuv420p10le"])
@pytest.mark.parametrize(
    ("matrix", "color_range", "tagged"),
    [
        (BT709, LIMITED, True),
        (BT709, FULL, True),
        (BT601, LIMITED, True),
        (BT601, FULL, True),
        (9, LIMITED, True),
        (BT601, LIMITED, False),
    ],
)
def test_colours_come_back(tmp_path, pixels, matrix, color_range, tagged):
    images = [np.full((48, 64, 3), colour, np.uint8) for colour in COLOURS]
    path = write_clip(
        tmp_path / "clip.mp4",
        images=images,
        pixels=pixels,
        matrix=matrix,
        color_range=color_range,
        tagged=tagged,
        options={"crf": "1"},
    )
    shown = read_frames(path, [index / 25 for index in range(len(COLOURS))])
    for image, colour in zip(shown, COLOURS, strict=True):
        assert np.abs(np.asarray(image).astype(int) - colour).max() <= 4


TURNED = {
    (0, False, False): lambda a: a,
    (90, False, False): lambda a: np.rot90(a),
    (180, False, False): lambda a: np.rot90(a, 2),
    (270, False, False): lambda a: np.rot90(a, 3),
    (0, True, False): lambda a: a[:, ::-1],
    (0, False, True): lambda a: a[::-1],
    (90, True, False): lambda a: np.rot90(a)[:, ::-1],
    (270, True, False): lambda a: np.rot90(a, 3)[:, ::-1],
}


@pytest.mark.parametrize("turn", TURNED)
def test_a_turned_or_mirrored_clip_is_shown_upright(tmp_path, turn):
    path = write_clip(tmp_path / "clip.mp4", num_frames=2, turn=turn, options={"crf": "1"}, pixels="yuv444p")
    shown = np.asarray(read_frames(path, [0.0])[0]).astype(int)
    expected = TURNED[turn](pattern(0))
    facts = check_video(path)
    assert (facts.height, facts.width) == shown.shape[:2] == expected.shape[:2]
    assert np.abs(shown - expected).mean() < 3


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


def test_times_are_equally_spaced():
    assert clip_times(2.0, num_frames=3, fps=4) == [2.0, 2.25, 2.5]


@pytest.mark.parametrize(
    ("where", "count", "expected"),
    [
        ("start", 1, [0.0]),
        ("center", 1, [1.0]),
        ("uniform", 1, [1.0]),
        ("uniform", 2, [0.0, 2.0]),
        ("uniform", 3, [0.0, 1.0, 2.0]),
        ("random", 3, [0.0, 1.0, 2.0]),
    ],
)
def test_places_of_clips(where, count, expected):
    draw = [0.999, 0.0, 0.5].__getitem__ if where == "random" else never
    assert starts(3.0, 1.0, where, count, draw=draw) == expected


def test_a_file_as_long_as_a_clip_gives_it_once_and_the_rounding_of_a_container_makes_none_too_short():
    for where in ("uniform", "random"):
        assert starts(1.0, 1.0, where, 4, draw=lambda index: index / 4) == [0.0]
    assert starts(1.334, 40 * 1001 / 30000, "start", 1) == [0.0]


@pytest.mark.parametrize(
    ("duration_s", "where", "count", "message"),
    [
        (0.9, "start", 1, r"0\.9 s are too short for a clip of 1 s"),
        (9.0, "start", 2, "2 clips .* start; use random or uniform"),
        (9.0, "center", 2, "2 clips .* center; use random or uniform"),
    ],
)
def test_clips_that_a_file_does_not_have_are_refused(duration_s, where, count, message):
    with pytest.raises(UserError, match=message):
        starts(duration_s, 1.0, where, count)


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


def frames(num_frames=9, size=(64, 48)):
    return [Image.fromarray(pattern(index, *size)) for index in range(num_frames)]


@pytest.mark.parametrize("fps", [16, 25, 23.976, 30000 / 1001, 7.5])
def test_what_is_written_is_read_again(tmp_path, fps):
    path = tmp_path / "new" / "clip.mp4"
    write_video(path, frames(), fps=fps)
    facts = check_video(path)
    assert (facts.width, facts.height, facts.num_frames, facts.is_variable_rate) == (64, 48, 9, False)
    assert facts.fps == pytest.approx(fps, rel=1e-4)
    shown = read_frames(path, clip_times(0, num_frames=9, fps=fps))
    assert [index_shown(image) for image in shown] == list(range(9))
    for image, original in zip(shown, frames(), strict=True):
        assert np.abs(np.asarray(image).astype(int) - np.asarray(original)).mean() < 4


@pytest.mark.parametrize(("rate", "written"), [(24000, 24000), (1600, 48000)])
def test_audio_is_written_with_the_frames_and_on_time(tmp_path, rate, written):
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    waveform = torch.zeros(2, rate // 2)
    waveform[1, rate // 4 : rate // 4 + rate // 100] = 2.0
    for path in paths:
        write_video(path, frames(5), fps=10, audio=Audio(waveform=waveform, sample_rate=rate), comment="x")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with av.open(str(paths[0])) as file:
        (sound,) = file.streams.audio
        assert (sound.codec_context.name, sound.rate, sound.duration) == ("aac", written, written // 2)
        left, right = np.concatenate([frame.to_ndarray() for frame in file.decode(sound)], axis=1)
    assert abs(left).max() < 0.05
    # What is too loud is clipped; the first loud sample is at 0.25 s.
    assert 0.8 < abs(right).max() < 1.3
    assert np.flatnonzero(abs(right) > 0.5)[0] / written == pytest.approx(0.25, abs=0.002)
    shown = read_frames(paths[0], clip_times(0, num_frames=5, fps=10))
    assert [index_shown(image) for image in shown] == list(range(5))


def test_players_know_the_colours(tmp_path):
    write_video(tmp_path / "clip.mp4", frames(2), fps=25)
    with av.open(str(tmp_path / "clip.mp4")) as file:
        context = file.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        colours = (context.colorspace, context.color_primaries, context.color_trc, context.color_range)
        assert colours == (1, 1, 1, 1)


def test_equal_frames_give_equal_bytes_and_an_old_file_is_replaced(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"old")
        write_video(tmp_path / name, frames(), fps=25)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize(
    "wrong", [[], frames(2, (63, 48)), frames(2, (64, 47)), [*frames(1), *frames(1, (32, 48))]]
)
def test_frames_that_cannot_be_written_leave_the_old_file(tmp_path, wrong):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"clip\.mp4: frames of one size, width and height even"):
        write_video(path, wrong, fps=25)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("clip.mp4", b"old")]


def test_a_failure_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    broken = frames(3)
    broken[2] = Image.new("RGB", (64, 48))
    broken[2].convert = None
    with pytest.raises(TypeError):
        write_video(path, broken, fps=25)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("clip.mp4", b"old")]


def test_without_x264_another_encoder_is_taken_or_the_remedy_is_named(tmp_path, monkeypatch):
    path = tmp_path / "clip.mp4"
    monkeypatch.setattr(video, "_ENCODERS", {"libnone": {}, "libx265": video._ENCODERS["libx265"]})
    write_video(path, frames(), fps=25)
    assert [index_shown(image) for image in read_frames(path, clip_times(0, num_frames=9, fps=25))] == list(
        range(9)
    )
    monkeypatch.setattr(video, "_ENCODERS", {"libnone": {}})
    with pytest.raises(UserError, match=r"writes no H\.264 or H\.265 \(libnone\); install PyAV's wheel"):
        write_video(path, frames(), fps=25)
