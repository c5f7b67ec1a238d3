"""S1, S2 and S4: planted pickles, names that lead out of the data, and no network."""

import json
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pyarrow
import pyarrow.parquet
from audit_watch import watched_files, watched_pickles
from datasets import Dataset, Features, Image, Value
from path_corpus import (
    DATASETS,
    NO_PATHS,
    OUTSIDE,
    ROWS,
    THROUGH_LINKS,
    can_hold,
    escapes,
    plant,
    secrets,
    written_out,
)
from poison import poisons
from unconnected_train import train_unconnected

from faults.bench import PLAIN, Bench, Run, fault

SETTINGS = (*PLAIN, "train.steps=3", "data.num_workers=0")
SURVIVED = (0, 2)
"""Exit codes of a run that meets a file that it cannot read: it continues without, or says so."""


@dataclass(frozen=True)
class Start:
    """A start of a run, and files that it reads.

    Attributes:
        files: of which one at a time is replaced.
        stopped: run folder that is copied and continued; None for a new run.
    """

    run: Run
    files: tuple[Path, ...]
    stopped: Path | None = None

    def with_content(self, file: Path, content: bytes) -> int:
        """The exit code of the start when one file has another content."""
        folder = self.run.root / "tried"
        if self.stopped:
            shutil.copytree(self.stopped, folder)
        is_copied = self.stopped is not None and file.is_relative_to(self.stopped)
        place = folder / file.relative_to(self.stopped) if is_copied and self.stopped else file
        before = place.read_bytes()
        place.write_bytes(content)
        try:
            return self.run.exit_code(folder)
        finally:
            if not is_copied:
                place.write_bytes(before)
            shutil.rmtree(folder, ignore_errors=True)


@fault("S1", "none is unpickled: no code runs, and no name is looked up")
def plant_pickles(bench: Bench) -> str:
    """Pickles in the place of each file that a run reads."""
    marker = bench.root / "planted code ran"
    forms = list(poisons(marker).items())[: bench.pick(1, 2, None)]
    watch = watched_pickles()
    tried: dict[str, int] = {}
    for name, start in _starts(bench).items():
        untouched = start.files[0]
        assert start.with_content(untouched, untouched.read_bytes()) == 0, f"{name}: is refused as it is"
        for file, (form, content) in product(start.files[:: bench.pick(4, 1, 1)], forms):
            with watch.on() as names:
                code = start.with_content(file, content)
            assert code in SURVIVED, f"{name}, {file.name} as {form}: exit code {code}"
            assert not names, f"{name}, {file.name} as {form}: {names}"
            assert not marker.exists(), f"{name}, {file.name} as {form}"
            tried[name] = tried.get(name, 0) + 1
    return ", ".join(f"{number} in {name}" for name, number in tried.items())


def _starts(bench: Bench) -> dict[str, Start]:
    """A start for each kind of file: checkpoint and run folder, cache, data, LoRA."""
    run = bench.images(*SETTINGS)
    stopped = run.stop_after(2, "stopped")
    data = run.root / "data"
    return {
        "checkpoint and run folder": Start(run, _files(stopped), stopped),
        "cache": Start(run, _files(run.root / "cache")),
        "images and captions": Start(run, (data / "1.png", data / "1.txt")),
        **{f"metadata{suffix}": _with_rows(run, data, suffix) for suffix in (".jsonl", ".csv", ".parquet")},
        "dataset": _with_dataset(run, data),
        "LoRA": _with_lora(run, stopped),
    }


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"))


def _with_rows(run: Run, data: Path, suffix: str) -> Start:
    """Captions in one metadata file next to the images."""
    rows = [{"file_name": f"{place}.png", "text": "a red circle"} for place in range(5)]
    metadata = run.root / f"rows{suffix}"
    if suffix == ".jsonl":
        metadata.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".csv":
        metadata.write_text(
            "file_name,text\n" + "".join(f"{row['file_name']},{row['text']}\n" for row in rows)
        )
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), metadata)
    return Start(run.having(f"data.metadata={metadata}"), (metadata,))


def _with_dataset(run: Run, data: Path) -> Start:
    folder = run.root / "dataset"
    cells = [{"bytes": (data / f"{place}.png").read_bytes(), "path": None} for place in range(5)]
    columns = {"image": cells, "text": ["a red circle"] * 5}
    Dataset.from_dict(columns, features=Features(image=Image(), text=Value("string"))).save_to_disk(folder)
    source = f"data.sources=[{{dataset: {folder}, media_column: image}}]"
    return Start(run.having("data.path=null", source), _files(folder))


def _with_lora(run: Run, stopped: Path) -> Start:
    folder = run.root / "theirs"
    shutil.copytree(stopped / "lora", folder)
    return Start(run.having(f"lora.init_from={folder}"), _files(folder))


def _on(run: Run, *settings: str) -> Run:
    return run.having(*settings)


@fault("S2", "nothing outside is named, opened or fetched")
def lead_out_of_the_data(bench: Bench) -> str:
    """File names that lead out of the data, in each place that holds one."""
    root = bench.root / "planted"
    plant(root)
    watch = watched_files()
    outside = {str(path.resolve()) for path in secrets(root)}
    num_tried = 0
    for place, read in (ROWS | DATASETS).items():
        texts = [text for text in (*OUTSIDE, *THROUGH_LINKS, *NO_PATHS) if can_hold(place, text)]
        for text in texts[:: bench.pick(5, 1, 1)]:
            with watch.on() as opened:
                is_out = escapes(read, root, written_out(text, root), may_be_inside=place in DATASETS)
                noted = {str(path) for path, *_ in opened}
            assert not is_out, f"{place}: {text!r}"
            assert noted.isdisjoint(outside), f"{place}: {text!r} was opened"
            num_tried += 1
    return f"{num_tried} texts in {len(ROWS | DATASETS)} places"


@fault("S4", "pass, and try no connection")
def cut_the_network(bench: Bench) -> str:
    """Runs without a network."""
    runs = [bench.images()] if bench.scale == "ci" else [bench.images(), bench.clips()]
    num_starts = 0
    for run in runs:
        for is_offline in (True, False):
            for steps in (1, 2):
                notes = run.root / "notes"
                trackers = ("logging.trackers=[tensorboard]", f"output.dir={run.root / str(is_offline)}")
                command = (*run.arguments, f"train.steps={steps}", "train.lr_scheduler=constant", *trackers)
                allowed = "resume.allow=[train.steps]"
                done = train_unconnected(notes, *command, allowed, is_offline=is_offline)
                assert done.returncode == 0, done.stderr
                assert not notes.exists(), notes.read_text()
                num_starts += 1
    return f"{num_starts} starts, half of them without HF_HUB_OFFLINE"
