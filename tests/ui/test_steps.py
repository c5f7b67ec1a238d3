"""Which step was best, on the screen of a run: the grid of its steps, and the choice of one."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
from processes import wait_for
from run_folders import full_folder
from screens import INLINE, Screen, Started
from waiting_runs import Waiting

from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.runs.steps import RunSteps
from diffsynth_lite.ui.tries.studio import device_holders

CONFIG = "model: {family: qwen_image, path: m}\ndata: {path: d}\noutput: {dir: runs/mine}\n"


def with_loras(folder: Path, *steps: int) -> Path:
    for step in steps:
        copy = folder / "checkpoints" / f"lora-{step:08d}"
        copy.mkdir(parents=True)
        (copy / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    return folder


def test_one_button_makes_the_grid_of_all_steps_and_another_chooses_one(
    screen: Screen, started: Started
) -> None:
    folder = with_loras(full_folder(screen.workspace.runs_folder / "mine"), 2, 4)
    assert screen.get("/runs/mine/steps.png").status_code == 404
    assert screen.post("/runs/mine/compare-steps").status_code == 200
    assert "The grid is being generated." in screen.get("/runs/mine/").text
    refusal = screen.post("/runs/mine/compare-steps")
    assert (refusal.status_code, refusal.json()["error"]) == (
        422,
        "steps of mine are being compared already; stop that first",
    )
    samples = folder / "samples" / "0001"
    samples.mkdir(parents=True)
    for name in ("grid.png", "prompt-00-seed-0-step-00000002-scale-1.png"):
        (samples / name).write_bytes(name.encode())
    started.end()
    assert screen.get("/runs/mine/steps.png").content == b"grid.png"
    page = screen.get("/runs/mine/").text
    assert 'alt="Each prompt by step: without the LoRA, then with that of each step"' in page
    assert not INLINE.search(page)
    assert screen.post("/runs/mine/choose", {"lora": "lora-00000002"}).status_code == 200
    assert json.loads((folder / "chosen.json").read_text()) == {"lora": "lora-00000002"}
    page = screen.get("/runs/mine/").text
    assert "Step 2, chosen" in page
    assert 'aria-label="Use step 4"' in page
    assert page.index("Chosen LoRA, step 2") < page.index("LoRA of step 4")


def test_the_loss_on_held_out_data_of_a_step_is_next_to_its_button(screen: Screen) -> None:
    folder = with_loras(full_folder(screen.workspace.runs_folder / "mine"), 100, 150, 200)
    assert "on held-out data at this step" not in screen.get("/runs/mine/").text
    rows = '{"step": 100, "validation_loss": 0.251251}\n{"step": 200, "validation_loss": 0.125}\n'
    (folder / "metrics.jsonl").write_text(rows)
    assert screen.post("/runs/mine/choose", {"lora": "lora-00000200"}).status_code == 200
    wait_for(lambda: "on held-out data at this step" in screen.get("/runs/mine/").text)
    page = screen.get("/runs/mine/").text
    buttons = page[page.index("Which step was best") :].partition("</div>\n<div")[0]
    of_steps = buttons.split('<span class="row">')[1:]
    assert ["Recommended" in each for each in of_steps] == [True, False, False]
    assert [re.findall(r"tep (\d+)(?:, chosen)?<|loss ([\d.]+)<", each) for each in of_steps] == [
        [("100", ""), ("", "0.2513")],
        [("150", "")],
        [("200", ""), ("", "0.125")],
    ]


def test_only_a_lora_that_is_there_can_be_chosen_and_one_that_is_gone_is_reported(screen: Screen) -> None:
    folder = with_loras(full_folder(screen.workspace.runs_folder / "mine"), 100, 200)
    for lora in ("lora-00000300", "../lora-00000100", "step-00000100", "", None, 100, ["lora-00000100"]):
        refusal = screen.post("/runs/mine/choose", {"lora": lora})
        assert (refusal.status_code, refusal.json()["error"]) == (
            422,
            "mine has no LoRA of that step (any more)",
        )
    assert not (folder / "chosen.json").exists()
    assert screen.post("/runs/nowhere/choose", {"lora": "lora-00000100"}).status_code == 404
    assert screen.post("/runs/mine/choose", {"lora": "lora-00000100"}).status_code == 200
    (folder / "checkpoints" / "lora-00000100").rename(folder / "checkpoints" / ".left-lora-00000100-1")
    assert "Step 100 was chosen, and its LoRA is gone. Choose another." in screen.get("/runs/mine/").text
    (folder / "chosen.json").write_text("torn")
    assert "chosen.json: names no LoRA of the run; remove it, or choose" in screen.get("/runs/mine/").text


def test_a_grid_runs_and_captions_have_the_device_by_turns(
    screen: Screen, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_loras(full_folder(screen.workspace.runs_folder / "mine"), 100)
    other = with_loras(full_folder(screen.workspace.runs_folder / "other"), 100)
    mug = screen.workspace.data_folder / "mug"
    mug.mkdir()
    status = json.loads((other / "status.json").read_text())
    (other / "status.json").write_text(json.dumps(status | {"state": "running"}))
    (other / ".lock").write_text(Process.of(os.getpid()).as_text())
    studio = screen.client.app._app.state.studio  # type: ignore[attr-defined]
    with monkeypatch.context() as open_studio:
        open_studio.setattr(studio, "end", lambda: pytest.fail("Try it was ended"))
        refusal = screen.post("/runs/mine/compare-steps")
    assert refusal.status_code == 422
    assert refusal.json()["error"].startswith("this device is in use: other trains; stop that first")
    (other / "status.json").write_text(json.dumps(status))
    stop = "/runs/mine/stop-comparing"
    assert screen.post(stop).json()["error"] == "no steps of mine are being compared on this machine"
    assert screen.post("/runs/mine/compare-steps").status_code == 200
    assert started.words == [["sample", "--lora=runs/mine", "--every-checkpoint"]]
    assert device_holders(screen.workspace) == ["steps of mine"]
    for path, given in (
        ("/runs/other/compare-steps", {}),
        ("/data/mug/captioning", {"do": "write", "model": "m"}),
    ):
        assert "this device is in use: steps of mine;" in screen.post(path, given).json()["error"]
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG)
    queue = Waiting(Queue(screen.workspace))
    queue.add("quick-run")
    worker = threading.Thread(target=queue.work_as_the_command_does, daemon=True)
    worker.start()
    wait_for(queue.queue.is_worked)
    assert "The next run waits: steps of mine on this device" in screen.get("/").text
    assert queue.started() == []
    assert screen.post(stop).status_code == 200
    wait_for(lambda: not RunSteps(screen.workspace, "mine", folder).values()["is_generating"])
    worker.join()
    assert queue.names("done") == ["quick-run"]


def test_a_process_that_cannot_be_noted_is_ended(
    screen: Screen, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_loras(full_folder(screen.workspace.runs_folder / "mine"), 100)

    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("diffsynth_lite.ui.jobs.write_json", full)
    assert "No space left on device" in screen.post("/runs/mine/compare-steps").json()["error"]
    assert started.children[0].wait(60) == -signal.SIGINT


def test_a_grid_behind_a_link_or_of_other_samples_is_not_shown(screen: Screen, tmp_path: Path) -> None:
    folder = with_loras(full_folder(screen.workspace.runs_folder / "mine"), 100)
    secret = tmp_path / "secret"
    secret.mkdir()
    for place in (secret, folder / "samples" / "0001", folder / "samples" / "0002"):
        place.mkdir(parents=True, exist_ok=True)
    (secret / "grid.png").write_bytes(b"secret")
    (secret / "prompt-00-seed-0-step-00000100-scale-1.png").write_bytes(b"")
    (folder / "samples" / "0003").symlink_to(secret)
    (folder / "samples" / "0002" / "grid.png").write_bytes(b"of one step")
    assert screen.get("/runs/mine/steps.png").status_code == 404
    (folder / "samples" / "0001" / "grid.png").symlink_to(secret / "grid.png")
    (folder / "samples" / "0001" / "prompt-00-seed-0-step-00000100-scale-1.png").write_bytes(b"")
    assert screen.get("/runs/mine/steps.png").status_code == 404
