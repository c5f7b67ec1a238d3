"""Makes the README's images of pages: of the doctor's, and of a run's, both as the quickstart has them.

    python scripts/page_images.py     # trains the quickstart; needs Chromium and what that installs

They differ each time in times and speeds, and in nothing else.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from browser import DESKTOP_PX, Browser, chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
MARGIN_PX = 8
QUALITY = 80
"""Of WebP: letters are sharp, and a file has about 200 kB, half of what it has without loss."""


def main() -> None:
    """Run the quickstart in a folder of its own, and image the pages that it leaves."""
    program = chromium()
    if program is None:
        sys.exit("no Chromium: install one, or name it in CHROMIUM")
    with TemporaryDirectory() as place:
        folder = Path(place)
        # Its paths are on the pages: they are those of a user.
        shutil.copy(ROOT / "configs" / "quickstart.yaml", folder)
        (folder / "examples").symlink_to(ROOT / "examples")
        run(folder, "examples/quickstart/make_data.py", "--output", "runs/quickstart_data")
        run(folder, "-m", "diffsynth_lite.cli.main", "doctor", "--config", "quickstart.yaml")
        run(folder, "-m", "diffsynth_lite.cli.train", "--config", "quickstart.yaml")
        browser = Browser(program, folder / "profile")
        take(browser, folder / "doctor.html", "doctor_page.webp", until=".sheet")
        report = folder / "runs" / "quickstart" / "report.html"
        take(browser, report, "run_page.webp", until=".items tbody tr:nth-child(5)")
        browser.close()


def run(folder: Path, *arguments: str) -> None:
    """Run Python in a folder, on the package of this clone."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=os.environ | variables, check=True)


def take(browser: Browser, page: Path, name: str, *, until: str) -> None:
    """Image a page from its top to the end of what a selector names."""
    with browser.page(page, width=DESKTOP_PX) as shown:
        if shown.complaints:
            sys.exit(f"{page.name}: {shown.complaints}")
        height = shown.evaluate(f"document.querySelector('{until}').getBoundingClientRect().bottom")
        whole = page.with_suffix(".png")
        shown.screenshot(whole)
    with Image.open(whole) as image:
        top = image.convert("RGB").crop((0, 0, image.width, round(height) + MARGIN_PX))
    top.save(IMAGES / name, quality=QUALITY, method=6)
    print(f"{name}: {top.width} x {top.height}, {(IMAGES / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
