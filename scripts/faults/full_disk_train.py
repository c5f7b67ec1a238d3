"""The training command, in which process 0 finds the disk full at step 4; each notes how it ended."""

import errno
import os
import sys
from pathlib import Path

from diffsynth_lite.cli import train
from diffsynth_lite.errors import exit_code
from diffsynth_lite.training.checkpoint import store

_write = store.write_synced  # type: ignore[attr-defined]


def _full_at_step_4(path: Path, content: bytes) -> None:
    if "step-00000004" in str(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _write(path, content)


def main(arguments: list[str]) -> int:
    """Train, and write beside the config the exit code and error that this process ended with."""
    config = Path(arguments[arguments.index("--config") + 1])
    run = train._train

    def noted(*args: object) -> None:
        try:
            run(*args)  # type: ignore[arg-type]
        except BaseException as error:
            note = config.parent / f"end-{os.environ['RANK']}"
            note.write_text(f"{exit_code(error)} {error}")
            raise

    train._train = noted
    return train.main(arguments)


if __name__ == "__main__":
    store.write_synced = _full_at_step_4  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[1:]))
