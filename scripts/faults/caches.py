"""V1: what changes an entry of the cache, kills while it is filled, also by parts, and entries that rot."""

import json
import logging
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from damages import RANDOM
from PIL import Image
from test_bad_input import copied_model
from test_run_cache import entries
from tiny_run import garble_media, tiny_image

from diffsynth_lite.cli.main import main
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.video import write_video
from faults.bench import PLAIN, Bench, Run, assert_same, fault, forked, waited


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one input.

    Attributes:
        items: images or clips that must then be encoded.
        captions: also.
        settings: that make it.
        file: below the run's folder that is changed,
        edit: and how.
    """

    items: int = 0
    captions: int = 0
    settings: tuple[str, ...] = ()
    file: str | None = None
    edit: Callable[[Path], object] = Path.touch


def _with_note(path: Path) -> None:
    """Other bytes, of the same meaning."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"note": "changed"}))


def _with_other_weight(path: Path) -> None:
    """The last number of a file of weights differs in its last bit."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def _with_other_frames(path: Path) -> None:
    write_video(path, [tiny_image(32, 48, 40 + frame) for frame in range(12)], fps=16)


NUM_IMAGES, NUM_CAPTIONS, NUM_CLIPS = 5, 2, 3
_ALL_ITEMS = {"items": NUM_IMAGES}
_ALL_CAPTIONS = {"captions": NUM_CAPTIONS}
_ALL_CLIPS = {"items": NUM_CLIPS}

IMAGES = {
    "an image": Change(items=1, file="data/1.png", edit=lambda path: tiny_image(80, 48, 77).save(path)),
    "a caption": Change(captions=1, file="data/1.txt", edit=lambda path: path.write_text("a green square")),
    "a mask": Change(
        items=1, file="masks/1.png", edit=lambda path: Image.linear_gradient("L").resize((81, 48)).save(path)
    ),
    "no masks": Change(**_ALL_ITEMS, settings=("data.mask_dir=null",)),
    "the width": Change(**_ALL_ITEMS, settings=("data.width=48",)),
    "the height": Change(**_ALL_ITEMS, settings=("data.height=48",)),
    "the crop": Change(**_ALL_ITEMS, settings=("data.crop=random",)),
    "the background": Change(**_ALL_ITEMS, settings=("data.background=black",)),
    "the trigger": Change(**_ALL_CAPTIONS, settings=("data.trigger=ohwx",)),
    "captions left out": Change(captions=1, settings=("data.caption_dropout=0.5",)),
    "the VAE's type": Change(**_ALL_ITEMS, settings=("model.vae_dtype=bfloat16",)),
    "the text encoder's type": Change(**_ALL_CAPTIONS, settings=("model.text_encoder_dtype=bfloat16",)),
    "the text encoder's format": Change(**_ALL_CAPTIONS, settings=("model.text_encoder_quantize=int8",)),
    "one weight of the VAE": Change(
        **_ALL_ITEMS, file="model/vae/diffusion_pytorch_model.safetensors", edit=_with_other_weight
    ),
    "the VAE's config": Change(**_ALL_ITEMS, file="model/vae/config.json", edit=_with_note),
    "one weight of the text encoder": Change(
        **_ALL_CAPTIONS, file="model/text_encoder/model.safetensors", edit=_with_other_weight
    ),
    "the tokenizer": Change(**_ALL_CAPTIONS, file="model/tokenizer/tokenizer_config.json", edit=_with_note),
}

CLIPS = {
    "a clip": Change(items=1, file="clips/upright.mp4", edit=_with_other_frames),
    "the rate": Change(**_ALL_CLIPS, settings=("data.fps=8",)),
    "the number of frames": Change(**_ALL_CLIPS, settings=("data.frame_counts=[9]",)),
    "the place in the clip": Change(**_ALL_CLIPS, settings=("data.clip=center",)),
    "more clips of a file": Change(**_ALL_CLIPS, settings=("data.clip=uniform", "data.clips_per_video=2")),
    "the resolution": Change(**_ALL_CLIPS, settings=("data.resolutions=[24]",)),
}

NOTHING = {
    "a moved run": Change(settings=("train.seed=7", "lora.rank=8")),
    "the times of the files": Change(file="data/2.png", edit=Path.touch),
    "the transformer": Change(
        file="model/transformer/diffusion_pytorch_model.safetensors", edit=_with_other_weight
    ),
}
"""What no entry depends on."""


def changing_images(bench: Bench) -> Run:
    """Five images with masks and two captions, and a copy of the pipeline."""
    run = bench.images(*PLAIN, "train.steps=1", name="changing")
    (run.root / "masks").mkdir()
    for place in range(NUM_IMAGES):
        Image.radial_gradient("L").resize((80 + place, 48)).save(run.root / "masks" / f"{place}.png")
    copied_model(run)
    return run.having(f"data.mask_dir={run.root / 'masks'}")


def changing_clips(bench: Bench) -> Run:
    """Three clips that are long enough for all that is changed."""
    run = bench.clips("train.steps=1", name="changing clips")
    for path in (run.root / "clips").iterdir():
        if path.stem not in ("long", "fast", "upright"):
            path.unlink()
    plain = ("data.frame_counts=[5]", "data.clip=start", "data.clips_per_video=1", "data.crop=center")
    return run.having(*plain, "data.caption_dropout=0")


MIN_WHILE_FILLING = 0.5
"""Of the kills; the others may strike after the last entry, on a machine that wakes this process late."""


@fault("V1", "exactly what depends on it is encoded again; no entry torn, none encoded twice; rot is found")
def distrust_the_cache(bench: Bench) -> str:
    """Each input of a cached tensor changed by itself; kill -9 while caching, also by parts; rot."""
    stride = bench.pick(4, 1, 1)
    num_changes = change_each_input(changing_images(bench), IMAGES | NOTHING, stride)
    num_changes += change_each_input(changing_clips(bench), CLIPS, stride)
    kills = kill_while_caching(bench, wanted=bench.pick(2, 20, 200))
    num_killed_parts = kill_parts(bench, wanted=bench.pick(2, 10, 100))
    num_rotten = let_entries_rot(bench, ways=bench.pick(1, 2, 8))
    return (
        f"{num_changes} inputs, {kills} kills, {num_killed_parts} kills of parts, {num_rotten} rotten entries"
    )


class _Encoded(logging.Handler):
    """Counts what runs encode, by kind."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).endswith("that the cache does not hold"):
            number, kind = record.args
            self.counts[f"{str(kind).removesuffix('s')}s"] += int(str(number))


