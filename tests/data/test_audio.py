"""Audio is cut out of files where its frames are, in the form asked for; what is damaged is an error."""

import dataclasses
import random
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clip_makers import avi_slots, index_shown, write_audio_clip, write_avi, write_clip
from PIL import Image

from diffsynth_lite.data import audio as audio_module
from diffsynth_lite.data.audio import AudioFacts, check_audio, read_audio
from diffsynth_lite.data.buckets import Bucket, BucketRule
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.images import DECODER_ID as IMAGE_DECODER_ID
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import FileMemory, MediaIndex
from diffsynth_lite.data.plan import PlanRules, plan_items
from diffsynth_lite.data.records import Record
from diffsynth_lite.data.video import DECODER_ID as VIDEO_DECODER_ID
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio, AudioFormat

MONO, STEREO = AudioFormat(sample_rate=16000, num_channels=1), AudioFormat(sample_rate=16000, num_channels=2)


def click(at_s: float, *, rate: int, seconds: float = 2.0, channels: int = 1) -> np.ndarray:
    """A short sine whose loudest sample is at a time."""
    times = np.arange(round(seconds * rate)) / rate - at_s
    wave = np.cos(2 * np.pi * 800 * times) * np.exp(-((times / 0.001) ** 2))
    return np.tile(wave.astype(np.float32) * 0.8, (channels, 1))


def tone(frequency: float, *, rate: int, seconds: float = 2.0, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)
    return np.tile(wave.astype(np.float32), (channels, 1))


def heard(found: Audio | None) -> torch.Tensor:
    assert found is not None
    return found.waveform


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("clip.mp4", "aac", 44100),
        ("clip.mkv", "flac", 22050),
        ("clip.webm.mkv", "libopus", 48000),
        ("clip.mov", "pcm_s24le", 48000),
        ("clip.avi", "pcm_u8", 8000),
    ],
)
def test_audio_is_where_its_frames_are_whatever_the_file(
    tmp_path: Path, name: str, codec: str, rate: int
) -> None:
    path = write_audio_clip(tmp_path / name, click(0.9, rate=rate), rate=rate, codec=codec)
    for start_s, duration_s in ((0.0, 1.7), (0.3, 1.1), (0.8437, 0.5)):
        found = read_audio(path, start_s, duration_s, MONO)
        waveform = heard(found)
        assert (found.sample_rate, waveform.dtype) == (16000, torch.float32)
        assert waveform.shape == (1, round(duration_s * 16000))
        loudest = int(waveform[0].abs().argmax())
        assert abs(loudest - (0.9 - start_s) * 16000) <= 1
        assert waveform.abs().max() == pytest.approx(0.8, abs=0.08)


def test_a_tone_keeps_its_frequency_and_strength(tmp_path: Path) -> None:
    path = write_audio_clip(tmp_path / "a.mkv", tone(440, rate=44100), rate=44100, codec="flac")
    for rate in (16000, 24000, 48000):
        form = AudioFormat(sample_rate=rate, num_channels=1)
        waveform = heard(read_audio(path, 0.5, 1.0, form))[0]
        spectrum = torch.fft.rfft(waveform).abs() / (rate / 2)
        assert int(spectrum.argmax()) == 440  # of a second, so that places are Hertz
        assert float(spectrum[440]) == pytest.approx(0.5, rel=1e-3)
        expected = 0.5 * torch.sin(
            2 * torch.pi * 440 * (0.5 + torch.arange(rate, dtype=torch.float64) / rate)
        )
        assert (waveform - expected).abs().max() < 2e-3


def test_channels_become_those_that_are_asked_for(tmp_path: Path) -> None:
    mono = write_audio_clip(tmp_path / "mono.mov", tone(100, rate=16000))
    left = np.concatenate([tone(100, rate=16000), 0 * tone(100, rate=16000)])
    stereo = write_audio_clip(tmp_path / "stereo.mov", left)
    centre = np.zeros((6, 32000), np.float32)
    centre[2] = tone(100, rate=16000)[0]
    surround = write_audio_clip(tmp_path / "surround.mkv", centre, codec="flac")
    # A quarter of a second is 25 periods.
    expected = torch.from_numpy(tone(100, rate=16000, seconds=0.25)).float()
    both = heard(read_audio(mono, 0.5, 0.25, STEREO))
    torch.testing.assert_close(both, expected.expand(2, -1), atol=1e-4, rtol=0)
    assert torch.equal(heard(read_audio(mono, 0.5, 0.25, MONO)), both[:1])
    alone = heard(read_audio(stereo, 0.5, 0.25, STEREO))
    torch.testing.assert_close(alone, torch.cat([expected, 0 * expected]), atol=1e-4, rtol=0)
    mixed = heard(read_audio(stereo, 0.5, 0.25, MONO))
    torch.testing.assert_close(mixed, expected / 2, atol=1e-4, rtol=0)
    for channel in heard(read_audio(surround, 0.5, 0.25, STEREO)):
        torch.testing.assert_close(channel[None], expected * 0.5**0.5 / (1 + 2 * 0.5**0.5), atol=1e-4, rtol=0)


