"""One walk through all screens in a browser, as a person takes it: from images to a LoRA in ComfyUI."""

import json
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chat_server
import pytest
from browser import LIMIT_S, PHONE_PX, Browser, Page
from screens import Server, server_process

from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import lora_copies
from diffsynth_lite.workspace import Workspace

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart"
CONFIG = """extends: quickstart.yaml

model:
  path: {model}

data:
  path: data/shapes

train:
  steps: 100000   # until it is stopped
  global_batch_size: 2
  micro_batch_size: 2

validation:
  prompts: [a teal circle]
  every_steps: 1000
  num_inference_steps: 2

output:
  dir: runs/shapes
  checkpoint_every_steps: 1000
"""


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so on the disk."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def arrive(page: Page, path: str) -> None:
    """Wait until a page that a control leads to is there."""
    page.wait_for(f"location.pathname === '{path}' && document.readyState === 'complete'")


@contextmanager
def opened(browser: Browser, server: Server, path: str, *, width: int = 1280) -> Iterator[Page]:
    """A page of the screen, whose controls have names, and which neither complains nor asks elsewhere."""
    token = server.address.partition("/?")[2]
    with browser.page(f"{server.root}{path}{'&' if '?' in path else '?'}{token}", width=width) as page:
        page.wait_for("document.getElementById('main') && document.readyState === 'complete'")
        yield page
        assert page.nameless() == []
        assert page.complaints == []
        assert {urllib.parse.urlsplit(url).netloc for url in page.requests} == {server.root[7:]}


@pytest.mark.slow
def test_a_person_goes_from_images_to_a_lora_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    workspace = tmp_path / "studio"
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--output", tmp_path / "images"], check=True)
    images = sorted((tmp_path / "images").glob("teal*.png"))
    with server_process(workspace) as server:
        make_data_set(browser, server, workspace, images)
        with chat_server.running() as chat:
            write_captions(browser, server, workspace, images[1:4], chat)
        make_config(browser, server, workspace)
        port = int(server.root.rpartition(":")[2])
        queue_two_more(browser, server, workspace)
        train_and_stop(browser, server, workspace / "runs" / "shapes")
        go_on(browser, server, workspace)
        change_steps(browser, server, workspace)
        with opened(browser, server, "/runs/shapes/") as page:
            server.kill()  # The tab stays open.
            page.wait_for("!document.getElementById('lost').hidden")
            with server_process(workspace, port=port) as server:
                page.wait_for("document.getElementById('lost').hidden")
                page.press("button", "Continue")
                finish_and_download(page, workspace / "runs" / "shapes")
                page.complaints.clear()  # of the requests that nobody answered
                find_and_archive(browser, server)
                examine(browser, server)
                try_it(browser, server)
                choose_step(browser, server, workspace / "runs" / "shapes")
                share(browser, server, tmp_path / "ComfyUI" / "models" / "loras")
                page.evaluate("location.replace('about:blank')")  # or it would ask a server that has ended
    assert not list(workspace.rglob("*.tmp"))


@pytest.mark.slow
def test_two_tabs_on_one_config_and_on_one_data_set_do_not_write_over_each_other(
    browser: Browser, tmp_path: Path
) -> None:
    workspace = tmp_path / "studio"
    with server_process(workspace) as server:
        command = [sys.executable, EXAMPLE / "make_data.py", "--output", workspace / "data" / "shapes"]
        subprocess.run(command, check=True)
        text = CONFIG.format(model=EXAMPLE / "mini_qwen_image")
        (workspace / "configs" / "shapes.yaml").write_text(text)
        change_in_two_tabs(browser, server, workspace)
        with opened(browser, server, "/configs/shapes/") as page:
            page.wait_for("document.getElementById('plan-message').innerText.startsWith('Fits: ')")


