"""A LoRA in the names of other programs: each name one layer, the same updates, back the same file."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.loaders import lora_conversion_utils as diffusers_converters
from safetensors.torch import load_file

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.conversion import FamilyNames, Target, convert, write_conversion
from diffsynth_lite.lora.layer_names import LayerNames, Original, fused, join, renamed, split
from diffsynth_lite.lora.reading import LoraContents, contents_of, known_pairs
from diffsynth_lite.lora.spelling import DIFFUSERS, Spelling, taken_by_comfyui
from diffsynth_lite.lora.updates import LoraPair
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.sana import Sana
from diffsynth_lite.pipelines.sdxl import SDXL
from diffsynth_lite.pipelines.wan import Wan

FLUX = FamilyNames(layers=Flux.lora_layers, comfyui=taken_by_comfyui())
WAN = FamilyNames(layers=Wan.lora_layers, comfyui=Wan.lora_spelling)
SDXL_NAMES = FamilyNames(layers=SDXL.lora_layers, comfyui=SDXL.lora_spelling)
SANA = FamilyNames(layers=Sana.lora_layers, comfyui=DIFFUSERS)
FILE = Path("out.safetensors")


def kohya(*layers: tuple[str, int, int], alpha: float = 2.0, rank: int = 4) -> LoraContents:
    """A file as sd-scripts or musubi-tuner write it, of layers with these inputs and outputs."""
    content: dict[str, torch.Tensor] = {}
    for seed, (key, inputs, outputs) in enumerate(layers):
        generator = torch.Generator().manual_seed(seed)
        content[f"{key}.lora_down.weight"] = torch.randn(rank, inputs, generator=generator)
        content[f"{key}.lora_up.weight"] = torch.randn(outputs, rank, generator=generator)
        content[f"{key}.alpha"] = torch.tensor(alpha)
    return contents_of(Path("in.safetensors"), content, {"ss_output_name": "mine", "sshs_legacy_hash": "1"})


OF_FLUX = kohya(
    ("lora_unet_double_blocks_0_img_attn_qkv", 6, 18),
    ("lora_unet_double_blocks_0_txt_attn_proj", 6, 6),
    ("lora_unet_single_blocks_7_linear1", 6, 42),
    ("lora_unet_final_layer_adaLN_modulation_1", 6, 12),
    ("lora_te1_text_model_encoder_layers_3_self_attn_out_proj", 6, 6),
)
OF_WAN = kohya(
    ("lora_unet_blocks_0_self_attn_o", 6, 6),
    ("lora_unet_blocks_1_cross_attn_v_img", 6, 6),
    ("lora_unet_blocks_1_ffn_0", 6, 24),
    ("lora_unet_head_head", 6, 5),
)
OF_SDXL = kohya(
    ("lora_unet_input_blocks_7_1_transformer_blocks_9_attn2_to_out_0", 6, 6),
    ("lora_unet_output_blocks_2_1_proj_in", 6, 6),
    ("lora_unet_middle_block_1_transformer_blocks_0_ff_net_0_proj", 6, 48),
    ("lora_te1_text_model_encoder_layers_0_mlp_fc1", 6, 6),
)


def as_tensors(contents: LoraContents) -> dict[str, torch.Tensor]:
    tensors = {}
    for key, pair in contents.pairs.items():
        tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"] = pair.down, pair.up
        tensors[f"{key}.alpha"] = torch.tensor(pair.alpha)
    return tensors


def equal(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(
        torch.equal(tensors[name], others[name]) for name in tensors
    )


@pytest.mark.parametrize(
    ("contents", "names"),
    [(OF_FLUX, FLUX), (OF_WAN, WAN), (OF_SDXL, SDXL_NAMES)],
    ids=["flux", "wan", "sdxl"],
)
@pytest.mark.parametrize("to", ["diffusers", "comfyui", "kohya"])
def test_there_and_back_is_the_identity(contents: LoraContents, names: FamilyNames, to: Target) -> None:
    there = convert(contents, names, to, FILE)
    assert there.difference == 0
    back = convert(there.contents, names, "kohya", FILE)
    assert back.difference == 0
    assert equal(back.tensors, as_tensors(contents))
    assert back.contents.metadata == {
        "ss_output_name": "mine",
        "ss_network_dim": "4",
        "ss_network_alpha": "2",
    }
    again = convert(convert(there.contents, names, "diffusers", FILE).contents, names, to, FILE)
    assert equal(again.tensors, there.tensors)
    assert again.contents.metadata == back.contents.metadata


def test_there_and_back_is_the_identity_where_the_alpha_that_was_folded_would_round() -> None:
    folded = {name: tensor.half() for name, tensor in convert(OF_WAN, WAN, "comfyui", FILE).tensors.items()}
    metadata = {"ss_network_dim": "4", "ss_network_alpha": "3"}
    there = convert(contents_of(FILE, folded, metadata), WAN, "kohya", FILE)
    assert there.difference == 0
    assert equal(convert(there.contents, WAN, "comfyui", FILE).tensors, folded)


def test_layers_that_shared_a_matrix_are_written_separately(tmp_path: Path) -> None:
    shared = kohya(("lora_unet_double_blocks_0_img_attn_qkv", 6, 18), alpha=4.0)
    there = convert(shared, FLUX, "diffusers", tmp_path / "new" / "out.safetensors")
    write_conversion(there)
    assert equal(load_file(there.contents.file), there.tensors)
    assert len({tensor.data_ptr() for tensor in there.tensors.values()}) == 6


def test_each_program_gets_its_names() -> None:
    def first(names: FamilyNames, contents: LoraContents, to: Target) -> str:
        return next(iter(convert(contents, names, to, FILE).tensors))

    assert first(FLUX, OF_FLUX, "comfyui") == "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    assert first(WAN, OF_WAN, "diffusers") == "transformer.blocks.0.attn1.to_out.0.lora_A.weight"
    assert first(WAN, OF_WAN, "comfyui") == "diffusion_model.blocks.0.self_attn.o.lora_A.weight"
    unet = "down_blocks.2.attentions.0.transformer_blocks.9.attn2.to_out.0"
    assert first(SDXL_NAMES, OF_SDXL, "diffusers") == f"unet.{unet}.lora_A.weight"
    assert (
        f"lora_unet_{unet.replace('.', '_')}.alpha" in convert(OF_SDXL, SDXL_NAMES, "comfyui", FILE).tensors
    )


def assert_updates_alike(
    content: Mapping[str, torch.Tensor], contents: LoraContents, names: FamilyNames
) -> None:
    """Compare updates with those of diffusers' converter, in which alpha is folded into both matrices."""
    pairs = known_pairs(contents, names.layers)
    theirs = {name.removesuffix(".lora_A.weight") for name in content if name.endswith(".lora_A.weight")}
    assert theirs == pairs.keys()
    for layer, pair in pairs.items():
        down, up = content[f"{layer}.lora_A.weight"], content[f"{layer}.lora_B.weight"]
        expected = LoraPair(down=down, up=up, alpha=float(len(down)))
        # Other factors of the same product, in fp32.
        assert pair.distance(expected) <= 1e-3 * pair.norm


