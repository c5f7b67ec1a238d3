"""Commands on a cluster of three nodes: results are those of one machine, whatever is killed meanwhile."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_server import name_image, running
from nodes import Nodes, make_tiny_run
from PIL import Image
from tiny_run import TinyRun, checkpoint_tensors, differing, forked

from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.main import main
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.testing.captioners import save_tiny_qwen3_vl
from diffsynth_lite.workspace import Workspace

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.nightly,
    # Ray 2.60 on settings of its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LIMIT_S = 900.0
TRAINED = ("train.steps=40", "output.checkpoint_every_steps=4", "output.keep_checkpoints=20")
ON_CPUS = ("--gpus-per-task", "0")


def entries(cache: Path) -> dict[str, str]:
    """The entries of a cache, by name, with a hash of each."""
    files = sorted(cache.rglob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until something is there."""
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def meanwhile(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def started(words: Sequence[str], folder: Path, **options: Any) -> "subprocess.Popen[bytes]":
    """A command in a process of its own, which can be killed."""
    return subprocess.Popen([sys.executable, "-m", "diffsynth_lite.cli.main", *words], cwd=folder, **options)


def kill_first(nodes: Nodes, words: str) -> Any:
    """Kill a process of the first node that runs one, and return the node."""
    node = wait_for(lambda: nodes.running(words))[0]
    for process in nodes.processes(node, words):
        process.kill()
    return node


def train_words(run: TinyRun, nodes: Nodes, *more: str) -> list[str]:
    """The command that trains on two nodes."""
    return [
        *("train", *run.arguments, *TRAINED, "--ray", nodes.address, "--num-nodes", "2"),
        *("--gpus-per-node", "0", *more),
    ]


def has_checkpoint(run: TinyRun, step: int) -> bool:
    return (run.folder / "checkpoints" / f"step-{step:08d}" / "COMPLETE").is_file()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a run of two processes on this machine, without a cluster."""
    run = make_tiny_run(tmp_path_factory.mktemp("whole"), tiny_model)
    assert forked(run, *TRAINED, num_processes=2).wait() == 0
    return run.folder


def test_the_cache_is_filled_as_by_one_machine_though_a_task_is_killed_and_a_node_is_lost(
    tiny_run: TinyRun, nodes: Nodes, tmp_path: Path
) -> None:
    assert main(["cache", "fill", *tiny_run.arguments, f"data.cache_dir={tmp_path / 'alone'}"]) == 0

    def disturb() -> None:
        first = kill_first(nodes, "cache fill")
        others = wait_for(lambda: [node for node in nodes.running("cache fill") if node is not first])
        nodes.lose(others[0])

    disturbing = meanwhile(disturb)
    words = ["cache", "fill", *tiny_run.arguments, "--ray", nodes.address, "--parts", "5", *ON_CPUS]
    assert main(words) == 0
    disturbing.join(LIMIT_S)
    assert entries(tiny_run.root / "cache") == entries(tmp_path / "alone")


def test_a_fill_whose_driver_was_killed_goes_on_and_encodes_nothing_twice(
    tiny_run: TinyRun, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tiny_run.root / "cache"
    words = ["cache", "fill", *tiny_run.arguments, "--ray", nodes.address, "--parts", "5", *ON_CPUS]
    driver = started(words, tiny_run.root)
    wait_for(lambda: entries(cache))
    driver.kill()
    driver.wait()
    wait_for(lambda: not nodes.running("cache fill"))  # What it started has ended with it.
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    assert main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(entries(cache)) > 5


@pytest.mark.parametrize("lost", ["task", "node", "driver"])
def test_captions_of_an_endpoint_are_those_of_one_machine_whatever_is_lost(
    tiny_run: TinyRun, nodes: Nodes, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    data = tiny_run.root / "data"
    for caption in data.glob("*.txt"):
        caption.unlink()

    def disturb() -> None:
        node = wait_for(lambda: nodes.running("diffsynth_lite.cli.main caption"))[0]
        if lost == "node":
            nodes.lose(node)
        else:
            kill_first(nodes, "diffsynth_lite.cli.main caption")

    with running() as double:
        double.always = name_image
        words = ["caption", str(data), "--endpoint", double.endpoint, "--model", "colours", "--json"]
        there = [*words, "--ray", nodes.address, "--parts", "3"]
        if lost == "driver":
            driver = started(there, tiny_run.root)
            wait_for(lambda: nodes.running("diffsynth_lite.cli.main caption"))
            driver.kill()
            driver.wait()
            wait_for(lambda: not nodes.running("diffsynth_lite.cli.main caption"))
            assert main(there) == 0
        else:
            disturbing = meanwhile(disturb)
            assert main(there) == 0
            disturbing.join(LIMIT_S)
        found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        written = {path.name: path.read_text() for path in sorted(data.glob("*.txt"))}
        assert main([*words, "--replace", "all"]) == 0
    here = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert written == {path.name: path.read_text() for path in sorted(data.glob("*.txt"))}
    # What was written before the loss was kept by the next try.
    assert found["written"].items() <= here["written"].items()
    assert len(found["written"]) + found["kept"] == 5
    assert sorted(path.name for path in (data / ".captions").glob("report*")) == ["report.jsonl"]


def test_captions_of_a_model_that_each_part_loads_are_those_of_one_machine(
    nodes: Nodes, tmp_path: Path
) -> None:
    model, data = save_tiny_qwen3_vl(tmp_path / "captioner"), tmp_path / "data"
    data.mkdir()
    for place, colour in enumerate(("red", "lime", "blue", "black", "white")):
        Image.new("RGB", (64, 64), colour).save(data / f"{place}.png")
    words = ["caption", str(data), "--model", str(model), "--replace", "all"]
    written = []
    for there in ([], ["--ray", nodes.address, "--parts", "2", *ON_CPUS]):
        for caption in data.glob("*.txt"):
            caption.unlink()
        assert main([*words, *there]) == 0
        written.append({path.name: path.read_text() for path in sorted(data.glob("*.txt"))})
    assert written[0] == written[1]
    assert len(set(written[0].values())) > 1


def test_a_run_whose_node_is_lost_goes_on_elsewhere_and_is_the_same_bit_for_bit(
    tiny_run: TinyRun, nodes: Nodes, whole_run: Path
) -> None:
    def disturb() -> None:
        wait_for(lambda: has_checkpoint(tiny_run, 8))
        nodes.lose(wait_for(lambda: nodes.running("cli.train"))[0])

    disturbing = meanwhile(disturb)
    assert main(train_words(tiny_run, nodes)) == 0
    disturbing.join(LIMIT_S)
    assert len(nodes.nodes) == 2
    assert differing(checkpoint_tensors(whole_run, 40), checkpoint_tensors(tiny_run.folder, 40)) == []


def test_a_run_goes_on_with_fewer_nodes_as_its_last_checkpoint_does_on_one_machine(
    tiny_run: TinyRun, cluster: Nodes, tmp_path: Path
) -> None:
    cluster.restore()
    cluster.lose(cluster.nodes[0])
    kept: list[Path] = []

    def disturb() -> None:
        wait_for(lambda: has_checkpoint(tiny_run, 8))
        cluster.lose(wait_for(lambda: cluster.running("cli.train"))[0])
        wait_for(lambda: not cluster.running("cli.train"))
        kept.append(max((tiny_run.folder / "checkpoints").glob("step-*")))

    disturbing = meanwhile(disturb)
    assert main(train_words(tiny_run, cluster, "--min-nodes", "1")) == 0
    disturbing.join(LIMIT_S)
    assert tiny_run.train(*TRAINED, f"output.dir={tmp_path / 'alone'}", "--resume", str(kept[0])) == 0
    assert (
        differing(checkpoint_tensors(tmp_path / "alone", 40), checkpoint_tensors(tiny_run.folder, 40)) == []
    )


def test_a_run_whose_driver_and_a_process_were_killed_goes_on_by_the_same_command(
    tiny_run: TinyRun, nodes: Nodes, whole_run: Path
) -> None:
    driver = started(train_words(tiny_run, nodes), tiny_run.root)
    wait_for(lambda: has_checkpoint(tiny_run, 4))
    driver.kill()
    driver.wait()
    wait_for(lambda: not nodes.running("cli.train"))  # The processes have ended with it.

    def disturb() -> None:
        wait_for(lambda: has_checkpoint(tiny_run, 12))
        kill_first(nodes, "cli.train")

    disturbing = meanwhile(disturb)
    assert main(train_words(tiny_run, nodes)) == 0
    disturbing.join(LIMIT_S)
    assert differing(checkpoint_tensors(whole_run, 40), checkpoint_tensors(tiny_run.folder, 40)) == []


def test_a_run_of_two_processes_on_a_node_is_that_of_a_launcher_though_one_of_them_is_killed(
    tiny_run: TinyRun, cluster: Nodes, whole_run: Path
) -> None:
    # GPUs of Ray only: torch finds none, and takes the CPU.
    node = cluster.cluster.add_node(num_cpus=1, num_gpus=2, include_dashboard=False)

    def disturb() -> None:
        wait_for(lambda: has_checkpoint(tiny_run, 8))
        cluster.processes(node, "cli.train")[-1].kill()

    disturbing = meanwhile(disturb)
    words = ["train", *tiny_run.arguments, *TRAINED, "--ray", cluster.address, "--gpus-per-node", "2"]
    assert main(words) == 0
    disturbing.join(LIMIT_S)
    cluster.cluster.remove_node(node, allow_graceful=False)
    assert differing(checkpoint_tensors(whole_run, 40), checkpoint_tensors(tiny_run.folder, 40)) == []


def test_a_run_that_is_asked_to_stop_names_the_command_with_the_cluster_which_goes_on(
    tiny_run: TinyRun, nodes: Nodes, whole_run: Path
) -> None:
    words = train_words(tiny_run, nodes)
    for ready, message in (
        (lambda: has_checkpoint(tiny_run, 4), "saved; the same command continues it: "),
        # Its processes remove what asks for a stop before they look for it.
        (lambda: nodes.running("cli.train"), "before the first step; the same command starts again, "),
    ):
        driver = started(words, tiny_run.root, stderr=subprocess.PIPE)
        wait_for(ready)
        driver.send_signal(signal.SIGINT)
        log = driver.communicate()[1].decode()
        assert driver.returncode == 75
        end = [line for line in log.splitlines() if message in line][-1]
        assert end.endswith(command(*words))
        assert not (tiny_run.folder / "STOP").exists()
    assert main(words) == 0
    assert differing(checkpoint_tensors(whole_run, 40), checkpoint_tensors(tiny_run.folder, 40)) == []


def test_a_run_that_is_refused_is_not_started_again(
    tiny_run: TinyRun, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(train_words(tiny_run, nodes, "lora.target_modules=[nothing]")) == 2
    assert "lora.target_modules" in caplog.text
    assert not tiny_run.folder.exists()


def make_workspace(run: TinyRun, path: Path) -> Path:
    """A workspace with the config of a run, whose paths are whole, as ``configs/tiny.yaml``."""
    (path / "configs").mkdir(parents=True)
    config = run.config.read_text().replace(f"{run.root}/run", "runs/tiny")
    (path / "configs" / "tiny.yaml").write_text(config)
    return path


def differing_from_here(run: TinyRun, folder: Path, *settings: str) -> Sequence[str]:
    """Tensors of a run of two steps in a folder that are not those of one on this machine."""
    here = run.root / f"here {folder.name}"
    assert run.train(*settings, "train.steps=2", f"output.dir={here}") == 0
    return differing(checkpoint_tensors(here, 2), checkpoint_tensors(folder, 2))


def test_six_variants_are_trained_at_once_by_a_queue_whose_worker_was_killed_and_a_node_lost(
    tiny_run: TinyRun, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = make_workspace(tiny_run, tmp_path / "work")
    bad = shutil.copytree(tiny_run.root / "data", tmp_path / "bad")
    (bad / "3.png").write_bytes(b"")
    words = ["queue", "add", "--workspace", str(workspace), "--config", "tiny.yaml", *tiny_run.settings]
    assert main([*words, "train.steps=2", "lora.rank=1,2,3,4,5,6"]) == 0
    work = ["queue", "work", "--workspace", str(workspace), "--ray", nodes.address, "--gpus-per-node", "0"]
    worker = started(work, tmp_path)
    kill_first(nodes, "cli.train")
    worker.kill()
    worker.wait()
    assert main([*words, "train.steps=2", f"data.path={bad}", "output.dir=runs/bad"]) == 0
    most = 0

    def disturb() -> None:
        nonlocal most
        nodes.lose(wait_for(lambda: nodes.running("cli.train"))[0])
        while not (workspace / "done").exists():
            most = max(most, len(nodes.running("cli.train")))
            time.sleep(0.1)

    disturbing = meanwhile(disturb)
    assert main(work) == 0
    (workspace / "done").touch()
    disturbing.join(LIMIT_S)
    done = Queue(Workspace(workspace)).snapshot().in_state("done")
    found = {run.name: run.entry for run in done if run.entry}
    refused = found.pop("bad")
    assert (refused.outcome, refused.exit_code) == ("refused", 2)
    assert "3.png" in refused.message
    assert [(entry.outcome, entry.exit_code) for entry in found.values()] == [("finished", 0)] * 6
    assert most > 1
    for rank in (1, 6):
        folder = workspace / found[f"tiny-rank{rank}"].folder
        assert differing_from_here(tiny_run, folder, f"lora.rank={rank}") == []


def test_a_sweep_trains_its_runs_on_the_cluster_and_compares_them(
    tiny_run: TinyRun,
    nodes: Nodes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = make_workspace(tiny_run, tmp_path / "work")
    run = tiny_run.having("data.hold_out=0.4", "validation.loss_items=2", "train.steps=2")
    words = ["sweep", "tiny.yaml", *run.settings, "lora.rank=2,4", "--workspace", str(workspace), "--json"]
    assert main([*words, "--ray", nodes.address, "--gpus-per-node", "0"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert [(each["state"], each["message"]) for each in there["runs"]] == [("finished", "")] * 2
    assert sorted(each["result"] for each in there["runs"]) == ["", "best"]
    for each in there["runs"]:
        folder = workspace / "runs" / each["name"]
        assert differing_from_here(run, folder, f"lora.rank={each['differs']['lora.rank']}") == []
