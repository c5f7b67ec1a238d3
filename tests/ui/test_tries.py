"""Trying a LoRA on the screen: the request and the command of a form, one process, and what it leaves."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from processes import wait_for
from run_folders import full_folder
from screens import INLINE, Screen

from diffsynth_lite import serving
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.jobs import Job
from diffsynth_lite.ui.tries.studio import Studio, device_holders

HOSTILE = '"><img src=x onerror=alert(1)> $(x); `y` é\n@/etc/passwd'
SERVER = """
import json, os, sys, time
journal = open(sys.argv[1], "a")
print(json.dumps(["began", os.getpid(), *sys.argv[2:]]), file=journal, flush=True)
free = os.environ["FREE"]
counted = {"device_bytes": 5 << 30, "free_device_bytes": int(free) if free else None}

def answer(asked, state, **more):
    print(json.dumps({"id": asked and asked["id"], "state": state, **more}), flush=True)

answer(None, "ready")
last = None
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(asked), file=journal, flush=True)
    prompt = asked.get("prompt", [""])[0]
    if asked["ask"] == "cancel":
        answer(last, "cancelled" if last["ask"] == "generate" else "counted", **counted)
        continue
    last = asked
    if asked["ask"] == "count":
        if prompt != "long count":
            answer(asked, "counted", **counted)
    elif prompt == "die":
        sys.exit("torch is broken")
    elif prompt == "wrong":
        answer(asked, "failed", error="validation.width: 33 is not divisible by 16")
    elif prompt == "stuck":
        answer(asked, "working", phase="loading", done=0, total=3, ticks=0)
        time.sleep(600)
    else:
        answer(asked, "working", phase="generating", done=0, total=1, ticks=7)
        if prompt != "long":
            answer(asked, "done", grid="samples/0007/grid.png", columns={})
