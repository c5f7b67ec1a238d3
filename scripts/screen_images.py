"""Makes images of the screen: those of docs/ui.md, or a page with every screen in light, dark and on a phone.

    python scripts/screen_images.py                                  # needs Chromium; trains the quickstart
    python scripts/screen_images.py --first-run                      # counts clicks and seconds, too
    python scripts/screen_images.py --all FOLDER [--mockups FOLDER]  # FOLDER/index.html; mockups are NAME.png

They differ each time in times, speeds and the name of a temporary folder, and in nothing else.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from page_images import IMAGES, QUALITY, ROOT, run
from PIL import Image

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "ui")]

from browser import PHONE_PX, Browser, Page, chromium
from screens import Server, server_process

WIDTH_PX, HEIGHT_PX = 1360, 900
SCREENS = {
    "empty": "/",
    "home": "/",
    "dataset": "/data/shapes/",
    "new": "/new?data=colours",
    "config": "/configs/colours/",
    "config_wrong": "/configs/mistyped/",
    "run": "/runs/colours_live/",
    "run_killed": "/runs/colours_killed/",
    "run_finished": "/runs/colours/",
}
IN_DOCS = ("empty", "home", "dataset", "config", "run")
OF_FIRST_RUN = ("try", "share")
CONFIG = """extends: quickstart.yaml

data:
  path: data/colours

train:
  steps: {steps}

validation:
  every_steps: 50

output:
  dir: runs/{name}
  checkpoint_every_steps: 50
