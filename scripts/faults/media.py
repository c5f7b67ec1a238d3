"""M1 and M2: files of images and clips that are odd, bad, or damaged at random."""

import json
import math
import resource
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from clip_corpus import CLIPS, Refused
from clip_makers import write_clip
from image_corpus import ACCEPTED, BAD_BODIES, BAD_HEADERS, noise_image
from media_verdicts import assert_clip, assert_image, mutated

from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.video import check_video, clip_times, read_frames
from diffsynth_lite.errors import UserError
from faults.bench import PLAIN, Bench, Run, fault, forked, limit_memory, waited

LIMIT_S, MEMORY_BYTES = 5, 1 << 30
"""Of a processor, and next to what the process has, for one file."""
NUM_FRAMES = 25
SAME, OTHER, REFUSED = 10, 11, 12
"""Exit codes of a child that has read a damaged file: with the pixels of the whole one, others, or none."""


@fault("M1", "each as its table says, in 5 s and 1 GiB; the run leaves out exactly what is bad")
def read_odd_media(bench: Bench) -> str:
    """Odd and bad images and clips, one at a time and in a run."""
    files = bench.root / "files"
    images, clips = files / "images", files / "clips"
    _in_child(bench, "make", partial(_make_corpora, images, clips))
    for path in images.iterdir():
        _in_child(bench, path.name, limited(partial(assert_image, path)))
    for name, (_, expected) in CLIPS.items():
        _in_child(bench, name, limited(partial(assert_clip, clips / name, expected)))
    left_out = _quarantined(bench.images(), images) + _quarantined(bench.clips(), clips)
    return f"{len(images_of_corpus())} images, {len(CLIPS)} clips; 2 runs, which leave {left_out} out"


def images_of_corpus() -> dict[str, bytes]:
    """All images by name."""
    return {name: content for name, (content, _) in (ACCEPTED | BAD_HEADERS | BAD_BODIES).items()}


def _make_corpora(images: Path, clips: Path) -> None:
    images.mkdir(parents=True)
    clips.mkdir()
    for name, content in images_of_corpus().items():
        (images / name).write_bytes(content)
    for name, (make, _) in CLIPS.items():
        make(clips / name)
    for path in clips.iterdir():
        if path.name not in CLIPS:
            path.unlink()


def _quarantined(run: Run, media: Path) -> int:
    """Train on a corpus; exactly what is bad in it is left out, and listed."""
    for path in media.iterdir():
        path.with_suffix(".txt").write_text("a red circle")
    lenient = (
        "data.upscale=true",
        "data.on_bad_item=skip",
        "data.max_bad_ratio=0.9",
        "train.steps=2",
        f"data.path={media}",
    )
    run = run.having(*PLAIN, "data.clips_per_video=1", *lenient)
    run.finish(run.folder)
    rows = (run.folder / "quarantine.jsonl").read_text().splitlines()
    bad = {name for name, (_, verdict) in CLIPS.items() if isinstance(verdict, Refused)}
    bad |= {"one_frame.mp4", *BAD_HEADERS, *BAD_BODIES}  # of one frame no clip of five can be taken
    expected = {path.name for path in media.iterdir()} & bad
    assert {json.loads(row)["item"] for row in rows} == expected
    return len(expected)


@fault("M2", "no crash, no hang, no clip that is short without an error")
def damage_media(bench: Bench) -> str:
    """Images and clips damaged at random."""
    num_clips, num_images = bench.pick(20, 180, 1800), bench.pick(20, 600, 6000)
    whole = write_clip(bench.root / "whole.mp4", container={"movflags": "faststart"})
    pixels = _frames_of(whole)
    tallies = {"mp4": _read_damaged(bench, whole, num_clips, lambda path: _frames_of(path) == pixels)}
    for suffix in ("jpg", "png", "webp"):
        path = bench.root / f"whole.{suffix}"
        noise_image().save(path)
        shown = _pixels_of(path)
        tallies[suffix] = _read_damaged(
            bench, path, num_images, lambda path, shown=shown: _pixels_of(path) == shown
        )
    return (
        f"{num_clips} mp4, {num_images} each of jpg, png, webp; refused / read with other pixels: "
        + ", ".join(f"{kind} {tally[REFUSED]} / {tally[OTHER]}" for kind, tally in tallies.items())
    )


def _frames_of(path: Path) -> list[bytes]:
    """The frames of a clip, which must say that it has all of them, or be refused."""
    facts = check_video(path)
    assert facts.num_frames == NUM_FRAMES, f"{facts.num_frames} of {NUM_FRAMES} frames"
    frames = read_frames(path, clip_times(0, num_frames=NUM_FRAMES, fps=NUM_FRAMES))
    assert len(frames) == NUM_FRAMES
    return [np.asarray(frame).tobytes() for frame in frames]


def _pixels_of(path: Path) -> bytes:
    return load_image(path, background="white").tobytes()


def _read_damaged(bench: Bench, whole: Path, times: int, is_same: Callable[[Path], bool]) -> Counter[int]:
    """How often a file that was damaged at random was read, or refused."""
    content, dice = whole.read_bytes(), bench.new_dice()
    damaged = whole.with_name(f"damaged{whole.suffix}")
    tally: Counter[int] = Counter()

    def work() -> int:
        try:
            return SAME if is_same(damaged) else OTHER
        except UserError:
            return REFUSED

    for number in range(times):
        damaged.write_bytes(mutated(content, dice))
        code = waited(forked(work, bench.root / "log"), 60)
        if code not in (SAME, OTHER, REFUSED):
            log = (bench.root / "log").read_text()[-2000:]
            raise AssertionError(f"{whole.suffix}, damage {number}: exit code {code}\n{log}")
        tally[code] += 1
    return tally


def _in_child(bench: Bench, name: str, work: Callable[[], None]) -> None:
    code = waited(forked(lambda: work() or 0, bench.root / "log"), 600)
    assert code == 0, f"{name}: exit code {code}\n{(bench.root / 'log').read_text()[-2000:]}"


def limited(check: Callable[[], None]) -> Callable[[], None]:
    """The check of a file, which is killed when it takes more than the limits."""

    def checked() -> None:
        limit_memory(MEMORY_BYTES)
        seconds = math.ceil(time.process_time()) + LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        check()

    return checked
