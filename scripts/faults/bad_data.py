"""M3: runs on data of which some cannot be used."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiny_run import tiny_image

from faults.bench import PLAIN, Bench, Run, assert_same, fault

NUM_IMAGES, NUM_CLIPS = 60, 60
STEPS = 8
SETTINGS = (
    *PLAIN,
    *("train.ema_decay=0.6", "data.caption_dropout=0.3", f"train.steps={STEPS}"),
    *("data.on_bad_item=skip", "data.max_bad_ratio=0.1", "output.checkpoint_every_steps=100"),
)
KINDS: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: content[: len(content) // 2],
    lambda _: b"<html>404</html>",
    lambda _: b"",
)
"""What bad files hold: a half of what they did, the answer of a web server, nothing."""
WAYS = {"with the cache": (), "without": ("data.cache=false",)}


@dataclass(frozen=True)
class SpoiltRun:
    """A run whose data were spoiled in part.

    Attributes:
        run: whose settings allow one bad item in ten.
        media: its files.
    """

    run: Run
    media: tuple[Path, ...]

    def spoil(self, num_bad: int) -> list[str]:
        """Spoil so many files, spread evenly, in each of the `KINDS` in turns; their names."""
        assert num_bad >= len(KINDS), f"{num_bad} files, too few for each kind of badness"
        chosen = self.media[:: len(self.media) // num_bad][:num_bad]
        for place, path in enumerate(chosen):
            path.write_bytes(KINDS[place % len(KINDS)](path.read_bytes()))
        return sorted(path.name for path in chosen)

    def spoil_captions(self) -> list[str]:
        """Remove one caption and make another no text; the names of their images or clips."""
        lacking, unreadable = self.media[1], self.media[-1]
        lacking.with_suffix(".txt").unlink()
        unreadable.with_suffix(".txt").write_bytes(b"\xff\xfe\x00")
        return [lacking.name, unreadable.name]


@fault("M3", "5 %: left out, continued bit for bit; 30 %: exit 2, as all that a user can fix")
def train_on_bad_data(bench: Bench) -> str:
    """Runs with 5 % of bad items and two bad captions, and with 30 %."""
    resumed = 0
    makers = bench.pick((_images,), (_images, _clips), (_images, _clips))
    for make in makers:
        for name, way in WAYS.items():
            spoilt = make(bench, f"{make.__name__} {name}", way)
            damaged = spoilt.spoil(len(spoilt.media) // 20)
            bad = sorted([*damaged, *spoilt.spoil_captions()])
            for step in bench.pick((3,), (3,), range(1, STEPS)):
                _check_resumed(spoilt.run, bad, step)
                resumed += 1
            _refuse_repaired(spoilt, damaged[0])
        spoilt = make(bench, f"{make.__name__}, spoilt", ())
        _refuse_spoilt(spoilt, spoilt.spoil(3 * len(spoilt.media) // 10))
    return f"{resumed} runs with 5 % and two captions bad, {len(makers)} with 30 %"


def _images(bench: Bench, name: str, way: tuple[str, ...]) -> SpoiltRun:
    run = bench.images(name=name)
    data = run.root / "data"
    for place in range(5, NUM_IMAGES):
        tiny_image(80, 48, 10 + place).save(data / f"{place}.png")
        (data / f"{place}.txt").write_text("a red circle")
    return SpoiltRun(run.having(*SETTINGS, *way), tuple(sorted(data.glob("*.png"))))


def _clips(bench: Bench, name: str, way: tuple[str, ...]) -> SpoiltRun:
    run = bench.clips(name=name)
    data = run.root / "clips"
    originals = sorted(data.glob("*.mp4"))
    for place in range(len(originals), NUM_CLIPS):
        source = originals[place % len(originals)]
        shutil.copy(source, data / f"copy {place}.mp4")
        (data / f"copy {place}.txt").write_text(f"clip {place}")
    return SpoiltRun(run.having(*SETTINGS, *way), tuple(sorted(data.glob("*.mp4"))))


def _check_resumed(run: Run, bad: list[str], step: int) -> None:
    """A run on what is left is the same when it is stopped and continued, and lists what it left out."""
    samples = run.recorded(whole := run.root / "whole")
    rest = run.recorded(parts := run.stop_after(step, "parts"))
    assert rest == [row for row in samples if row["step"] >= step]
    assert run.losses(parts) == run.losses(whole)
    assert_same(whole, parts, STEPS)
    for folder in (whole, parts):
        assert _listed(folder) == bad
    used = {row["name"].partition("#")[0] for row in samples}
    assert used.isdisjoint(bad)
    for folder in (whole, parts):
        shutil.rmtree(folder)
        shutil.rmtree(f"{folder}.records")


def _refuse_repaired(spoilt: SpoiltRun, name: str) -> None:
    """A bad item that was repaired between two starts changes what is trained on, and so is refused."""
    run, folder = spoilt.run, spoilt.run.stop_after(2, "repaired")
    path = next(path for path in spoilt.media if path.name == name)
    damaged = path.read_bytes()
    path.write_bytes(next(each for each in spoilt.media if each.name != name).read_bytes())
    assert run.exit_code(folder) == 2
    path.write_bytes(damaged)
    run.finish(folder)


def _refuse_spoilt(spoilt: SpoiltRun, bad: list[str]) -> None:
    """More than the tenth that may be bad: refused with all of them, before anything is trained."""
    folder = spoilt.run.folder
    assert spoilt.run.exit_code(folder) == 2
    assert _listed(folder) == bad
    assert not list(folder.rglob("*.safetensors"))


def _listed(folder: Path) -> list[str]:
    rows = (folder / "quarantine.jsonl").read_text().splitlines()
    return sorted(json.loads(row)["item"] for row in rows)
