"""Write a config for a folder of images or clips, by what is in it; asks nothing and loads no weights."""

import argparse
from pathlib import Path
from typing import Any

from diffsynth_lite.cli.arguments import add_preset_argument
from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.cli.invocation import command
from diffsynth_lite.config.document import shortened
from diffsynth_lite.config.files import read_preset
from diffsynth_lite.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite init``."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images or clips, with their captions")
    parser.add_argument("--family", metavar="NAME", help="model family (default: by what the folder holds)")
    folders: dict[str, Any] = {"metavar": "FOLDER", "type": Path, "action": "append", "default": []}
    for name, content in (
        ("--inputs", "images that those in FOLDER are edits of, with the same names; repeatable"),
        (
            "--layers",
            "layers of those in FOLDER, with the same names; once for each layer, from the bottom up",
        ),
    ):
        parser.add_argument(name, **folders, help=content)
    parser.add_argument(
        "--masks",
        metavar="FOLDER",
        type=Path,
        help="masks of the same names: white is what the model learns to fill",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="yaml to write; must be new (default: FOLDER_lora.yaml)"
    )
    add_preset_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    """Look, write, and print what comes next."""
    presets = [read_preset(name) for name in parsed.presets]
    name = parsed.folder.resolve().name  # that of "." too; "/" has none
    out: Path = parsed.out or Path(f"{name}_lora.yaml" if name else "lora.yaml")
    if out.exists():
        raise UserError(f"--out {out}: already exists and was not changed; choose another name")
    # The libraries take seconds to import: wrong arguments are refused before that.
    from diffsynth_lite.doctor.starting_point import (
        look_at,
        starting_config,
        starting_point,
        write_start,
    )

    inputs, layers, masks = parsed.inputs, parsed.layers, parsed.masks
    start = starting_point(
        *(parsed.folder, parsed.family),
        has_inputs=bool(inputs),
        has_layers=bool(layers),
        has_masks=masks is not None,
    )
    found = look_at(parsed.folder, start, input_dirs=inputs, layer_dirs=layers, mask_dir=masks)
    commands = [command(name, "--config", shortened(str(out))) for name in ("doctor", "plan", "train")]
    text = starting_config(found, start, out=out, commands=commands, presets=presets)
    image = write_start(found, start, out)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    reason = start.reason and f", {start.reason} (--family names another)"
    lines = [
        f"{found.path}: {found.summary}",
        *(f"> {problem}" for problem in found.problems),
        f"Wrote {out}{f' and {image}' if image else ''}, for {start.family}{reason}. Look at it, then:",
        *(f"  {line}" for line in commands),
    ]
    print_lines(*lines)