@contextmanager
def encoded() -> Iterator[Counter[str]]:
    """Scope in which what is encoded is counted."""
    handler, logger = _Encoded(), logging.getLogger("diffsynth_lite.data.encoding")
    logger.addHandler(handler)
    try:
        yield handler.counts
    finally:
        logger.removeHandler(handler)


def change_each_input(run: Run, changes: Mapping[str, Change], stride: int) -> int:
    """After each change exactly what depends on it is encoded, and nothing once it is undone."""
    run.finish(run.folder)
    chosen = list(changes.items())[::stride]
    for name, change in chosen:
        path = run.root / change.file if change.file else None
        before = path.read_bytes() if path else b""
        if path:
            change.edit(path)
        with encoded() as counts:
            shutil.rmtree(run.finish("again", *change.settings))
        assert (counts["items"], counts["captions"]) == (change.items, change.captions), f"{name}: {counts}"
        if path:
            path.write_bytes(before)
        with encoded() as counts:
            shutil.rmtree(run.finish("again"))
        assert not counts, f"{name}, undone: {counts}"
    return len(chosen)


def kill_while_caching(bench: Bench, *, wanted: int) -> int:
    """Kill a trainer while it fills the cache, until it is done, again and again."""
    run, whole = _filled_run(bench, "killed")
    made = entries(run)
    entry_s = (max(made.values()) - min(made.values())) / len(made) * 1e-9
    dice, kills = bench.new_dice(), Counter()
    while kills["all"] < wanted:
        shutil.rmtree(run.root / "cache")
        # Some of the new entries, so that one filling is killed several times; then a part of the next one.
        while _killed(run, dice.randint(1, len(made) // 4), dice.uniform(0, 2) * entry_s, len(made), kills):
            pass
        assert entries(run).keys() == made.keys()
        assert_same(whole, run.folder, 1)
        shutil.rmtree(run.folder)
    assert kills["while filling"] >= MIN_WHILE_FILLING * kills["all"], kills
    return kills["all"]


def kill_parts(bench: Bench, *, wanted: int) -> int:
    """Kill processes that fill a cache by parts, all at once and one part twice, until each part is done.

    The run that follows reads no media, and is the one on a cache filled at once. Returns the kills.
    """
    run, whole = _filled_run(bench, "parts")
    made = {path.name: path.read_bytes() for path in entries(run)}
    dice, kills = bench.new_dice(), 0
    while kills < wanted:
        shutil.rmtree(run.root / "cache")
        left = [0, 1, 2, 1]
        while left:
            left = _parts_killed(run, left, dice)
            kills += len(left)
        assert {path.name: path.read_bytes() for path in entries(run)} == made
        garble_media(run.root / "data")
        assert_same(whole, run.finish_in_child(run.folder), 1)
        shutil.rmtree(run.folder)
        _write_images(run)
    return kills


def _filled_run(bench: Bench, name: str) -> tuple[Run, Path]:
    """A run of one step on 40 images, and its folder after an undisturbed start, which filled the cache."""
    run = bench.images(*PLAIN, "train.steps=1", name=name)
    _write_images(run)
    return run, run.finish_in_child("whole")


def _write_images(run: Run) -> None:
    for place in range(40):
        tiny_image(64, 40, 10 + place).save(run.root / "data" / f"{place}.png")
        (run.root / "data" / f"{place}.txt").write_text(f"number {place}")


def _parts_killed(run: Run, parts: Sequence[int], dice: random.Random) -> list[int]:
    """Fill parts at once, and kill about half of them in the middle; those that did not end by themselves."""
    children = {forked(partial(_fill_part, run, index), run.log): index for index in parts}
    time.sleep(dice.uniform(0.2, 1.5))
    for child in children:
        if dice.random() < 0.5:
            os.kill(child, signal.SIGKILL)
    codes = {child: waited(child, 120) for child in children}
    assert set(codes.values()) <= {0, -signal.SIGKILL}, codes
    return [children[child] for child, code in codes.items() if code]


def _fill_part(run: Run, index: int) -> int:
    return main(["cache", "fill", *run.arguments, "--part", f"{index}/3"])


def _killed(run: Run, num_new: int, delay_s: float, num_entries: int, kills: Counter[str]) -> bool:
    """Start a run, and kill it a while after so many new entries are there; False if it ends before."""
    kept = entries(run)
    child = run.forked(run.folder)
    code = _ended_before(child, lambda: len(entries(run)) >= len(kept) + num_new)
    if code is None:
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        code = waited(child, 60)
    assert code in (0, -signal.SIGKILL), code
    found = entries(run)
    assert {path: found.get(path) for path in kept} == kept, "an entry was made twice, or is gone"
    store = TensorCache(run.root / "cache")
    torn = [path for path in found if store.read(path.stem) is None]
    assert not torn, torn
    kills["all"] += code != 0
    kills["while filling"] += code != 0 and len(kept) < len(found) < num_entries
    return code != 0


def _ended_before(child: int, is_time: Callable[[], bool]) -> int | None:
    """The exit code of a child, or None as soon as it is time."""
    while not is_time():
        if (code := waited(child, 0.001)) is not None:
            return code
    return None


def let_entries_rot(bench: Bench, *, ways: int) -> int:
    """Damage each entry: where that shows from outside, the next start makes it again; else that after it."""
    run = bench.images(*PLAIN, "train.steps=3", name="rotten")
    whole, dice = run.finish("whole"), bench.new_dice()
    content = {path: path.read_bytes() for path in entries(run)}
    chosen = sorted(content)[: bench.pick(2, None, None)]
    for path in chosen:
        for number in range(ways):
            _rot(path, dice, RANDOM[number % len(RANDOM)], in_silence=number % 2 == 1)
            if number % 2 == 1:
                assert (code := run.exit_code(run.folder)) == 3, code
            assert_same(whole, run.finish(run.folder), 3)
            assert {path: path.read_bytes() for path in entries(run)} == content
            shutil.rmtree(run.folder)
    return len(chosen) * ways


def _rot(path: Path, dice: random.Random, damage: Callable[..., None], *, in_silence: bool) -> None:
    """Damage an entry; in silence, its size and time stay as they were, as when a disk fails."""
    before, content = path.stat(), path.read_bytes()
    if not in_silence:
        damage(path, dice)
        return
    rotten = bytearray(content)
    rotten[dice.randrange(len(rotten))] ^= 1 << dice.randrange(8)
    path.write_bytes(rotten)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
