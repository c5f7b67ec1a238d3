"""This file tells errors of a file, which make a bad item, from those of the machine, which stop the run."""

import errno
from pathlib import Path

_OF_THE_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine failed, and not the file: no memory, too many open files, a disk that fails.

    The file may be good, so a run that leaves it out would train on less than it was given. Pillow's own
    errors about damaged files are OSErrors without a number.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, _OF_THE_FILE)


def is_regular_file(path: Path) -> bool:
    """Whether a file is there; a path that is too long for any, or may not be looked at, is none.

    Raises:
        OSError: the machine failed.
    """
    try:
        return path.is_file()
    except OSError as error:
        if is_of_the_machine(error) and error.errno != errno.ENAMETOOLONG:
            raise
        return False
