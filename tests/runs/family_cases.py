"""A run for each family, each kind of its data and each layout of its releases: pipeline, data and config."""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import release_layouts
import torch
from family_sample import shortest_clip
from PIL import Image
from tiny_run import TinyRun, tiny_image, write_config

from diffsynth_lite.data.video import write_video
from diffsynth_lite.media import Audio, RecordKind
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder, load_family, minimax_h3, sdxl, wan_animate

STEPS = 2
PROMPT = "a red circle"
SETTINGS = (
    *(f"train.steps={STEPS}", "train.global_batch_size=2", "train.micro_batch_size=1"),
    *(
        f"validation.prompts=[{PROMPT}]",
        "validation.loss_items=0",
        "validation.item_losses=0",
        "lora.rank=2",
    ),
    *("train.use_gradient_checkpointing=true", "train.use_gradient_checkpointing_offload=true"),
)
SIZES = ((96, 64), (80, 80))  # of all images and clips; the smallest that FLUX.2 takes to start from


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """What is trained, on what.

    Attributes:
        family: name.
        build: makes the pipeline, each time the same.
        kind: of the data; by default the first that the family trains on.
        has_last_frames: whether data and previews name the last frames of their clips.
        has_sound: whether the audio of clips is learned and drawn; one of them has none.
        control_downscale: pixels of an item to one of its control, on each axis.
        trained: folders that get a LoRA; by default those that the family trains.
        conditioning: what the cache must hold of an item next to its latents: tensors and their first axes.
        is_plain: whether it is the family's own tiny pipeline on its first kind of data.
        is_first: whether no case before it has data of its kind and previews of such data.
    """

    family: str
    build: Callable[[], Any]
    kind: RecordKind | None = None
    has_last_frames: bool = False
    has_sound: bool = False
    control_downscale: int = 1
    trained: tuple[str, ...] | None = None
    conditioning: tuple[tuple[str, int], ...] = ()
    is_plain: bool = False
    is_first: bool = False

    @property
    def needs(self) -> tuple[object, ...]:
        """What a run does for it, besides what its family does."""
        kinds: object = load_family(self.family).record_kinds  # a property, where they depend on the folder
        kind = self.kind or (kinds[0] if isinstance(kinds, tuple) else kinds)
        return kind, self.has_last_frames, self.has_sound, self.trained


def cases_of(families: Sequence[str]) -> dict[str, FamilyCase]:
    """What these families are trained on, by what it is called."""
    found = {}
    for name in families:
        found |= _of_each_kind(name)
        found |= {called: case for called, case in LAYOUTS.items() if case.family == name}
    first: dict[object, str] = {}
    for called, case in found.items():
        first.setdefault(case.needs, called)
    return found | {called: replace(found[called], is_first=True) for called in first.values()}


def _of_each_kind(name: str) -> dict[str, FamilyCase]:
    """The family's own tiny pipeline, on all data that its class states."""
    family = load_family(name)
    plain = FamilyCase(family=name, build=importlib.import_module(family.__module__).tiny)
    kinds = family.record_kinds
    others = kinds[1:] if isinstance(kinds, tuple) else ()  # a property, where they depend on the folder
    return {name: replace(plain, is_plain=True)} | {
        f"{name}, {kind}": replace(plain, kind=kind, conditioning=CONDITIONING.get((name, kind), ()))
        for kind in others
    }


OF_A_REFERENCE = (("input_latents_0", 128),)
OF_A_START = (("first_frame_latents", 16), ("loss_mask", 1))
OF_A_DRAWN_START = (("first_frame_latents", 128), ("first_frame_std", 128), ("loss_mask", 1))

CONDITIONING: dict[tuple[str, RecordKind], tuple[tuple[str, int], ...]] = {
    **dict.fromkeys((("flux2", "edit"), ("flux3", "edit")), OF_A_REFERENCE),
    ("qwen_image_21", "edit"): (("input_latents_0", 64), ("input_places", 1)),
    ("ltx2", "image_to_video"): OF_A_START,
    ("ltx2", "control"): (("control_latents", 16),),
    ("hunyuan_video_i2v", "image_to_video"): (("first_frame_latents", 4), ("loss_mask", 1)),
    ("ltx_video", "image_to_video"): OF_A_DRAWN_START,
}
"""What tiny pipelines cache of items of other kinds than their first, next to latents."""

