"""Folders and data of Wan image to video: what they need, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from family_sample import CPU, build_media
from wan_pipelines import families_from_pictures

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines import wan as wan_text
from diffsynth_lite.pipelines.wan import Wan
from diffsynth_lite.pipelines.wan_i2v import WanI2V, tiny


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, WanI2V]:
    return families_from_pictures(tmp_path_factory.mktemp("wan_i2v"))


def test_what_a_folder_needs_follows_from_its_transformer(families: dict[str, WanI2V]) -> None:
    for release, family in families.items():
        assert family.record_kinds == ("video", "image_to_video")
        assert family.needs_inputs
        assert ("image_encoder" in family.components) == (release != "a14b")
        assert ("add_k_proj" in family.default_target_modules) == (release != "a14b")
    identities = {family.media_encoder_id(torch.float32) for family in families.values()}
    assert len(identities) == 3
    # Prompts are those of the text-to-video models, which may share a cache.
    text_family = Wan(families["i2v"].folder)
    assert text_family.prompt_encoder_id(torch.float32) == families["i2v"].prompt_encoder_id(torch.float32)


def test_other_pixels_for_clip_are_other_embeddings(families: dict[str, WanI2V], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(families["i2v"].folder.path, tmp_path / "copy"))
    file = copy / "image_processor" / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"image_mean": [0.5, 0.5, 0.5]}))
    changed, family = WanI2V(PipelineFolder(path=copy)), families["i2v"]
    assert changed.media_encoder_id(torch.float32) != family.media_encoder_id(torch.float32)
    media = build_media(family)[:1]
    ours, theirs = (one.load_media_encoder(torch.float32, CPU)(media)[0] for one in (family, changed))
    assert not torch.equal(ours["image_embeds"], theirs["image_embeds"])


def test_the_folder_says_whether_a_clip_may_end_with_a_picture(families: dict[str, WanI2V]) -> None:
    takes = {release: family.takes_last_frames for release, family in families.items()}
    assert takes == {"i2v": False, "flf2v": True, "a14b": True}


@pytest.mark.parametrize(
    ("release", "of_the_sampler", "shift"),
    [("flf2v", 16.0, 5.0), ("flf2v", 3.0, 3.0), ("i2v", 16.0, 16.0), ("a14b", 12.0, 12.0)],
)
def test_the_shift_is_the_samplers_but_at_most_5_where_a_clip_leads_to_a_last_frame(
    release: str, of_the_sampler: float, shift: float, families: dict[str, WanI2V], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(families[release].folder.path, tmp_path / release))
    file = copy / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"flow_shift": of_the_sampler}))
    family = WanI2V(PipelineFolder(path=copy))
    shape = family.latents_shape(1280, 720, 81)
    assert family.family_shift(shape) == shift
    assert family.earlier_shift(shape) == of_the_sampler


@pytest.mark.parametrize("num_frames", [0, 1, 4])
def test_a_clip_needs_frames_behind_the_first(num_frames: int, families: dict[str, WanI2V]) -> None:
    with pytest.raises(UserError, match=f"data.frame_counts: {num_frames} frames; .* such as 5 or 9"):
        families["i2v"].check_frames(num_frames, key="data.frame_counts")
    families["i2v"].check_frames(5, key="data.frame_counts")


def test_a_folder_without_what_encodes_pictures_is_refused(
    families: dict[str, WanI2V], tmp_path: Path
) -> None:
    for missing in ("image_encoder", "image_processor"):
        copy = Path(shutil.copytree(families["i2v"].folder.path, tmp_path / missing))
        shutil.rmtree(copy / missing)
        with pytest.raises(UserError, match=missing):
            WanI2V(PipelineFolder(path=copy)).check_folder()


def test_ti2v_is_sent_to_the_family_that_trains_it(tmp_path: Path) -> None:
    WanImageToVideoPipeline(**tiny().components, expand_timesteps=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"TI2V-5B .* model.family: wan trains, .* _class_name: WanPipeline"):
        WanI2V(PipelineFolder(path=tmp_path)).check_folder()


def test_folders_from_text_and_from_pictures_are_told_apart(
    families: dict[str, WanI2V], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"set model.family: wan_i2v"):
        require_family(Wan, families["i2v"].folder)
    WanPipeline(**wan_text.tiny().components).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"set model.family: wan,"):
        require_family(WanI2V, PipelineFolder(path=tmp_path))
