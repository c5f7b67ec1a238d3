"""The section ``objective.slider``: a LoRA whose strength moves one property, learned from prompts."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from diffsynth_lite.config.settings import Distinct, NonEmptyStr, Problem, Settings


class SliderTriple(Settings):
    """Three prompts for one subject, which differ in the property that is to be moved."""

    neutral: NonEmptyStr
    """The prompt that the slider works on, such as `a photo of a person`."""

    positive: NonEmptyStr
    """What strength 1 makes of it, such as `a photo of an old person`."""

    negative: NonEmptyStr
    """What strength -1 makes of it, such as `a photo of a young person`."""

    def conflicts(self) -> Iterator[Problem]:
        prompts = (self.neutral, self.positive, self.negative)
        if len({" ".join(prompt.split()) for prompt in prompts}) < len(prompts):
            message = f"{self.neutral!r}: neutral, positive and negative must be three different prompts"
            yield Problem(("neutral", "positive", "negative"), message)


class SliderSettings(Settings):
    """The prompts of a slider, and how it is trained: see [methods.md](methods.md#sliders). One run trains
    one."""

    triples: list[SliderTriple] = Field(min_length=1)
    """The prompts for each of a few subjects; about six make a slider that works on subjects that are in none
    of them."""

    anchors: Distinct[NonEmptyStr] = Field(default=[])
    """Prompts that should look the same at any strength, next to the empty prompt: what is close to the
    triples and must not follow the slider. Each second sample brings one."""

    anchor_weight: float = Field(default=1.0, ge=0, le=1000)
    """How much the mean error on anchors and the empty prompt counts against that on the triples; 0 leaves
    them out."""

    target: Literal["ends", "difference"] = "ends"
    """What strength 1 and -1 learn on the neutral prompt, where e is the prediction without the LoRA: `ends`
    is e(neutral) + eta (e(positive) - e(neutral)), and the same with the negative one; `difference` is
    e(neutral) + eta (e(positive) - e(negative)), and minus it, which leaves out what both ends share beyond
    the neutral prompt, and changes outlines more."""

    eta: float = Field(default=1.0, ge=0.01, le=10)
    """How far strength 1 goes. Above 1 images break at strengths that are useful otherwise; a LoRA can be
    used at a higher strength instead."""

    images_per_prompt: int = Field(default=16, ge=1, le=1000)
    """Images that the base model generates from each neutral prompt and each anchor to learn on, where `data`
    names none: as previews are generated, once, kept in `data.cache_dir`."""

    def conflicts(self) -> Iterator[Problem]:
        if self.anchors and self.anchor_weight == 0:
            yield Problem(("anchors", "anchor_weight"), "have no effect with anchor_weight 0; remove them")

    @property
    def prompts(self) -> tuple[str, ...]:
        """Neutral, positive and negative of each triple, one triple after the other."""
        return tuple(prompt for one in self.triples for prompt in (one.neutral, one.positive, one.negative))

    @property
    def texts(self) -> tuple[str, ...]:
        """All prompts, each once."""
        return tuple(dict.fromkeys((*self.prompts, *self.kept)))

    @property
    def kept(self) -> tuple[str, ...]:
        """The prompts that should look the same at any strength, the empty one first; none without weight."""
        return ("", *self.anchors) if self.anchor_weight else ()

    def advice(self) -> Iterator[Problem]:
        """What makes a slider worse than it could be."""
        if len(self.triples) == 1:
            message = "is one, so that the slider may work on nothing else; give about six"
            yield Problem(("objective.slider.triples",), message)
        if not self.anchors:
            message = "is empty, so that more than the property may change; name two or more prompts"
            yield Problem(("objective.slider.anchors",), message)
        if self.eta > 1:
            message = f"{self.eta:g} breaks images at strengths from 1 to 2; set it to 1"
            yield Problem(("objective.slider.eta",), message)
