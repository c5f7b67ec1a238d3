"""What is gathered of a run for its LoRA files: its sources, its base model, no paths and no secrets."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

from diffsynth_lite.config import load_config
from diffsynth_lite.data import Bucket, ItemRow, ItemTable, TagCounts
from diffsynth_lite.lora.metadata import SourceFacts
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.export.lora_facts import gather_lora_facts

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
    told = {name: value for name, value in facts.training.items() if value is not None}
    assert (told["discrete_flow_shift"], told["shuffle_caption"], told["random_crop"]) == (3, True, True)
    assert told.keys().isdisjoint(("max_grad_norm", "network_dropout", "min_snr_gamma"))
    assert str(tmp_path) not in str(facts)