LAYOUTS = {
    "flux2 klein from references": FamilyCase(
        family="flux2", build=release_layouts.klein, kind="edit", conditioning=OF_A_REFERENCE
    ),
    "hunyuan_video_i2v of 33 channels": FamilyCase(
        family="hunyuan_video_i2v",
        build=release_layouts.hunyuan_of_33_channels,
        conditioning=(("first_frame_latents", 4),),
    ),
    "hunyuan_video_15 from images": FamilyCase(
        family="hunyuan_video_15",
        build=release_layouts.hunyuan_of_images,
        kind="image_to_video",
        conditioning=(("first_frame_latents", 4), ("image_embeds", 4)),
    ),
    "kandinsky5_video from images": FamilyCase(
        family="kandinsky5_video",
        build=release_layouts.kandinsky_of_images,
        kind="image_to_video",
        conditioning=(("first_frame_latents", 4), ("loss_mask", 1)),
    ),
    "ltx2 as 2.3 with audio": FamilyCase(
        family="ltx2", build=release_layouts.ltx_2_3, has_sound=True, conditioning=(("audio_latents", 4),)
    ),
    "ltx2 as 2.3 with audio by small controls": FamilyCase(
        family="ltx2",
        build=release_layouts.ltx_2_3,
        kind="control",
        has_sound=True,
        control_downscale=2,
        conditioning=(("audio_latents", 4), ("control_latents", 16)),
    ),
    "ltx2 as 2.5 with audio from first frames": FamilyCase(
        family="ltx2",
        build=release_layouts.ltx_2_5,
        kind="image_to_video",
        has_sound=True,
        conditioning=(("audio_latents", 4), *OF_A_START),
    ),
    "ltx_video of conditions": FamilyCase(family="ltx_video", build=release_layouts.ltx_of_conditions),
    "ltx_video of conditions from first frames": FamilyCase(
        family="ltx_video",
        build=release_layouts.ltx_of_conditions,
        kind="image_to_video",
        conditioning=OF_A_DRAWN_START,
    ),
    "minimax_h3 with audio": FamilyCase(
        family="minimax_h3", build=minimax_h3.tiny, has_sound=True, conditioning=(("audio_latents", 2),)
    ),
    "sdxl with text encoders": FamilyCase(
        family="sdxl", build=sdxl.tiny, trained=("unet", "text_encoder", "text_encoder_2")
    ),
    "wan ti2v": FamilyCase(family="wan", build=release_layouts.ti2v),
    "wan ti2v from first frames": FamilyCase(
        family="wan",
        build=release_layouts.ti2v,
        kind="image_to_video",
        conditioning=(("first_frame_latents", 48), ("loss_mask", 1)),
    ),
    "wan_i2v to last frames": FamilyCase(
        family="wan_i2v",
        build=partial(release_layouts.wan_of_images, "flf2v"),
        kind="image_to_video",
        has_last_frames=True,
        conditioning=(("condition_latents", 20), ("image_embeds", 2)),
    ),
    "wan_animate of another character": FamilyCase(
        family="wan_animate",
        build=wan_animate.tiny,
        kind="image_to_video",
        conditioning=(
            ("condition_latents", 20),
            ("face_pixels", 3),
            ("image_embeds", 1),
            ("pose_latents", 16),
        ),
    ),
    "wan_i2v of two experts": FamilyCase(
        family="wan_i2v",
        build=partial(release_layouts.wan_of_images, "a14b"),
        conditioning=(("condition_latents", 20),),
    ),
    "wan_vace of two experts": FamilyCase(
        family="wan_vace",
        build=release_layouts.vace_of_two_experts,
        conditioning=(("control_latents", 32),),
    ),
}
"""Releases of another layout than the family's tiny pipeline, and other choices of what is trained."""