def test_updates_are_those_that_diffusers_converter_of_flux_finds() -> None:
    # The released model's width is in it.
    width = 3072
    layers = [
        *((f"lora_unet_double_blocks_1_{part}_attn_qkv", 2, 6) for part in ("img", "txt")),
        *((f"lora_unet_double_blocks_1_{part}_attn_proj", 2, 3) for part in ("img", "txt")),
        *((f"lora_unet_double_blocks_1_{part}_mlp_0", 2, 8) for part in ("img", "txt")),
        *((f"lora_unet_double_blocks_1_{part}_mlp_2", 2, 3) for part in ("img", "txt")),
        *((f"lora_unet_double_blocks_1_{part}_mod_lin", 2, 3) for part in ("img", "txt")),
        ("lora_unet_single_blocks_37_linear1", width, 7 * width),
        ("lora_unet_single_blocks_37_linear2", 2, 3),
        ("lora_unet_single_blocks_37_modulation_lin", 2, 3),
    ]
    contents = kohya(*layers, rank=1, alpha=0.5)
    content = diffusers_converters._convert_kohya_flux_lora_to_diffusers(as_tensors(contents))
    assert_updates_alike(content, contents, FLUX)
    # Trained separately: each layer with a rank of its own in the one that they are.
    separate = convert(contents, FLUX, "diffusers", FILE)
    pairs = {key: pair for key, pair in separate.contents.pairs.items() if "attn.to_" in key}
    other = {
        key: LoraPair(down=torch.randn_like(pair.down), up=pair.up, alpha=1.0) for key, pair in pairs.items()
    }
    joined = convert(
        LoraContents(file=FILE, updates=dict(other), metadata={}, has_alpha=True), FLUX, "kohya", FILE
    )
    assert joined.tensors["lora_unet_single_blocks_37_linear1.lora_down.weight"].shape == (4, width)
    content = diffusers_converters._convert_kohya_flux_lora_to_diffusers(dict(joined.tensors))
    content = {name: tensor for name, tensor in content.items() if tensor.any()}
    assert_updates_alike(content, joined.contents, FLUX)


