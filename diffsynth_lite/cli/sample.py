"""Generate images from prompts with a LoRA and without it, side by side, as a run does its previews."""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from diffsynth_lite.cli.arguments import add_config_arguments, add_serve_argument, positive_count
from diffsynth_lite.cli.console import hide_progress_bars, importing_libraries
from diffsynth_lite.cli.plan import kept_counts_folder
from diffsynth_lite.cli.processes import join_processes
from diffsynth_lite.cli.train import make_cublas_repeatable
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import run_of
from diffsynth_lite.run_folder.reading import require_run_file
from diffsynth_lite.sampling.request import (
    FILES,
    GivenLora,
    SampleRequest,
    find_lora,
    loras_by_step,
    require_new,
)
from diffsynth_lite.serving import Requests, standard_lines

if TYPE_CHECKING:
    from diffsynth_lite.sampling.session import SampleSession

logger = logging.getLogger(__name__)

_FLAG_KEYS = {
    "negative": "validation.negative_prompt",
    "steps": "validation.num_inference_steps",
    "guidance": "validation.guidance_scale",
    "frames": "validation.num_frames",
    "layers": "validation.num_layers",
}

_SCALES = [0.0, 1.0]
_CAPTIONS_AT_ONCE = 64
"""Captions of training data that are encoded together, as their encoder is loaded each time."""
_MAX_SEED = 2**63 - 1
"""torch takes some more."""
_FILES = {
    "input": "image to start from, for each prompt",
    "last-frame": "image that a clip ends with, for each prompt",
    "control": "control image or video, for each prompt",
    "mask": "inpainting mask, white is regenerated, for each prompt",
    "face": "clip of a face, for each prompt",
}
"""Files that a preview may need, by the name of their argument."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite sample``."""
    add_config_arguments(
        parser,
        help="yaml that names the base model; not needed for the LoRA of a run",
        required=False,
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="PATH[@STEP][:WEIGHT]",
        help="a run's folder, also @1000, @last, @best, @ema or @chosen of it, or a .safetensors file; give "
        "it again to add others",
    )
    parser.add_argument(
        "--every-checkpoint",
        action="store_true",
        help="compare the LoRAs of all steps that the run kept, a column for each",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT|@FILE",
        help="give it again for more; of a file each line (default: validation.prompts)",
    )
    parser.add_argument(
        "--from-captions",
        metavar="FILE|FOLDER",
        help="make training data in --out: an image or clip for each line, or caption of a data set",
    )
    parser.add_argument("--negative", metavar="TEXT", help="what to steer away from, with a guidance above 1")
    parser.add_argument(
        "--seed",
        type=_seed_numbers,
        metavar="N[,N...]",
        help="of the noise (default: validation.seed, as previews)",
    )
    parser.add_argument(
        "--num", type=positive_count, metavar="N", help="number of consecutive seeds, starting at --seed"
    )
    parser.add_argument(
        "--scale",
        type=_numbers,
        default=_SCALES,
        metavar="X[,X...]",
        help="multiplies the weights of all LoRAs; 0 is the base model (default: 0,1)",
    )
    parser.add_argument("--steps", metavar="N", help="denoising steps")
    parser.add_argument("--guidance", metavar="X", help="how strongly to follow the prompt")
    parser.add_argument("--size", type=_size, metavar="WxH", help="in pixels, such as 1024x768")
    parser.add_argument("--frames", metavar="N", help="of a clip")
    parser.add_argument("--layers", metavar="N", help="that an image is decomposed into")
    for name, content in _FILES.items():
        parser.add_argument(f"--{name}", action="append", metavar="FILE", help=f"{content}, or one for all")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="new or empty; default: a new one in samples/ of the run, or of the working folder without one",
    )
    way = "keep the model loaded, take requests as lines of JSON on stdin, with these"
    add_serve_argument(parser, way=f"{way} arguments as defaults, and answer on stdout")