def test_video_and_audio_that_begin_at_other_times_keep_their_clock(tmp_path: Path) -> None:
    late = write_audio_clip(tmp_path / "late.mkv", click(0.5, rate=16000), codec="flac", sound_start=0.4)
    waveform = heard(read_audio(late, 0.0, 2.0, MONO))[0]
    assert int(waveform.abs().argmax()) == round(0.9 * 16000)
    assert not waveform[: round(0.39 * 16000)].any()
    ahead = write_audio_clip(tmp_path / "ahead.mkv", click(0.9, rate=16000), codec="flac", video_start=0.5)
    waveform = heard(read_audio(ahead, 0.2, 1.0, MONO))[0]
    assert int(waveform.abs().argmax()) == round((0.9 - 0.5 - 0.2) * 16000)


def test_what_is_missing_is_silent_and_mostly_missing_is_no_audio(tmp_path: Path) -> None:
    short = write_audio_clip(tmp_path / "short.mov", tone(100, rate=16000, seconds=1.2))
    waveform = heard(read_audio(short, 0.0, 2.0, MONO))[0]
    assert waveform[: round(1.19 * 16000)].abs().max() > 0.4
    assert not waveform[round(1.21 * 16000) :].any()
    assert read_audio(short, 0.6, 1.3, MONO) is None  # 0.6 of 1.3 seconds
    assert read_audio(short, 1.5, 0.5, MONO) is None

    gap = write_audio_clip(tmp_path / "gap.mkv", tone(100, rate=16000), gap=(1.0, 0.3), seconds=3)
    waveform = heard(read_audio(gap, 0.5, 1.5, MONO))[0]
    quiet = (waveform.abs().unfold(0, 400, 100).amax(1) < 1e-3).nonzero().flatten() * 100 / 16000 + 0.5
    # It begins with the block of 1024 samples after the first second.
    assert (float(quiet.min()), float(quiet.max()) + 400 / 16000) == pytest.approx((1.024, 1.324), abs=0.01)


def test_files_without_a_track_and_with_a_mute_one_have_no_audio(tmp_path: Path) -> None:
    without = write_clip(tmp_path / "without.mp4")
    assert check_audio(without) is None
    assert read_audio(without, 0.0, 0.5, MONO) is None
    mute = write_audio_clip(tmp_path / "mute.mp4", np.zeros((2, 88200), np.float32), rate=44100, codec="aac")
    assert check_audio(mute) == AudioFacts(codec="aac", sample_rate=44100, num_channels=2)
    assert read_audio(mute, 0.0, 1.0, MONO) is None
    quiet = write_audio_clip(tmp_path / "quiet.mov", np.full((1, 32000), 2.0**-14, np.float32))
    assert heard(read_audio(quiet, 0.0, 1.0, MONO)).unique().tolist() == [2.0**-14]


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "flac"), ("a.mp4", "aac"), ("a.mov", "pcm_s16le")])
def test_a_late_part_is_sought_and_is_what_decoding_all_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str
) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, (1, 8000 * 9)).astype(np.float32)
    path = write_audio_clip(tmp_path / name, noise, rate=8000, codec=codec, seconds=9)
    sought: list[object] = []
    frames = audio_module._frames

    def watched(container: object, at: object) -> object:
        sought.append(at)
        return frames(container, at)

    monkeypatch.setattr(audio_module, "_frames", watched)
    found = heard(read_audio(path, 6.5, 2.0, MONO))
    assert len(sought) == 1
    assert sought[0] is not None
    monkeypatch.setattr(audio_module, "_PRE_ROLL_S", 100)
    whole = heard(read_audio(path, 6.5, 2.0, MONO))
    assert sought[1:] == [None]
    torch.testing.assert_close(found, whole, atol=0.0 if codec != "aac" else 1e-3, rtol=0)


