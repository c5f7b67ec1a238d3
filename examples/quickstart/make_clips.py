"""Draws the training set of the video quickstart: 48 captioned clips of moving shapes.

32 clips show the new word and 16 the known directions. Each is an MP4 with its caption in a .txt file next to
it. The same files come out at every call; scenes that `score_clips.py` asks for are not among them.
"""

import random
import tempfile
from pathlib import Path

import motions
from make_data import write_missing

from diffsynth_lite.data.video import write_video

SEED = 7


def main() -> None:
    """Write what is missing into the output folder."""
    files = training_files()
    folder = write_missing(files, __doc__.splitlines()[0])
    print(f"{len(files) // 2} clips with captions in {folder}")


def training_files() -> dict[str, bytes]:
    """The whole training set by file name."""
    rng = random.Random(SEED)
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as scratch:
        clip = Path(scratch) / "clip.mp4"
        for scene in motions.training_scenes():
            write_video(clip, motions.draw_clip(scene, rng), fps=motions.FPS)
            name = f"{scene.colour}_{scene.shape}_{scene.direction}_on_{scene.ground}"
            files[f"{name}.mp4"] = clip.read_bytes()
            files[f"{name}.txt"] = f"{scene.caption}\n".encode()
    return files


if __name__ == "__main__":
    main()
