"""Train a LoRA: settings come from the yaml, presets, key=value and flags."""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from diffsynth_lite import __version__
from diffsynth_lite.cli.arguments import add_config_arguments, command, config_words, same_command
from diffsynth_lite.cli.cluster import add_training_arguments, refuse_without_ray, train_there
from diffsynth_lite.cli.console import hide_progress_bars, importing_libraries
from diffsynth_lite.cli.processes import grace_can_be_set, grace_period, join_processes, parent_command
from diffsynth_lite.config import Config, LoadedConfig, load_config
from diffsynth_lite.errors import EXIT_BUG, RunInterrupted, UserError, exit_code
from diffsynth_lite.redaction import redacted
from diffsynth_lite.releases.families import require_family_name
from diffsynth_lite.sampling.request import FILES

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LAUNCHED = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
"""Variables that ``accelerate launch`` and torchrun set."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE_WORKSPACES = (":4096:8", ":16:8")
_SWITCHES = {
    "use_gradient_checkpointing": "recompute transformer blocks in backward instead of keeping activations",
    "use_gradient_checkpointing_offload": "also offload the blocks' inputs to host memory",
}
_FLAG_KEYS = {"resume": "resume.source"} | {name: f"train.{name}" for name in _SWITCHES}


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The few flags of ``diffsynth-lite train``; everything else is a ``key=value`` of the config."""
    add_config_arguments(parser)
    parser.add_argument("--resume", metavar="auto|none|must|PATH", help="where to start from (default: auto)")
    for name, effect in _SWITCHES.items():
        switch = parser.add_mutually_exclusive_group()
        switch.add_argument(f"--{name}", action="store_true", default=None, help=effect)
        switch.add_argument(f"--no-{name}", dest=name, action="store_false", default=None)
    add_training_arguments(parser)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Arguments of ``train`` that somebody else may have written.

    Raises:
        UserError: they are none.
    """
    parser = _RaisingParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_intermixed_args(words)


def words_of(parsed: argparse.Namespace) -> list[str]:
    """The arguments of ``train``, as words."""
    switches = [
        f"--{'' if is_on else 'no-'}{name}"
        for name in _SWITCHES
        if (is_on := getattr(parsed, name)) is not None
    ]
    resume = [] if parsed.resume is None else ["--resume", parsed.resume]
    return [*config_words(parsed), *switches, *resume]


def settings_of(parsed: argparse.Namespace) -> list[str]:
    """The arguments of ``train`` but for config and presets, as ``section.key=value``."""
    flags = {key: getattr(parsed, name) for name, key in _FLAG_KEYS.items()}
    return [*parsed.overrides, *(f"{key}={value}" for key, value in flags.items() if value is not None)]


def load(parsed: argparse.Namespace, config: str | Path) -> LoadedConfig:
    """The config that the arguments of ``train`` ask for."""
    return load_config(config, settings_of(parsed), presets=parsed.presets)


def run(parsed: argparse.Namespace) -> None:
    """Train."""
    started_at = time.perf_counter()
    _die_with_launcher()
    with _errors_for_launcher(os.environ.get(_ERROR_FILE)):
        try:
            _train(parsed, started_at)
        except KeyboardInterrupt:  # while the run does not listen to signals
            raise RunInterrupted("stopped by SIGINT; the same command continues") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """``diffsynth-lite train`` for launchers, which start a file or a module; returns its exit code."""
    from diffsynth_lite.cli.main import main as run_program

    return run_program(["train", *(sys.argv[1:] if arguments is None else arguments)])


@contextmanager
def _errors_for_launcher(file: str | None) -> Iterator[None]:
    """Scope whose errors torch's elastic agent shows in the summary that it prints when a process failed.

    Args:
        file: where the agent looks for it; none, or empty, where there is no agent.
    """
    try:
        yield
    except (Exception, RunInterrupted) as error:
        if file:
            text = str(error) if exit_code(error) != EXIT_BUG else traceback.format_exc()
            # In the layout of torch.distributed.elastic.multiprocessing.errors.
            message = {"message": redacted(text), "extraInfo": {"timestamp": str(int(time.time()))}}
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": message}))
        raise


def _train(parsed: argparse.Namespace, started_at: float) -> None:
    loaded = load(parsed, parsed.config)
    require_family_name(loaded.config.model.family)
    if parsed.ray is not None:
        train_there(parsed, loaded, words_of(parsed), again=same_command(os.environ, parsed.words))
        return
    refuse_without_ray(parsed, "num_nodes", "min_nodes", "gpus_per_node", "max_failures")
    logger.info("diffsynth_lite %s, settings from %s", __version__, loaded.path)
    for warning in (*loaded.warnings, *_launcher_warnings(loaded.config.train.mixed_precision)):
        logger.warning("%s", warning)
    if loaded.config.train.deterministic:
        make_cublas_repeatable()
    # The libraries take seconds to import: a wrong config is refused before that.
    importing_since = time.perf_counter()
    with importing_libraries():
        join_processes(os.environ, sys.argv)
        from diffsynth_lite.training.run import run_training
        from diffsynth_lite.training.session import StartupClock, open_run

    clock = StartupClock(started_at)
    clock.add("importing libraries", time.perf_counter() - importing_since)
    if not parsed.console.is_terminal:
        hide_progress_bars()
    again = same_command(os.environ, parsed.words)
    grace = grace_period(os.environ, parent_command(), can_be_set=grace_can_be_set())
    given = {"console": parsed.console, "clock": clock, "grace": grace, "command": again}
    run_training(open_run(loaded, **given, arguments=parsed.words[1:]))
    _log_next(loaded.config)


def _log_next(config: Config) -> None:
    """Log the commands that try the LoRA of a finished run; the console of other processes is silent."""
    from diffsynth_lite.run_folder.folder import RunFolder
    from diffsynth_lite.run_folder.loras import lora_copies

    folder = config.output.dir
    sample = command("sample", "--lora", folder)
    given = [name for name, setting in FILES.items() if getattr(config.validation, setting)]
    files = "".join(f" --{name.replace('_', '-')} FILE" for name in given)
    logger.info('Next: %s --prompt "..."%s', sample, files)
    if len(lora_copies(RunFolder(Path(folder)).checkpoints_folder)) > 1:
        logger.info('Which step was best: %s --every-checkpoint --prompt "..."%s', sample, files)


def _launcher_warnings(mixed_precision: str) -> list[str]:
    """The launcher's settings that the config overrules."""
    # The launcher sets "no" also where nobody asked for it.
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in ("no", mixed_precision):
        return []
    return [f"accelerate launch asks for {launched}; train.mixed_precision: {mixed_precision} is used"]


def make_cublas_repeatable() -> None:
    """Have cuBLAS, which reads it when it is first used, take workspaces of a fixed size."""
    value = os.environ.setdefault(_WORKSPACE, _REPEATABLE_WORKSPACES[0])
    if value not in _REPEATABLE_WORKSPACES:
        raise UserError(
            f"train.deterministic: true, but {_WORKSPACE} is {value!r} in the environment; unset it, or set "
            f"it to {' or '.join(_REPEATABLE_WORKSPACES)}"
        )


def _die_with_launcher() -> None:
    """Have the kernel send SIGTERM when the launcher dies.

    ``accelerate launch`` with one process forwards no signal, and torchrun none but SIGTERM and SIGINT, so
    that without this a stopped launcher leaves trainers that run on.
    """
    if sys.platform == "linux" and not _LAUNCHED.isdisjoint(os.environ):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
