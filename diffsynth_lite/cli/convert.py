"""Write a LoRA file, of ours or of another trainer, as diffusers, ComfyUI or kohya's tools read it."""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from diffsynth_lite.cli.arguments import positive_number
from diffsynth_lite.cli.console import importing_libraries, print_lines
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.run_folder.loras import (
    SUFFIX,
    chosen_or,
    contract_of,
    find_lora_place,
    named_file,
    run_of,
)

if TYPE_CHECKING:  # Wrong arguments are reported before torch is imported, which takes seconds.
    from diffsynth_lite.lora.conversion import FamilyNames, Target
    from diffsynth_lite.lora.reading import LoraContents

_EXPLANATION = (
    "Every tensor of IN is accounted for: what is not known, and what is not a plain LoRA, is an error. The "
    "update of each layer stays the same, whatever its names, alpha and dtype; how far it came through is "
    "measured and printed. No model is loaded."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite convert``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument(
        "source",
        metavar="IN",
        help="LoRA file, folder with one, run (its chosen LoRA, else the latest), or its RUN@STEP, @last, "
        "@best, @ema or @chosen",
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        type=Path,
        help="file to write; with --to comfyui also a folder that is there, such as ComfyUI's models/loras, "
        "into which the LoRA of a run goes as RUN.safetensors, as output.copy_to does",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("diffusers", "comfyui", "kohya"),
        help="diffusers: its names of layers, alpha folded into lora_B; comfyui: what ComfyUI takes of this "
        "family; kohya: the names of sd-scripts and musubi-tuner, not all of which ComfyUI takes, and a "
        "tensor of alpha for each layer",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="write over a file that is there; that of the same run in a folder is replaced without it",
    )
    parser.add_argument(
        "--alpha",
        metavar="X",
        type=positive_number,
        help="alpha of OUT, where it has tensors for it; lora_up is scaled so that the update stays the same "
        "(default: that of IN or, where that has it folded, the one in its metadata)",
    )
    parser.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16", "float16"),
        default="keep",
        help="of the matrices in OUT (default: keep)",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="model family, where metadata and layers of IN do not show it"
    )
    parser.add_argument(
        "--without-text-encoders", action="store_true", help="leave out what IN has for text encoders"
    )


def run(parsed: argparse.Namespace) -> None:
    """Convert, and print what came of it."""
    target = parsed.target.expanduser()
    if target.is_dir() and parsed.to == "comfyui":
        _copy(parsed, target)
        return
    if target.suffix != SUFFIX:
        raise UserError(f"{target}: is the file to write; name one that ends in {SUFFIX}")
    if target.exists() and not (parsed.replace and target.is_file()):
        raise UserError(f"{target}: is there already; name another file, or remove it")
    source = find_lora_place(chosen_or(parsed.source))
    with importing_libraries():
        import torch

        from diffsynth_lite.lora.conversion import convert, write_conversion
        from diffsynth_lite.lora.reading import read_contents

    contents = read_contents(source)
    if parsed.without_text_encoders:
        contents = contents.without_text_encoders()
    name, names = _family_of(contents, parsed.family, parsed.to)
    dtype = None if parsed.dtype == "keep" else getattr(torch, parsed.dtype)
    converted = convert(contents, names, parsed.to, target, alpha=parsed.alpha, dtype=dtype)
    try:
        write_conversion(converted)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: could not be written ({error})") from error
    if converted.difference:
        updates = f"differ by {converted.difference:.1e} of their size at most ({converted.layer})"
    else:
        updates = "are the same"
    lines = [
        f"{contents.file}: {name}, {_described(contents)}",
        f"{target}: {_described(converted.contents)}",
        f"All layers are in it, and their updates {updates}.",
    ]
    if parsed.to == "kohya" and not names.comfyui.comfyui_takes_kohya_names:
        lines.append(
            "ComfyUI takes only some layers of this family by these names: for ComfyUI use --to comfyui."
        )
    print_lines(*lines)


