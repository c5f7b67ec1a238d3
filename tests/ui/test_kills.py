"""A server that is killed in the middle of what a button does: nothing is lost, nothing is half, and the next
server shows what is there."""

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import FORKED
from run_folders import full_folder
from screens import Screen, signed_in

from diffsynth_lite.files import is_unfinished
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace, open_workspace

KILLED = 9
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "subprocess.Popen")
CONFIG = "extends: qwen_lora.yaml\n\ndata:\n  path: data/mug\n\noutput:\n  dir: runs/new\n"
PAGES = (
    "/",
    "/configs/mine/",
    "/data/mug/",
    "/data/mug/examined?config=mine",
    "/runs/old/",
    "/runs/old/try",
)
CAPTIONS = [{"file": f"{name}.png", "was": f"a {name}", "caption": f"one {name}"} for name in "abc"]
COMPARED = ("data", "trash", "configs", "queue/waiting", "runs")


@dataclass(frozen=True)
class Action:
    """What a button asks for.

    Attributes:
        first: what was done before it, each an address with what is sent.
        again: what completes, or takes back, what a kill left of it; itself if there is none.
        is_taken_back: whether everything is as before after that.
        trains: whether a run trains meanwhile.
    """

    path: str
    given: Mapping[str, Any] = field(default_factory=dict)
    first: tuple[str, Mapping[str, Any]] | None = None
    again: str = ""
    is_taken_back: bool = False
    trains: bool = False

    def ask(self, screen: Screen) -> Any:
        if "content" in self.given:
            return screen.post(self.path, content=self.given["content"])
        return screen.post(self.path, dict(self.given))


ACTIONS = {
    "a new data set": Action("/data", {"name": "new"}),
    "a file that is added": Action("/data/mug/add?name=d.png", {"content": b"an image"}),
    "a new config": Action(
        "/configs", {"name": "new", "data": "mug", "recipe": "qwen_lora.yaml", "goal": ""}
    ),
    "a copy": Action("/configs", {"name": "copy", "config": "mine"}),
    "captions": Action(
        "/data/mug/captions", {"changes": CAPTIONS}, again="/data/mug/undo", is_taken_back=True
    ),
    "trash": Action(
        "/data/mug/trash", {"files": ["a.png", "b.png"]}, again="/data/mug/undo", is_taken_back=True
    ),
    "undo": Action("/data/mug/undo", first=("/data/mug/trash", {"files": ["a.png", "b.png"]})),
    "captions by a model": Action(
        "/data/mug/captioning",
        {"do": "write", "model": "tiny", "replace": "all"},
        again="/data/mug/undo",
        is_taken_back=True,
    ),
    "examine": Action("/data/mug/examine", {"config": "mine", "do": "start"}),
    "plan": Action("/configs/mine/plan", {"gpu": "RTX 4090"}),
    "start": Action("/configs/mine/start"),
    "several values": Action("/configs/mine/variants", {"do": "add", "settings": ["lora.rank=4,8,16"]}),
    "stop": Action("/runs/old/stop", trains=True),
    "take out": Action("/queue/remove", {"run": "new"}, first=("/configs/mine/start", {})),
    "try": Action("/runs/old/try", {"do": "generate", "prompt": "a mug"}),
    "grid of steps": Action("/runs/old/compare-steps"),
    "use this one": Action("/runs/old/choose", {"lora": "lora-00000100"}),
}