def make_data_set(browser: Browser, server: Server, workspace: Path, images: list[Path]) -> None:
    first, *others = images
    captions = [each.with_suffix(".txt") for each in images[4:]]
    with opened(browser, server, "/", width=PHONE_PX) as page:
        assert page.overflow_px() == 0
        page.press("DisclosureTriangle", "New data set")
        page.fill("textbox", "Name", "shapes")
        page.press("button", "Make the data set")
        arrive(page, "/data/shapes/")
    with opened(browser, server, "/data/shapes/") as page:
        page.upload("button", "Add files", [first, *others, *captions])
        caption = workspace / "data" / "shapes" / first.with_suffix(".txt").name
        page.await_control("radio", "No caption 4")
        page.fill("textbox", f"Caption of {first.name}", "a teal shape, écrit à la main")
        wait_for(caption.exists)
        assert caption.read_text(encoding="utf-8").strip() == "a teal shape, écrit à la main"
        page.await_control("radio", "No caption 3")
        page.press("checkbox", f"Choose {first.name}")
        page.press("button", "Move to trash")
        wait_for(lambda: not caption.exists())
        page.press("button", "Undo")
        wait_for(caption.exists)


def write_captions(
    browser: Browser,
    server: Server,
    workspace: Path,
    images: list[Path],
    chat: chat_server.ChatServerDouble,
) -> None:
    """A server writes those that are missing; one is edited, and written again, which asks first."""
    is_awaited, behave, endpoint = threading.Event(), chat.always, chat.endpoint

    def answer_once_awaited(handler: chat_server.Handler) -> None:
        is_awaited.wait(LIMIT_S)
        behave(handler)

    chat.always = answer_once_awaited
    folder = workspace / "data" / "shapes"
    file, name = folder / images[0].with_suffix(".txt").name, images[0].name
    with opened(browser, server, "/data/shapes/", width=PHONE_PX) as page:
        page.press("button", "Write captions")
        page.press("radio", "A server")
        page.fill("textbox", "Endpoint", endpoint)
        page.fill("combobox", "Model", "eyes")
        page.fill("combobox", "Goal", "Style")
        page.fill("textbox", "Trigger", "shp")
        page.wait_for(f"document.getElementById('c-command').textContent.includes({json.dumps(endpoint)})")
        assert page.text("#c-command").endswith("--goal style --trigger shp")
        assert page.overflow_px() == 0
        page.press("button", "Write 3 captions")
        page.await_control("button", "Stop")
    with opened(browser, server, "/data/shapes/") as page:
        page.await_control("button", "Stop")
        is_awaited.set()
        page.await_control("radio", "Written by a model 3")
        page.await_control("radio", "No caption 0")
        page.wait_for("document.getElementById('job-head').innerText === 'Finished'")
        written = file.read_text()
        assert "shp" in written
        assert "écrit à la main" in "".join(each.read_text() for each in folder.glob("*.txt"))
        page.fill("textbox", f"Caption of {name}", "my words")
        wait_for(lambda: file.read_text() == "my words\n")
        page.await_control("radio", "Written by a model 2")
        page.await_control("button", "Write this one again")
        page.press("button", "Write this one again")
        page.press("button", "Keep mine")
        page.press("button", "Write this one again")
        page.press("button", "Write over it")
        page.await_control("radio", "Written by a model 3")
        assert file.read_text() == written
        page.wait_for("document.getElementById('job-head').innerText === 'Finished'")
        page.press("button", "Undo")
        page.await_control("radio", "Written by a model 2")
        assert file.read_text() == "my words\n"


def make_config(browser: Browser, server: Server, workspace: Path) -> None:
    file = workspace / "configs" / "shapes.yaml"
    with opened(browser, server, "/data/shapes/") as page:
        page.press("link", "Train on it")
        arrive(page, "/new")
        assert page.evaluate("document.querySelector('[name=data]:checked').value") == "shapes"
        page.press("radio", "qwen_lora.yaml Qwen-Image")
        page.fill("textbox", "Name", "shapes")
        page.press("button", "Make the config")
        arrive(page, "/configs/shapes/")
    assert "data/shapes" in file.read_text()
    text = CONFIG.format(model=EXAMPLE / "mini_qwen_image")
    with opened(browser, server, "/configs/shapes/") as page:
        page.press("tab", "Text (yaml)")
        page.fill("textbox", "Config configs/shapes.yaml", text)
        wait_for(lambda: file.read_text() == text)
        page.press("tab", "Settings")
        page.fill("textbox", "Rank lora.rank", "many")
        page.wait_for("document.getElementById('lora.rank-wrong').innerText.includes('many')")
        page.fill("textbox", "Rank lora.rank", "4")
        wait_for(lambda: file.read_text().replace("\n\nlora:\n  rank: 4\n", "") == text.rstrip("\n"))
        page.press("button", "Start")
        arrive(page, "/runs/shapes/")