def _copy(parsed: argparse.Namespace, folder: Path) -> None:
    """Copy the files of a LoRA into a folder of ComfyUI."""
    if parsed.alpha or parsed.dtype != "keep" or parsed.without_text_encoders:
        raise UserError(
            f"{folder}: is a folder, which takes the LoRA with its alpha, dtype and layers; name a file in it"
        )
    source = find_lora_place(chosen_or(parsed.source))
    run = run_of(source)
    files = [source] if source.is_file() else sorted(source.glob(f"*{SUFFIX}"))
    targets = {
        file: named_file(folder, run.path.resolve().name, file.name) if run else folder / file.name
        for file in files
    }
    for file, target in targets.items():
        is_ours = contract_of(file) is not None and contract_of(target) == contract_of(file)
        if target.exists() and not (is_ours or parsed.replace):
            raise UserError(f"{target}: is there already, and not of this run; move it, or give --replace")
    with importing_libraries():
        from diffsynth_lite.lora.reading import read_contents
        from diffsynth_lite.training.checkpoint.comfyui_copies import write_copy

    for file, target in targets.items():
        contents = read_contents(file)
        name, names = _family_of(contents, parsed.family, "comfyui")
        try:
            write_copy(contents, target, names)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{target}: could not be written ({error})") from error
        print_lines(f"{target}: {file}, {name}, as ComfyUI reads it")


def _family_of(contents: "LoraContents", asked: str | None, to: "Target") -> tuple[str, "FamilyNames"]:
    """The families that a file may be of, by its metadata or its layers, and their names of layers."""
    from diffsynth_lite.lora.conversion import FamilyNames
    from diffsynth_lite.lora.reading import likeliest, unknown_layers
    from diffsynth_lite.pipelines import family_names, load_family

    try:
        families = {name: load_family(name) for name in ([asked] if asked else family_names())}
    except UserError as error:
        raise UserError(f"--family: {str(error).removeprefix('model.family: ')}") from error
    names = {
        name: FamilyNames(layers=family.lora_layers, comfyui=family.lora_spelling)
        for name, family in families.items()
    }
    if asked:
        if not names[asked].layers:
            raise UserError(f"--family: {asked} has no names of layers in files (lora_layers)")
        return asked, names[asked]
    if (written := contents.metadata.get("diffsynth_lite.family", "")) in names:
        return written, names[written]
    architecture = contents.metadata.get("modelspec.architecture", "").removesuffix("/lora")
    for name, family in families.items():
        if architecture in {release.architecture for release in family.releases}:
            return name, names[name]
    unknown = {name: unknown_layers(contents, one.layers) for name, one in names.items()}
    fitting = likeliest(
        contents, {name: names[name].layers for name, layers in unknown.items() if not layers}
    )
    if not fitting:
        nearest = min(unknown, key=lambda name: len(unknown[name]))
        raise UserError(
            f"{contents.file}: its layers are of no family that is known; of {nearest}, the nearest, "
            f"{len(unknown[nearest])} of {len(contents.pairs)} are not: {join_names(unknown[nearest])}"
        )
    if len({_names_as_written(contents, names[name], to) for name in fitting}) > 1:
        raise UserError(f"{contents.file}: has layers of {', '.join(fitting)}; name its family with --family")
    return " or ".join(fitting), names[fitting[0]]


def _names_as_written(contents: "LoraContents", names: "FamilyNames", to: "Target") -> frozenset[str]:
    """Names of the tensors that OUT would have; of a family that cannot be written, what is wrong."""
    from diffsynth_lite.lora.conversion import convert

    try:
        return frozenset(convert(contents, names, to, contents.file).tensors)
    except UserError as error:
        return frozenset({str(error)})


def _described(contents: "LoraContents") -> str:
    pairs = contents.pairs
    ranks, alphas = (
        " and ".join(f"{value:g}" for value, _ in Counter(values).most_common())
        for values in ([pair.rank for pair in pairs.values()], [pair.alpha for pair in pairs.values()])
    )
    note = "" if contents.has_alpha else " (the file has none: that is the rank)"
    return (
        f"{len(pairs)} layers such as {min(pairs)}; rank {ranks}, alpha {alphas}{note}, "
        f"{str(contents.dtype).removeprefix('torch.')}"
    )
