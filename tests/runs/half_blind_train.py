"""The training command, in which process 1 finds no ``2.png``, and each process notes the headers it reads.

The first argument is the file of the notes; the others are those of the training command.
"""

import os
import sys
from pathlib import Path

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import media_index
from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.media_index import MediaFacts, MediaIndex
from diffsynth_lite.errors import UserError

_NOTES = Path(sys.argv[1])
_facts = MediaIndex.facts


def _blind_facts(self: MediaIndex, path: Path) -> MediaFacts:
    if os.environ["RANK"] == "1" and path.name == "2.png":
        raise UserError(f"{path}: unreadable from here")
    return _facts(self, path)


def _noted_check(path: Path) -> ImageFacts:
    with _NOTES.open("a") as file:
        file.write(f"{os.environ['RANK']} {path.name}\n")
    return check_image(path)


if __name__ == "__main__":
    media_index.check_image = _noted_check
    MediaIndex.facts = _blind_facts  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
