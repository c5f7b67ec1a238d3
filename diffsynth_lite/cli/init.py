"""Write a config for a folder of images or clips, by what is in it; asks nothing and loads no weights."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite.captioning.report import CaptionReport
from diffsynth_lite.cli.arguments import add_preset_argument, command
from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.config import load_config
from diffsynth_lite.config.document import shortened
from diffsynth_lite.config.files import Preset, read_preset
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.releases.families import require_family_name

if TYPE_CHECKING:
    from diffsynth_lite.doctor.starting_point import StartingPoint
    from diffsynth_lite.training.planning.gpus import Gpu

_HINTS = {"sd_xl": "sdxl", "sdxl": "sdxl", "flux": "flux", "wan": "wan", "qwen": "qwen_image"}
"""A model family that a word in the name of its file speaks for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite init``."""
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, help="images or clips, with their captions"
    )
    parser.add_argument(
        "--from",
        dest="theirs",
        metavar="FILE",
        type=Path,
        help="config of another trainer to translate: ai-toolkit, kohya, musubi-tuner, OneTrainer, "
        "SimpleTuner, diffusion-pipe; FOLDER may be left out",
    )
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
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="graphics card that is to train it, such as 'RTX 4090' (default: the one that is here)",
    )
    add_preset_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    """Look, write, and print what comes next."""
    if parsed.folder is None and parsed.theirs is None:
        raise UserError(
            "FOLDER: is missing; name the folder of your images, or --from another trainer's config"
        )
    presets = [read_preset(name) for name in parsed.presets]
    if parsed.family:
        require_family_name(parsed.family)
    # By what it is made from; the name of "." too, while "/" has none.
    name = parsed.theirs.stem if parsed.theirs else parsed.folder.resolve().name
    out = parsed.out or Path(f"{name}_lora.yaml" if name else "lora.yaml")
    flags = {"plan": ["--gpu", parsed.gpu]} if parsed.gpu else {}
    commands = [
        command(name, "--config", shortened(str(out)), *flags.get(name, []))
        for name in ("doctor", "plan", "train")
    ]
    # The libraries take seconds to import: wrong arguments are refused before that.
    from diffsynth_lite.doctor.model_choice import base_model, card_here
    from diffsynth_lite.pipelines import load_family
    from diffsynth_lite.training.planning.gpus import gpu_named

    gpu = gpu_named(parsed.gpu) if parsed.gpu else card_here()
    if parsed.family:
        load_family(parsed.family)
    if out.exists():
        raise UserError(
            f"--out {out}: already exists and was not changed; choose another name"
            if parsed.out
            else f"{out} already exists and was not changed; choose another name with --out NAME.yaml"
        )
    if parsed.theirs:
        start, lines = _translate(parsed, out, commands, gpu)
    else:
        start, lines = _write_for_folder(parsed, out, commands, gpu, presets)
    base = base_model(start.family, start.model or load_config(start.recipe).config.model.path)
    print_lines(*lines, f"Base model: {base}. Look at the file, then:", *(f"  {line}" for line in commands))


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None


def _translate(
    parsed: argparse.Namespace, out: Path, commands: list[str], gpu: "Gpu | None"
) -> "tuple[StartingPoint, list[str]]":
    """Write what another trainer's config is here; the lines to print."""
    from diffsynth_lite.doctor.starting_point import recipe_of_family
    from diffsynth_lite.doctor.translation import translated_config, translation_of

    if parsed.inputs or parsed.layers or parsed.masks or parsed.presets:
        raise UserError(
            "--from: --inputs, --layers, --masks and --preset do not go with it; edit what it writes"
        )
    found = translation_of(parsed.theirs, parsed.folder)
    family = parsed.family or found.family
    if family is None:
        files = " ".join(re.findall(r"[\w.-]+\.(?:safetensors|gguf)", str(found).lower()))
        name = next((f"{hint}, by its file's name" for word, hint in _HINTS.items() if word in files), "NAME")
        raise UserError(f"--from {parsed.theirs}: names no model that is known here; add --family {name}")
    start = recipe_of_family(family, found.settings.get("model.path"), gpu)
    if "data.path" not in found.settings and "data.sources" not in found.settings:
        found.rest.append("no folder of images or clips is named: set data.path")
    _write(out, translated_config(found, start, parsed.theirs, commands))
    try:
        warnings = load_config(out).warnings
    except UserError as error:  # the file stays, to be put right
        warnings = tuple(str(error).splitlines())
    lines = [
        f"{parsed.theirs}: a config of {found.trainer}, {len(found.settings)} settings translated",
        *(["Not translated:"] if found.rest else []),
        *(f"  {line}" for line in found.rest),
        *(f"> {warning}" for warning in warnings),
        f"Wrote {out}, for {start.family}{start.reason and f', {start.reason}'}.",
    ]
    return start, lines


def _write_for_folder(
    parsed: argparse.Namespace,
    out: Path,
    commands: list[str],
    gpu: "Gpu | None",
    presets: "Sequence[Preset]",
) -> "tuple[StartingPoint, list[str]]":
    """Write what a folder asks for; the lines to print."""
    from diffsynth_lite.doctor.starting_point import look_at, starting_config, starting_point, write_start

    masks = [] if parsed.masks is None else [parsed.masks]
    companions = {"--inputs": parsed.inputs, "--layers": parsed.layers, "--masks": masks}
    given = [flag for flag, folders in companions.items() if folders]
    start = starting_point(parsed.folder, parsed.family, given=given, gpu=gpu)
    found = look_at(parsed.folder, start, companions)
    text = starting_config(found, start, out=out, commands=commands, presets=presets)
    image = write_start(found, start, out)
    _write(out, text)
    reason = start.reason and f", {start.reason}"
    if reason and not parsed.family:
        reason += f" (--family names another{'' if gpu else ', --gpu your card for one that fits it'})"
    lines = [
        f"{found.path}: {found.summary}",
        *(f"> {problem}" for problem in found.problems),
        *_preset_of_captions(parsed),
        *(
            [
                f"> {start.family} does not train on {join_names(found.strays)}; a run stops at such files: "
                f"move them out of the folder, or set {found.skip_settings}"
            ]
            if found.strays
            else ()
        ),
        *([f"Models with a recipe for your {gpu.name}:"] if gpu and start.fitting else ()),
        *(f"  {model.family}: {model.facts}" for model in start.fitting),
        f"Wrote {out}{f' and {image}' if image else ''}, for {start.family}{reason}.",
    ]
    return start, lines


def _preset_of_captions(parsed: argparse.Namespace) -> list[str]:
    """A line with the preset for what the captions of a folder were written for, unless one was given."""
    goal = CaptionReport(parsed.folder).flag("--goal")
    if parsed.presets or goal not in ("likeness", "style", "motion"):
        return []
    return [f"> The captions were written with --goal {goal}: --preset {goal} has settings for that"]
