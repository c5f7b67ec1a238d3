"""The model card of a LoRA, the code in it, and the metadata of its files."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import release_layouts
import torch
from card_code import LARGEST_DIFFERENCE, difference, generated
from diffusers import LTXPipeline, WanVACEPipeline
from family_sample import NEGATIVE, PROMPTS, Sample, adapted_transformer, build_sample, clip, hole, mandelbrot
from huggingface_hub import ModelCard as HubCard
from torch import nn

from diffsynth_lite.config import load_config
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.images import black_or_white, cover
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.video import read_frames, write_video
from diffsynth_lite.lora import adapter_settings, adapter_tensors, exported_tensors
from diffsynth_lite.lora.kinds import LORA, AdapterKind, Dora, Lokr
from diffsynth_lite.lora.metadata import LoraFacts, SourceFacts
from diffsynth_lite.media import Generated
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.release_folder import find_base_model, write_release
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.releases import BaseModel
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.export.card import CardWriter, gather_lora_facts
from diffsynth_lite.training.export.usage import usage_code
from diffsynth_lite.training.layer_groups import adapter_kind
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.planning.subject import family_without_weights
from diffsynth_lite.training.previews import Previews

KNOWN = "Its terms for derived models apply to this one."
FLUX = "black-forest-labs/FLUX.1-dev"
TURBO = "model.path=Tongyi-MAI/Z-Image-Turbo model.quantize=int8"
WAN_LAYERS = ["blocks.0.attn1.to_q"]
HIGH, LOW = (f"pytorch_lora_weights_{name}_noise.safetensors" for name in ("high", "low"))


def card_of(folder: Path, recipe: str, settings: Sequence[str], base: BaseModel | None) -> str:
    """The card of a LoRA with the lowest loss, on a release or another base model."""
    config = load_config(
        recipe, ["data.path=pictures", "output.dir=runs/one", "validation.negative_prompt=blur", *settings]
    ).config
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
            family.lora_files.settle(family.empty_transformer(), WAN_LAYERS, rank=16, kind=kind)
        previews = Previews(
            family=family,
            folder=run.previews_folder,
            requests=[],
            model="tiny",
            sampler="Euler",
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


CARDS: list[tuple[str, str, Mapping[str, object], Sequence[str]]] = [
    (
        "flux_lora.yaml",
        "",
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
        "",
        {"license": "openrail++"},
        [
            "    negative_prompt='blur',\n    guidance_scale=5.0,\n",
            "The licence of the base model is CreativeML Open RAIL++-M.",
        ],
    ),
    ("sdxl_text_encoders_lora.yaml", "", {}, ["with the node\n`LoraLoader`.\n"]),
    (
        "z_image_lora.yaml",
        TURBO,
        {"license": "apache-2.0", "base_model": "Tongyi-MAI/Z-Image-Turbo"},
        ["was distilled to 8 steps without guidance", "It was trained on weights in int8"],
    ),
    (
        "wan22_t2v_a14b_lora.yaml",
        "",
        {"pipeline_tag": "text-to-video"},
        [
            "Put each file into `models/loras`",
            f"load_lora_weights('path/to/this/folder', weight_name=\"{HIGH}\")\n",
            f'weight_name="{LOW}", load_into_transformer_2=True)\n',
            "export_to_video(result.frames[0],",
        ],
    ),
    (
        "ltx2_lora.yaml",
        "data.fps=16",
        {"pipeline_tag": "text-to-video"},
        [
            "    stg_scale=0.0,\n    audio_stg_scale=0.0,\n",
            "    num_frames=81,\n    output_type='pil',\n    frame_rate=16.0,\n",
        ],
    ),
    (
        "ltx2_lora.yaml",
        "data.audio=true objective.audio_noise=own",
        {},
        ["normal, shift: resolution, audio at levels of its own"],
    ),
    (
        "ltx2_lora.yaml",
        "validation.guidance_scale=1.0",
        {},
        ["    guidance_scale=1.0,\n", "    audio_guidance_scale=1.0,\n    stg_scale=0.0,\n"],
    ),
    ("qwen_image_edit_lora.yaml", "", {"pipeline_tag": "image-to-image"}, [KNOWN]),
    (
        "cogvideox_lora.yaml",
        "",
        {"pipeline_tag": "text-to-video"},
        ["- For ComfyUI convert the file with diffsynth-lite convert --to comfyui."],
    ),
    (
        "ltx_video_lora.yaml",
        "data.first_frame_dir=firsts",
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
        "lora.kind=dora",
        {"library_name": None},
        [
            "Nothing of diffusers loads a DoRA of this model: the file is for ComfyUI and "
            "diffsynth-lite sample."
        ],
    ),
    ("sana_lora.yaml", "", {}, ["ComfyUI has no names that we know for 1 of its 1 layers."]),
    (
        "qwen_lora.yaml",
        "lora.init_from=first.safetensors",
        {"base_model": "ann/tuned"},
        [
            "The licence of the base model is not known here",
            "from_pretrained('ann/tuned'",
            "started from another",
        ],
    ),
]
"""Recipe, settings, what the header of the card has, and words of the card."""
TUNED = BaseModel(hub_id="ann/tuned")
"""That of a LoRA which started from another; the others are for the recipe's own model."""