def test_damaged_audio_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = write_audio_clip(tmp_path / "bad.mkv", tone(440, rate=16000), codec="flac")
    with av.open(str(path)) as file:
        packet = [bytes(one) for one in file.demux(audio=0) if one.size][2]
    whole = path.read_bytes()
    place = whole.index(packet) + len(packet) // 2
    path.write_bytes(
        whole[:place] + bytes(255 - byte for byte in whole[place : place + 8]) + whole[place + 8 :]
    )
    with pytest.raises(UserError, match=r"bad\.mkv: its audio is damaged"):
        read_audio(path, 0.0, 2.0, MONO)


def test_audio_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = write_audio_clip(tmp_path / "cut.mov", tone(440, rate=16000))
    content = path.read_bytes()
    moov = content.index(b"moov") - 4
    media = content.index(b"mdat") - 4
    assert media < moov
    # The index first, its places corrected, as files for the web have it; then the end is cut.
    with (
        av.open(str(path)) as file,
        av.open(str(tmp_path / "web.mov"), "w", options={"movflags": "faststart"}) as out,
    ):
        streams = {stream.index: out.add_stream_from_template(stream) for stream in file.streams}
        for packet in file.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                out.mux(packet)
    web = tmp_path / "web.mov"
    assert heard(read_audio(web, 0.0, 2.0, MONO)).shape == (1, 32000)
    web.write_bytes(web.read_bytes()[:-20_000])
    with pytest.raises(UserError, match=r"web\.mov: "):
        read_audio(web, 0.0, 2.0, MONO)


@pytest.mark.parametrize(("codec", "channels"), [("pcm_s16le", 2), ("pcm_u8", 1), ("adpcm_ms", 2)])
def test_an_avi_is_read_to_its_end_and_what_it_lacks_is_an_error(
    tmp_path: Path, codec: str, channels: int
) -> None:
    path = write_audio_clip(
        tmp_path / "clip.avi", tone(440, rate=16000, channels=channels), rate=16000, codec=codec
    )
    assert heard(read_audio(path, 0.0, 2.0, MONO))[0, -1000:].abs().max() > 0.4
    with av.open(str(path)) as file:
        (sound,) = file.streams.audio
        places = [entry.pos for entry in sound.index_entries]
    content = bytearray(path.read_bytes())
    end = content.rindex(b"idx1")
    content[places[-4] : end] = bytes(end - places[-4])  # as of a download that was not finished
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"clip\.avi: its audio is cut off"):
        read_audio(path, 0.0, 2.0, MONO)


def decoded_from_the_start(path: Path, rate: int) -> np.ndarray:
    """The reference: the audio of a file by PyAV itself, from time 0."""
    converter = av.AudioResampler("fltp", "mono", rate)
    with av.open(str(path)) as file:
        frames = [one.to_ndarray() for frame in file.decode(audio=0) for one in converter.resample(frame)]
    return np.concatenate(frames, axis=1)[0]


@pytest.mark.parametrize(
    ("codec", "audio_codec", "rate"),
    [
        ("mpeg4", "libmp3lame", 44100),
        ("libx264", "libmp3lame", 48000),
        ("mpeg4", "pcm_s16le", 16000),
        ("libx264", "pcm_s16le", 22050),
    ],
)
def test_frames_and_audio_of_an_avi_keep_their_clock_where_empty_chunks_move_frames(
    tmp_path: Path, codec: str, audio_codec: str, rate: int
) -> None:
    draw = random.Random(0)
    gaps = [0, *draw.choices((0, 1, 2, 3, 4), weights=(12, 1, 1, 1, 1), k=47)]
    slots = [index + gap for index, gap in enumerate(accumulate(gaps))]
    marked = (9, 24, 46)
    wave = sum(click(slots[index] / 25, rate=rate, seconds=slots[-1] / 25 + 1) for index in marked)
    path = write_avi(
        tmp_path / "clip.avi", slots=slots, codec=codec, waveform=wave, rate=rate, audio_codec=audio_codec
    )
    places = avi_slots(path)
    num_slots = places[-1] + 1
    assert num_slots > len(slots)
    assert check_video(path).duration_s == pytest.approx(num_slots / 25)

    shown = [bisect_right(places, slot) - 1 for slot in range(num_slots)]
    assert [index_shown(read_frames(path, [slot / 25])[0]) for slot in range(num_slots)] == shown

    reference = decoded_from_the_start(path, rate)
    form = AudioFormat(sample_rate=rate, num_channels=1)
    for index in marked:
        start_s = places[index] / 25
        found = heard(read_audio(path, start_s - 0.08, 0.2, form))[0]
        first = round((start_s - 0.08) * rate)
        expected = torch.from_numpy(reference[first : first + len(found)])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        # The click is at its frame, but for the delay of the encoder, which FFmpeg rounds to whole frames.
        assert abs(int(found.abs().argmax()) / rate - 0.08) < (0.04 if audio_codec == "libmp3lame" else 1e-4)


