"""What the card of a LoRA says of released models: where they are, their licence, how they are used."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard as HubCard

from diffsynth_lite.config import load_config
from diffsynth_lite.lora.metadata import LoraFacts
from diffsynth_lite.pipelines.base.release_folder import find_base_model
from diffsynth_lite.releases import BaseModel
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.builder import build_picture_source
from diffsynth_lite.training.export.card import CardWriter
from diffsynth_lite.training.layer_groups import adapter_kind
from diffsynth_lite.training.planning.subject import family_without_weights
from diffsynth_lite.training.previews import Previews

KNOWN = "The licence is that of the base model"
FLUX = "black-forest-labs/FLUX.1-dev"
TURBO = ("model.path=Tongyi-MAI/Z-Image-Turbo", "model.quantize=int8")
WAN_LAYERS = ["blocks.0.attn1.to_q"]
HIGH, LOW = (f"pytorch_lora_weights_{name}_noise.safetensors" for name in ("high", "low"))


def card_of(folder: Path, recipe: str, settings: Sequence[str], base: BaseModel | None) -> str:
    """The card of a LoRA with the lowest loss, on a release or another base model."""
    config = load_config(recipe, ["data.path=pictures", "output.dir=runs/one", *settings]).config
    kind = adapter_kind(config)
    run = RunFolder(folder)
    run.best_lora_folder.mkdir()
    rows = [{"step": step, "validation_loss": 1 - step / 1000} for step in (0, 100, 250, 300)]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with family_without_weights(config) as family:
        facts = LoraFacts(
            version="1.2.3",
            name=None,
            family=config.model.family,
            base=base or find_base_model(family.releases, config.model.path, family.folder),
            contract="0" * 64,
            trigger_words=("ohwx dog",),
            rank=16,
            alpha=8,
            resolution=(64, 64),
            items_by_size={(64, 64): 1, (64, 48): 5, (32, 64): 2, (32, 32): 2, (96, 32): 1},
            sources={},
            training={},
            kind=kind.title,
        )
        if config.lora.kind != "lora":
            family.settle_lora_spelling(family.empty_transformer(), WAN_LAYERS, rank=16, kind=kind)
        previews = Previews(
            family=family,
            folder=run.previews_folder,
            prompts=[],
            negative_prompt="blur",
            requests=[],
            source=build_picture_source(config, family),
            vae_dtype=torch.float32,
        )
        writer = CardWriter(
            config=config,
            family=family,
            facts=facts,
            previews=previews,
            loss_name="validation_loss",
            measures_average=False,
            folder=run,
            layers=["blocks.0.to_q"],
        )
        writer.write(run.best_lora_folder, 250)
    card = run.best_lora_folder / "README.md"
    return card.read_text() if card.exists() else ""


@pytest.mark.parametrize(
    ("recipe", "settings", "base", "header", "words"),
    [
        (
            "flux_lora.yaml",
            (),
            None,
            {
                "base_model": FLUX,
                "base_model_relation": "adapter",
                "license": "other",
                "license_name": "flux-1-dev-non-commercial-license",
                "license_link": f"https://huggingface.co/{FLUX}",
                "pipeline_tag": "text-to-image",
                "tags": ["text-to-image", "diffusers", "lora", "template:sd-lora", "flux", "diffsynth-lite"],
                "instance_prompt": "ohwx dog",
            },
            [
                f"FluxPipeline.from_pretrained('{FLUX}', dtype=torch.bfloat16)",
                "    guidance_scale=3.5,\n",
                "Put the file into `models/loras`",
                "with the node\n`LoraLoaderModelOnly`.\n",
                "after 250 optimizer steps, where the loss on held-out data was lowest",
                "| 11 items: 64x48 (5), 32x32 (2), 32x64 (2), 64x64 (1) and 1 more |",
                "held-out items, step 0 | 1.0000 |",
                "held-out items, step 250 | 0.7500 |",
                KNOWN,
            ],
        ),
        (
            "sdxl_lora.yaml",
            (),
            None,
            {"license": "openrail++"},
            ["    negative_prompt='blur',\n    guidance_scale=5.0,\n", f"{KNOWN}: CreativeML Open RAIL++-M."],
        ),
        ("sdxl_text_encoders_lora.yaml", (), None, {}, ["with the node\n`LoraLoader`.\n"]),
        (
            "z_image_lora.yaml",
            TURBO,
            None,
            {"license": "apache-2.0", "base_model": "Tongyi-MAI/Z-Image-Turbo"},
            ["was distilled to 8 steps without guidance", "It was trained on weights in int8"],
        ),
        (
            "wan22_t2v_a14b_lora.yaml",
            (),
            None,
            {"pipeline_tag": "text-to-video"},
            [
                "Put each file into `models/loras`",
                f"load_lora_weights('path/to/this/folder', weight_name=\"{HIGH}\")\n",
                f'weight_name="{LOW}", load_into_transformer_2=True)\n',
                "export_to_video(drawn.frames[0],",
            ],
        ),
        (
            "ltx2_lora.yaml",
            ("data.fps=16",),
            None,
            {"pipeline_tag": "text-to-video"},
            [
                "    stg_scale=0.0,\n    audio_stg_scale=0.0,\n",
                "    num_frames=81,\n    output_type='pil',\n    frame_rate=16.0,\n",
            ],
        ),
        (
            "ltx2_lora.yaml",
            ("data.audio=true", "objective.audio_noise=own"),
            None,
            {},
            ["normal, shift: resolution, audio at levels of its own"],
        ),
        (
            "ltx2_lora.yaml",
            ("validation.guidance_scale=1.0",),
            None,
            {},
            ["    guidance_scale=1.0,\n", "    audio_guidance_scale=1.0,\n    stg_scale=0.0,\n"],
        ),
        (
            "qwen_image_edit_lora.yaml",
            (),
            None,
            {"pipeline_tag": "image-to-image"},
            [KNOWN],
        ),
        (
            "cogvideox_lora.yaml",
            (),
            None,
            {"pipeline_tag": "text-to-video"},
            ["- For ComfyUI convert the file with diffsynth-lite convert --to comfyui."],
        ),
        (
            "ltx_video_lora.yaml",
            ("data.first_frame_dir=firsts",),
            None,
            {"pipeline_tag": "image-to-video"},
            [
                "from PIL import ImageOps\n",
                "pipeline = LTXImageToVideoPipeline.from_pretrained(",
                '    image=ImageOps.fit(load_image("input.png"), (768, 512)),\n',
                "The code reads input.png, which you provide",
            ],
        ),
        (
            "wan_t2v_lora.yaml",
            ("lora.kind=dora",),
            None,
            {"library_name": None},
            [
                "Nothing of diffusers loads a DoRA of this model: the file is for ComfyUI and "
                "diffsynth-lite sample.",
            ],
        ),
        ("sana_lora.yaml", (), None, {}, ["ComfyUI has no names that we know for 1 of its 1 layers."]),
        (
            "qwen_lora.yaml",
            ("lora.init_from=first.safetensors",),
            BaseModel(hub_id="ann/tuned"),
            {"base_model": "ann/tuned"},
            [
                "The licence of the base model is not known here",
                "from_pretrained('ann/tuned'",
                "started from another",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_card_names_the_base_model_its_licence_and_what_draws_with_it(
    tmp_path: Path,
    recipe: str,
    settings: Sequence[str],
    base: BaseModel | None,
    header: Mapping[str, object],
    words: Sequence[str],
) -> None:
    text = card_of(tmp_path, recipe, settings, base)
    found = HubCard(text).data.to_dict()
    assert {key: found.get(key) for key in header} == header
    assert [word for word in words if word not in text] == []
    assert ("## In ComfyUI" in text) is (recipe not in ("cogvideox_lora.yaml", "sana_lora.yaml"))
    assert ("license" in found) is (base is None)
    assert "step 300" not in text


def test_a_card_of_which_something_is_not_known_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks(*_args: object, **_settings: object) -> str:
        raise KeyError("scheduler")

    monkeypatch.setattr("diffsynth_lite.training.export.card.usage_code", lacks)
    assert card_of(tmp_path, "flux_lora.yaml", (), None) == ""
    assert "The model card in " in caplog.text
    assert "could not be written: 'scheduler'" in caplog.text