def test_updates_are_those_that_diffusers_converters_of_wan_find() -> None:
    blocks = [f"{part}_{x}" for part in ("self_attn", "cross_attn") for x in "qkvo"]
    blocks += ["cross_attn_k_img", "cross_attn_v_img", "ffn_0", "ffn_2"]
    contents = kohya(*((f"lora_unet_blocks_0_{layer}", 2, 3) for layer in blocks))
    content = diffusers_converters._convert_musubi_wan_lora_to_diffusers(as_tensors(contents))
    assert_updates_alike(content, contents, WAN)
    comfyui = convert(contents, WAN, "comfyui", FILE)
    content = diffusers_converters._convert_non_diffusers_wan_lora_to_diffusers(dict(comfyui.tensors))
    assert_updates_alike(content, comfyui.contents, WAN)


def test_layers_are_those_that_diffusers_converter_of_sdxl_finds() -> None:
    """All layers of the released UNet, by the names of its own code, and two of a text encoder."""
    names = SDXL.lora_layers["unet"].kohya
    keys = [f"lora_unet_{name.replace('*', '1').replace('.', '_')}" for name in names]
    contents = kohya(*((key, 2, 3) for key in keys), ("lora_te1_text_model_encoder_layers_1_mlp_fc1", 2, 3))
    content = diffusers_converters._maybe_map_sgm_blocks_to_diffusers(
        as_tensors(contents), SimpleNamespace(layers_per_block=2)
    )
    content, alphas = diffusers_converters._convert_non_diffusers_lora_to_diffusers(content)
    assert set(alphas.values()) == {2.0}
    # In names of their own, of before peft.
    theirs = contents_of(FILE, content, {})
    pairs = known_pairs(contents, SDXL_NAMES.layers)
    found = known_pairs(theirs, SDXL_NAMES.layers)
    assert found.keys() == pairs.keys()
    assert all(torch.equal(found[layer].up, pair.up) for layer, pair in pairs.items())


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_a_smaller_dtype_rounds_and_the_greatest_difference_is_reported(
    dtype: torch.dtype, most: float
) -> None:
    small = convert(OF_FLUX, FLUX, "diffusers", FILE, dtype=dtype)
    assert {tensor.dtype for tensor in small.tensors.values()} == {dtype}
    assert most / 10 < small.difference < most
    # What is kept in it is not rounded again.
    kept = convert(small.contents, FLUX, "kohya", FILE)
    assert (kept.difference, kept.contents.dtype) == (0, dtype)
    assert kept.tensors["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"].dtype == dtype


