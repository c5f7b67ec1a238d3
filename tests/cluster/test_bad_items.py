"""An image that is damaged: on a cluster each command ends as on one machine, with the same results."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_server import name_image, running
from nodes import Nodes
from tiny_run import TinyRun, forked

from diffsynth_lite.cli.main import main

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.nightly,
    # Ray 2.60 on settings of its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SKIPPED = ("data.on_bad_item=skip", "data.max_bad_ratio=0.5")
Ended = tuple[int, dict[str, str]]
"""An exit code, and files with hashes of their contents."""


def contents(folder: Path, pattern: str) -> dict[str, str]:
    files = sorted(folder.rglob(pattern))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def fill(run: TinyRun, *there: str) -> Ended:
    cache = run.root / ("cache there" if there else "cache here")
    on = [*there, "--parts", "5", "--gpus-per-task", "0"] if there else []
    code = main(["cache", "fill", *run.arguments, f"data.cache_dir={cache}", *on])
    return code, contents(cache, "*.safetensors")


def captions(run: TinyRun, *there: str) -> Ended:
    for caption in (run.root / "data").glob("*.txt"):
        caption.unlink()
    with running() as double:
        double.always = name_image
        words = ["caption", str(run.root / "data"), "--endpoint", double.endpoint, "--model", "numbers"]
        code = main([*words, *there, *(["--parts", "5"] if there else [])])
    return code, contents(run.root / "data", "*.txt")


def training(run: TinyRun, *there: str) -> Ended:
    settings = ("train.steps=3", "output.checkpoint_every_steps=3")
    if there:
        words = ["train", *run.arguments, *settings, f"output.dir={run.root / 'there'}", *there]
        code = main([*words, "--num-nodes", "2", "--gpus-per-node", "0"])
    else:
        code = forked(run, *settings, f"output.dir={run.root / 'here'}", num_processes=2).wait()
    folder = run.root / ("there" if there else "here") / "checkpoints" / "step-00000003"
    return code, contents(folder, "*.safetensors")


@pytest.mark.parametrize(
    ("command", "settings", "code"),
    [
        (fill, (), 2),
        (fill, SKIPPED, 0),
        (captions, (), 2),
        (training, (), 2),
        (training, SKIPPED, 0),
    ],
)
def test_an_image_that_is_damaged_is_named_and_ends_a_command_as_on_one_machine(
    command: Callable[..., Ended],
    settings: tuple[str, ...],
    code: int,
    tiny_run: TinyRun,
    nodes: Nodes,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = tiny_run.root / "data" / "3.png"
    bad.write_bytes(bad.read_bytes()[:200])
    run = tiny_run.having(*settings)
    code_here, here = command(run)
    capfd.readouterr()
    caplog.clear()
    code_there, there = command(run, "--ray", nodes.address)
    assert (code_here, code_there) == (code, code)
    assert bool(there) == (command is not training or not code)
    if command is fill and code:
        assert here.items() < there.items()  # Parts without it are filled.
    else:
        assert here == there
    assert "3.png" in "".join([caplog.text, *capfd.readouterr()])
    assert "tried again" not in caplog.text