@pytest.mark.parametrize(("recipe", "settings", "header", "words"), CARDS)
def test_a_card_names_the_base_model_its_licence_and_what_draws_with_it(
    tmp_path: Path,
    recipe: str,
    settings: str,
    header: Mapping[str, object],
    words: Sequence[str],
) -> None:
    base = TUNED if header.get("base_model") == TUNED.hub_id else None
    text = card_of(tmp_path, recipe, settings.split(), base)
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


GIVEN = {"num_inference_steps": 2, "guidance_scale": 3.0, "seed": 4}
KINDS: dict[str, tuple[AdapterKind, ...]] = {
    "flux": (Dora(), Lokr()),
    "ltx2": (Dora(),),
    "qwen_image": (Dora(), Lokr()),
    "sdxl": (),
    "wan": (),
    "z_image": (Dora(), Lokr()),
}
"""Those of other adapters that diffusers loads, of some families."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def export(sample: Sample, kind: AdapterKind = LORA) -> nn.Module:
    """The family's model with an adapter, which is written to the folder ``lora``."""
    model = adapted_transformer(sample.family, kind=kind).eval()
    for name, parameter in model.named_parameters():
        if ".lokr_w" in name:
            parameter.data.mul_(4)
    settings, family = adapter_settings(model), sample.family
    family.lora_files.settle(family.empty_transformer(), settings["target_modules"], rank=4, kind=kind)
    tensors = exported_tensors(model, adapter_tensors(model), torch.device("cpu"))
    export_lora(family, Path("lora"), tensors, settings, lambda _: {})
    return model


def code_for(family: ModelFamily, request: PreviewRequest, base: str = "model") -> str | None:
    given = {"base": base, "dtype": "float32", "lora": "lora"}
    prompts = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE}
    return usage_code(family, request, **given, **prompts, fps=family.default_fps)


def previewed(family: ModelFamily, model: nn.Module, request: PreviewRequest) -> Generated:
    with torch.no_grad():
        [preview] = family.sample(model, torch.float32, [request])
    return preview


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_adapters_have_code_where_diffusers_loads_them(name: str) -> None:
    sample = build_sample(name, Path("model"))
    family, request = sample.family, sample.request(**GIVEN)
    plain = previewed(family, family.load_transformer(torch.float32), request)
    for kind in (Dora(), Lokr()):
        model = export(sample, kind)
        code = code_for(family, request)
        assert (code is not None) == family.lora_files.loaded_by_diffusers == (kind in KINDS[name])
        if code is not None:
            preview = previewed(family, model, request)
            assert difference(generated(code)[0], preview) <= LARGEST_DIFFERENCE
            assert difference(plain, preview) > LARGEST_DIFFERENCE


def of_0_9_5_by_another_name() -> LTXPipeline:
    """As diffusers' conversion script writes it."""
    return LTXPipeline(**release_layouts.ltx_of_conditions().components)


@pytest.mark.parametrize(
    ("name", "build"), [("wan", release_layouts.two_experts), ("ltx_video", of_0_9_5_by_another_name)]
)
def test_releases_of_another_layout_have_code_of_their_own(name: str, build: Callable[[], Any]) -> None:
    sample = build_sample(name, Path("model"), build)
    family, request = sample.family, sample.request(**GIVEN)
    model = export(sample)
    code = code_for(family, request)
    assert code is not None
    # What a base is called is not a code.
    assert "import Image" not in str(code_for(family, request, base="somebody/Z-Image"))
    drawn, pipeline = generated(code)
    assert all(getattr(pipeline, part).peft_config for part in family.trained)
    assert difference(drawn, previewed(family, model, request)) <= LARGEST_DIFFERENCE


