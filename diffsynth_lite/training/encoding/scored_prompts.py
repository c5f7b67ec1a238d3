"""This file chooses the prompts that scores are made of, and the images that theirs are compared with.

New prompts are captions of held-out items, taught ones those of training items. Plain prompts do not name
what is taught: they are given, else captions of sources that are preserved, else captions of training items
without the trigger and the phrases that most of them have in common, of those that have one of them.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from diffsynth_lite.config import Config
from diffsynth_lite.data.captions import trigger_pattern
from diffsynth_lite.data.images import load_image
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.media import evenly_spread
from diffsynth_lite.pipelines import Conditioning, ModelFamily, PreviewRequest
from diffsynth_lite.scores.recommendation import FEWEST_PROMPTS
from diffsynth_lite.training.data_settings import data_sources
from diffsynth_lite.training.encoding.phrases import constant_phrases
from diffsynth_lite.training.preview_requests import any_preview

logger = logging.getLogger(__name__)

NUM_PROMPTS = 16
"""Of each kind, at most: more prompts count for more than more seeds of each."""
_MAX_IMAGES = 4
"""Of one caption, that images for it are compared with."""
_FEWEST = 2
_UNSCORED = {"control", "inpaint", "layers"}
"""Kinds of items whose files decide most of what features see of a result."""


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt.

    Attributes:
        items: what an image for it is compared with; it starts from what the first one starts from. An image
            for a plain prompt is compared with none.
    """

    text: str
    items: Sequence[TrainingItem]


@dataclass(frozen=True, kw_only=True)
class ScoredPrompts:
    """The prompts of each kind; none where a run is not scored."""

    new: Sequence[ScoredPrompt] = ()
    plain: Sequence[ScoredPrompt] = ()
    taught: Sequence[ScoredPrompt] = ()

    @property
    def all(self) -> list[ScoredPrompt]:
        """In the order in which images are generated for them."""
        return [*self.new, *self.plain, *self.taught]


NOTHING_SCORED = ScoredPrompts()


def choose_prompts(
    config: Config, family: ModelFamily, trained_on: Sequence[TrainingItem], held_out: Sequence[TrainingItem]
) -> ScoredPrompts:
    """The prompts of a run; none where ``validation.scores`` is off.

    Raises:
        UserError: there are too few of a kind, or the items are of a kind that is not scored.
    """
    if not config.validation.scores:
        return NOTHING_SCORED
    _check_kinds([*trained_on, *held_out])
    preserved = {place for place, source in enumerate(data_sources(config)) if source.preserve}
    taught = [item for item in trained_on if item.record.source not in preserved]
    new = _by_caption(held_out, family)
    if len(new) < _FEWEST:
        raise UserError(
            f"validation.scores: the held-out items have {len(new)} different captions, and scores need at "
            f"least {_FEWEST}, and 8 for a recommendation; hold out more, or give them captions"
        )
    texts = config.validation.plain_prompts
    texts = texts or [item.record.captions[0] for item in trained_on if item.record.source in preserved]
    texts = evenly_spread(list(dict.fromkeys(texts or _without_taught(config, taught))), NUM_PROMPTS)
    if len(texts) < _FEWEST:
        raise UserError(
            f"validation.plain_prompts: {len(texts)} can be written from the captions, as too few of them "
            "have data.trigger or a phrase that most have in common; give 16 prompts that do not name what "
            "is taught, but what is like it"
        )
    for text in texts:
        family.check_prompt(text, "validation.plain_prompts")
    plain = [
        ScoredPrompt(text=text, items=new[place % len(new)].items[:1]) for place, text in enumerate(texts)
    ]
    logger.info(
        "Scores: %d captions of held-out items, and %d prompts of what is not taught: %s.",
        *(len(new), len(plain), join_names([repr(text) for text in texts])),
    )
    if min(len(new), len(plain)) < FEWEST_PROMPTS:
        logger.warning("Scores: fewer than %d of a kind give no recommendation.", FEWEST_PROMPTS)
    return ScoredPrompts(new=new, plain=plain, taught=_by_caption(taught, family))


def request_of(
    config: Config,
    family: ModelFamily,
    prompt: ScoredPrompt,
    place: int,
    conditioning: Conditioning,
    negative: Conditioning,
) -> PreviewRequest:
    """The image of the prompt at ``place``: as previews are generated, from noise of its own."""
    request = any_preview(config, family)
    inputs = _inputs(family, prompt.items[0])
    if family.edits.keeps_input_size:
        width, height = family.edits.input_size(*inputs[0].size)
        request = replace(request, width=width, height=height)
    return replace(
        request,
        prompt=prompt.text,
        conditioning=conditioning,
        negative=negative,
        inputs=inputs,
        seed=request.seed + place,
    )


def _inputs(family: ModelFamily, item: TrainingItem) -> tuple[Image, ...]:
    """The images that an item starts from, and the one that it leads to."""
    record = item.record
    if not item.is_clip:
        return tuple(load_image(path, background=item.background) for path in record.inputs)
    if not (family.needs_inputs or record.first_frame):
        return ()
    last = (load_image(record.last_frame, background=item.background),) if record.last_frame else ()
    return item.start(), *last


def _check_kinds(items: Iterable[TrainingItem]) -> None:
    for item in items:
        if kinds := _UNSCORED.intersection(item.record.kinds):
            raise UserError(
                f"validation.scores: {item.record.name} is of kind {', '.join(kinds)}, whose files decide "
                "most of what scores would see; set it to false"
            )


def _by_caption(items: Iterable[TrainingItem], family: ModelFamily) -> list[ScoredPrompt]:
    """A prompt for each caption, evenly spread; where items start from images, for each item."""
    groups: dict[object, list[TrainingItem]] = {}
    for item in {item.record.name: item for item in items}.values():  # one crop or clip of each
        start = item.content if family.needs_inputs else item.content[1:]
        groups.setdefault((item.record.captions[0], start), []).append(item)
    return [
        ScoredPrompt(text=group[0].record.captions[0], items=evenly_spread(group, _MAX_IMAGES))
        for group in evenly_spread(list(groups.values()), NUM_PROMPTS)
    ]


def _without_taught(config: Config, items: Iterable[TrainingItem]) -> Iterator[str]:
    """Captions without trigger and constant phrases, of those that have one of them."""
    by_trigger = defaultdict(list)
    for item in items:
        by_trigger[data_sources(config)[item.record.source].trigger or ""].append(item.record.captions[0])
    for trigger, captions in by_trigger.items():
        yield from without_taught(captions, trigger)


def without_taught(captions: Sequence[str], trigger: str) -> Iterator[str]:
    """Captions without the trigger and without the phrases that most of them have in common.

    Those in which nothing else is left are left out, as are those that have none of this.
    """
    phrases = [constant.text for constant in constant_phrases(captions, trigger=trigger)]
    patterns = [trigger_pattern(text).replace("\\ ", r"[\W_]+") for text in filter(None, [trigger, *phrases])]
    if not patterns:
        return
    for caption in captions:
        text, count = re.subn("|".join(patterns), "", caption, flags=re.IGNORECASE)
        # Of two commas in a row the last, and none at the ends.
        text = re.sub(r"\s+", " ", re.sub(r"(?:\s*[,;])+", ",", text)).strip(" ,.;:-")
        if count and text:
            yield text