def run(parsed: argparse.Namespace) -> None:
    """Generate the images, and log where they are."""
    if parsed.from_captions is not None:
        try:
            _make_items(parsed)
        except KeyboardInterrupt:
            raise RunInterrupted(
                "stopped; items that are there are whole, and the same command goes on"
            ) from None
        return
    parsed.prompt = [text for given in parsed.prompt or [] for text in _texts(given)]
    request = _request(parsed)
    session_class = _imported(parsed, request)
    if parsed.serve is not None:
        _serve(parsed, request)
        return
    with closing(session_class.open(request.config, request.run)) as session:
        grid, here = session.generate(request).grid, Path.cwd()
    grid = grid.relative_to(here) if grid.is_relative_to(here) else grid
    has_clips = any(grid.parent.glob("*.mp4"))
    logger.info("Images: %s%s", grid, f"; the clips: {grid.parent / '*.mp4'}" * has_clips)


def _imported(parsed: argparse.Namespace, request: SampleRequest) -> "type[SampleSession]":
    """The libraries take seconds to import: wrong arguments are refused before that."""
    with importing_libraries():
        join_processes(os.environ, sys.argv)
        from diffsynth_lite.sampling.session import SampleSession

    if request.config.train.deterministic:
        make_cublas_repeatable()
    if parsed.serve is not None or not Console(stderr=True).is_terminal:
        hide_progress_bars()
    return SampleSession


def _make_items(parsed: argparse.Namespace) -> None:
    """Generate training data from captions."""
    from diffsynth_lite.sampling.captioned import missing_items

    if parsed.scale == _SCALES:
        parsed.scale = [1.0 if parsed.lora else 0.0]
    given = [name for name in ("prompt", "num", "every_checkpoint", "serve") if getattr(parsed, name)]
    if given or parsed.out is None or len(parsed.scale) > 1 or len(parsed.seed or ()) > 1:
        raise UserError(
            "--from-captions: makes one item of each caption; give --out, at most one --seed and --scale, "
            "and none of --prompt, --num, --every-checkpoint and --serve"
        )
    out, parsed.out = Path(parsed.out).expanduser(), None
    items, num_there = missing_items(Path(parsed.from_captions).expanduser(), out)
    parts = [items[start : start + _CAPTIONS_AT_ONCE] for start in range(0, len(items), _CAPTIONS_AT_ONCE)]
    prompts = [[item.caption for item in part] for part in parts]
    requests = [_request(argparse.Namespace(**vars(parsed) | {"prompt": texts})) for texts in prompts]
    if requests:
        session_class, first = _imported(parsed, requests[0]), requests[0]
        with closing(session_class.open(first.config, first.run)) as session:
            for part, request in zip(parts, requests, strict=True):
                session.generate_items(request, part, out)
    logger.info("Items: %s, %d new, %d were there", out, len(items), num_there)


def _serve(parsed: argparse.Namespace, first: SampleRequest) -> None:
    from diffsynth_lite.sampling.serving import AskedSamples, serve_samples

    if parsed.config is None and first.run is not None:
        parsed.config = first.run.resolved_file  # also for the LoRAs of other runs

    def request_of(given: dict[str, Any]) -> SampleRequest:
        return _request(argparse.Namespace(**(vars(parsed) | given)))

    with standard_lines() as (lines, answers):
        # Nobody takes the images of a program that is gone.
        wanted = chain(lines, [b'{"ask": "end"}'])
        requests = Requests(AskedSamples, wanted, answers, idle_s=60 * parsed.serve)
        serve_samples(requests, first.config, first.run, request_of, kept_counts_folder(os.environ))


