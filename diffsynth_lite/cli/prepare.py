"""Make training data of raw images and clips: scenes, frames, smaller sizes, without black bars."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from diffsynth_lite.cli.arguments import positive_count
from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.errors import RunInterrupted, UserError, join_lines, join_names

if TYPE_CHECKING:
    from diffsynth_lite.preparing.folder import Preparation, Prepared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite prepare``."""
    of_folder = "images and clips, with their captions; not changed"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=of_folder)
    out = "folder for the results, new or empty; the same command goes on in it where it was stopped"
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help=out)
    scenes = "cut clips at hard cuts into CLIP-0001.mp4 and so on, exact to the frame, with their audio"
    parser.add_argument("--split-scenes", action="store_true", help=scenes)
    frames = "write N sharp images, evenly spread, in place of each clip, or of each of its scenes"
    parser.add_argument("--extract-frames", metavar="N", type=positive_count, help=frames)
    side = "scale images and clips down to this longest side; smaller ones stay"
    parser.add_argument("--max-side", metavar="PX", type=positive_count, help=side)
    bars = "cut off black bars; not for folders with masks or other files that lie over an image"
    parser.add_argument("--strip-bars", action="store_true", help=bars)
    parser.add_argument("--dry-run", action="store_true", help="show what would become of each file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(parsed: argparse.Namespace) -> None:
    """Prepare the folder, and print what became of it."""
    if not (parsed.split_scenes or parsed.extract_frames or parsed.max_side or parsed.strip_bars):
        flags = "--split-scenes, --extract-frames N, --max-side PX or --strip-bars"
        raise UserError(f"nothing to do: give {flags}")
    from diffsynth_lite.doctor.findings import counted
    from diffsynth_lite.preparing.folder import prepare_folder
    from diffsynth_lite.preparing.images import Steps

    steps = Steps(
        split_scenes=parsed.split_scenes,
        extract_frames=parsed.extract_frames,
        max_side=parsed.max_side,
        strip_bars=parsed.strip_bars,
    )
    try:
        found = prepare_folder(parsed.folder, parsed.out, steps, is_dry_run=parsed.dry_run)
    except KeyboardInterrupt:
        kept = f"what is in {parsed.out} is whole, and the same command goes on"
        raise RunInterrupted(f"stopped; {kept}") from None
    if parsed.json:
        print_lines(json.dumps(asdict(found), indent=2))
    else:
        print_lines(*(_table(found.items) if parsed.dry_run else ()), *_summary(parsed, found))
    if found.problems:
        lines = [f"{name}: {reason}" for name, reason in found.problems.items()]
        raise UserError(join_lines([*lines, f"{counted(len(lines), 'file')} could not be prepared"]))


def _table(items: "list[Prepared]") -> list[str]:
    """What each file is and becomes, in columns."""
    rows = [("file", "before", "after")]
    for item in items:
        duration = "" if item.duration_s is None else f", {item.duration_s:.1f} s"
        rows.append((item.file, f"{item.width} x {item.height}{duration}", _after(item)))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"{file:<{widths[0]}}  {before:<{widths[1]}}  {after}" for file, before, after in rows]


def _after(item: "Prepared") -> str:
    if item.is_copy:
        return "the same"
    size = f"{item.new_width} x {item.new_height}"
    if item.duration_s is None:
        return size
    kind = "clips" if item.results[0].endswith(".mp4") else "images"
    scenes = f" of {item.num_scenes} scenes" if kind == "images" and item.num_scenes > 1 else ""
    return f"{len(item.results)} {kind if len(item.results) > 1 else kind[:-1]}{scenes}, {size}"


def _summary(parsed: argparse.Namespace, found: "Preparation") -> list[str]:
    from diffsynth_lite.doctor.findings import counted

    num_clips = sum(item.duration_s is not None for item in found.items)
    num_same = sum(item.is_copy for item in found.items)
    num_results = sum(len(item.results) for item in found.items)
    short = {item.file: item.num_short for item in found.items if item.num_short}
    kinds = {"image": len(found.items) - num_clips, "clip": num_clips}
    made = "would be made" if parsed.dry_run else "made"
    same = f", {num_same} bit for bit the same" if num_same else ""
    before = f"; {counted(found.num_kept, 'file')} prepared before" if found.num_kept else ""
    lines = [
        f"{parsed.folder}: {' and '.join(counted(count, kind) for kind, count in kinds.items() if count)}",
        f"{parsed.out}: {counted(num_results, 'file')} {made} of them{same}{before}",
    ]
    if short:
        what = f"{counted(sum(short.values()), 'scene')} of less than half a second"
        lines.append(f"Left out: {what}, in {join_names(list(short))}")
    if found.spread_captions:
        lines.append(
            f"Captions that go to each scene or image of their clip, which may show only a part of what they "
            f"describe: {join_names(found.spread_captions)}"
        )
    if found.not_taken:
        lines.append(f"Files that were not taken: {join_names(found.not_taken)}")
    return lines
