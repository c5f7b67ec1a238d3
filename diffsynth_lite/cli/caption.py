"""Write the captions of images and clips, by a model of this machine or by a server."""

import argparse
import json
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diffsynth_lite.captioning.captioner import Captioner
from diffsynth_lite.captioning.choice import joined_outcome
from diffsynth_lite.captioning.cleaning import RULES
from diffsynth_lite.captioning.instructions import CaptionRequest, Goal, fill
from diffsynth_lite.cli.arguments import command, part_of, positive_count
from diffsynth_lite.cli.cluster import (
    add_ray_arguments,
    refuse_without_ray,
    require_done,
    run_parts,
    without_ray,
)
from diffsynth_lite.cli.console import hide_progress_bars, importing_libraries, print_lines
from diffsynth_lite.config.files import did_you_mean
from diffsynth_lite.data.captions import EXAMPLE_MODEL
from diffsynth_lite.data.folder import is_unicode
from diffsynth_lite.data.records import WHOLE, Part, is_video
from diffsynth_lite.errors import RunInterrupted, UserError, join_names
from diffsynth_lite.progress_log import Phase, watched

if TYPE_CHECKING:
    from diffsynth_lite.captioning.choice import CaptionJob, Outcome

logger = logging.getLogger(__name__)

_DEFAULT_KEY = "OPENAI_API_KEY"
_MAX_NAMED = 10
_NUM_SHOWN = 5
_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
_SAME_EVENT_S = 2.0
"""A terminal and a launcher may both send a signal: that is one event."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite caption``."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images or clips")

    def flag(name: str, value: str | Sequence[str], help: str, **options: Any) -> None:
        """A flag whose value has a name, such as FILE, or is one of some words."""
        named: dict[str, Any] = {"metavar": value} if isinstance(value, str) else {"choices": value}
        parser.add_argument(name, **named, **options, help=help)

    several: dict[str, Any] = {"action": "append", "default": []}
    by_model = f"hub id or folder of a model that writes about images, such as {EXAMPLE_MODEL}"
    flag("--model", "MODEL", f"{by_model}; with --endpoint its name there")
    flag(
        "--endpoint", "URL", "server of OpenAI's chat protocol, such as http://localhost:1234/v1 of LM Studio"
    )
    key = f"environment variable with the key of the server (default: {_DEFAULT_KEY}, if it is set)"
    flag("--key-variable", "NAME", key)
    taught = "what the captions are to teach: a likeness, a style, a motion, an edit (default: a plain "
    flag("--goal", get_args(Goal), f"{taught}description; with --inputs an edit)")
    inputs = "images that those in FOLDER are edits of, with the same names; repeatable"
    flag("--inputs", "FOLDER", inputs, type=Path, **several)
    flag("--trigger", "TEXT", "words that each caption has, such as 'ohwx woman'")
    flag("--instruction", "FILE", "text file with what to ask, in place of our own", type=Path)
    flag("--language", "NAME", "of the captions (default: English)")
    flag("--length", ("short", "medium", "long"), "(default: medium)")
    formats = ("prose", "tags", "json")
    flag("--format", formats, "json is that of Ideogram 4 (default: %(default)s)", default="prose")
    limit = parser.add_mutually_exclusive_group()
    of_config = "yaml of a run, whose text encoder limits the length of a caption"
    limit.add_argument("--config", metavar="FILE", help=of_config)
    limit.add_argument("--family", metavar="NAME", help="model family whose text encoder does")
    flag("--keep", "RULE", f"rule of cleaning that is not applied: {', '.join(RULES)}; repeatable", **several)
    replaced = "also captions that are there: those that a model wrote and nobody changed since, or all"
    flag("--replace", ("model", "all"), replaced, default="none")
    flag("--only", "FILE", "only this item; repeatable", **several)
    shown = f"print the captions of so many items ({_NUM_SHOWN}), and write none"
    flag("--dry-run", "N", shown, nargs="?", type=positive_count, const=_NUM_SHOWN, default=0)
    flag("--frames", "N", "of a clip (default: %(default)s)", type=positive_count, default=8)
    flag("--batch", "N", "items at once (default: 8; a CPU 1, a server 4)", type=positive_count)
    types = ("float32", "bfloat16", "float16")
    flag("--dtype", types, "of the weights (default: bfloat16; on a CPU float32)")
    flag("--quantize", ("none", "int8", "nf4"), "of the weights (default: none)")
    flag("--device", "NAME", "such as cuda:1 or cpu (default: the first GPU)")
    parser.add_argument("--json", action="store_true", help="print the result as json")
    part = "of N parts of the items, I from 0 to N - 1, in a process that knows of no other"
    flag("--part", "I/N", part, type=part_of)
    add_ray_arguments(parser, parts=True)


def run(parsed: argparse.Namespace) -> None:
    """Write the captions, and print what comes next."""
    _check(parsed)
    safe = f"the captions so far are written, and it goes on with {command(*parsed.words)}"
    if parsed.ray is not None:
        try:
            _caption_on_cluster(parsed)
        except KeyboardInterrupt:  # Ray would swallow what else a signal raises.
            raise RunInterrupted(f"stopped; {safe}") from None
        return
    refuse_without_ray(parsed, "gpus_per_task", "parts")
    job = _job(parsed)
    console: Console = parsed.console
    with _interrupted_by_signals("it was a dry run, and nothing is written" if parsed.dry_run else safe):
        from diffsynth_lite.captioning.job import write_captions

        with _progress(console):
            outcome = write_captions(
                job, partial(_captioner, parsed, os.environ), logs_progress=not console.is_terminal
            )
    _print(parsed, outcome)
    _require_all(outcome.failed)


def _caption_on_cluster(parsed: argparse.Namespace) -> None:
    """Write the captions of parts as tasks of a cluster; the page is written here, of all of them."""
    from diffsynth_lite.captioning.choice import choose
    from diffsynth_lite.captioning.contents import read_contents
    from diffsynth_lite.captioning.job import finish_parts
    from diffsynth_lite.captioning.report import CaptionReport

    for name in ("part", "dry_run"):
        if value := getattr(parsed, name):
            raise UserError(f"--{name.replace('_', '-')} {value}: does not go with --ray; leave it out")
    job = _job(parsed)
    contents = read_contents(job.source, logs_skipped=True)
    choose(job, contents, CaptionReport(job.folder))  # What is wrong is an error here, not in each part.
    frames = {item.file: float(job.num_frames if is_video(item.file) else 1) for item in contents.items}
    words = [word for word in without_ray(parsed.words) if word != "--json"]
    began_at = time.perf_counter()
    given = [Path(text).expanduser() for text in (parsed.model, parsed.instruction, parsed.config) if text]
    ended = run_parts(
        parsed,
        [*words, "--json"],
        frames,
        written=[job.folder.resolve()],
        read=[Path.cwd(), *(path.resolve() for path in (*job.inputs, *given) if path.exists())],
        gpus=0 if parsed.endpoint else None,
    )
    outcome = joined_outcome([json.loads(each.output) for each in ended if each.output])
    outcome.seconds = time.perf_counter() - began_at
    finish_parts(job, outcome)
    _print(parsed, outcome)
    require_done([each for each in ended if not each.output])  # what a part itself reports is below
    _require_all(outcome.failed)


def _require_all(failed: Mapping[str, str]) -> None:
    if failed:
        counted = "1 item is" if len(failed) == 1 else f"{len(failed)} items are"
        raise UserError(f"{counted} without a caption; the same command asks again for what is missing")


def _check(parsed: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if parsed.model is None and parsed.endpoint is None:
        raise UserError(
            f"--model, --endpoint: name a model, such as --model {EXAMPLE_MODEL}, or a server, such as "
            "--endpoint http://localhost:1234/v1"
        )
    if parsed.endpoint is None:
        _refuse(parsed, ("key_variable",), "is for a server: give --endpoint, or leave it out")
    else:
        from diffsynth_lite.captioning.endpoint import api_address

        _refuse(parsed, ("dtype", "quantize", "device"), "is for a model that is loaded here: leave it out")
        api_address(parsed.endpoint)
    if parsed.inputs and parsed.goal != "edit":
        _refuse(parsed, ("goal",), "is not for edits; leave it or --inputs out")
    if parsed.inputs and parsed.format != "prose":
        _refuse(parsed, ("format",), "what changes in an edit is written as prose")
    if parsed.goal == "edit" and not parsed.inputs:
        raise UserError("--goal edit: name the folder of the images before the edit, with --inputs FOLDER")
    if unknown := [name for name in parsed.keep if name not in RULES]:
        hint = did_you_mean(unknown[0], RULES).strip() or f"there are {', '.join(RULES)}"
        raise UserError(f"--keep {unknown[0]}: is not a rule of cleaning; {hint}")
    if broken := [word for word in parsed.words if not is_unicode(word)]:
        raise UserError(f"{broken[0]!a}: is not UTF-8 text")
    if parsed.trigger is not None and not parsed.trigger.strip():
        raise UserError("--trigger: is empty; leave it out")
    if parsed.key_variable is not None and not os.environ.get(parsed.key_variable):
        raise UserError(f"--key-variable {parsed.key_variable}: this environment variable is not set")


def _refuse(parsed: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    for name in names:
        if (value := getattr(parsed, name)) is not None:
            raise UserError(f"--{name.replace('_', '-')} {value}: {reason}")


def _job(parsed: argparse.Namespace) -> "CaptionJob":
    """What the arguments ask for."""
    from diffsynth_lite.captioning.choice import CaptionJob
    from diffsynth_lite.captioning.limit import limit_of_config, limit_of_family

    trigger = (parsed.trigger or "").strip()
    goal: Goal | None = "edit" if parsed.inputs else parsed.goal
    language = parsed.language or "English"
    limit_of = limit_of_config if parsed.config else limit_of_family
    limited_by = parsed.config or parsed.family
    values = {"trigger": trigger, "language": language, "goal": goal or ""}
    return CaptionJob(
        folder=parsed.folder.expanduser(),
        request=CaptionRequest(
            goal=goal,
            trigger=trigger,
            language=language,
            length=parsed.length or "medium",
            format=parsed.format,
            instruction=_instruction(parsed, values) if parsed.instruction else "",
        ),
        inputs=[path.expanduser() for path in parsed.inputs],
        limit=partial(limit_of, limited_by, trigger=trigger) if limited_by else None,
        replaced=parsed.replace,
        only=parsed.only,
        kept_rules=parsed.keep,
        num_frames=parsed.frames,
        num_shown=parsed.dry_run,
        part=Part(*parsed.part) if parsed.part else WHOLE,
        arguments=tuple(word for word in parsed.words[1:] if word != "--json"),
    )


def _instruction(parsed: argparse.Namespace, values: Mapping[str, str]) -> str:
    """The text of the user's own file, with the values that it names."""
    where = f"--instruction {parsed.instruction}"
    try:
        text = parsed.instruction.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: is not UTF-8 text; save it as UTF-8") from None
    unused = [name for name in ("goal", "language", "length") if f"{{{name}}}" not in text]
    _refuse(parsed, unused, "is part of what --instruction replaces: leave it out, or use it in the file")
    return fill(text, values, where=where)


