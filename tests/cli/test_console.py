"""What a command prints has no secrets in it."""

import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console
from torch import distributed

from diffsynth_lite.cli.console import importing_libraries, log_level, run_command
from diffsynth_lite.cli.train import main
from diffsynth_lite.errors import ON_EACH_MACHINE, RunInterrupted, UserError
from diffsynth_lite.redaction import redacted

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console in memory, and two variables of the environment."""
    monkeypatch.setenv("MY_SECRET", "swordfish")
    monkeypatch.setenv("DIFFUSERS_DISABLE_REMOTE_CODE", "0")
    return Console(file=io.StringIO())


def run(work: Callable[[], None], console: Console, *, level: int = logging.INFO) -> int:
    """Run a command; it finds the root logger without handlers, as a process of its own would."""
    logging.getLogger().handlers.clear()
    return run_command(work, console, level=level)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_line_is_masked_with_its_arguments_and_its_traceback(console: Console) -> None:
    def work() -> None:
        try:
            raise OSError("https://ann:swordfish@example.org/x")
        except OSError:
            logging.getLogger("diffsynth_lite").warning("%s failed", TOKEN, exc_info=True)

    assert run(work, console) == 0
    assert "REDACTED failed" in printed(console)
    assert "OSError: https://REDACTED@example.org/x" in printed(console)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("--lora runs/[bold]:abc: is not there", "--lora runs/[bold]:abc: is not there"),
        ("output.dir: runs/swordfish is a file", "output.dir: runs/REDACTED is a file"),
    ],
)
def test_the_line_of_an_error_is_printed_as_it_is_and_masked(console: Console, text: str, line: str) -> None:
    def work() -> None:
        raise UserError(text)

    assert run(work, console) == 2
    assert line in printed(console)


@pytest.mark.parametrize(("error", "code"), [(UserError, 2), (RunInterrupted, 75), (None, 0)])
def test_how_a_run_ended_is_printed_once_a_machine(
    console: Console, error: type[BaseException] | None, code: int
) -> None:
    def work() -> None:
        logger = logging.getLogger("diffsynth_lite")
        logger.warning("a slow disk")
        if error is not None:
            raise error("the end")
        logger.info("the end", extra=ON_EACH_MACHINE)

    lines = []
    for rank in range(4):
        file = console.file = io.StringIO()
        level = log_level({"RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
        assert run(work, console, level=level) == code
        lines.append([line.split(" ", 1)[1] for line in file.getvalue().splitlines()])
    assert lines == [["a slow disk", "the end"], [], ["the end"], []]


@pytest.mark.parametrize("error", [None, UserError])
def test_a_process_leaves_its_group_before_the_interpreter_ends(
    console: Console, error: type[Exception] | None
) -> None:
    def work() -> None:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        if error is not None:
            raise error("lora.rank: 0")

    run(work, console)
    assert not distributed.is_initialized()


def test_a_group_that_cannot_be_ended_changes_nothing_of_how_the_run_ended(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise distributed.DistBackendError("NCCL communicator was aborted on rank 1")

    def work() -> None:
        raise UserError("lora.rank: 0")

    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(distributed, "destroy_process_group", lost)
    assert run(work, console) == 2
    assert "aborted on rank 1" not in printed(console)


@pytest.mark.parametrize(("error", "num_ended"), [(None, 1), (UserError("lora.rank: 0"), 0)])
def test_a_process_that_failed_does_not_wait_for_the_others_of_nccl(
    console: Console, monkeypatch: pytest.MonkeyPatch, error: Exception | None, num_ended: int
) -> None:
    def work() -> None:
        if error is not None:
            raise error

    ended: list[None] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: ended.append(None))
    run(work, console)
    assert len(ended) == num_ended


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_traceback_of_a_bug_is_masked_on_every_process(
    console: Console, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    def work() -> None:
        raise KeyError("swordfish") from OSError(TOKEN)

    with pytest.raises(SystemExit, match="1"):
        run(work, console, level=log_level({"RANK": rank, "LOCAL_RANK": rank}))
    error = capsys.readouterr().err
    assert "KeyError: 'REDACTED'" in error
    assert "OSError: REDACTED" in error


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("place", ["a closed pipe", "a full disk", "a terminal that is gone"])
def test_a_log_that_takes_nothing_more_stops_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = sys.stderr = open_log(place, monkeypatch)

    def work() -> None:
        logging.getLogger("diffsynth_lite").info("a line")
        sys.stderr.write("a progress bar")
        sys.stderr.flush()
        raise UserError("lora.rank: 0")

    assert run(work, Console(stderr=True)) == 2
    assert sys.stderr is stream
    stream.close()  # The interpreter flushes at its exit, where an error is exit code 120.


def test_a_command_without_an_error_stream_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    def work() -> None:
        raise UserError("lora.rank: 0")

    assert run(work, Console(stderr=True)) == 2


def open_log(place: str, monkeypatch: pytest.MonkeyPatch) -> TextIO:
    """A log that can be written to no more; ``sys.stderr`` is as before after the test."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    if place == "a full disk":
        return Path("/dev/full").open("w", buffering=1)
    reader, writer = os.pipe() if place == "a closed pipe" else os.openpty()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def test_a_command_forbids_code_from_a_hub_and_masks_what_it_writes(console: Console) -> None:
    def work() -> None:
        assert os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"] == "1"
        assert redacted("swordfish") == "REDACTED"

    assert run(work, console) == 0
    assert redacted("swordfish") == "swordfish"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "transformers.utils.import_utils",
            "`CLIPImageProcessor` requires torchvision (not installed); falling back",
        ),
        (
            "bitsandbytes.backends.cpu.ops",
            "Failed to load CPU gemm_4bit_forward. Please make sure you already `pip install kernels`",
        ),
        (
            "transformers.integrations.sdpa_attention",
            "`sdpa` attention does not support `output_attentions=True`.",
        ),
    ],
)
def test_advice_that_nobody_should_follow_is_not_printed(
    name: str, advice: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers, where it is imported, keeps its records from the root logger.
    logger = logging.getLogger(name)
    handler = BufferingHandler(capacity=10)
    monkeypatch.setattr(logger, "handlers", [handler])

    def work() -> None:
        logger.warning(advice)
        logger.warning("another warning")

    assert run(work, console) == 0
    assert [record.getMessage() for record in handler.buffer] == ["another warning"]


@pytest.mark.parametrize(
    ("words", "category"),
    [
        ("`FluxPosEmbed` is deprecated and", FutureWarning),
        ("`torch.nn.utils.weight_norm` is deprecated in favor of", FutureWarning),
        ("Mismatch dtype between input and weight: input dtype = float", UserWarning),
    ],
)
def test_warnings_of_libraries_that_nobody_should_act_on_are_not_shown(
    words: str, category: type[Warning], console: Console
) -> None:
    def work() -> None:
        warnings.warn(words, category, stacklevel=1)
        warnings.warn(f"not {words}", category, stacklevel=1)

    warnings.simplefilter("always")
    with pytest.warns(category) as shown:
        assert run(work, console) == 0
    assert [str(warning.message) for warning in shown] == [f"not {words}"]


@pytest.mark.usefixtures("console")
def test_a_refused_secret_is_not_shown_not_even_its_beginning(
    tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "swordfish-" * 20
    monkeypatch.setenv("MY_LONG_KEY", long)
    config = tmp_path / "recipe.yaml"
    config.write_text(f"train:\n  steps: {long}\n  seed: x{TOKEN}\n")
    logging.getLogger().handlers.clear()
    assert main(["--config", str(config), f"lora.rank={long}"]) == 2
    error = capsys.readouterr().err
    assert "train.steps: got 'REDACTED'" in error
    assert "train.seed: got 'xREDACTED'" in error
    assert "lora.rank=REDACTED (command line)" in error
    assert "swordfish" not in error


def test_the_imports_of_a_process_of_ours_are_left_out_of_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with importing_libraries():  # a test has imported torch: the process is not ours
        calls.append("imports")
    assert calls == ["imports"]
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), importing_libraries():
        raise ImportError
    assert calls == ["imports", "disable", "freeze", "enable"]