def make_case(case: FamilyCase, root: Path) -> tuple[TinyRun, ModelFamily]:
    """The case on disk: pipeline, data and config."""
    case.build().save_pretrained(root / "model")
    family = load_family(case.family)(PipelineFolder(path=root / "model"), trained=case.trained)
    kind = case.kind or family.record_kinds[0]
    family.with_audio, family.with_controls = case.has_sound, kind == "control"
    family.control_downscale = case.control_downscale
    width, height = (math.ceil(side / family.size_divisor) * family.size_divisor for side in (64, 32))
    settings = [f"model.family={case.family}", f"data.width={width}", f"data.height={height}", *SETTINGS]
    settings.append(f"data.audio={str(case.has_sound).lower()}")
    settings.append(f"data.control_downscale={case.control_downscale}")
    settings.append(f"validation.guidance_scale={2 if family.has_guidance else 1}")
    if case.trained:
        settings.append(f"lora.components=[{', '.join(case.trained)}]")
    if kind in ("image", "edit", "layers", "inpaint"):
        add_images(root / "data", detail=10)
    else:
        add_clips(root / "data", family, has_sound=case.has_sound)
        settings.append(f"data.frame_counts=[{shortest_clip(family, 1)}]")
    settings += add_others(kind, root, family)
    if case.has_last_frames:
        settings.append(f"data.last_frame_dir={add_images(root / 'lasts', detail=30)}")
        settings.append(f"validation.last_frames=[{root / 'lasts' / '0.png'}]")
    if family.takes_faces:
        settings += [] if kind == "control" else add_others("control", root, family)
        (root / "faces").mkdir()
        add_clips(root / "faces", family, detail=50)
        settings += [f"data.face_dir={root / 'faces'}", f"validation.faces=[{root / 'faces' / '0.mp4'}]"]
    if kind in ("edit", "image_to_video") or family.needs_inputs:
        settings.append(f"validation.inputs=[{add_images(root / 'starts', detail=40) / '0.png'}]")
    for place in range(len(SIZES)):
        (root / "data" / f"{place}.txt").write_text("a red circle" + " on a white background" * place)
    config = write_config(root, root / "model", root / "data")
    return TinyRun(root=root, config=config, settings=tuple(settings)), family


def add_others(kind: RecordKind, root: Path, family: ModelFamily) -> list[str]:
    """What an item of a kind has next to its target, and the settings that name it."""
    if kind == "edit":
        return [f"data.input_dirs=[{add_images(root / 'inputs', detail=20)}]"]
    if kind == "layers":
        behind, above = add_images(root / "behind", detail=20), add_images(root / "above", detail=30)
        make_transparent(above)
        return [f"data.layer_dirs=[{behind}, {above}]"]
    if kind == "image_to_video":
        return [f"data.first_frame_dir={add_images(root / 'firsts', detail=20)}"]
    if kind == "control":
        controls = root / "controls"
        controls.mkdir()
        add_clips(controls, family, detail=20)
        return [f"data.control_dir={controls}", f"validation.control=[{controls / '0.mp4'}]"]
    if kind == "inpaint":
        holes = add_masks(root / "holes")
        return [f"data.inpaint_mask_dir={holes}", f"validation.inpaint_masks=[{holes / '0.png'}]"]
    return []


def add_images(folder: Path, *, detail: int) -> Path:
    """One image for each item."""
    folder.mkdir()
    for place, size in enumerate(SIZES):
        tiny_image(*size, detail + place).save(folder / f"{place}.png")
    return folder


def make_transparent(folder: Path) -> None:
    """What is bright in its images is seen, and what is dark is seen through."""
    for path in folder.iterdir():
        with Image.open(path) as opened:
            image = opened.convert("RGBA")
        image.putalpha(image.convert("L"))
        image.save(path)


def add_masks(folder: Path) -> Path:
    """One mask of what is regenerated for each item."""
    folder.mkdir()
    for place, (width, height) in enumerate(SIZES):
        mask = Image.new("L", (width, height))
        mask.paste(255, (width // 4, height // 4, width - 9, height - 5))
        mask.save(folder / f"{place}.png")
    return folder


def add_clips(folder: Path, family: ModelFamily, *, detail: int = 10, has_sound: bool = False) -> None:
    """One clip for each item, at the speed that the model was trained on; the first with a tone."""
    assert family.default_fps is not None
    for place, size in enumerate(SIZES):
        frames = [tiny_image(*size, detail + place + frame) for frame in range(shortest_clip(family, 1) + 2)]
        samples = torch.arange(round(len(frames) / family.default_fps * 48000))
        tone = Audio(waveform=torch.sin(samples * 0.06)[None] / 2, sample_rate=48000)
        sound = tone if has_sound and place == 0 else None
        write_video(folder / f"{place}.mp4", frames, fps=round(family.default_fps), audio=sound)
