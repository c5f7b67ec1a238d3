"""Draws the training set of the quickstart: 32 images of shapes in four new colours, with captions.

Each image has its caption in a .txt file next to it. The same files come out at every call; shapes and
grounds that `score.py` asks for are not among them.
"""

import argparse
import io
import random
from pathlib import Path

import shapes

IMAGES_PER_COLOUR = 8
SEED = 7


def main() -> None:
    """Write what is missing into the output folder."""
    files = training_files()
    folder = write_missing(files, __doc__.splitlines()[0])
    print(f"{len(files) // 2} images with captions in {folder}")


def write_missing(files: dict[str, bytes], description: str) -> Path:
    """Read the command line and write the files that its folder lacks; a folder with others is an error."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, required=True, help="folder for the media and captions")
    folder: Path = parser.parse_args().output
    if folder.exists() and not folder.is_dir():
        parser.error(f"--output {folder} is a file; name a folder")
    foreign = foreign_files(folder, files)
    if foreign:
        parser.error(f"--output {folder} holds other files ({', '.join(foreign[:3])}); name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    return folder


def training_files() -> dict[str, bytes]:
    """The whole training set by file name."""
    rng = random.Random(SEED)
    files: dict[str, bytes] = {}
    for colour in shapes.NEW_COLOURS:
        for scene in shapes.training_scenes(colour, IMAGES_PER_COLOUR):
            png = io.BytesIO()
            shapes.draw_scene(scene, rng).save(png, "PNG")
            name = f"{scene.colour}_{scene.shape}_on_{scene.ground}"
            files[f"{name}.png"] = png.getvalue()
            files[f"{name}.txt"] = f"{scene.caption}\n".encode()
    return files


def foreign_files(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Names in the folder, sorted, that are not ours or whose content is not; hidden files do not count."""
    if not folder.exists():
        return []
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(
        path.name for path in visible if path.name not in files or path.read_bytes() != files[path.name]
    )


if __name__ == "__main__":
    main()
