"""Which frames are read, against decoding everything; and that damage never makes a clip short."""

import random
import weakref
from fractions import Fraction

import numpy as np
import pytest
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
from media_damage import mutated

from diffsynth_lite.data.video import check_video, clip_times, read_frames
from diffsynth_lite.errors import UserError

VARYING = [
    0,
    3,
    4,
    9,
    10,
    30,
    31,
    33,
    40,
    41,
    42,
    60,
    62,
    63,
    70,
    71,
    90,
    95,
    96,
    99,
    100,
    101,
    120,
    125,
    126,
]

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


@pytest.mark.parametrize("time", [1.0, 1.5, 100.0])
def test_nothing_is_shown_after_the_end(tmp_path, time):
    path = write_clip(tmp_path / "clip.mp4")
    with pytest.raises(UserError, match=rf"clip\.mp4: a frame at {time:g} s .* ends before"):
        read_frames(path, [0.5, time])
    assert index_shown(read_frames(path, [0.999])[0]) == 24


def test_nothing_is_shown_before_the_start(tmp_path):
    path = write_clip(tmp_path / "clip.mp4")
    with pytest.raises(UserError, match=r"clip\.mp4: a frame at -0\.1 s"):
        read_frames(path, [-0.1, 0.5])


def test_no_times_give_no_frames(tmp_path):
    assert read_frames(write_clip(tmp_path / "clip.mp4"), []) == []


def test_times_may_come_in_any_order_and_repeat(tmp_path):
    path = write_clip(tmp_path / "clip.mp4")
    assert [index_shown(image) for image in read_frames(path, [0.9, 0.0, 0.9, 0.4])] == [22, 0, 22, 10]


def test_frames_are_made_smaller_one_by_one_so_that_no_two_whole_ones_are_held(tmp_path):
    path = write_clip(tmp_path / "clip.mp4")
    whole = []

    def smaller(image):
        assert [reference for reference in whole if reference() is not None] == []
        whole.append(weakref.ref(image))
        return image.resize((2, 2))

    images = read_frames(path, [0.0, 0.0, 0.4, 0.8], each=smaller)
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
