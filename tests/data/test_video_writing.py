import av
import numpy as np
import pytest
import torch
from clip_makers import index_shown, pattern
from PIL import Image

from diffsynth_lite.data.video import check_video, clip_times, read_frames, write_video
from diffsynth_lite.media import Audio


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
def test_audio_is_written_beside_the_frames_and_on_time(tmp_path, rate, written):
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


def test_players_are_told_the_colours(tmp_path):
    write_video(tmp_path / "clip.mp4", frames(2), fps=25)
    with av.open(str(tmp_path / "clip.mp4")) as file:
        context = file.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (
            1,
            1,
            1,
            1,
        )


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