def test_what_guides_a_clip_and_what_of_it_stays_are_read_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model hardly changes with them, so that they are compared as the pipeline has them."""
    sample = build_sample("wan_vace", Path("model"))
    seen, prepare = [], WanVACEPipeline.preprocess_conditions

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(prepare(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(WanVACEPipeline, "preprocess_conditions", note)
    family = sample.family
    assert family.frame_step is not None
    plain = replace(sample.request(**GIVEN), control=(), num_frames=family.frame_step + 1)
    width, height, times = plain.width, plain.height, [place / 16 for place in range(plain.num_frames)]
    write_video(Path("control.mp4"), clip(96, 48, plain.num_frames + 2, 40), fps=16)
    guides = tuple(cover(frame, width, height) for frame in read_frames(Path("control.mp4"), times))
    mandelbrot(60, 50, 20).save("input.png")
    mandelbrot(70, 40, 30).save("control.png")
    hole(90, 60, 0).save("mask.png")
    still = (mandelbrot(60, 50, 20),)
    mask = (black_or_white(cover(hole(90, 60, 0), width, height)),) * plain.num_frames
    model, pipeline = export(sample), None
    for request in (
        plain,
        replace(plain, control=guides),
        replace(plain, inpaint_mask=mask, inputs=still),
        replace(plain, inpaint_mask=mask, control=guides),
        replace(plain, inpaint_mask=mask, control=guides, inputs=still),
        replace(plain, num_frames=1, control=(cover(mandelbrot(70, 40, 30), width, height),)),
    ):
        code = code_for(family, request)
        assert code is not None
        preview = previewed(family, model, request)
        drawn, pipeline = generated(code, pipeline=pipeline)
        assert difference(drawn, preview) <= LARGEST_DIFFERENCE
    for (video, mask, _), (read, read_mask, _) in zip(seen[::2], seen[1::2], strict=True):
        # In [-1, 1]; another decoder rounds another way.
        torch.testing.assert_close(read, video, rtol=0, atol=2.01 * LARGEST_DIFFERENCE / 255)
        assert torch.equal(read_mask, mask)
    assert len({video.sum().item() for video, *_ in seen[::2]}) == 5  # a clip that stays guides itself


TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
CONFIG = """
model: {{family: qwen_image, path: {root}/Qwen-Image}}
lora: {{rank: 8, alpha: 4}}
data:
  sources:
    - {{path: {root}/photos, trigger: ohwx dog, repeats: 3}}
    - {{path: {root}/drawings, trigger: "{token}", weight: 0.5}}
    - {{path: {root}/more, trigger: ohwx dog}}
  resolutions: [512, 1024]
  tag_shuffles: 2
  crop: random
objective: {{shift: static, shift_value: 3, sigma_min: 0.25}}
train: {{max_grad_norm: null, steps: 12}}
logging: {{run_name: "mine, with {token}"}}
output: {{dir: {root}/run}}
"""


def test_facts_are_gathered_by_source_without_paths_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG.format(root=tmp_path, token=TOKEN))
    config = load_config(tmp_path / "run.yaml").config
    release = QwenImage.releases[0]
    family = QwenImage(write_release(release, tmp_path / "Qwen-Image"))
    sizes = [(512, 512, 1), (512, 512, 5), (1024, 768, 1)]
    rows = [
        ItemRow(
            name=str(place),
            bucket=Bucket(width=width, height=height, num_frames=num_frames),
            source=source,
            media_key="0" * 64,
            caption_keys=("1" * 64,),
        )
        for place, (source, (width, height, num_frames)) in enumerate(zip((0, 0, 1), sizes, strict=True))
    ]
    tags = {"red": 3, "a": 2, "b": 2, "ohwx dog": 2}
    tag_counts = {0: TagCounts(3, tags), 1: TagCounts(2, {f"a {TOKEN}": 1, "red": 2})}
    encoded = SimpleNamespace(items=ItemTable.build(rows), tag_counts=tag_counts)

    facts = gather_lora_facts(config, family, encoded, {"b": 1, "a": [2.5]})
    assert facts == gather_lora_facts(config, family, encoded, {"a": [2.5], "b": 1})
    assert facts.base.release == release
    assert facts.contract == hashlib.sha256(b'{"a": [2.5], "b": 1}').hexdigest()
    assert facts.title == "mine, with REDACTED"
    assert facts.trigger_words == ("ohwx dog", "REDACTED")
    without = load_config(tmp_path / "run.yaml", [f"data.sources=[{{path: {tmp_path}}}]"]).config
    assert gather_lora_facts(without, family, encoded, {}).trigger_words == ("red",)
    assert facts.sources == {
        "data.sources[0]": SourceFacts(num_items=2, passes=3.0, tag_counts=tags),
        "data.sources[1]": SourceFacts(num_items=1, passes=0.5, tag_counts={"a REDACTED": 1, "red": 2}),
        "data.sources[2]": SourceFacts(num_items=0, passes=1.0, tag_counts={}),
    }
    counted = list(facts.sources["data.sources[0]"].tag_counts)
    assert counted == ["red", "ohwx dog", "a", "b"]  # the trigger before what is as frequent
    assert facts.items_by_size == {(512, 512): 2, (1024, 768): 1}
    assert (facts.resolution, facts.sigma_range) == ((1024, 1024), (0.25, 1.0))
    known = {name: value for name, value in facts.training.items() if value is not None}
    assert (known["discrete_flow_shift"], known["shuffle_caption"], known["random_crop"]) == (3, True, True)
    assert known.keys().isdisjoint(("max_grad_norm", "network_dropout", "min_snr_gamma"))
    assert str(tmp_path) not in str(facts)