def test_audio_that_is_not_finite_or_has_too_many_channels_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tone(440, rate=16000)
    broken[0, 8000] = np.nan
    path = write_audio_clip(tmp_path / "nan.mkv", broken, codec="pcm_f32le")
    with pytest.raises(UserError, match=r"nan\.mkv: its audio has numbers that are not finite"):
        read_audio(path, 0.0, 1.0, MONO)
    stereo = write_audio_clip(tmp_path / "two.mkv", tone(440, rate=16000, channels=2))
    monkeypatch.setattr(audio_module, "_MOST_CHANNELS", 1)
    with pytest.raises(UserError, match=r"two\.mkv: its audio has 2 channels"):
        read_audio(stereo, 0.0, 1.0, MONO)


def test_audio_that_nothing_decodes_is_an_error(tmp_path: Path) -> None:
    path = write_audio_clip(tmp_path / "odd.mov", tone(440, rate=16000))
    content = path.read_bytes()
    assert content.count(b"sowt") == 1
    path.write_bytes(content.replace(b"sowt", b"zzzz"))
    for work in (lambda: check_audio(path), lambda: read_audio(path, 0.0, 1.0, MONO)):
        with pytest.raises(UserError, match=r"odd\.mov: its audio is of a kind that cannot be decoded"):
            work()


ITEM = TrainingItem(
    name="a",
    record=Record(name="a", source=0, target=Path("a.mp4"), captions=("a",)),
    content=("c",),
    bucket=Bucket(width=32, height=16, num_frames=5),
    crop_x=0.5,
    crop_y=0.5,
    clip_start_s=0.5,
    fps=10.0,
    background="white",
)


def test_the_key_of_an_entry_names_the_form_of_the_audio_and_without_audio_is_what_it_was() -> None:
    cache = TensorCache(Path())
    silent = ITEM.key(cache, "vae")
    parts = {
        "kind": "media video",
        "content": "target:c",
        "size": "32x16x5",
        "crop": "0.5 0.5",
        "times": "10.0: [0.5, 0.6, 0.7, 0.8, 0.9]",
        "transform": "v1 cover mask-area white",
        "encoder": "vae",
    }
    assert silent == cache.key(**parts, decoder=f"{IMAGE_DECODER_ID} {VIDEO_DECODER_ID}")
    keys = {dataclasses.replace(ITEM, audio=form).key(cache, "vae") for form in (None, MONO, STEREO)}
    assert len(keys) == 3
    assert silent in keys


@pytest.mark.parametrize(
    ("clip", "codec", "decoder"), [("a.mov", "pcm_s16le", "pcm_s16le"), ("a.avi", "libmp3lame", "mp3float")]
)
def test_plans_ask_only_for_the_audio_of_clips_and_only_where_it_is_learned(
    tmp_path: Path, clip: str, codec: str, decoder: str
) -> None:
    write_audio_clip(tmp_path / clip, tone(100, rate=16000), codec=codec)
    write_clip(tmp_path / "b.mp4", size=(32, 32))
    Image.new("RGB", (32, 32)).save(tmp_path / "c.png")
    records = [
        Record(name=name, source=0, target=tmp_path / name, captions=("a",))
        for name in (clip, "b.mp4", "c.png")
    ]
    buckets = BucketRule(divisor=8, step=8, sizes=((32, 32),), frame_counts=(1, 9))
    plans = {}
    for form in (None, STEREO):
        with FileMemory(tmp_path / "index") as memory:
            rules = PlanRules(buckets=buckets, fps=10.0, audio=form)
            plans[form] = plan_items(records, index=MediaIndex(memory), rules=rules)
    assert plans[None].audio == {}
    assert plans[STEREO].audio == {clip: AudioFacts(codec=decoder, sample_rate=16000, num_channels=1)}
    assert [item.audio for item in plans[None].items] == [None] * 3
    assert [item.audio for item in plans[STEREO].items] == [STEREO, STEREO, None]
    media = [item.load() for item in plans[STEREO].items]
    assert media[0].audio is not None
    assert media[0].audio.waveform.shape == (2, round(0.9 * 16000))
    assert (media[1].audio, media[2].audio) == (None, None)
    assert plans[STEREO].without({clip: "bad"}).audio == {}
    entries = [
        item.complete({"audio_latents": torch.zeros(1)}, one)
        for item, one in zip(plans[STEREO].items, media, strict=True)
    ]
    assert [entry["has_audio"].item() for entry in entries] == [1, 0, 0]