def _captioner(parsed: argparse.Namespace, environment: Mapping[str, str]) -> Captioner:
    """What writes the captions. A model is loaded where the result is entered."""
    if parsed.endpoint is not None:
        from diffsynth_lite.captioning.endpoint import ChatServer, is_this_machine

        if not is_this_machine(parsed.endpoint):
            host = urlsplit(parsed.endpoint).netloc
            logger.warning("The images are sent to %s, which is not this machine.", host)
        variable = parsed.key_variable or _DEFAULT_KEY
        key = environment.get(variable, "")
        server = ChatServer(parsed.endpoint, model=parsed.model, key=key, key_variable=variable)
        server.batch_size = parsed.batch or server.batch_size
        return server
    with importing_libraries():
        hide_progress_bars()
        from diffsynth_lite.captioning.model import open_captioner

    return open_captioner(
        parsed.model,
        dtype=parsed.dtype,
        quantize=parsed.quantize or "none",
        device=parsed.device,
        batch_size=parsed.batch,
    )


@contextmanager
def _interrupted_by_signals(ending: str) -> Iterator[None]:
    """Scope that a signal to stop ends at any place.

    Raises:
        RunInterrupted: a signal came.
    """

    received_at = -math.inf

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal received_at
        if time.monotonic() - received_at < _SAME_EVENT_S:
            return
        received_at = time.monotonic()
        raise RunInterrupted(f"{signal.Signals(number).name}: stopped; {ending}")

    numbers = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    # nohup has SIGHUP ignored
    before = {
        each: signal.signal(each, stop) for each in numbers if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _progress(console: Console) -> Iterator[None]:
    """Scope of a progress line, where the console is a terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("loading", total=None, counts="")
        shown: list[Phase] = ["loading"]

        def watch(phase: Phase, done: int, total: int) -> None:
            if phase != shown[-1]:
                shown.append(phase)
                progress.reset(task, description=phase)
            counts, speed = f"{100 * done // total} %" if total else "", progress.tasks[0].speed
            if phase == "captioning":
                counts = f"{done} of {total}{f', {60 * speed:,.1f} a minute' if speed else ''}"
            progress.update(task, completed=done, total=total or None, counts=counts)

        with watched(watch):
            yield


def _print(parsed: argparse.Namespace, outcome: "Outcome") -> None:
    from diffsynth_lite.captioning.report import CaptionReport

    page, is_dry_run = CaptionReport(parsed.folder.expanduser()).page_file, parsed.dry_run
    captions = {name: made.text for name, made in outcome.made.items()}
    if parsed.json:
        result = {
            "model": outcome.model,
            "written": {} if is_dry_run else captions,
            "preview": captions if is_dry_run else {},
            "kept": outcome.kept,
            "appeared": outcome.appeared,
            "locked": outcome.locked,
            "failed": outcome.failed,
            "cut": {name: made.cut for name, made in outcome.made.items() if made.cut},
            "cleaned": {name: made.removed for name, made in outcome.made.items() if made.removed},
            "seconds": round(outcome.seconds, 3),
            "items_per_minute": round(outcome.items_per_minute, 3),
            "page": None if is_dry_run or parsed.part else str(page),
        }
        print_lines(json.dumps(result, ensure_ascii=False))
        return
    lines = [f"{name}:\n  {text}" for name, text in captions.items()] if is_dry_run else []
    if outcome.locked:
        lines.append(f"Not replaced, as they are several or cannot be read: {join_names(outcome.locked)}")
    if outcome.appeared:
        lines.append(f"Kept, as somebody wrote them in the meantime: {join_names(outcome.appeared)}")
    lines += [f"> {name}: {reason}" for name, reason in list(outcome.failed.items())[:_MAX_NAMED]]
    if len(outcome.failed) > _MAX_NAMED:
        lines.append(f"> and {len(outcome.failed) - _MAX_NAMED} more, on the page")
    if is_dry_run:
        lines.append(outcome.summary.replace(" written", " shown and not written"))
    else:
        lines += [outcome.summary, f"Page with all captions: {page}", f"Next: {_next(parsed)}"]
    print_lines(*lines)


def _next(parsed: argparse.Namespace) -> str:
    """The command that looks at the captions, of a run that is there or that is to be made."""
    if parsed.config is not None:
        return command("doctor", "--config", parsed.config)
    inputs = [word for path in parsed.inputs for word in ("--inputs", str(path))]
    family = ["--family", parsed.family] if parsed.family else []
    return command("init", str(parsed.folder), *inputs, *family)
