"""This file tells size and content of media files, and reads a file for that only when it has changed."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from diffsynth_lite.data.cache import file_fingerprint
from diffsynth_lite.data.file_errors import is_of_the_machine
from diffsynth_lite.data.file_memory import FileMemory, FileState
from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import DECODER_ID as VIDEO_DECODER_ID
from diffsynth_lite.data.video import VideoFacts, check_video
from diffsynth_lite.errors import UserError

MediaFacts = ImageFacts | VideoFacts

_FACTS_ID = f"facts 2 {VIDEO_DECODER_ID}"
_CONTENT_ID = "sha256"


class MediaIndex:
    """Facts and fingerprints of files, remembered as long as size and time of change of a file stay.

    Args:
        memory: where they are remembered.
    """

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory

    def facts(self, path: Path) -> MediaFacts:
        """What the header of a picture or the packets of a clip tell; nothing is decoded.

        Raises:
            UserError: the file cannot be used.
            OSError: the machine failed to read it; a MemoryError likewise.
        """

        def read() -> str:
            facts = check_video(path) if is_video(path.name) else check_image(path)
            return json.dumps(dataclasses.asdict(facts))

        values = json.loads(self._recall(_FACTS_ID, path, read))
        return VideoFacts(**values) if is_video(path.name) else ImageFacts(**values)

    def content(self, path: Path) -> str:
        """The sha256 of the bytes of a file, in hexadecimal.

        Raises:
            UserError: the file cannot be read.
            OSError: the machine failed to read it.
        """
        return self._recall(_CONTENT_ID, path, lambda: file_fingerprint(path))

    def _recall(self, what: str, path: Path, read: Callable[[], str]) -> str:
        # A hash, because a path need not be text that SQLite takes.
        name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
        try:
            state = FileState.of(path)  # before the reading: a file that changes meanwhile is read again
            value = self._memory.recall(f"{what} {name}", state)
            if value is None:
                value = read()
                self._memory.remember(f"{what} {name}", state, value)
            return value
        except OSError as error:
            if is_of_the_machine(error):
                raise
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
