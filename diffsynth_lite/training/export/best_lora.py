"""This file keeps the folder of the best LoRA at the step that the scores of a run recommend."""

import logging
import shutil

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing, set_aside
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, lora_copies
from diffsynth_lite.run_folder.model_card import CARD, IMAGES, is_edited
from diffsynth_lite.scores.recommendation import recommend
from diffsynth_lite.scores.record import read_scores

logger = logging.getLogger(__name__)


def follow_scores(folder: RunFolder, export: str, *, kept: int | None, sets_aside: bool = True) -> int | None:
    """Have ``lora_best`` be the copy of the recommended step of the run, with its card unless one was edited.

    Args:
        export: that the copies are of, ``lora`` or ``lora_ema``.
        kept: the step whose LoRA is there, as far as that is known.
        sets_aside: whether that is set aside where no step is recommended.

    Returns:
        The step whose LoRA is there now.
    """
    place = folder.best_lora_folder
    copies = {copy.step: copy for copy in lora_copies(folder.checkpoints_folder, export)}
    try:
        record = read_scores(folder.scores_file)
    except (OSError, UserError) as error:
        logger.warning("%s. %s stays as it is.", error, place)
        return kept
    best = None
    if record is not None:  # LoRAs of others may have been scored, too.
        own = tuple(column for column in record.columns if column.step is not None)
        found = recommend(record.model_copy(update={"columns": own}), copies).best
        best = found.step if found else None
    if best is None:
        if not sets_aside:
            return kept
        if place.exists():
            logger.warning("The scores recommend no step: %s moved to %s.", place, set_aside(place, "left"))
    elif best != kept:
        source = copies[best].path
        card = () if is_edited(place) else (CARD, f"{IMAGES}/*")
        for file in [file for pattern in (f"*{SUFFIX}", *card) for file in source.glob(pattern)]:
            copied = place / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            with replacing(copied) as temporary:
                shutil.copyfile(file, temporary)
        logger.info("The scores recommend step %d so far, whose LoRA is in %s.", best, place)
    return best