print(json.dumps({"ask": "end"}), file=journal, flush=True)
"""


@dataclass
class Tried:
    """A run with LoRAs in a workspace, whose page has a process that only pretends to generate.

    Attributes:
        holders: names of what uses the device.
    """

    screen: Screen
    run: Path
    holders: list[str] = field(default_factory=list)

    def post(self, do: str, **given: Any) -> Any:
        return self.screen.post("/runs/mine/try", {"do": do} | given)

    def command(self, **given: Any) -> str:
        return str(self.post("command", **given).json()["command"])

    def state(self) -> dict[str, Any]:
        return dict(self.screen.get("/runs/mine/try/state").json())

    def generate(self, prompt: str, until: str) -> dict[str, Any]:
        assert self.post("generate", prompt=prompt).status_code == 200
        wait_for(lambda: self.state()["state"] == until)
        return self.state()

    def journal(self) -> list[Any]:
        """What processes were started, as lists, and what each was asked."""
        file = self.screen.workspace.path / "journal"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pids(self) -> list[int]:
        return [entry[1] for entry in self.journal() if isinstance(entry, list)]

    @property
    def studio(self) -> Studio:
        found: Studio = self.screen.client.app._app.state.studio  # type: ignore[attr-defined]
        return found


def make_run(
    screen: Screen, name: str, *, family: str = "qwen_image", loras: tuple[str, ...] = ("lora",)
) -> Path:
    folder = screen.workspace.runs_folder / name
    full_folder(folder)
    data = "data:\n  path: data/mug\n  width: 64\n  height: 32\n"
    settings = f"model:\n  family: {family}\n  path: models/tiny\n{data}"
    validation = (
        "validation:\n  prompts: [a circle]\n  negative_prompt: blurry\n  seed: 5\noutput:\n  dir: runs/x\n"
    )
    (folder / "resolved.yaml").write_text(settings + validation)
    for each in loras:
        (folder / each).mkdir(parents=True)
        (folder / each / "pytorch_lora_weights.safetensors").touch()
    return folder


@pytest.fixture
def tried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tried]:
    command = (sys.executable, "-S", "-c", SERVER, str(tmp_path / "workspace" / "journal"))
    monkeypatch.setattr("diffsynth_lite.ui.server.Studio", partial(Studio, command=command, watch_s=0.02))
    monkeypatch.setenv("FREE", str(7 << 30))
    screen = request.getfixturevalue("screen")
    loras = ("lora", "lora_ema", "checkpoints/lora-00000040", "checkpoints/lora-00000100")
    tried = Tried(screen, make_run(screen, "mine", loras=loras))
    monkeypatch.setattr("diffsynth_lite.ui.server.device_holders", lambda _: tried.holders)
    yield tried
    tried.studio.end()


@pytest.mark.parametrize(
    ("form", "command"),
    [
        ({}, "--lora runs/mine --prompt x --seed 5 --scale 0,1"),
        (
            {
                "seed": "10000000",
                "steps": "8",
                "size": "64 x 32",
                "guidance": "1.5",
                "frames": "9",
                "scale": "0.7",
            },
            "--lora runs/mine --prompt x --seed 10000000 --scale 0,0.7 --steps 8 --guidance 1.5 --frames 9 "
            "--size 64x32",
        ),
        (
            {
                "lora": "40",
                "others": [{"run": "other", "weight": "0.4"}, {"run": "", "weight": ""}],
                "scale": "0",
            },
            "--lora runs/mine@40 --lora runs/other:0.4 --prompt x --seed 5 --scale 0",
        ),
        ({"lora": "ema", "negative": ""}, "--lora runs/mine@ema --prompt x --seed 5 --scale 0,1 --negative="),
        ({"scale": "-0.5"}, "--lora runs/mine --prompt x --seed 5 --scale 0,-0.5"),
        ({"negative": " blurry"}, "--lora runs/mine --prompt x --seed 5 --scale 0,1"),
        ({"prompt": "-x; `y` é"}, "--lora runs/mine '--prompt=-x; `y` é' --seed 5 --scale 0,1"),
        (
            {"prompt": "@/etc/passwd 😀"},
            """--lora runs/mine 'validation.prompts=["@/etc/passwd 😀"]' --seed 5 --scale 0,1""",
        ),
        (
            {"input": "mug/a b.png", "last_frame": "mug/c.png"},
            "--lora runs/mine --prompt x --seed 5 --scale 0,1 --input 'data/mug/a b.png' "
            "--last-frame data/mug/c.png",
        ),
    ],
)
def test_a_form_is_a_command_to_copy(tried: Tried, form: dict[str, Any], command: str) -> None:
    make_run(tried.screen, "other")
    (tried.screen.workspace.data_folder / "mug").mkdir()
    for name in ("a b.png", "c.png"):
        (tried.screen.workspace.data_folder / "mug" / name).touch()
    assert tried.command(**{"prompt": " x "} | form) == f"diffsynth-lite sample {command}"


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"prompt": " "}, "Prompt: is empty"),
        ({"prompt": "x" * 10_001}, "Prompt: give text"),
        ({"prompt": "x\0"}, "Prompt: give text"),
        ({"prompt": "\ud800"}, "Prompt: give text"),
        ({"seed": "-1"}, "Seed: give a whole number"),
        ({"steps": "٣"}, "Steps: give a whole number"),
        ({"steps": 1.5}, "Steps: give a whole number"),
        ({"guidance": "nan"}, "Guidance: give a number"),
        ({"scale": "much"}, "Scale: give a number"),
        ({"size": "64"}, "Size: give width x height"),
        ({"lora": "../../x"}, "LoRA: mine has none of ../../x"),
        ({"lora": "best"}, "LoRA: mine has none of best"),
        ({"others": [{"run": "wan", "weight": "1"}]}, "Further LoRAs: choose runs of the same family"),
        ({"others": [{"run": "../mine", "weight": "1"}]}, "Further LoRAs: choose runs of the same family"),
        ({"others": [{"run": "other", "weight": "inf"}]}, "Weight of other: give a number"),
        ({"input": "mug/../../.ui/token"}, "Input image: choose a file of a data set"),
        ({"mask": "/etc/passwd"}, "Mask: choose a file of a data set"),
        ({"control": "mug/"}, "Control: choose a file of a data set"),
    ],
)
def test_what_a_form_names_is_looked_up_and_nothing_starts_where_it_is_wrong(
    tried: Tried, form: dict[str, Any], reason: str
) -> None:
    make_run(tried.screen, "other")
    make_run(tried.screen, "wan", family="wan")
    (tried.screen.workspace.data_folder / "mug").mkdir()
    content = json.dumps({"do": "generate", "prompt": "x"} | form).encode()
    sent = {"content-type": "application/json"}
    answer = tried.screen.post("/runs/mine/try", content=content, headers=sent)
    assert answer.status_code == 422
    assert reason in answer.json()["error"]
    assert tried.journal() == []


def test_the_page_offers_what_there_is_as_text(tried: Tried) -> None:
    other = make_run(tried.screen, "<b>other")
    make_run(tried.screen, "wan", family="wan")
    make_run(tried.screen, "empty", loras=())
    (tried.run / "chosen.json").write_text('{"lora": "lora-00000040"}')
    (tried.screen.workspace.data_folder / "<i>mug").mkdir()
    page = tried.screen.get("/runs/mine/try").text
    options = [part.partition("</option>")[0] for part in page.split("<option")[1:]]
    assert options[:5] == [
        ' value="chosen">Chosen',
        *(' value="last">Latest', ' value="ema">Averaged', ' value="100">Step 100', ' value="40">Step 40'),
    ]
    assert options[-2:] == [' value="">none', f">&lt;b&gt;{other.name[3:]}"]
    for shown in ('placeholder="64x32"', 'placeholder="5"', ">a circle</textarea>", ">blurry</textarea>"):
        assert shown in page, shown
    assert "<b>other" not in page
    assert "<i>mug" not in page
    assert not INLINE.search(page)
    assert 'href="/runs/mine/try"' in tried.screen.get("/runs/mine/").text
    assert "/try" not in tried.screen.get("/runs/empty/").text
    assert "This run has no LoRA yet" in tried.screen.get("/runs/empty/try").text
    assert tried.screen.get("/runs/nobodys/try").status_code == 404
    resolved = RunFolder(other).resolved_file
    resolved.write_text(resolved.read_text().replace("qwen_image", "my_package.family"))
    assert "is code that comes with neither" in tried.screen.get(f"/runs/{other.name}/try").text
    refusal = tried.screen.post(f"/runs/{other.name}/try", {"do": "generate", "prompt": "x"})
    assert "is code that comes with neither" in refusal.json()["error"]
    resolved.unlink()
    assert "nothing names the base model" in tried.screen.get(f"/runs/{other.name}/try").text


def test_one_process_generates_for_one_request_after_the_other(tried: Tried) -> None:
    assert tried.state() == {"state": "none", "is_open": False, "results": []}
    working = tried.generate("long", "working")
    wait_for(lambda: tried.state().get("ticks") == 7)
    tag = tried.screen.get("/runs/mine/try/state").headers["etag"]
    assert tried.screen.get("/runs/mine/try/state", **{"if-none-match": tag}).status_code == 304
    tried.post("cancel")
    wait_for(lambda: tried.state()["state"] == "cancelled")
    done = tried.generate(HOSTILE, "done")
    assert (done["number"], done["is_open"], working["is_open"]) == ("0007", True, True)
    failed = tried.generate("wrong", "failed")
    assert (failed["error"], failed["is_open"]) == ("validation.width: 33 is not divisible by 16", True)
    began, long, cancel, hostile, _ = tried.journal()
    assert began[2:] == ["--lora=runs/mine", "--serve", "15"]
    assert long == {
        "id": 1,
        "ask": "generate",
        "cancels": True,
        "lora": ["runs/mine"],
        "prompt": ["long"],
        "seed": [5],
        "scale": [0.0, 1.0],
    }
    assert (cancel["ask"], hostile["prompt"]) == ("cancel", [HOSTILE])
    dead = tried.generate("die", "failed")
    assert (dead["error"], dead["is_open"]) == ("The process ended. torch is broken", False)


def test_another_run_and_whatever_starts_end_the_process_which_is_gone_then(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_END_S", 0.1)
    make_run(tried.screen, "other")
    tried.generate("stuck", "working")
    wait_for(lambda: tried.state()["phase"] == "loading")
    tried.screen.post("/runs/other/try", {"do": "generate", "prompt": "x"})
    wait_for(lambda: len(tried.pids()) == 2)
    first = tried.pids()[0]
    assert not Process.of(first).is_alive()
    assert tried.state() == {"state": "none", "is_open": False, "results": []}
    wait_for(lambda: tried.screen.get("/runs/other/try/state").json()["state"] == "done")

    def start(*_: Any, **__: Any) -> list[str]:
        assert not Process.of(tried.pids()[-1]).is_alive()
        return ["mine"]

    def refuse(*_: Any) -> None:
        raise UserError("it is in the queue already")

    monkeypatch.setattr(Job, "start", start)
    monkeypatch.setattr("diffsynth_lite.ui.runs.routes.entry_of_continuation", lambda *_: None)
    monkeypatch.setattr("diffsynth_lite.ui.queued.QueuedRuns.add", refuse)
    (tried.screen.workspace.data_folder / "mug").mkdir()
    (tried.screen.workspace.configs_folder / "c.yaml").write_text((tried.run / "resolved.yaml").read_text())
    queued = (
        ("/configs/c/start", {}),
        ("/configs/c/variants", {"do": "add", "settings": []}),
        ("/runs/mine/continue", {}),
    )
    tried.generate("x", "done")
    assert [tried.screen.post(*each).status_code for each in queued] == [422] * 3
    assert tried.state()["is_open"]
    monkeypatch.setattr("diffsynth_lite.ui.queued.QueuedRuns.add", lambda *_: None)
    for path, given in (
        ("/data/mug/captioning", {"do": "write", "model": "m"}),
        ("/runs/mine/compare-steps", {}),
        *queued,
    ):
        tried.generate("x", "done")
        assert tried.screen.post(path, given).status_code == 200, path
        assert not tried.state()["is_open"]
    assert len(tried.pids()) == 7
    # Not so what takes no device, nor what is refused.
    monkeypatch.setattr(Job, "start", lambda *_, **__: None)
    tried.generate("x", "done")
    server = {"do": "write", "model": "m", "endpoint": "http://localhost/v1"}
    assert tried.screen.post("/data/mug/captioning", server).status_code == 200
    (tried.screen.workspace.configs_folder / "c.yaml").write_text("train: {step: 3}\n")
    assert tried.screen.post("/configs/c/start").status_code == 422
    assert tried.state()["is_open"]


def test_next_to_a_training_it_generates_only_where_both_fit(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tried.screen, "live")
    tried.generate("x", "done")
    tried.holders.append("live")  # as a queue or a terminal starts one
    wait_for(lambda: not tried.state()["is_open"])
    assert tried.generate("x", "done")["is_open"]  # 5 GiB and what the libraries take, of 7
    assert [entry["ask"] for entry in tried.journal()[-2:]] == ["count", "generate"]
    tried.holders.append("captions of mug")
    wait_for(lambda: not tried.state()["is_open"])
    monkeypatch.setenv("FREE", str((6 << 30) - 1))
    failed = tried.generate("x", "failed")
    assert not failed["is_open"]
    assert failed["error"] == (
        "live, captions of mug uses the device: this takes about 6.0 GiB, and 6.0 GiB are free."
    )
    assert failed["sample"] == ["live"]
    assert [entry["ask"] for entry in tried.journal()[-2:]] == ["count", "end"]
    monkeypatch.setenv("FREE", "")  # on a CPU
    tried.generate("long", "working")
    wait_for(lambda: "remark" in tried.state())
    tried.holders.append("second")
    wait_for(lambda: tried.state()["state"] == "failed")
    assert tried.state()["error"] == "second began to use the device."


def test_what_is_cancelled_while_its_memory_is_counted_is_not_generated(tried: Tried) -> None:
    tried.holders.append("live")
    tried.generate("long count", "working")
    tried.post("cancel")
    wait_for(lambda: tried.state()["state"] == "cancelled")
    assert [entry["ask"] for entry in tried.journal()[1:]] == ["count", "cancel"]


def test_a_run_that_trains_has_the_device_and_captions_by_a_server_do_not(screen: Screen) -> None:
    run, data = make_run(screen, "live"), screen.workspace.data_folder / "mug"
    (data / ".captions").mkdir(parents=True)
    status = {"state": "running", "process": Process.current().as_text(), "arguments": ["data/mug"]}
    (data / ".captions" / "status.json").write_text(json.dumps(status))
    assert device_holders(screen.workspace) == ["captions of mug"]
    status["arguments"] = ["data/mug", "--endpoint=http://localhost"]
    (data / ".captions" / "status.json").write_text(json.dumps(status))
    RunFolder(run).write_status("running", exit_code=None, step=2, message="training")
    (run / ".lock").write_text(f"{Process.current().as_text()}\n")
    assert device_holders(screen.workspace) == ["live"]


def save(folder: Path, name: str, prompt: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = PngInfo()
    texts.add_text("parameters", f"{prompt} <lora:mine:1>\nNegative prompt: a\nSteps: 3, Seed: 0")
    Image.new("RGB", (8, 8), "teal").save(folder / name, pnginfo=texts)


def test_earlier_results_are_shown_in_pairs_and_no_other_file_is_served(tried: Tried) -> None:
    samples = tried.run / "samples"
    for scale in ("0", "0.5", "1"):
        save(samples / "0002", f"prompt-00-seed-3-scale-{scale}.png", "a dog\non a mat")
    (samples / "0002" / "prompt-00-seed-3-scale-1.mp4").write_bytes(b"clip")
    save(samples / "0010", "prompt-00-seed-3-step-00000040-scale-0.5.png", "a <b>cat")
    (samples / "0011").mkdir()
    (samples / "0011" / "prompt-00-seed-3-scale-1.png").write_bytes(b"not an image")
    (samples / "0012").symlink_to(tried.screen.workspace.path / ".ui")
    (samples / "0002" / "prompt-00-seed-4-scale-1.png").symlink_to("/etc/passwd")
    (samples / "0002" / "notes.txt").touch()
    newest, cat, dog = tried.state()["results"]
    assert (newest["number"], newest["prompt"]) == ("0011", "")
    assert (cat["prompt"], cat["before"]) == ("a <b>cat", None)
    assert cat["after"] == {
        "label": "Step 40, scale 0.5",
        "image": "0010/prompt-00-seed-3-step-00000040-scale-0.5.png",
        "video": None,
    }
    assert (dog["prompt"], dog["before"]["label"]) == ("a dog\non a mat", "Base")
    assert (dog["after"]["label"], dog["after"]["video"]) == (
        "LoRA, scale 1",
        "0002/prompt-00-seed-3-scale-1.mp4",
    )
    get = partial(tried.screen.get)
    assert get(f"/runs/mine/samples/{dog['after']['image']}").headers["content-type"] == "image/png"
    clip = get(f"/runs/mine/samples/{dog['after']['video']}", range="bytes=1-2")
    assert (clip.status_code, clip.content) == (206, b"li")
    for other in (
        "0002/notes.txt",
        "0002/prompt-00-seed-4-scale-1.png",
        "0012/token",
        "0002/..%2f..%2f.lock",
    ):
        assert get(f"/runs/mine/samples/{other}").status_code == 404
    assert get("/runs/mine/samples/%2e%2e/status.json").status_code == 404
    samples.rename(tried.run / "elsewhere")
    samples.symlink_to(tried.run / "elsewhere")
    assert tried.state()["results"] == []
