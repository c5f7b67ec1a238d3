"""This file reads the captions that stand in text files beside pictures and clips."""

import logging
import re
from collections.abc import Sequence

from diffsynth_lite.data.captions import clean_caption
from diffsynth_lite.data.folder import Folder
from diffsynth_lite.data.listing import listed
from diffsynth_lite.data.records import stem
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"(.*)\.(\d+)")


class CaptionFiles:
    """Text files of a folder by the files that they describe.

    A whole file is one caption. ``cat.txt`` belongs to ``cat.png``, and so do further captions in
    ``cat.1.txt``, ``cat.2.txt``, unless there is a ``cat.1.png`` for them to belong to.
    """

    def __init__(self, folder: Folder, targets: Sequence[str]) -> None:
        self._folder = folder
        stems = {stem(name) for name in targets}
        self._texts: dict[str, list[tuple[int, str]]] = {}
        orphans = []
        for name in folder.files:
            if name[-4:].lower() != ".txt":
                continue
            owner, number = name[:-4], -1
            if owner not in stems and (numbered := _NUMBERED.fullmatch(owner)):
                owner, number = numbered[1], int(numbered[2])
            if owner in stems:
                self._texts.setdefault(owner, []).append((number, name))
            else:
                orphans.append(name)
        self._orphans = orphans

    def __bool__(self) -> bool:
        return bool(self._texts)

    def of(self, target: str) -> tuple[str, ...]:
        """Captions of a target: that of its own name first, then the numbered ones in order.

        Raises:
            UserError: there is none, or one cannot be used.
        """
        texts = self._texts.get(stem(target))
        if not texts:
            raise UserError(f"no {stem(target)}.txt")
        return tuple(self._read(name) for _, name in sorted(texts))

    def _read(self, name: str) -> str:
        path = self._folder.use(name)
        try:
            return clean_caption(path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError:
            raise UserError(f"{name}: not UTF-8 text") from None
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        except OSError as error:
            raise UserError(f"{name}: cannot be read: {error.strerror}") from error

    def warn_of_orphans(self) -> None:
        """Name the text files that belong to nothing."""
        if self._orphans:
            logger.warning(
                "%s: %d .txt files belong to no picture or clip: %s",
                self._folder.path,
                len(self._orphans),
                listed(self._orphans),
            )
