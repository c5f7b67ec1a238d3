"""Share, on the screen of a run: its LoRA is converted, copied to ComfyUI and published by commands."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import PHONE_PX, Browser, Page
from forked_commands import HOLD
from hub_server import REPOSITORY, Hub, serving
from huggingface_hub import constants
from processes import wait_for
from run_folders import full_folder
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from screens import INLINE, Screen, Server, Started, server_process

from diffsynth_lite.cli.main import main
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import choose, lora_copies
from diffsynth_lite.ui.jobs import Job
from diffsynth_lite.ui.runs.share import ONLY_IN_DIFFUSERS, RunShare

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
OWN = {"diffsynth_lite.family": "qwen_image", "diffsynth_lite.contract": "c" * 64}


def write_lora(folder: Path, step: int, **own: str) -> None:
    folder.mkdir(parents=True)
    layer = "transformer.transformer_blocks.0.attn.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 6) * step, f"{layer}.lora_B.weight": torch.ones(6, 2)}
    own = {"step": str(step)} | own
    metadata = OWN | {f"diffsynth_lite.{key}": value for key, value in own.items()}
    save_file(tensors, folder / "pytorch_lora_weights.safetensors", metadata)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# LoRA\n")


@pytest.fixture
def run(screen: Screen) -> Path:
    """A run with its latest LoRA, of step 200, and that of step 100."""
    folder = full_folder(screen.workspace.runs_folder / "mine")
    write_lora(folder / "lora", 200)
    write_lora(folder / "checkpoints" / "lora-00000100", 100)
    return folder


class _Commands:
    """Runs the commands that the screen starts in this process, as if each ended at once.

    Attributes:
        ended: their words with their exit codes.
    """

    def __init__(self) -> None:
        self.ended: list[tuple[list[str], int]] = []

    def start(self, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        code = main(command[3:])
        self.ended.append((command[3:], code))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], stdout=options["log"])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> _Commands:
    found = _Commands()
    monkeypatch.setattr("diffsynth_lite.ui.jobs.start_detached", found.start)
    return found


def await_end(screen: Screen, folder: Path) -> None:
    """Until the latest commands have ended, with codes that are known."""

    def have_ended() -> bool:
        commands = [Job.of(screen.workspace, each, folder) for each in ("convert", "publish")]
        return all(not each.words or each.exit_code is not None for each in commands)

    wait_for(have_ended)


def act(screen: Screen, action: str, **given: Any) -> Any:
    return screen.post(f"/runs/mine/share/{action}", given)


def refusal(answer: Any) -> str:
    assert answer.status_code == 422
    return str(answer.json()["error"])


def test_the_latest_or_the_chosen_lora_is_converted_once_and_is_there_to_download(
    screen: Screen, run: Path, commands: _Commands, tmp_path: Path
) -> None:
    page = screen.get("/runs/mine/").text
    assert not INLINE.search(page)
    out = "runs/mine/converted/kohya/lora-00000200.safetensors"
    assert f"diffsynth-lite convert runs/mine@last {out} --to=kohya" in page
    for _ in range(2):
        assert act(screen, "convert", name="lora-00000200-kohya.safetensors").status_code == 200
        await_end(screen, run)
    assert commands.ended == [(["convert", "runs/mine@last", out, "--to=kohya"], 0)]
    assert main(["convert", str(run), str(tmp_path / "by_hand.safetensors"), "--to", "kohya"]) == 0
    by_hand = (tmp_path / "by_hand.safetensors").read_bytes()
    assert screen.get("/runs/mine/download/lora-00000200-kohya.safetensors").content == by_hand
    page = screen.get("/runs/mine/").text
    assert 'aria-label="Download for kohya&#39;s trainers"' in page
    assert 'aria-label="Convert for ComfyUI"' in page

    choose(RunFolder(run), lora_copies(run / "checkpoints")[0])
    assert act(screen, "convert", name="lora-00000200-kohya.safetensors").status_code == 422
    assert act(screen, "convert", name="lora-00000100-kohya.safetensors").status_code == 200
    await_end(screen, run)
    file = run / "converted" / "kohya" / "lora-00000100.safetensors"
    assert {float(each.max()) for name, each in load_file(file).items() if "down" in name} == {100.0}
    (run / "checkpoints" / "lora-00000100").rename(tmp_path / "gone")
    assert "step 100 was chosen, and its LoRA is gone; choose another" in screen.get("/runs/mine/").text


def test_what_was_trained_again_is_converted_again(screen: Screen, run: Path, commands: _Commands) -> None:
    assert act(screen, "convert", name="lora-00000200-diffusers.safetensors").status_code == 200
    await_end(screen, run)
    written = run / "converted" / "diffusers" / "lora-00000200.safetensors"
    before = written.read_bytes()
    shutil.rmtree(run / "lora")
    write_lora(run / "lora", 200, version="of a later start")
    os.utime(written, (0, 0))
    assert act(screen, "convert", name="lora-00000200-diffusers.safetensors").status_code == 200
    await_end(screen, run)
    assert [words[-1] for words, code in commands.ended if not code] == ["--to=diffusers", "--replace"]
    assert written.read_bytes() != before


@pytest.mark.parametrize(
    ("own", "num_off", "words"),
    [
        ({"family": "sana"}, 2, "to have names for the layers of sana."),
        ({"kind": "DoRA"}, 3, "Only a plain LoRA can be converted; this is a DoRA."),
    ],
)
def test_formats_that_convert_would_refuse_are_off_and_say_why(
    screen: Screen, own: dict[str, str], num_off: int, words: str
) -> None:
    folder = full_folder(screen.workspace.runs_folder / "mine")
    write_lora(folder / "lora", 200, **own)
    rows = RunShare(screen.workspace, "mine", folder).values()["conversions"]
    assert [bool(row["refusal"]) for row in rows] == [True, True, num_off == 3]  # the last is diffusers
    assert words in screen.get("/runs/mine/").text
    assert "has no LoRA that can be converted so" in refusal(act(screen, "convert", name=rows[0]["name"]))
    assert screen.post("/runs/mine/share/eat").status_code == 404


def test_families_that_only_diffusers_has_names_for_are_known() -> None:
    spellings = {name: load_family(name).lora_spelling for name in family_names()}
    unknown = [
        name
        for name, spelling in spellings.items()
        if not spelling.is_converted_for_comfyui and spelling.unknown_to_comfyui in (None, ("",))
    ]
    assert tuple(unknown) == ONLY_IN_DIFFUSERS


def test_the_folder_of_comfyui_is_named_once_and_a_file_of_others_is_replaced_only_after_a_question(
    screen: Screen, run: Path, commands: _Commands, tmp_path: Path
) -> None:
    assert "Name ComfyUI&#39;s folder of LoRAs first." in screen.get("/runs/mine/").text
    assert refusal(act(screen, "copy", folder="", replace=[])) == "Name ComfyUI's folder of LoRAs first."
    theirs = tmp_path / "loras"
    assert "is not a folder on this machine" in refusal(act(screen, "folder", folder=str(theirs)))
    theirs.mkdir()
    assert act(screen, "folder", folder=str(theirs)).json() == {"go": "/runs/mine/#share"}
    assert screen.workspace.settings == {"comfyui_folder": str(theirs)}
    for _ in range(2):  # one of this run is replaced without a question
        assert act(screen, "copy", folder=str(theirs), replace=[]).status_code == 200
        await_end(screen, run)
    assert [code for _, code in commands.ended] == [0, 0]
    copy = theirs / "mine.safetensors"
    with safe_open(copy, "pt") as opened:
        assert opened.metadata()["diffsynth_lite.step"] == "200"
    assert "mine.safetensors of this run is there." in screen.get("/runs/mine/").text
    copy.write_bytes(b"of others")
    assert "Is it to be replaced?" in screen.get("/runs/mine/").text
    # As tabs have it that were opened before, or before the folder was another one.
    for seen in ({"folder": str(theirs), "replace": []}, {"folder": "/old", "replace": [copy.name]}):
        assert "is not as it was shown; look again" in refusal(act(screen, "copy", **seen))
    assert copy.read_bytes() == b"of others"
    assert act(screen, "copy", folder=str(theirs), replace=[copy.name]).status_code == 200
    await_end(screen, run)
    assert copy.read_bytes() != b"of others"
    theirs.rename(tmp_path / "moved")
    assert f"{theirs} is not a folder (any more)." in screen.get("/runs/mine/").text
    assert "is not a folder (any more)." in refusal(act(screen, "copy"))
    screen.workspace.settings_file.write_text("{")
    assert "mend or remove the file" in screen.get("/runs/mine/").text


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    hub = Hub({})
    hub.exists, hub.token = False, TOKEN
    with serving(hub, tmp_path / "cache"):
        yield hub


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
def test_only_what_a_dry_run_has_shown_is_published(
    screen: Screen, run: Path, commands: _Commands, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"repository": REPOSITORY, "visibility": "private", "licence": "mit"}
    command = f"diffsynth-lite publish runs/mine@last --to={REPOSITORY} --private --license=mit"

    def publish(shown: str = command) -> Any:
        return act(screen, "publish", command=shown)

    assert "show it again" in refusal(publish())
    assert "give one line" in refusal(act(screen, "dry-run", **form | {"repository": "a\nb"}))
    assert act(screen, "dry-run", **form | {"repository": "no-owner"}).status_code == 200
    await_end(screen, run)
    assert "show it again" in refusal(publish(command.replace(REPOSITORY, "no-owner")))
    assert act(screen, "dry-run", **form).json() == {"go": "/runs/mine/#share"}
    await_end(screen, run)
    page = screen.get("/runs/mine/").text
    assert f"<code>{command}</code>" in page
    assert TOKEN not in page
    for other in ("", command.replace("mit", "apache-2.0")):
        assert "show it again" in refusal(publish(other))
    (run / "lora" / "README.md").write_text("# Edited")
    assert "show it again" in refusal(publish())
    assert act(screen, "dry-run", **form).status_code == 200
    await_end(screen, run)
    assert hub.requests == []

    hub.refuses_uploads = True
    assert publish().status_code == 200
    await_end(screen, run)
    hub.refuses_uploads = False
    assert publish().status_code == 200  # what failed may be tried again
    await_end(screen, run)
    assert [code for _, code in commands.ended] == [2, 0, 0, 2, 0]
    assert hub.is_private
    assert hub.files["README.md"].startswith(b"---\nlicense: mit\n---\n")
    assert "show it again" in refusal(publish())
    monkeypatch.delenv("HF_TOKEN")
    assert "There is no token for the hub: give <code>hf auth login</code>" in screen.get("/runs/mine/").text


def test_a_command_outlives_the_server_is_started_once_and_can_be_stopped(
    screen: Screen, run: Path, started: Started
) -> None:
    assert act(screen, "convert", name="lora-00000200-kohya.safetensors").status_code == 200
    # As a server has it that was started meanwhile.
    assert Job.of(screen.workspace, "convert", run).is_alive
    another = act(screen, "convert", name="lora-00000200-comfyui.safetensors")
    assert refusal(another).endswith("--to=kohya runs; wait until it has ended")
    assert 'aria-label="Stop the conversion"' in screen.get("/runs/mine/").text
    assert act(screen, "stop", what="conversion").status_code == 200
    wait_for(lambda: not Job.of(screen.workspace, "convert", run).is_alive)
    assert len(started.words) == 1


@contextmanager
def opened(browser: Browser, server: Server, *, dark: bool = False) -> Iterator[Page]:
    """What Share holds, on a phone."""
    address = f"{server.root}/runs/mine/?{server.address.partition('/?')[2]}"
    with browser.page(address, width=PHONE_PX, dark=dark) as page:
        page.wait_for("document.getElementById('share')")
        page.click("#share > summary")
        yield page


@pytest.mark.slow
def test_a_server_that_is_killed_loses_no_conversion_and_a_failure_is_shown_in_the_words_of_the_command(
    screen: Screen, run: Path, browser: Browser
) -> None:
    hold = screen.workspace.path / HOLD
    hold.touch()
    with server_process(screen.workspace.path) as server, opened(browser, server) as page:
        page.press("button", "Convert for ComfyUI")
        page.await_control("button", "Stop the conversion")
        server.kill()
    hold.unlink()
    wait_for(lambda: not Job.of(screen.workspace, "convert", run).is_alive)
    with server_process(screen.workspace.path) as server, opened(browser, server, dark=True) as page:
        page.await_control("link", "Download for ComfyUI")
        page.fill("textbox", "Repository", "no-owner")
        page.press("button", "Show what would be sent")
        page.wait_for("document.getElementById('share').innerText.includes('not the name of a repository')")
        assert page.value("textbox", "Repository") == "no-owner"
        assert (page.nameless(), page.complaints, page.overflow_px()) == ([], [], 0)
