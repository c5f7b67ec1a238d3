"""This file words what a model is asked to write about an image, a clip or an edit."""

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Literal

from diffsynth_lite.captioning.cleaning import CaptionFormat
from diffsynth_lite.errors import UserError, join_names

Goal = Literal["likeness", "style", "motion", "edit"]
CaptionLength = Literal["short", "medium", "long"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionRequest:
    """What captions are for, and their form.

    Attributes:
        goal: what a LoRA is to learn from them; None for a plain description.
        trigger: the word that stands for the subject, such as "ohwx woman"; empty where there is none.
        instruction: replaces all of ours; empty for ours.
    """

    goal: Goal | None = None
    trigger: str = ""
    language: str = "English"
    length: CaptionLength = "medium"
    format: CaptionFormat = "prose"
    instruction: str = ""


_WORDS: Mapping[CaptionLength, int] = {"short": 20, "medium": 60, "long": 150}
_TAGS: Mapping[CaptionLength, int] = {"short": 10, "medium": 25, "long": 50}
# A word of English is 1.3 tokens; of other languages up to 4.
_TOKENS: Mapping[CaptionLength, int] = {"short": 128, "medium": 256, "long": 640}
_JSON_TOKENS = 1024

_PLAIN = (
    "Describe it plainly and completely: the subjects and what they do, their looks and clothes, the "
    "surroundings, the light, the colours, the framing, and the medium, such as a photo or a painting. Quote "
    "text that is legible."
)
_LIKENESS = (
    "Describe everything that could be different in another image of the same subject: pose, action, "
    "expression, clothes, objects, other people, surroundings, light, framing and viewpoint. Never mention "
    "what belongs to the subject itself: no face, eyes, skin, hair, hair colour, age, body or ethnicity of a "
    "person; no fur, breed, shape, material or colour of an animal or a thing. {name}"
)
_BY_TRIGGER = 'Call the main subject "{trigger}", exactly so, as if it were its name.'
_BY_CLASS = 'Call the main subject by its class only, such as "a woman", "a man", "a dog" or "a car".'
_STYLE = (
    "Describe only the content: the subjects, what they do, their clothes, objects, the place, and where "
    "things are. Never mention how it is made or looks as a work: no medium, style, technique, artist, era, "
    "mood, quality or rendering, and no words such as photo, painting, drawing, illustration or artwork."
)
_MOTION = (
    "Describe what moves and how, in the order in which it happens: who or what, in which direction, how "
    "fast, and what changes from the beginning to the end. Then describe what the camera does: whether it is "
    "still, pans, tilts, zooms, or follows something. Name the subject and the place in one clause, and "
    "nothing else that is still."
)
_EDIT = (
    "Write the instruction by which somebody would ask for that result. Begin with a verb, such as Replace, "
    "Remove, Add, Change, Turn or Move. Name what changes and what it becomes, exactly enough to repeat it. "
    "Do not mention what stays the same{images}."
)
_JSON = (
    "Write one JSON object on one line with exactly these keys, in this order: "
    '{"high_level_description": "one sentence on the whole", "compositional_deconstruction": '
    '{"background": "the place, without the subjects", "elements": ['
    '{"type": "obj", "desc": "a subject or thing, and where it is"}, '
    '{"type": "text", "text": "the letters as written", "desc": "how and where they are written"}]}}. '
    "One element for each subject, the main one first; elements of the type text only for legible text. "
    "The keys and types stay English."
)


_TASKS: Mapping[Goal | None, str] = {"likeness": _LIKENESS, "style": _STYLE, "motion": _MOTION}


def instruction_for(request: CaptionRequest, *, is_clip: bool = False, num_inputs: int = 0) -> str:
    """What is asked about an item.

    Args:
        num_inputs: images that an edit is made from; they come before its result.
    """
    if request.instruction:
        return request.instruction
    if num_inputs:
        images = "; call the inputs image 1, image 2" if num_inputs > 1 else ""
        shown = "The second image was made by editing the first."
        if num_inputs > 1:
            shown = f"The last image was made from the first {num_inputs} images."
        parts = [shown, _EDIT.format(images=images)]
    else:
        goal = None if request.goal == "motion" and not is_clip else request.goal
        name = _BY_TRIGGER.format(trigger=request.trigger) if request.trigger else _BY_CLASS
        task = _TASKS.get(goal, _PLAIN).format(name=name)
        frames = "The images are frames of one video clip, in their order. " if is_clip else ""
        parts = [f"{frames}Write a caption of this {'video' if is_clip else 'image'}.", task]
    return " ".join([*parts, _form(request, is_edit=num_inputs > 0), "Answer with the caption only."])


def fill(instruction: str, values: Mapping[str, str], *, where: str) -> str:
    """A user's own instruction, with values such as that of {trigger}; ``{{`` and ``}}`` are braces."""
    filled, problems = "", []
    try:
        for literal, name, form, conversion in Formatter().parse(instruction):
            filled += literal
            if name is None:
                continue
            if name not in values or form or conversion:
                problems.append(f"{{{name[:40]}}} is not known")
            elif not values[name]:
                problems.append(f"it has {{{name}}}, but --{name} was not given")
            filled += values.get(name, "")
    except ValueError as error:
        problems.append(str(error))
    if problems:
        listed, known = join_names(list(dict.fromkeys(problems))), ", ".join(f"{{{name}}}" for name in values)
        raise UserError(f"{where}: {listed}; it may have {known}, and {{{{ and }}}} for braces")
    if not filled.strip():
        raise UserError(f"{where}: is empty; write what the model is to do")
    return filled.strip()


def plainer(instruction: str) -> str:
    """The instruction for a second try, after a model refused the first."""
    return (
        "Describe in neutral words only what is visible, and leave out what you cannot describe. "
        f"Nobody is to be identified or judged.\n\n{instruction}"
    )


def max_tokens(request: CaptionRequest) -> int:
    """Tokens that an answer may have: more than the length that is asked for, in any language."""
    if request.format == "json":
        return _JSON_TOKENS + _TOKENS[request.length]
    return _TOKENS["long" if request.instruction else request.length]


def _form(request: CaptionRequest, *, is_edit: bool) -> str:
    language, words = f"Write in {request.language}.", f"{_WORDS[request.length]} words"
    if request.format == "tags":
        return (
            f"Write about {_TAGS[request.length]} short tags in lower case, separated by commas, as on image "
            f"boards, the most important first; no sentences. {language}"
        )
    if request.format == "json":
        # In front of the object, where a trigger else is put, it would be no JSON.
        begin = f'Begin the high_level_description with "{request.trigger}". ' if request.trigger else ""
        return f"{_JSON} {begin}{language} Use about {words} in all."
    if is_edit:
        return f"{language} Use at most {words}, in one paragraph, without headings, lists or opinions."
    return (
        f"{language} Use about {words}, in whole sentences and one paragraph, without headings, lists or "
        'opinions. Begin with what is shown, not with words such as "The image shows".'
    )
