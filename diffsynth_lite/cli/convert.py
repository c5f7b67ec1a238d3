"""Write LoRA files, of ours or of other trainers, as other programs read them; merge and shrink them."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from diffsynth_lite.cli.arguments import positive_count, positive_number
from diffsynth_lite.cli.console import importing_libraries, print_lines
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.run_folder.loras import (
    SUFFIX,
    chosen_or,
    contract_of,
    find_lora_place,
    lora_name,
    named_file,
    run_of,
    split_weight,
)

if TYPE_CHECKING:  # Wrong arguments are reported before torch is imported, which takes seconds.
    from diffsynth_lite.lora.conversion import FamilyNames, Target
    from diffsynth_lite.lora.merging import WeightedLora
    from diffsynth_lite.lora.reading import LoraContents

_EXPLANATION = (
    "Every tensor of IN is accounted for: what is not known, and what is not a plain LoRA, is an error. The "
    "update of each layer stays the same, whatever its names, alpha and dtype; how far it came through is "
    "measured and printed. No model is loaded. --merge makes one LoRA of several, --rank a smaller one, and "
    "--into-base writes the base model with them in its weights."
)
Norms = Mapping[str, tuple[float, float]]
"""Of layers what their update lost, and the update, as Frobenius norms."""
_NUM_WORST = 5
"""Layers that are printed of those that lost most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite convert``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument(
        "places",
        nargs="+",
        metavar="IN",
        help="LoRA file, folder with one, run (its chosen LoRA, else the latest), or its RUN@STEP, @last, "
        "@best, @ema or @chosen; after the last IN, OUT: file to write; with --to comfyui also a folder that "
        "is there, such as ComfyUI's models/loras, into which the LoRA of a run goes as RUN.safetensors, as "
        "output.copy_to does",
    )
    _add_merging(parser)
    parser.add_argument(
        "--to",
        choices=("diffusers", "comfyui", "kohya"),
        help="diffusers: its names of layers, alpha folded into lora_B; comfyui: what ComfyUI takes of this "
        "family; kohya: the names of sd-scripts and musubi-tuner, not all of which ComfyUI takes, and a "
        "tensor of alpha for each layer (default: as a run writes it, where one file suits both programs)",
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
        help="of the matrices in OUT (default: keep; of a sum float32, and of a base model bfloat16)",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="model family, where metadata and layers of IN do not show it"
    )
    parser.add_argument(
        "--without-text-encoders", action="store_true", help="leave out what IN has for text encoders"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_merging(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--merge",
        metavar="OUT",
        help="write the sum of all IN, each times its weight (IN:0.8, or IN:-0.5; default: 1), as one LoRA "
        "with all their ranks",
    )
    parser.add_argument(
        "--rank",
        metavar="N",
        type=positive_count,
        help="reduce the rank of all layers to this one, by singular values, and print what that loses",
    )
    parser.add_argument(
        "--into-base",
        metavar="FOLDER",
        help="write the base model with the sum of all IN in its weights, as the transformer of a diffusers "
        "folder",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="for --into-base: yaml that names the base model (default: that of the first run)",
    )


def run(parsed: argparse.Namespace) -> None:
    """Convert, and print what came of it."""
    if parsed.into_base is not None:
        _into_base(parsed)
        return
    if parsed.config is not None:
        raise UserError(f"--config {parsed.config}: has an effect only with --into-base; leave it out")
    if parsed.merge is not None:
        found, target = _found(parsed.places), Path(parsed.merge).expanduser()
    elif len(parsed.places) == 2:
        found, target = _found(parsed.places[:1]), Path(parsed.places[1]).expanduser()
        if found[0][1] != 1:
            raise UserError(f"{parsed.places[0]}: a weight has an effect only with --merge or --into-base")
    else:
        raise UserError(
            f"convert: takes IN and OUT, not {len(parsed.places)} names; --merge OUT makes one of several"
        )
    if target.is_dir() and parsed.to == "comfyui" and not parsed.merge:
        _copy(parsed, found[0][0], target)
        return
    if target.suffix != SUFFIX:
        raise UserError(f"{target}: is the file to write; name one that ends in {SUFFIX}")
    if target.exists() and not (parsed.replace and target.is_file()):
        raise UserError(f"{target}: is there already; name another file, or remove it")
    _write(parsed, found, target)


def _write(parsed: argparse.Namespace, found: Sequence[tuple[Path, float]], target: Path) -> None:
    """Write one LoRA of those that were found."""
    with importing_libraries():
        import torch

        from diffsynth_lite.lora.conversion import convert, write_conversion
        from diffsynth_lite.lora.merging import merge, reduce_rank

    sources = [_read(parsed, *one) for one in found]
    name, names = _family_of(sources[0].contents, parsed.family, parsed.to)
    contents, lost = sources[0].contents, dict[str, tuple[float, float]]()
    if parsed.merge or parsed.rank:
        contents = merge(sources, names.layers, target)
    if parsed.rank:
        contents, lost = reduce_rank(contents, parsed.rank)
    dtype = None if parsed.dtype == "keep" else getattr(torch, parsed.dtype)
    to = parsed.to or _as_of_a_run(names)
    converted = convert(contents, names, to, target, alpha=parsed.alpha, dtype=dtype)
    try:
        write_conversion(converted)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: could not be written ({error})") from error
    if parsed.json:
        given = [{"file": str(one.contents.file), "weight": one.weight} for one in sources]
        ranks = {layer: pair.rank for layer, pair in converted.contents.pairs.items()}
        facts = {"family": name, "largest_difference": converted.difference, "ranks": ranks}
        _print_json({"file": str(target), "sources": given, **facts}, lost)
        return
    for one in sources:
        factor = f" x {one.weight:g}" if parsed.merge else ""
        print_lines(f"{one.contents.file}{factor}: {name}, {_described(one.contents)}")
    updates = "are the same"
    if converted.difference:
        updates = f"differ by {converted.difference:.1e} of their size at most ({converted.layer})"
    print_lines(f"{target}: {_described(converted.contents)}")
    if lost:
        _print_lost(f"Rank {parsed.rank}", lost)
    else:
        print_lines(f"All layers are in it, and their updates {updates}.")
    if to == "kohya" and not names.comfyui.comfyui_takes_kohya_names:
        print_lines(
            "ComfyUI takes only some layers of this family by these names: for ComfyUI use --to comfyui."
        )


def _read(parsed: argparse.Namespace, place: Path, weight: float) -> "WeightedLora":
    from diffsynth_lite.lora.merging import WeightedLora, in_two_matrices
    from diffsynth_lite.lora.reading import read_contents

    contents = read_contents(place)
    if parsed.without_text_encoders:
        contents = contents.without_text_encoders()
    if parsed.merge or parsed.rank:
        contents = in_two_matrices(contents)
    return WeightedLora(name=lora_name(place), contents=contents, weight=weight)


def _found(places: Sequence[str]) -> list[tuple[Path, float]]:
    """The places of LoRAs that are given as ``IN:WEIGHT``, and their weights."""
    found = []
    for given in places:
        place, weight = split_weight(given)
        if not weight:
            raise UserError(f"{given}: with the weight 0 it has no effect; leave it out")
        found.append((find_lora_place(chosen_or(place)), weight))
    return found


def _as_of_a_run(names: "FamilyNames") -> "Target":
    """The form that a run writes, for both programs where one file suits both."""
    spelling = names.comfyui
    is_for_both = not (spelling.is_converted_for_comfyui or spelling.unknown_to_comfyui is None)
    return "comfyui" if is_for_both else "diffusers"


def _shares(norms: Norms) -> tuple[float, dict[str, float]]:
    """What is lost of all updates together, and of each, the largest first."""
    by_layer = {layer: lost / norm if lost else 0.0 for layer, (lost, norm) in norms.items()}
    lost, whole = (math.hypot(*column) for column in zip(*norms.values(), strict=True))
    return lost / whole if lost else 0.0, dict(sorted(by_layer.items(), key=lambda pair: -pair[1]))


def _print_lost(cause: str, norms: Norms) -> None:
    total, by_layer = _shares(norms)
    print_lines(f"{cause} loses {total:.2%} of the updates, by Frobenius norm; of single layers at most")
    print_lines(*(f"  {share:7.2%}  {layer}" for layer, share in list(by_layer.items())[:_NUM_WORST]))


def _print_json(facts: Mapping[str, object], norms: Norms) -> None:
    total, by_layer = _shares(norms) if norms else (0.0, {})
    print_lines(json.dumps({**facts, "lost": total, "lost_by_layer": by_layer}, indent=2))


def _into_base(parsed: argparse.Namespace) -> None:
    """Write the base model with LoRAs in its weights."""
    others = ("merge", "rank", "to", "alpha", "family", "without_text_encoders", "replace")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(parsed, name)]:
        raise UserError(f"--into-base: {', '.join(given)} has no effect with it; leave it out")
    folder = Path(parsed.into_base).expanduser()
    if folder.exists():
        raise UserError(f"--into-base {folder}: is there already; name a new folder")
    found = _found(parsed.places)
    run = next(filter(None, (run_of(place) for place, _ in found)), None)
    base: str | Path | None = parsed.config or (run.resolved_file if run else None)
    if base is None:
        raise UserError(
            f"--config: is missing, and no run names the base model of {found[0][0]}; name a yaml"
        )
    config = load_config(base, []).config
    with importing_libraries():
        import torch

        from diffsynth_lite.training.export.merged_base import write_merged_base

    dtype = "bfloat16" if parsed.dtype == "keep" else parsed.dtype
    try:
        norms = write_merged_base(config, found, folder, getattr(torch, dtype))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: could not be written ({error})") from error
    if parsed.json:
        _print_json({"folder": str(folder), "dtype": dtype}, norms)
        return
    print_lines(f"{folder}: {len(norms)} layers changed, written as {dtype} and read back.")
    _print_lost(f"Rounding to {dtype}", norms)


