"""Makes the README's images of pages: of the doctor's, and of a run's, both of the quickstart.

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

from browser import Browser, chromium  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH_PX = 1440
MARGIN_PX = 16
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
        # More evaluations than the recipe asks for: the page says how the run learns from the fifth on.
        train = ("-m", "diffsynth_lite.cli.train", "--config", "quickstart.yaml")
        run(folder, *train, "validation.every_steps=50")
        browser = Browser(program, folder / "profile")
        take(browser, folder / "doctor.html", "doctor_page.webp", until=".sheet")
        report = folder / "runs" / "quickstart" / "report.html"
        take(browser, report, "run_page.webp", until=".chart:nth-child(3)")
        browser.close()


def run(folder: Path, *arguments: str) -> None:
    """Run Python in a folder, on the package of this clone."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=os.environ | variables, check=True)


def take(browser: Browser, page: Path, name: str, *, until: str) -> None:
    """Image a page from its top to the end of what a selector names."""
    with browser.page(page, width=WIDTH_PX) as shown:
        if shown.complaints:
            sys.exit(f"{page.name}: {shown.complaints}")
        bottom = shown.evaluate(f"document.querySelector('{until}').getBoundingClientRect().bottom")
    file = page.with_suffix(".png")
    # In a window of that height, which what stays in its place fills.
    with browser.page(page, width=WIDTH_PX, height=round(bottom) + MARGIN_PX) as shown:
        shown.screenshot(file, whole=False)
    with Image.open(file) as image:
        top = image.convert("RGB")
    top.save(IMAGES / name, quality=QUALITY, method=6)
    print(f"{name}: {top.width} x {top.height}, {(IMAGES / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