def test_another_alpha_leaves_the_update_and_is_in_the_file() -> None:
    other = convert(OF_WAN, WAN, "kohya", FILE, alpha=16)
    assert other.difference == 0
    assert {float(tensor) for name, tensor in other.tensors.items() if name.endswith(".alpha")} == {16.0}
    assert other.contents.metadata["ss_network_alpha"] == "16"
    with pytest.raises(UserError, match=r"--alpha: a file for comfyui has no place for it"):
        convert(OF_WAN, WAN, "comfyui", FILE, alpha=16)


def test_what_rounding_does_to_an_update_is_within_its_bound_also_where_alpha_was_folded() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        down, up, alpha = torch.rand(3, 1, 1, generator=generator) + 0.5
        pair = LoraPair(down=down, up=up, alpha=float(alpha))
        assert pair.distance(pair.with_alpha(3.0)) <= pair.rounding_bound(torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = LoraPair(down=down.to(dtype), up=pair.with_alpha(1).up.to(dtype), alpha=1)
            assert 0 < pair.distance(rounded) <= pair.rounding_bound(dtype)


def test_a_star_in_a_rename_stands_for_one_part_of_a_name() -> None:
    spelling = Spelling(renames=(("blocks.*.out", "b.*.o"),))
    names = ("blocks.7.out", "blocks.7.attn.out", "blocks.7.out.blocks.8.out")
    assert [spelling.key(f"transformer.{name}").partition(".")[2] for name in names] == [
        *("b.7.o", "blocks.7.attn.out", "b.7.o.b.8.o")
    ]


def test_values_that_a_program_has_no_place_for_are_refused() -> None:
    sana = contents_of(
        FILE,
        {
            "transformer.proj_out.lora_A.weight": torch.ones(4, 6),
            "transformer.proj_out.lora_B.weight": torch.full((6, 4), 1e6),
        },
        {},
    )
    with pytest.raises(UserError, match=r"--to comfyui: ComfyUI is not known to have transformer.proj_out"):
        convert(sana, SANA, "comfyui", FILE)
    with pytest.raises(UserError, match=r"--to kohya: no program is known that reads such files"):
        convert(sana, SANA, "kohya", FILE)
    with pytest.raises(UserError, match=r"lora_B.weight: has values .* that torch.float16 cannot hold"):
        convert(sana, SANA, "diffusers", FILE, dtype=torch.float16)


QKV = fused("q", "k", "v")
LINEAR_1 = fused("q", "k", "v", "mlp", rows=(1, 1, 1, 4))


def pair(outputs: int, rank: int = 4, alpha: float = 2.0, seed: int = 0) -> LoraPair:
    generator = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(shape, generator=generator) for shape in ((rank, 5), (outputs, rank)))
    return LoraPair(down=down, up=up, alpha=alpha)


def delta(one: LoraPair) -> torch.Tensor:
    return (one.up @ one.down) * (one.alpha / one.rank)


def same(one: LoraPair, other: LoraPair) -> bool:
    return one.alpha == other.alpha and torch.equal(one.down, other.down) and torch.equal(one.up, other.up)


@pytest.mark.parametrize("rank", [4, 12])  # 12 is divisible, but the shares overlap
def test_layers_that_were_trained_as_one_share_the_first_matrix(rank: int) -> None:
    whole = pair(42, rank)
    parts = split(whole, LINEAR_1)
    assert torch.equal(torch.cat([part.up for part in parts.values()]), whole.up)
    assert [len(part.up) for part in parts.values()] == [6, 6, 6, 24]
    assert all(torch.equal(part.down, whole.down) and part.alpha == 2 for part in parts.values())
    assert same(join(parts, LINEAR_1), whole)


def test_layers_that_were_trained_separately_keep_their_own_rank() -> None:
    parts = {name: pair(6, seed=seed) for seed, name in enumerate("qkv")}
    whole = join(parts, QKV)
    assert (whole.rank, whole.alpha) == (12, 6.0)
    assert torch.allclose(delta(whole), torch.cat([delta(part) for part in parts.values()]), atol=1e-6)
    again = split(whole, QKV)
    assert all(same(again[name], parts[name]) for name in parts)


