"""A server that is killed while what it started does real work: a run, captions by a model, and Try it."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import wait_for
from screens import Server, server_command

from diffsynth_lite.captioning.report import CaptionReport
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.testing.captioners import save_tiny_qwen3_vl
from diffsynth_lite.workspace import Workspace, open_workspace

MINI = Path(__file__).parents[2] / "examples" / "quickstart" / "mini_qwen_image"
CONFIG = f"""extends: quickstart.yaml
model: {{path: {MINI}}}
data: {{path: data/shapes}}
train: {{steps: 100000, global_batch_size: 1, micro_batch_size: 1}}  # until it is stopped
validation: {{prompts: []}}
output: {{dir: runs/shapes, checkpoint_every_steps: 20}}
logging: {{every_steps: 1}}
"""
NUM_CAPTIONS = 100


@dataclass(frozen=True)
class Client:
    """What a browser sends that opened the address of a server."""

    server: Server
    headers: dict[str, str]

    def ask(self, path: str, given: dict[str, Any] | None = None) -> str:
        """The answer to a read, or to a change."""
        body = None if given is None else json.dumps(given).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.server.root}{path}", body, self.headers)
        ) as answer:
            return str(answer.read().decode())


@contextmanager
def opened(workspace: Workspace) -> Iterator[Client]:
    """A server in a process of its own, and its client."""
    with server_command(workspace.path) as server, urllib.request.urlopen(server.address) as page:
        secret = re.search(r'data-secret="(\w+)"', page.read().decode())
        assert secret is not None
        headers = {"cookie": page.headers["set-cookie"].partition(";")[0], "x-diffsynth-secret": secret[1]}
        yield Client(server, headers | {"origin": server.root, "content-type": "application/json"})


def commands_in(workspace: Workspace) -> list[str]:
    """The commands that run in a workspace, whoever started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == workspace.path:
                found += re.findall(r"cli\.main\0(\w+)", (process / "cmdline").read_text())
    return sorted(found)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A workspace in which nothing runs in the end."""
    workspace = open_workspace(tmp_path / "studio")
    yield workspace
    wait_for(lambda: commands_in(workspace) == [])


def make_images(workspace: Workspace, number: int) -> Path:
    """The folder of a data set."""
    folder = workspace.data_folder / "shapes"
    folder.mkdir()
    for place in range(number):
        Image.new("RGB", (64, 64), (place, 99, 99)).save(folder / f"{place}.png")
    return folder


@pytest.mark.slow
def test_a_run_goes_on_and_what_try_it_generates_ends_with_the_server(workspace: Workspace) -> None:
    (workspace.configs_folder / "shapes.yaml").write_text(CONFIG)
    (make_images(workspace, 1) / "0.txt").write_text("a shape")
    run = RunFolder(workspace.runs_folder / "shapes")
    with opened(workspace) as first:
        first.ask("/configs/shapes/start", {})
        wait_for(lambda: any(run.lora_folder.glob("*.safetensors")))
        first.ask("/runs/shapes/try", {"do": "generate", "prompt": "a teal circle", "steps": "1000"})
        wait_for(lambda: json.loads(first.ask("/runs/shapes/try/state")).get("phase") == "generating")
        assert commands_in(workspace) == ["queue", "sample", "train", "ui"]
        first.server.kill()
        wait_for(lambda: commands_in(workspace) == ["queue", "train"])
    with opened(workspace) as second:
        assert 'aria-label="Stop shapes"' in second.ask("/")
        tried = json.loads(second.ask("/runs/shapes/try/state"))
        assert tried == {"state": "none", "is_open": False, "results": []}
        second.ask("/runs/shapes/stop", {})
        wait_for(lambda: commands_in(workspace) == ["ui"])
        assert "Continue" in second.ask("/runs/shapes/")
    status = run.read_status()
    assert status is not None
    rows = [json.loads(row)["step"] for row in run.metrics_file.read_text().splitlines()]
    assert status["state"] == "interrupted"
    assert sorted(set(rows) - {0}) == list(range(1, status["step"] + 1))
    assert (run.checkpoints_folder / f"step-{status['step']:08d}" / "COMPLETE").is_file()


@pytest.mark.slow
def test_captions_outlive_the_server_and_those_of_a_killed_command_are_completed(
    workspace: Workspace,
) -> None:
    folder, model = make_images(workspace, NUM_CAPTIONS), save_tiny_qwen3_vl(workspace.path / "captioner")

    def written() -> dict[str, tuple[str, int]]:
        return {file.name: (file.read_text(), file.stat().st_mtime_ns) for file in folder.glob("*.txt")}

    def state(client: Client) -> str:
        return str(json.loads(client.ask("/data/shapes/items"))["captioning"]["state"])

    with opened(workspace) as first:
        first.ask("/data/shapes/captioning", {"do": "write", "model": str(model)})
        wait_for(lambda: len(written()) > 0)
        first.server.kill()
        assert commands_in(workspace) == ["caption"]
    status = CaptionReport(folder).status()
    process = Process.from_text(status.process) if status is not None else None
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: commands_in(workspace) == [])
    before = written()
    assert 0 < len(before) < NUM_CAPTIONS
    with opened(workspace) as second:
        assert state(second) == "killed"
        second.ask("/data/shapes/captioning", {"do": "go on"})
        wait_for(lambda: state(second) == "finished")
        wait_for(lambda: commands_in(workspace) == ["ui"])
    after = written()
    assert len(after) == NUM_CAPTIONS
    assert {name: after[name] for name in before} == before
