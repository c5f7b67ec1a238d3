"""Each command names the nodes that do not see its folders, before anything is started there."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from nodes import Nodes, make_tiny_run
from tiny_run import TinyRun

from diffsynth_lite.cli.main import main
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.workspace import Workspace

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.nightly,
    # Ray 2.60 on settings of its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Given = tuple[list[str], Sequence[str]]
"""The words of a command, and the folders and files below the root that it needs."""


@pytest.fixture(scope="module")
def unmounted(cluster: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that one node does not see, as on a machine where it is not mounted."""
    hidden = tmp_path_factory.mktemp("unmounted")
    program = tmp_path_factory.mktemp("program")
    (program / "sitecustomize.py").write_text(
        "import pathlib\n"
        "exists, read_text = pathlib.Path.exists, pathlib.Path.read_text\n"
        f"hidden = {str(hidden)!r}\n"
        "def read(path, *args, **options):\n"
        "    if str(path).startswith(hidden): raise FileNotFoundError(2, 'no such file', str(path))\n"
        "    return read_text(path, *args, **options)\n"
        "pathlib.Path.read_text = read\n"
        "pathlib.Path.exists = lambda path, **options: (\n"
        "    not str(path).startswith(hidden) and exists(path, **options)\n"
        ")\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(program), prepend=":")
        node = cluster.cluster.add_node(num_cpus=1, include_dashboard=False)
    yield hidden
    cluster.cluster.remove_node(node, allow_graceful=False)


def fill(run: TinyRun) -> Given:
    words = ["cache", "fill", *run.arguments, "--gpus-per-task", "0"]
    return words, ["tiny.yaml", "model", "data", "cache"]


def captions(run: TinyRun) -> Given:
    (run.root / "ask.txt").write_text("Describe the image.")
    words = ["caption", str(run.root / "data"), "--model", str(run.root / "model")]
    words += ["--instruction", str(run.root / "ask.txt"), "--gpus-per-task", "0"]
    return words, ["model", "ask.txt", "data"]


def training(run: TinyRun) -> Given:
    words = ["train", *run.arguments, "--gpus-per-node", "0"]
    return words, ["tiny.yaml", "model", "data", "", "cache"]


def a_queue(run: TinyRun) -> Given:
    (run.root / "configs").mkdir()
    config = run.config.rename(run.root / "configs" / "tiny.yaml")
    config.write_text(config.read_text().replace(f"{run.root}/run", "runs/tiny"))
    there = ["--workspace", str(run.root)]
    assert main(["queue", "add", *there, "--config", "tiny.yaml", *run.settings]) == 0
    words = ["queue", "work", *there, "--gpus-per-node", "0"]
    return words, ["", "configs/tiny.yaml", "model", "data", "runs", "cache"]


@pytest.mark.parametrize("command", [fill, captions, training, a_queue])
def test_a_node_that_does_not_see_the_folders_of_a_command_is_named(
    command: Callable[[TinyRun], Given],
    unmounted: Path,
    tiny_model: Path,
    cluster: Nodes,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path.cwd())  # Commands of a queue go to its workspace.
    root = unmounted / command.__name__
    shutil.copytree(tiny_model, root / "model")
    run = make_tiny_run(root, root / "model")
    words, needed = command(run)
    code = main([*words, "--ray", cluster.address])
    named = "; ".join(str(root / name) for name in needed)
    assert f"does not see {named}; mount a shared folder at the same path on all nodes" in caplog.text
    assert caplog.text.count("does not see") == 1
    assert not list(root.rglob(".tmp-*"))
    assert not list((root / "data").glob(".captions*"))
    assert not (root / "run").exists()
    if command is not a_queue:
        assert code == 2
        return
    [refused] = Queue(Workspace(root)).snapshot().in_state("done")
    assert refused.entry
    assert (refused.entry.outcome, refused.entry.exit_code) == ("refused", 2)