def test_a_layer_without_a_lora_is_left_out_again() -> None:
    parts = {"q": pair(6), "mlp": pair(24, seed=1)}
    whole = join(parts, LINEAR_1)
    assert whole.up.shape == (42, 16)
    assert not delta(whole)[6:18].any()
    again = split(whole, LINEAR_1)
    assert again.keys() == parts.keys()
    assert all(same(again[name], parts[name]) for name in parts)


def test_layers_of_other_strengths_and_ranks_become_one_of_the_same_update() -> None:
    parts = {"q": pair(6, alpha=8.0), "k": pair(6, seed=1), "v": pair(6, rank=2, seed=2)}
    whole = join(parts, QKV)
    together = torch.cat([delta(part) for part in parts.values()])
    assert torch.allclose(delta(whole), together, atol=1e-6)
    again = split(whole, QKV)
    assert [part.rank for part in again.values()] == [4, 4, 2]
    assert torch.allclose(torch.cat([delta(one) for one in again.values()]), together, atol=1e-6)


def test_a_lora_of_zeros_has_no_shares() -> None:
    whole = LoraPair(down=torch.ones(12, 5), up=torch.zeros(18, 12), alpha=12.0)
    assert [part.rank for part in split(whole, QKV).values()] == [12, 12, 12]


def test_halves_in_the_other_order_are_swapped_there_and_back() -> None:
    place, whole = Original(("norm",), halves_swapped=True), pair(10)
    (part,) = split(whole, place).values()
    assert torch.equal(part.up, torch.cat([whole.up[5:], whole.up[:5]]))
    assert same(join({"norm": part}, place), whole)
    # It has more than scale and shift: those of other blocks of Stable Diffusion 3.
    (others,) = split(pair(30), place).values()
    assert same(others, pair(30))
    assert same(join({"norm": others}, place), pair(30))


TABLES = {
    f"{component} of {name}": names
    for name in family_names()
    for component, names in load_family(name).lora_layers.items()
}
WAN_LAYERS, UNET = Wan.lora_layers["transformer"], SDXL.lora_layers["unet"]


def numbered(pattern: str) -> str:
    """The pattern with its stars as numbers that no layer has of itself."""
    numbers = iter(range(70, 80))
    return re.sub(r"\*", lambda _: str(next(numbers)), pattern)


def places(names: LayerNames) -> list[tuple[str, Original]]:
    plain = [(layer, renamed(layer)) for layer in names.layers]
    return [*plain, *names.kohya.items(), *names.others.items()]


@pytest.mark.parametrize("table", TABLES)
def test_each_name_is_found_with_dots_and_without_as_its_own_layers(table: str) -> None:
    names = TABLES[table]
    for name, place in places(names):
        layers = tuple(map(numbered, place.layers))
        assert [names.find(layer) for layer in layers] == [renamed(layer) for layer in layers]
        for spelled in (numbered(name), numbered(name).replace(".", "_")):
            found = names.find(spelled)
            assert found is not None
            assert (found.layers, found.rows, found.halves_swapped) == (
                layers,
                place.rows,
                place.halves_swapped,
            )
        assert names.find(f"{numbered(name)}.more") is None


@pytest.mark.parametrize("table", TABLES)
def test_kohyas_name_of_a_layer_leads_back_to_it(table: str) -> None:
    names = TABLES[table]
    for layer in map(numbered, names.layers):
        name, place = names.in_kohya(layer)
        assert layer in place.layers
        assert names.find(name) == place


def test_numbers_of_blocks_go_over_and_numbers_of_layers_are_distinguished() -> None:
    assert WAN_LAYERS.find("blocks_39_ffn_2") == renamed("blocks.39.ffn.net.2")
    assert WAN_LAYERS.find("blocks_39_ffn_1") is None
    assert UNET.find("input_blocks_4_1_transformer_blocks_1_attn1_to_out_0") == renamed(
        "down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_out.0"
    )
    assert UNET.find("input_blocks_4_0_transformer_blocks_1_attn1_to_out_0") is None