def queue_two_more(browser: Browser, server: Server, workspace: Path) -> None:
    """While the first one trains: one of them is moved up, and the queue is paused."""
    queue = Queue(Workspace(workspace))
    with opened(browser, server, "/configs/shapes/") as page:
        page.press("DisclosureTriangle", "Several values")
        page.fill("combobox", "Setting 1", "train.steps")
        page.fill("textbox", "Values 1", "1, 2")
        page.press("button", "Add 2 runs")
        page.await_control("link", "side by side")
        page.press("link", "side by side")
        arrive(page, "/compare")
        assert "2 runs side by side" in page.text("h1")
    with opened(browser, server, "/", width=PHONE_PX) as page:
        assert page.overflow_px() == 0
        page.evaluate("""document.querySelector("[aria-label='Move shapes-steps2 up']").focus()""")
        page.press("button", "Move shapes-steps2 up")
        wait_for(
            lambda: [run.name for run in queue.in_state("waiting")] == ["shapes-steps2", "shapes-steps1"]
        )
        page.wait_for("document.activeElement.ariaLabel === 'Move shapes-steps2 down'")  # up is off now
        page.press("button", "Start no more")
        page.await_control("button", "Go on")


def go_on(browser: Browser, server: Server, workspace: Path) -> None:
    """One is taken out, and the one that was moved up is trained."""
    queue = Queue(Workspace(workspace))
    with opened(browser, server, "/") as page:
        assert len(queue.in_state("waiting")) == 2
        page.press("button", "Take shapes-steps1 out of the queue")
        wait_for(lambda: [run.name for run in queue.in_state("waiting")] == ["shapes-steps2"])
        page.press("button", "Go on")
        wait_for(lambda: [run.name for run in queue.in_state("done")] == ["shapes", "shapes-steps2"])
        page.wait_for("document.getElementById('queue').innerText.includes('Nothing waits.')")
        assert not (workspace / "runs" / "shapes-steps1").exists()
        for name in ("shapes", "shapes-steps2"):
            page.press("checkbox", f"Choose {name}")
        page.press("button", "Side by side")
        arrive(page, "/compare")
        assert "2 runs side by side" in page.text("h1")


def train_and_stop(browser: Browser, server: Server, run: Path) -> None:
    with opened(browser, server, "/runs/shapes/") as page:
        wait_for(lambda: int((RunFolder(run).read_status() or {}).get("step", 0)) > 0)
        page.await_control("button", "Save now")
        page.press("button", "Stop")
        page.await_control("button", "Continue")
        assert "Interrupted" in page.text("h1")


def change_steps(browser: Browser, server: Server, workspace: Path) -> None:
    status = RunFolder(workspace / "runs" / "shapes").read_status()
    assert status is not None
    file = workspace / "configs" / "shapes.yaml"
    with opened(browser, server, "/configs/shapes/", width=PHONE_PX) as page:
        assert page.overflow_px() == 0
        page.fill("textbox", "Steps train.steps", str(status["step"] + 2))
        wait_for(lambda: f"steps: {status['step'] + 2}" in file.read_text())


