"""The training command, with secrets in the errors it meets: previews fail, and so does the second save."""

import os
import sys
from collections.abc import Callable
from typing import Any

from diffsynth_lite.cli.train import main
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.saver import Saver


def leaking_text() -> str:
    """A text of the kind that errors of network libraries have."""
    password = os.environ["LEAK_PASSWORD"]
    return f"GET https://ann:{password}@example.org/?token={os.environ['LEAK_TOKEN']} as {password!r} failed"


def leak(*_arguments: object) -> None:
    """Fail with secrets in the text."""
    raise RuntimeError(leaking_text())


def save_and_leak(save: Callable[[Saver, int], None]) -> Callable[[Saver, int], None]:
    """A save that works once."""
    saved: list[int] = []

    def save_once(self: Saver, step: int) -> None:
        if saved:
            leak()
        saved.append(step)
        save(self, step)

    return save_once


def make_leaky(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have previews and the second save of a run fail with secrets in the text."""
    replace(QwenImage, "sample", leak)
    replace(Saver, "save", save_and_leak(Saver.save))


if __name__ == "__main__":
    make_leaky()
    sys.exit(main())
