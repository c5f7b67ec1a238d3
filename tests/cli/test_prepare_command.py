"""``diffsynth-lite prepare``: scenes, frames, sizes and bars, in another folder, and what it refuses."""

import json
import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_makers import index_shown, write_avi, write_clip
from PIL import Image, ImageCms

from diffsynth_lite.cli.main import main
from diffsynth_lite.data.audio import read_audio
from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.video import check_video, read_frames, write_video
from diffsynth_lite.data.video_decoding import all_frames, transposition
from diffsynth_lite.files import temporary_path
from diffsynth_lite.media import Audio, AudioFormat
from diffsynth_lite.preparing import clips
from diffsynth_lite.run_folder.lock import open_lock

SIZE = (96, 64)
RATE = 16000


def scene(seed: int, count: int) -> list[Image.Image]:
    """Frames of a scene, each brighter by 3 than the one before it."""
    small = np.random.default_rng(seed).integers(20, 160, (4, 6, 3))
    return [
        Image.fromarray((small + 3 * index).astype(np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
        for index in range(count)
    ]


def barred(image: Image.Image, depth: int) -> Image.Image:
    whole = Image.new(image.mode, (image.width, image.height + 2 * depth))
    whole.paste(image, (0, depth))
    return whole


def pixels(images: Iterable[Image.Image]) -> list[np.ndarray]:
    return [np.asarray(image.convert("RGB")).astype(np.int16) for image in images]


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def prepare(raw: Path, out: Path, *flags: str) -> int:
    return main(["prepare", str(raw), "--out", str(out), *flags])


def names(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(path.relative_to(folder).as_posix() for path in files)


def three_scenes(path: Path, *, audio: Audio | None = None) -> Path:
    write_video(path, [*scene(0, 24), *scene(1, 20), *scene(2, 13)], fps=24, audio=audio)
    return path


def test_scenes_are_cut_to_the_frame_and_look_the_same_but_for_a_short_one(
    raw: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [*scene(0, 24), *scene(1, 20), *scene(3, 9), *scene(2, 13)]
    write_video(raw / "film.mp4", frames, fps=24000 / 1001)
    assert prepare(raw, out, "--split-scenes") == 0
    scenes = [out / f"film-000{number}.mp4" for number in (1, 2, 3)]
    assert [check_video(path).num_frames for path in scenes] == [24, 20, 13]
    assert {check_video(path).fps for path in scenes} == {24000 / 1001}
    shown = [frame.to_image() for frame in all_frames(raw / "film.mp4")]
    written = pixels(frame.to_image() for path in scenes for frame in all_frames(path))
    for before, after in zip(pixels([*shown[:44], *shown[53:]]), written, strict=True):
        assert np.abs(before - after).mean() < 2
    assert "Left out: 1 scene of less than half a second, in film.mp4\n" in capsys.readouterr().out


def test_a_folder_that_is_in_use_is_refused_and_left_as_it_is(
    raw: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene(0, 1)[0].save(raw / "a.png")
    assert prepare(raw, out, "--max-side", "9") == 0
    temporary_path(out / "b.png").touch()
    before = names(out)
    with open_lock(out / ".lock", place="").file:
        assert prepare(raw, out, "--max-side", "9") == 2
        assert names(out) == before
    assert f"--out {out} is in use by process {os.getpid()} on" in caplog.text
    assert prepare(raw, out, "--max-side", "9") == 0


def test_audio_is_cut_with_its_frames(raw: Path, out: Path) -> None:
    """A tone begins with the second scene, and a click is half a second after that."""
    waveform = torch.zeros(2, 57 * RATE // 24)
    begin = 24 * RATE // 24
    waveform[0, begin:] = 0.3 * torch.sin(torch.arange(waveform.shape[1] - begin) * 0.4)
    waveform[1, begin + RATE // 2] = 1
    source = three_scenes(raw / "film.mp4", audio=Audio(waveform=waveform, sample_rate=RATE))
    assert prepare(raw, out, "--split-scenes") == 0
    form = AudioFormat(sample_rate=RATE, num_channels=2)
    second, original = read_audio(out / "film-0002.mp4", 0, 0.8, form), read_audio(source, 1, 0.8, form)
    assert second is not None
    assert original is not None
    assert second.waveform[1].argmax() == original.waveform[1].argmax() == RATE // 2
    assert second.waveform[0, 50:].sub(original.waveform[0, 50:]).abs().mean() < 0.02
    first = read_audio(out / "film-0001.mp4", 0, 0.9, form)
    assert first is None or first.waveform.abs().max() < 0.01


def test_times_of_a_variable_rate_stay(raw: Path, out: Path) -> None:
    times = np.cumsum([0] + [20, 30, 50] * 13).tolist()
    images = pixels([*scene(0, 20), *scene(1, 20)])
    source = write_clip(
        raw / "phone.mp4",
        images=[image.astype(np.uint8) for image in images],
        times=times,
        time_base=Fraction(1, 600),
    )
    assert prepare(raw, out, "--split-scenes") == 0
    shown = [frame.time for frame in all_frames(source)]
    for number, expected in ((1, shown[:20]), (2, shown[20:])):
        frames = list(all_frames(out / f"phone-000{number}.mp4"))
        assert [frame.time for frame in frames] == pytest.approx([time - expected[0] for time in expected])
    assert check_video(out / "phone-0001.mp4").is_variable_rate


def test_a_frame_that_an_avi_repeats_still_lasts_longer(raw: Path, out: Path) -> None:
    source = write_avi(raw / "a.avi", slots=[*range(10), *range(11, 26)])
    assert prepare(raw, out, "--max-side", "32") == 0
    times = [frame.time for frame in all_frames(out / "a.mp4")]
    assert times == pytest.approx([frame.time for frame in all_frames(source)])
    assert times[10] == pytest.approx(0.44)


@pytest.mark.parametrize("suffix", [".mkv", ".mov"])
def test_a_clip_that_is_only_scaled_stays_in_order_and_upright(raw: Path, out: Path, suffix: str) -> None:
    write_clip(
        raw / f"a{suffix}",
        rate=Fraction(24000, 1001),
        size=(65, 48),
        turn=(90, False, False),
        pixels="yuv444p",
    )
    assert prepare(raw, out, "--max-side", "32") == 0
    facts = check_video(out / "a.mp4")
    assert (facts.width, facts.height, facts.num_frames, facts.fps) == (24, 32, 25, 24000 / 1001)
    assert not facts.is_variable_rate
    frames = list(all_frames(out / "a.mp4"))
    assert transposition(frames[0]) is None
    assert [index_shown(frame.to_image()) for frame in frames] == list(range(25))
    before, after = pixels([read_frames(raw / f"a{suffix}", [0])[0].resize((24, 32)), frames[0].to_image()])
    assert np.abs(before - after).mean() < 6


def test_bars_of_a_clip_are_cut_off_all_its_frames(raw: Path, out: Path) -> None:
    dark = [Image.new("RGB", (96, 100))] * 10
    write_video(raw / "a.mp4", [*dark, *(barred(frame, 18) for frame in scene(0, 20))], fps=24)
    assert prepare(raw, out, "--strip-bars") == 0
    assert (check_video(out / "a.mp4").width, check_video(out / "a.mp4").height) == SIZE
    assert check_video(out / "a.mp4").num_frames == 30


def test_the_sharpest_frames_are_taken_evenly_from_each_scene(raw: Path, out: Path) -> None:
    """Of 24 frames only 5 and 18 are sharp; they are those around the middles of the halves."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    sharp, blurred = Image.fromarray(noise), Image.fromarray(noise).resize((12, 8)).resize(SIZE)
    first = [sharp if index in (5, 18) else blurred for index in range(24)]
    write_video(raw / "a.mp4", [*first, *scene(1, 13)], fps=24)
    (raw / "a.txt").write_text("a walk")
    write_video(raw / "short.mp4", scene(0, 1), fps=24)
    assert prepare(raw, out, "--split-scenes", "--extract-frames", "2", "--max-side", "48") == 0
    stems = [f"a-{number:04d}-{frame:04d}" for number in (1, 2) for frame in (1, 2)]
    results = [f"{stem}{end}" for stem in stems for end in (".png", ".txt")]
    assert names(out) == [".prepared.jsonl", *results, "short-0001.png"]
    found = [opened(out / f"{stem}.png") for stem in stems]
    assert [image.size for image in found] == [(48, 32)] * 4
    assert min(np.std(image) for image in pixels(found[:2])) > 1.5 * np.std(
        pixels([blurred.resize((48, 32))])[0]
    )


def test_images_are_upright_and_keep_alpha_and_profile(raw: Path, out: Path) -> None:
    photo = scene(0, 1)[0].resize((200, 100))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(raw / "turned.jpg", exif=exif, icc_profile=profile)
    clear = photo.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    clear.save(raw / "clear.webp", lossless=True)
    photo.convert("CMYK").save(raw / "print.jpg", icc_profile=b"for four colours")
    Image.fromarray(np.full((100, 200), 257 * 80, np.uint16)).save(raw / "deep.png")
    photo.convert("P").save(raw / "few.gif")
    photo.resize((50, 25)).save(raw / "small.bmp")
    assert prepare(raw, out, "--max-side", "50") == 0
    results = {name: opened(out / name) for name in names(out)[1:]}
    assert {name: (image.mode, image.size) for name, image in results.items()} == {
        "clear.png": ("RGBA", (50, 25)),
        "deep.png": ("L", (50, 25)),
        "few.png": ("RGB", (50, 25)),
        "print.jpg": ("RGB", (50, 25)),
        "small.bmp": ("RGB", (50, 25)),
        "turned.jpg": ("RGB", (25, 50)),
    }
    assert results["turned.jpg"].info["icc_profile"] == profile
    assert "icc_profile" not in results["print.jpg"].info
    assert results["deep.png"].getextrema() == (80, 80)
    assert (out / "small.bmp").read_bytes() == (raw / "small.bmp").read_bytes()
    expected = load_image(raw / "turned.jpg", background="white").resize((25, 50), Image.Resampling.LANCZOS)
    assert np.abs(np.subtract(*pixels([expected, results["turned.jpg"]]))).mean() < 2
    ramp = clear.getchannel("A").resize((50, 25), Image.Resampling.LANCZOS)
    assert np.array_equal(results["clear.png"].getchannel("A"), ramp)


def test_what_needs_nothing_is_copied_bit_for_bit_and_captions_go_along(
    raw: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (raw / "trip/day").mkdir(parents=True)
    write_video(raw / "trip/a.mp4", scene(0, 15), fps=24)
    barred(scene(0, 1)[0], 20).save(raw / "trip/day/b.png")
    scene(1, 1)[0].save(raw / "c.jpg", quality=60)
    texts = ("trip/a.txt", "trip/day/b.caption", "trip/day/b.2.txt", "c.txt", "metadata.csv", "orphan.txt")
    for text in texts:
        (raw / text).write_text(f"\ufeff{text}\r\n")
    before = {name: (raw / name).read_bytes() for name in names(raw)}
    assert prepare(raw, out, "--split-scenes", "--strip-bars") == 0
    assert names(out)[1:] == sorted({*before} - {"metadata.csv", "orphan.txt"})
    assert [name for name in names(out)[1:] if (out / name).read_bytes() != before[name]] == [
        "trip/day/b.png"
    ]
    assert opened(out / "trip/day/b.png").size == SIZE
    assert {name: (raw / name).read_bytes() for name in names(raw)} == before
    assert "Files that were not taken: metadata.csv; orphan.txt" in capsys.readouterr().out


def test_a_bad_file_is_named_and_the_rest_goes_on(
    raw: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene(0, 1)[0].save(raw / "good.png")
    (raw / "torn.png").write_bytes((raw / "good.png").read_bytes()[:500])
    (raw / "torn.mp4").write_bytes(b"nothing")
    (raw / "away.png").symlink_to("/etc/hostname")
    assert prepare(raw, out, "--max-side", "32") == 2
    assert names(out)[1:] == ["good.png"]
    errors = caplog.text
    assert "torn.mp4: damaged, cut off, or not an MP4" in errors
    assert "away.png is a link that leaves the folder" in errors
    assert "3 files could not be prepared" in errors


def test_a_dry_run_shows_what_would_be_and_writes_nothing(
    raw: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_scenes(raw / "film.mp4")
    (raw / "film.txt").write_text("three things")
    assert prepare(raw, out, "--split-scenes", "--max-side", "48", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "film.mp4  96 x 64, 2.4 s  3 clips, 48 x 32\n" in printed
    assert "Captions that go to each scene or image of their clip" in printed
    assert not out.exists()
    assert prepare(raw, out, "--split-scenes", "--max-side", "48", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert (item["num_scenes"], item["new_width"], item["results"][2]) == (3, 48, "film-0003.mp4")
    assert (out / "film-0003.txt").read_text() == "three things"


def test_killed_and_continued_is_as_uninterrupted(
    raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_scenes(raw / "film.mp4")
    scene(3, 1)[0].save(raw / "last.png")
    whole = out.with_name("whole")
    flags = ("--split-scenes", "--max-side", "64")
    assert prepare(raw, whole, *flags) == 0

    num_frames = 0

    def until_killed(frame: object) -> Image.Image:
        nonlocal num_frames
        num_frames += 1
        if num_frames == 30:
            raise KeyboardInterrupt
        return rgb_image(frame)

    rgb_image = clips.rgb_image
    with monkeypatch.context() as patch:
        patch.setattr(clips, "rgb_image", until_killed)
        assert prepare(raw, out, *flags) == 75
    assert names(out) == [".prepared.jsonl", "film-0001.mp4"]
    temporary_path(out / "film-0002.mp4").write_bytes(b"half of it")  # as a kill leaves it
    with (out / ".prepared.jsonl").open("a") as file:
        file.write('{"file": "last.png", "resul')
    kept = (out / "film-0001.mp4").stat().st_mtime_ns
    assert prepare(raw, out, *flags) == 0
    assert (out / "film-0001.mp4").stat().st_mtime_ns == kept
    assert names(out) == names(whole)
    for name in names(whole)[1:]:
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_running_again_makes_only_what_is_new_or_changed(
    raw: Path, out: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    three_scenes(raw / "film.mp4")
    scene(3, 1)[0].save(raw / "a.png")
    (raw / "a.txt").write_text("ours")
    assert prepare(raw, out, "--split-scenes") == 0
    (out / "a.txt").write_text("edited")
    write_video(raw / "film.mp4", [*scene(5, 20), *scene(6, 30)], fps=24)
    scene(4, 1)[0].save(raw / "new.png")
    capsys.readouterr()
    assert prepare(raw, out, "--split-scenes") == 0
    assert "; 1 file prepared before" in capsys.readouterr().out
    assert names(out)[1:] == ["a.png", "a.txt", "film-0001.mp4", "film-0002.mp4", "new.png"]
    assert (out / "a.txt").read_text() == "edited"
    assert check_video(out / "film-0002.mp4").num_frames == 30
    assert prepare(raw, out, "--max-side", "10") == 2
    assert f"holds what another command made: prepare {raw} --split-scenes; choose" in caplog.text


def test_records_of_others_delete_nothing_outside(raw: Path, out: Path) -> None:
    scene(0, 1)[0].save(raw / "a.png")
    assert prepare(raw, out, "--max-side", "10") == 0
    records = out / ".prepared.jsonl"
    records.write_text(
        records.read_text().replace('["a.png"]', '["../raw/a.png"]').replace('"source": [', '"source": [1, ')
    )
    assert prepare(raw, out, "--max-side", "10") == 0
    assert (raw / "a.png").exists()


@pytest.mark.parametrize(
    ("files", "flags", "problem"),
    [
        ("a.webp a.png", "--max-side 9", "a.webp: would become a.png, as a.png may; rename one"),
        ("a.mp4 a-0001.png", "--extract-frames 1", "a-0001.png: has a name as results of a.mp4 get"),
        ("notes.txt", "--max-side 9", "holds no image or clip"),
        ("a.png", "--extract-frames 3", "holds no clips, so that --split-scenes and --extract-frames do n"),
        ("a.png metadata.csv", "--max-side 9", "the captions are in metadata.csv, which names the files as"),
        ("a.mp4", "--split-scenes", "a.mp4: has no scene of half a second"),
        ("a.png", "", "give --split-scenes, --extract-frames N, --max-side PX or --strip-bars"),
        ("a.png", "--max-side 9 --out raw", "raw: is in "),
        ("a.png", "--max-side 9 --out raw/inside", "raw/inside: is in "),
        ("a.png", "--max-side 9 --out full", "full: holds other files"),
        ("a.png", "--max-side 9 --out file", "file: is a file"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_what_there_is(
    raw: Path, out: Path, files: str, flags: str, problem: str, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    monkeypatch.chdir(raw.parent)
    Path("full").mkdir()
    for place in ("full/mine.txt", "file"):
        Path(place).touch()
    for name in files.split():
        if name.endswith(".mp4"):
            write_video(raw / name, [*scene(0, 8), *scene(1, 8)], fps=24)
        elif name.endswith((".txt", ".csv")):
            (raw / name).touch()
        else:
            scene(0, 1)[0].save(raw / name)
    before = names(raw.parent)
    assert prepare(raw, out, *flags.split()) == 2
    assert problem in caplog.text
    assert [name for name in names(raw.parent) if not name.startswith("out/")] == before