def make_workspace(path: Path) -> Workspace:
    """Three images with captions, a config, and a run that this process seems to train."""
    workspace = open_workspace(path)
    mug = workspace.data_folder / "mug"
    mug.mkdir()
    for place, name in enumerate("abc"):
        Image.new("RGB", (8, 8), (place, 0, 0)).save(mug / f"{name}.png")
        (mug / f"{name}.txt").write_text(f"a {name}\n")
    (workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    old = full_folder(workspace.runs_folder / "old")
    for name in ("lora", "checkpoints/lora-00000100"):
        (old / name).mkdir(parents=True)
        (old / name / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    (old / "resolved.yaml").write_text(f"{CONFIG}validation:\n  prompts: [a mug]\n")
    return workspace


def prepared(place: Path, action: Action, trainer: int) -> None:
    """The workspace before an action.

    Args:
        trainer: process that seems to train.
    """
    workspace = make_workspace(place)
    old = workspace.runs_folder / "old"
    if action.trains:
        status = json.loads((old / "status.json").read_text())
        (old / "status.json").write_text(json.dumps(status | {"state": "running"}))
        (old / ".lock").write_text(f"{Process.of(trainer).as_text()}\n")
    if action.first is not None:
        assert signed_in(workspace).post(action.first[0], dict(action.first[1])).status_code == 200


def strike_at(number: int) -> None:
    """End this process at its so-manieth change of the disk or start of a process."""
    left = [number]

    def strike(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            is_written = isinstance(path, str | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR)
            if not is_written or os.fspath(path).startswith("/dev"):
                return
        elif event not in CHANGES:
            return
        left[0] -= 1
        if left[0] == 0:
            if event == "open":
                os.open(path, flags, 0o600)  # It is there, without its content.
            os._exit(KILLED)

    sys.addaudithook(strike)


def strike_all(root: str, program: str, trainer: int) -> None:
    """Do each action again and again, killed at one moment after the other, until one is not."""
    sys.executable = program
    screen = signed_in(make_workspace(Path(root) / "read"))  # What this imports no child has to import.
    assert {screen.get(page).status_code for page in PAGES} == {200}
    for name, action in ACTIONS.items():
        status, number = KILLED, 0
        while status == KILLED:
            number += 1
            place = Path(root) / name / f"{number:03}"
            if (child := os.fork()) == 0:
                do(place, action, number, trainer)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"{name}: {status}"


def do(place: Path, action: Action, number: int, trainer: int) -> None:
    """Do an action in a workspace of its own, and end."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        prepared(place, action, trainer)
        screen = signed_in(Workspace(place))
        os.chdir(place)
        strike_at(number)
        answer = action.ask(screen)
        os._exit(answer.status_code != 200)
    finally:
        os._exit(2)


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workspaces by action and moment; in the last one of each nothing was killed."""
    root = tmp_path_factory.mktemp("struck")
    process = FORKED.Process(target=strike_all, args=(str(root), shutil.which("true"), os.getpid()))
    process.start()
    process.join()
    assert process.exitcode == 0
    return root


def tree(workspace: Path) -> dict[str, bytes | None]:
    """Files with their contents, and folders; of the queue the names only."""
    found: dict[str, bytes | None] = {}
    for path in (path for name in COMPARED for path in (workspace / name).rglob("*")):
        name = re.sub(r"\d{8}-\d{6}", "TIME", str(path.relative_to(workspace)))
        if not is_unfinished(path.name) and (path.is_file() or name.startswith("data/")):
            found[name] = path.read_bytes() if path.is_file() and "queue" not in name else None
    return found


def queued(found: Mapping[str, Any]) -> list[str]:
    """What waits: all that a button adds, or nothing of it."""
    return sorted(name for name in found if name.startswith("queue/"))


@pytest.mark.parametrize("name", ACTIONS)
def test_after_a_kill_at_any_moment_the_next_server_goes_on(
    struck: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *killed, whole = sorted((struck / name).iterdir())
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    action, after = ACTIONS[name], tree(whole)
    prepared(struck / name / "before", action, os.getpid())
    before = tree(struck / name / "before")
    for place in killed:
        monkeypatch.chdir(place)
        screen = signed_in(Workspace(place))
        assert {page: screen.get(page).status_code for page in PAGES} == dict.fromkeys(PAGES, 200), place.name
        now = tree(place)
        half = [each for each in now if now[each] not in (before.get(each, 0), after.get(each, 0))]
        assert half == [], place.name
        assert queued(now) in (queued(before), queued(after)), place.name
        lost = Counter(filter(None, before.values())) & Counter(after.values()) - Counter(now.values())
        assert not lost, place.name
        answer = (Action(action.again) if action.again else action).ask(screen)
        assert tree(place) == (before if action.is_taken_back else after), (place.name, answer.text)