def change_in_two_tabs(browser: Browser, server: Server, workspace: Path) -> None:
    """What one tab has changed, the other one does not write over: it shows that, and what is there now."""
    config = workspace / "configs" / "shapes.yaml"
    caption = sorted((workspace / "data" / "shapes").glob("*.txt"))[0]
    field = f"Caption of {caption.with_suffix('.png').name}"
    with (
        opened(browser, server, "/configs/shapes/") as one,
        opened(browser, server, "/configs/shapes/") as other,
    ):
        one.fill("textbox", "Steps train.steps", "7")
        wait_for(lambda: "steps: 7 " in config.read_text())
        other.fill("textbox", "Steps train.steps", "9")
        other.wait_for("document.getElementById('message').innerText.includes('changed elsewhere')")
        other.wait_for("document.getElementById('train.steps').value === '7'")
        assert "steps: 7 " in config.read_text()
        other.complaints.clear()  # of the refusal
    with opened(browser, server, "/data/shapes/") as one, opened(browser, server, "/data/shapes/") as other:
        one.fill("textbox", field, "of the first tab")
        wait_for(lambda: caption.read_text() == "of the first tab\n")
        other.fill("textbox", field, "of the second tab")
        other.wait_for("document.body.innerText.includes('meanwhile')")
        assert caption.read_text() == "of the first tab\n"


def finish_and_download(page: Page, run: Path) -> None:
    wait_for(lambda: (RunFolder(run).read_status() or {}).get("state") == "finished")
    page.wait_for("document.querySelector('h1').innerText.includes('Finished')")
    page.press("DisclosureTriangle", "Downloads")
    assert page.has("link", "Download lora.safetensors")
    downloaded = page.evaluate(
        "fetch('download/lora.safetensors').then(answer => answer.arrayBuffer()).then(all => all.byteLength)"
    )
    assert downloaded == (run / "lora" / "pytorch_lora_weights.safetensors").stat().st_size


def find_and_archive(browser: Browser, server: Server) -> None:
    with opened(browser, server, "/", width=PHONE_PX) as page:
        page.fill("searchbox", "Find runs", "steps2")
        page.wait_for("document.querySelectorAll('#found article').length === 1")
        page.press("button", "Archive shapes-steps2")
        page.fill("searchbox", "Find runs", "")
        page.await_control("radio", "Archived 1")
        page.press("radio", "Archived 1")
        page.press("button", "Take shapes-steps2 out of the archive")
        page.await_control("radio", "Archived 0")
        assert page.overflow_px() == 0


def examine(browser: Browser, server: Server) -> None:
    with opened(browser, server, "/data/shapes/?config=shapes", width=PHONE_PX) as page:
        page.press("button", "Examine")
        page.wait_for("document.getElementById('examined-head').innerText.startsWith('Examined ')")
        assert page.overflow_px() == 0


def try_it(browser: Browser, server: Server) -> None:
    """An image with the LoRA next to one of the base model."""
    with opened(browser, server, "/runs/shapes/try", width=PHONE_PX) as page:
        page.fill("textbox", "Prompt", "a teal circle")
        page.fill("spinbutton", "Steps", "2")
        page.press("button", "Generate")
        page.wait_for("document.querySelectorAll('#t-stage img').length === 2")
        page.await_control("slider", "Line between the base model and the LoRA")
        assert page.overflow_px() == 0


def choose_step(browser: Browser, server: Server, run: Path) -> None:
    """The grid of all steps is generated, and the first of them is chosen."""
    step = lora_copies(run / "checkpoints")[0].step
    with opened(browser, server, "/runs/shapes/", width=PHONE_PX) as page:
        page.press("DisclosureTriangle", "Which step was best")
        page.press("button", "Compare all steps")
        page.await_control("link", "Open the grid of steps")
        page.press("button", f"Use step {step}")
        wait_for((run / "chosen.json").exists)
        page.wait_for(f"document.body.innerText.includes('Step {step}, chosen')")
        assert page.overflow_px() == 0


def share(browser: Browser, server: Server, folder: Path) -> None:
    """The chosen step arrives where ComfyUI looks for LoRAs."""
    folder.mkdir(parents=True)
    with opened(browser, server, "/runs/shapes/", width=PHONE_PX) as page:
        page.click("#share summary")
        page.fill("textbox", "ComfyUI's folder of LoRAs", str(folder))
        page.press("button", "Use this folder")
        page.wait_for("document.querySelector('[aria-label=\"Copy to ComfyUI\"]:enabled')")
        page.press("button", "Copy to ComfyUI")
        page.wait_for("document.body.innerText.includes('shapes.safetensors of this run is there.')")
        assert page.overflow_px() == 0
    assert [file.name for file in folder.iterdir()] == ["shapes.safetensors"]