def _request(parsed: argparse.Namespace) -> SampleRequest:
    """What the arguments ask for."""
    if parsed.presets and parsed.config is None:
        raise UserError(f"--preset {parsed.presets[0]}: lies on top of a --config; give one, or leave it out")
    loras = [find_lora(given) for given in parsed.lora]
    run = next(filter(None, (run_of(lora.place) for lora in loras)), None)
    out = None if parsed.out is None else Path(parsed.out).expanduser()
    if out is not None:
        require_new(out)
    if parsed.config is None and run is None:
        raise UserError(
            f"--config: is missing, and no run names the base model of {loras[0].place}; name a yaml, "
            "such as --config qwen_lora.yaml"
            if loras
            else "--lora, --config: name the folder of a run, or a yaml file"
        )
    path = parsed.config
    if run is not None and path is None:
        path = run.resolved_file
        with suppress(FileNotFoundError):
            require_run_file(path)
    given = [f"{key}={value}" for key, value in _settings(parsed).items() if value is not None]
    config = load_config(path, [*parsed.overrides, *given], presets=parsed.presets).config
    if not loras:
        run = RunFolder(Path(config.output.dir).expanduser())
        run = run if run.holds_run() else None
        loras = _of_run(run, config.output.dir, parsed.scale)
    by_step = loras_by_step(run, loras) if parsed.every_checkpoint else {}
    return SampleRequest(
        config=config,
        # Those that are not seen anywhere need not be loaded.
        loras=(list(by_step.values())[:1] or loras) if any(parsed.scale) else [],
        scales=parsed.scale,
        by_step=by_step,
        seeds=_seeds(parsed, config.validation.seed),
        run=run,
        out=out,
    )


def _of_run(run: RunFolder | None, output_dir: str, scales: Sequence[float]) -> list[GivenLora]:
    """The LoRA of the run that a config is of; none where only the base model is asked for."""
    if not any(scales):
        return []
    if run is None:
        raise UserError(
            f"--lora: is missing, and the config's output.dir {output_dir} holds no run; name a LoRA, or "
            "generate with the base model only: --scale 0"
        )
    return [find_lora(str(run.path))]


def _settings(parsed: argparse.Namespace) -> dict[str, object]:
    """The settings of the section ``validation`` that arguments replace, by key."""
    settings: dict[str, object] = {key: getattr(parsed, name) for name, key in _FLAG_KEYS.items()}
    if parsed.size is not None:
        settings["validation.width"], settings["validation.height"] = parsed.size
    prompts = parsed.prompt
    if prompts:
        settings["validation.prompts"] = _as_list(prompts)
    for name, setting in FILES.items():
        given = getattr(parsed, name)
        # The config's images are for the config's prompts; those of a setting next to them are not.
        is_set = any(override.startswith(f"validation.{setting}=") for override in parsed.overrides)
        if given or (prompts and not is_set):
            files = given or []
            is_for_all = len(files) == 1 and prompts
            settings[f"validation.{setting}"] = _as_list(files * len(prompts) if is_for_all else files)
    return settings


def _texts(given: str) -> list[str]:
    """A prompt, or those of a file, one a line."""
    if not given.startswith("@"):
        return [given]
    file = Path(given[1:]).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--prompt {given}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt {given}: is not UTF-8 text; save it as UTF-8") from None
    if texts := [line.strip() for line in lines if line.strip()]:
        return texts
    raise UserError(f"--prompt {given}: has no line with a prompt")


def _as_list(texts: Sequence[str]) -> str:
    """As the value of a setting that is a list: json is yaml."""
    return json.dumps(list(texts), ensure_ascii=False)


def _seeds(parsed: argparse.Namespace, default: int) -> Sequence[int]:
    seeds = list(dict.fromkeys(parsed.seed or [default]))
    if parsed.num is None:
        return seeds
    if len(seeds) > 1:
        raise UserError(f"--num {parsed.num}: --seed lists {len(seeds)} seeds; give the first only")
    return range(seeds[0], seeds[0] + parsed.num)


def _seed_numbers(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) <= _MAX_SEED for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text}: whole numbers from 0 to {_MAX_SEED}, such as 0,1,2")
    return list(dict.fromkeys(map(int, text.split(","))))


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(f"{text}: numbers, such as 0,0.5,1")
    return list(dict.fromkeys(values))


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: width and height in pixels, such as 1024x768")
    return int(width), int(height)