def _copy(parsed: argparse.Namespace, source: Path, folder: Path) -> None:
    """Copy the files of a LoRA into a folder of ComfyUI."""
    if parsed.alpha or parsed.rank or parsed.dtype != "keep" or parsed.without_text_encoders:
        raise UserError(
            f"{folder}: is a folder, which takes the LoRA with its alpha, rank, dtype and layers; name a "
            "file in it"
        )
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


def _family_of(contents: "LoraContents", asked: str | None, to: "Target | None") -> tuple[str, "FamilyNames"]:
    """The families that a file may be of, by its metadata or its layers, and their names of layers."""
    from diffsynth_lite.lora.conversion import FamilyNames
    from diffsynth_lite.lora.reading import likeliest, unknown_layers
    from diffsynth_lite.pipelines import family_names, load_family

    known = family_names()
    if not asked and (written := contents.metadata.get("diffsynth_lite.family", "")) in known:
        asked = written
    try:
        families = {name: load_family(name) for name in ([asked] if asked else known)}
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


def _names_as_written(contents: "LoraContents", names: "FamilyNames", to: "Target | None") -> frozenset[str]:
    """Names of the tensors that OUT would have; of a family that cannot be written, what is wrong."""
    from diffsynth_lite.lora.conversion import convert

    try:
        return frozenset(convert(contents, names, to or _as_of_a_run(names), contents.file).tensors)
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