"""
TRAIN = ("-m", "diffsynth_lite.cli.main", "train", "--config")
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Fill a workspace, serve it, and image its screens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", metavar="FOLDER", type=Path, help="write all shots and index.html here")
    parser.add_argument("--mockups", metavar="FOLDER", type=Path, help="images to show next to the shots")
    parser.add_argument(
        "--first-run", action="store_true", help="only take the way of a first run, in clicks"
    )
    parsed = parser.parse_args()
    program = chromium()
    if program is None:
        sys.exit("no Chromium: install one, or name it in CHROMIUM")
    os.environ |= ENVIRONMENT
    with TemporaryDirectory() as place:
        workspace, shots = Path(place) / "studio", parsed.all or Path(place) / "shots"
        shots.mkdir(parents=True, exist_ok=True)
        browser = Browser(program, Path(place) / "profile")
        if not parsed.all:
            take_first_run(browser, Path(place) / "first", shots)
        if not parsed.first_run:
            shoot_all(browser, workspace, shots)
        browser.close()
        if parsed.all:
            write_index(shots, parsed.mockups)
        else:
            write_images_of_docs(shots, OF_FIRST_RUN if parsed.first_run else (*IN_DOCS, *OF_FIRST_RUN))


def take_first_run(browser: Browser, workspace: Path, shots: Path) -> None:
    """From the command on an empty folder to a LoRA that was tried; prints seconds and clicks until then."""
    started, clicks = time.monotonic(), 0

    def press(page: Page, role: str, name: str, until: str, what: str) -> None:
        nonlocal clicks
        page.press(role, name)
        clicks += 1
        page.wait_for(until)
        print(f"{time.monotonic() - started:4.0f} s, {clicks} clicks: {what}")

    with (
        server_process(workspace) as server,
        browser.page(server.address, width=WIDTH_PX, height=HEIGHT_PX) as page,
    ):
        first, is_first = "See it work (1 minute, no GPU)", "location.pathname === '/runs/example/'"
        press(page, "button", first, is_first, "the page of the run")
        page.wait_for("document.querySelector('h1') && document.readyState === 'complete'")
        wait_for(lambda: "Finished" in page.text("h1"))
        print(f"{time.monotonic() - started:4.0f} s, {clicks} clicks: the LoRA is finished")
        press(page, "DisclosureTriangle", "Downloads", "document.links.length", "its file can be downloaded")
        press(
            page, "link", "Try it", "document.getElementById('t-generate')", "the page on which it is tried"
        )
        two = "document.querySelectorAll('#t-stage img').length === 2"
        press(page, "button", "Generate", two, "an image with it, next to one without")
        page.wait_for("[...document.images].every(image => image.complete || image.loading === 'lazy')")
        page.wait_for("document.getElementById('t-state').hidden")
        page.screenshot(shots / "try_light.png", whole=False)
        page.press("link", "example")
        copy_to_comfyui(page, workspace / "ComfyUI" / "models" / "loras")
        page.screenshot(shots / "share_light.png", whole=False)


def copy_to_comfyui(page: Page, folder: Path) -> None:
    """Share's way from the page of a run into ComfyUI's folder."""
    folder.mkdir(parents=True)
    page.wait_for("document.querySelector('#share summary') && document.readyState === 'complete'")
    page.click("#share summary")
    page.fill("textbox", "ComfyUI's folder of LoRAs", str(folder))
    page.press("button", "Use this folder")
    page.wait_for("document.querySelector('[aria-label=\"Copy to ComfyUI\"]:enabled')")
    page.press("button", "Copy to ComfyUI")
    page.wait_for("document.body.innerText.includes('of this run is there.')")
    page.wait_for("!document.querySelector('[aria-label=\"Stop the conversion\"]')")
    page.evaluate("document.getElementById('share').scrollIntoView()")


def write_images_of_docs(shots: Path, names: Sequence[str]) -> None:
    """The shots that docs/ui.md shows."""
    for name in names:
        with Image.open(shots / f"{name}_light.png") as image:
            image.convert("RGB").save(IMAGES / f"screen_{name}.webp", quality=QUALITY, method=6)


def shoot_all(browser: Browser, workspace: Path, shots: Path) -> None:
    """Image all screens of a workspace, which is empty at first, and in which a run trains then."""
    with server_process(workspace) as server:
        shoot(browser, server, "empty", shots)
        fill(workspace)
        with training(workspace, "colours_live", steps=100_000, until_step=160):
            for name in list(SCREENS)[1:]:
                shoot(browser, server, name, shots)


def fill(workspace: Path) -> None:
    """Two data sets, two configs, a run that finished and one that was killed."""
    (workspace / "examples").symlink_to(ROOT / "examples")
    run(workspace, "examples/quickstart/make_data.py", "--output", "data/colours")
    shapes = workspace / "data" / "shapes"
    shutil.copytree(workspace / "data" / "colours", shapes)
    first, second, third = sorted(shapes.glob("*.png"))[:3]
    first.with_suffix(".txt").unlink()
    shutil.copy(second, shapes / "zz_again.png")
    shutil.copy(second.with_suffix(".txt"), shapes / "zz_again.txt")
    with Image.open(third) as image:
        image.resize((900, 600), Image.Resampling.LANCZOS).save(shapes / "large.jpg")
    (shapes / "large.txt").write_text("a photo of a shape, enlarged\n")
    mistyped = CONFIG.format(steps="many", name="mistyped") + "\nlora:\n  rnk: 8\n"
    (workspace / "configs" / "mistyped.yaml").write_text(mistyped)
    with training(workspace, "colours", steps=300):
        pass
    with training(workspace, "colours_killed", steps=300, until_step=110):
        pass


@contextmanager
def training(workspace: Path, name: str, *, steps: int, until_step: int | None = None) -> Iterator[None]:
    """A run, which is killed at the end of the scope; without ``until_step`` it finishes first."""
    file = workspace / "configs" / f"{name}.yaml"
    file.write_text(CONFIG.format(steps=steps, name=name))
    command = [sys.executable, *TRAIN, str(file.relative_to(workspace))]
    process = subprocess.Popen(command, cwd=workspace, stderr=subprocess.DEVNULL)
    try:
        if until_step is None:
            process.wait()
        else:
            status = workspace / "runs" / name / "status.json"
            wait_for(lambda: status.exists() and json.loads(status.read_text())["step"] >= until_step)
        yield
    finally:
        process.kill()
        process.wait()


def shoot(browser: Browser, server: Server, name: str, shots: Path) -> None:
    """Image a screen wide in light and dark, and on a phone; a page with complaints ends the program."""
    path, token = SCREENS[name], server.address.partition("/?")[2]
    target = f"{server.root}{path}{'&' if '?' in path else '?'}{token}"
    for kind, width in (("light", WIDTH_PX), ("dark", WIDTH_PX), ("phone", PHONE_PX)):
        with browser.page(target, width=width, height=HEIGHT_PX, dark=kind == "dark") as page:
            page.wait_for("document.getElementById('main') && !location.search.includes('token')")
            page.wait_for("[...document.images].every(image => image.complete || image.loading === 'lazy')")
            page.wait_for("!document.body.innerText.includes('Counting what it needs')")
            if page.complaints or page.overflow_px() > 0 or page.nameless():
                sys.exit(f"{name} {kind}: {page.complaints} {page.overflow_px()} {page.nameless()}")
            page.screenshot(shots / f"{name}_{kind}.png", whole=kind == "phone")
    print(f"{name}: light, dark, phone")


def write_index(shots: Path, mockups: Path | None) -> None:
    """A page with all shots, a row a screen, each row with its mockups."""
    rows = []
    for name in SCREENS:
        images = [shots / f"{name}_{kind}.png" for kind in ("light", "dark", "phone")]
        if mockups is not None:
            found = [mockups / f"{name}{ending}.png" for ending in ("", "_dark", "_phone")]
            images += [shutil.copy(each, shots / f"mockup_{each.name}") for each in found if each.exists()]
        cells = "".join(f'<img src="{escape(each.name)}" alt="{escape(each.stem)}">' for each in images)
        rows.append(f"<h2>{name}</h2><p>{cells}</p>")
    style = "<style>img { width: 32%; vertical-align: top; border: 1px solid #888; margin: 2px }</style>"
    head = f"<!doctype html><meta charset='utf-8'><title>The screen</title>{style}"
    (shots / "index.html").write_text(head + "\n".join(rows), encoding="utf-8")


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    while not is_so():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
