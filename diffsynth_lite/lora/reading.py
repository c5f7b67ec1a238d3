"""This file reads the LoRA files of this and other programs, and accounts for each tensor in them."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.lora.layer_names import LayerNames, Original, split
from diffsynth_lite.lora.layers import COMFYUI_SCALE, MAGNITUDE
from diffsynth_lite.lora.updates import LOKR_NAME, DoraUpdate, LayerUpdate, LokrUpdate, LoraPair, lokr_updates

_MATRIX = re.compile(
    r"(?P<key>.+?)\.(?:(?P<down>lora_A(?:\.default)?|lora_down|(?:lora\.|lora_linear_layer\.)?down)"
    r"|lora_B(?:\.default)?|lora_up|(?:lora\.|lora_linear_layer\.)?up)\.weight"
)
_ALPHA = ".alpha"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_OTHER_KINDS = {
    r"\.lokr_t2$": "a LoKr of convolutions",
    r"\.hada_": "a LoHa",
    r"\.boft_": "a BOFT",
    r"\.oft_": "an OFT",
    r"\.vera_lambda_": "a VeRA",
    r"\.[ab][12]\.weight$": "a GLoRA",
    r"\.lora_mid\.weight$": "a LoCon whose convolutions have three matrices",
    r"\.lora_(B|up)\b.*\.bias$": "a LoRA with biases",
    r"\.(diff|diff_b|set_weight|reshape_weight|w_norm|b_norm)$": "a LoRA that also changes whole weights",
    # It has rows by head, as the authors' files, where others have those of queries before those of keys.
    r"\.attn\.qkv_proj\.lora_A\.default\.": "a LoRA of DiffSynth-Studio on MiniMax-H3",
    r"\b(bundle_emb|emb_params|string_to_param)\b": "a LoRA with embeddings of its own",
}
"""Unsupported kinds, by pattern of a tensor's name."""
_NAMED_OF_ANOTHER_MODEL = 3
_NOT_HONOURED = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
"""peft's settings with which an adapter computes something other than the product of its two matrices."""
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq")
"""peft's initialisations that change the base model, so that the file only fits the changed one."""

_DOTTED = (
    *("model.diffusion_model.", "diffusion_model.", "base_model.model.", "pipe.dit2.", "pipe.dit."),
    *("pipe.unet.", "transformer.", "unet."),
)
_FLAT = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
_TEXT_ENCODERS = {
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.clip_g.transformer.": "text_encoder_2",
    "text_encoders.t5xxl.transformer.": "text_encoder_3",
    "text_encoder_3.": "text_encoder_3",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder.": "text_encoder",
    "lora_te3_": "text_encoder_3",
    "lora_te2_": "text_encoder_2",
    "lora_te1_": "text_encoder",
    "lora_te_": "text_encoder",
}
_DENOISERS = ("transformer", "unet")


class UnknownLayersError(UserError):
    """A LoRA has layers that a model does not have.

    Attributes:
        contents: the file.
    """

    def __init__(self, message: str, contents: "LoraContents") -> None:
        super().__init__(message)
        self.contents = contents


@dataclass(frozen=True, kw_only=True)
class LoraContents:
    """A LoRA file as it is.

    Attributes:
        updates: by the layers' names in the file, prefixes included.
        has_alpha: whether it has an alpha for any layer; without one, alpha is the rank.
    """

    file: Path
    updates: dict[str, LayerUpdate]
    metadata: dict[str, str]
    has_alpha: bool

    @property
    def is_plain(self) -> bool:
        """Whether it is neither a DoRA nor a LoKr."""
        return all(isinstance(update, LoraPair) for update in self.updates.values())

    @property
    def pairs(self) -> dict[str, LoraPair]:
        """The updates of a plain LoRA."""
        pairs = {key: update for key, update in self.updates.items() if isinstance(update, LoraPair)}
        if others := self.updates.keys() - pairs.keys():
            kind = "a LoKr" if isinstance(self.updates[min(others)], LokrUpdate) else "a DoRA"
            raise UserError(
                f"{self.file}: is {kind} ({len(others)} layers such as {min(others)}), which cannot be "
                "joined and split as those of other programs are; use a standard LoRA"
            )
        return pairs

    @property
    def dtype(self) -> torch.dtype:
        """That of the matrices; fp32 where they differ."""
        dtypes = {matrix.dtype for pair in self.pairs.values() for matrix in (pair.down, pair.up)}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def without_text_encoders(self) -> "LoraContents":
        """The same without the layers of any text encoder."""
        kept = {key: one for key, one in self.updates.items() if not key.startswith(tuple(_TEXT_ENCODERS))}
        if not kept:
            raise UserError(f"{self.file}: holds no layers but of text encoders")
        return replace(self, updates=kept)


def read_contents(place: Path) -> LoraContents:
    """Read a LoRA file.

    Args:
        place: the file, or a folder with one file of tensors in it. Where peft's ``adapter_config.json`` is
            next to an ``adapter_model.safetensors``, its alpha is that of the file.
    """
    file = _file_in(place)
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{file}: is not a readable safetensors file ({text})") from error
    return contents_of(file, tensors, metadata)


def contents_of(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> LoraContents:
    """The content of a file with these tensors and metadata, which need not be written yet."""
    settings = _peft_settings(file, metadata)
    _refuse_other_kinds(file, tensors, settings)
    matrices, vectors, alphas = _sorted_out(file, tensors)
    updates: dict[str, LayerUpdate] = {}
    has_alpha = bool(alphas)
    for key, (down, up) in matrices.items():
        alpha = alphas.get(key) or _alpha_of(file, key, settings, down.shape[0])
        has_alpha = has_alpha or alpha is not None
        updates[key] = pair = LoraPair(down=down, up=up, alpha=alpha or float(down.shape[0]))
        if (magnitude := vectors.get(f"{key}{MAGNITUDE}")) is not None:
            scale = vectors.get(f"{key}{COMFYUI_SCALE}")
            updates[key] = DoraUpdate(pair=pair, magnitude=magnitude, comfyui=scale)
    try:
        products = lokr_updates(tensors)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    for key, update in products.items():
        rank = update.inner_rank
        alpha = alphas.get(key) or (None if rank is None else _alpha_of(file, key, settings, rank))
        # Where both matrices are whole, a tensor for alpha has no effect.
        has_alpha = has_alpha or alpha is not None
        updates[key] = update if rank is None or alpha is None else replace(update, scale=alpha / rank)
    if len({type(update) for update in updates.values()}) > 1:
        raise UserError(
            f"{file}: has layers of different kinds (LoRA, DoRA, LoKr), which is not read here; get a file "
            "of one kind"
        )
    return LoraContents(file=file, updates=updates, metadata=dict(metadata), has_alpha=has_alpha)


def _alpha_of(file: Path, key: str, settings: Mapping[str, Mapping[str, Any]], rank: int) -> float | None:
    try:
        return _alpha_by_peft(key, settings, rank)
    except (AttributeError, OverflowError, TypeError, ValueError, re.error) as error:
        raise UserError(f"{file}: its settings of peft give no alpha for {key} ({error})") from error


def known_pairs(contents: LoraContents, names: Mapping[str, LayerNames]) -> dict[str, LoraPair]:
    """The updates of a plain LoRA by component and diffusers' name of the layer."""
    known = known_updates(replace(contents, updates=dict(contents.pairs)), names)
    return {name: update for name, update in known.items() if isinstance(update, LoraPair)}


def known_updates(contents: LoraContents, names: Mapping[str, LayerNames]) -> dict[str, LayerUpdate]:
    """The updates by component and diffusers' name of the layer.

    Args:
        names: layers by component; the denoiser is the first.
    """
    known: dict[str, LayerUpdate] = {}
    if unknown := unknown_layers(contents, names):
        family = contents.metadata.get("diffsynth_lite.family")
        origin = f" here, as the file is of {family}" if family else ""
        # For a LoRA of another model a few names are enough.
        named = unknown if len(unknown) < len(contents.updates) else unknown[:_NAMED_OF_ANOTHER_MODEL]
        raise UnknownLayersError(
            f"{contents.file}: {len(unknown)} of {len(contents.updates)} layers are not known{origin}: "
            f"{join_names(named)}{'; ...' if len(named) < len(unknown) else ''}",
            contents,
        )
    for key, update in contents.updates.items():
        component, place = _place_of(key, names)
        assert place is not None
        for layer, part in _split(contents.file, key, update, place).items():
            name = f"{component}.{layer}"
            if name in known:
                raise UserError(f"{contents.file}: has {name} twice, the second time as {key}")
            known[name] = part
    return known


def _split(file: Path, key: str, update: LayerUpdate, place: Original) -> Mapping[str, LayerUpdate]:
    if isinstance(update, LoraPair):
        return split(update, place)
    if len(place.layers) > 1 or place.swaps(*update.sizes):
        raise UserError(
            f"{file}: {key} is {join_names(place.layers)} of diffusers, and a LoKr or DoRA cannot be "
            "split; generate with it in the program that it is for"
        )
    return {place.layers[0]: update}


def unknown_layers(contents: LoraContents, names: Mapping[str, LayerNames]) -> list[str]:
    """The layers of a file that a model does not have, by the file's names, with their sizes."""
    unknown = []
    for key, update in contents.updates.items():
        place, sizes = _place_of(key, names)[1], update.sizes
        if place is None or not place.fits(*sizes):
            unknown.append(f"{key} ({sizes[0]} to {sizes[1]})")
    return unknown


def likeliest(contents: LoraContents, fitting: Mapping[str, Mapping[str, LayerNames]]) -> list[str]:
    """The likely families of a file, of those that have all its layers."""
    expected = {name: next(iter(names.values())).num_blocks for name, names in fitting.items()}
    same = [
        name for name, depths in expected.items() if depths and depths == _depths(contents, fitting[name])
    ]
    return same or [name for name, depths in expected.items() if not depths] or list(expected)


def _depths(contents: LoraContents, names: Mapping[str, LayerNames]) -> dict[str, int]:
    """Number of blocks in each list, by the last one of which a file has layers."""
    depths: dict[str, int] = {}
    for layer in known_updates(contents, names):
        _, blocks, number, *_ = (*layer.split("."), "", "")
        if number.isdecimal():
            depths[blocks] = max(depths.get(blocks, 0), int(number) + 1)
    return depths


def _place_of(key: str, names: Mapping[str, LayerNames]) -> tuple[str, Original | None]:
    component, name = _component_of(key)
    if component in _DENOISERS:
        component = next(iter(names))
    known = names.get(component)
    return component, None if known is None else known.find(name)


def _component_of(key: str) -> tuple[str, str]:
    """Component of a name in a file, and the name without the component."""
    for prefix, component in _TEXT_ENCODERS.items():
        if key.startswith(prefix):
            return component, key.removeprefix(prefix)
    for prefix in _FLAT:
        if key.startswith(prefix):
            return _DENOISERS[0], key.removeprefix(prefix)
    # Some have two, such as unet.base_model.model.
    while prefix := next(filter(key.startswith, _DOTTED), ""):
        key = key.removeprefix(prefix)
    return _DENOISERS[0], key


def _file_in(place: Path) -> Path:
    if place.is_dir():
        found = sorted(place.glob("*.safetensors"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise UserError(f"{place}: name one file of safetensors; in this folder there is {names}")
        place = found[0]
    if not place.is_file():
        raise UserError(f"{place}: there is no such file")
    return place


def _peft_settings(file: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """peft's settings of each component, from the header or the file's folder; "" is all components."""
    config = file.with_name("adapter_config.json")
    try:
        if LORA_ADAPTER_METADATA_KEY in metadata:
            settings: dict[str, dict[str, Any]] = {}
            for name, value in json.loads(metadata[LORA_ADAPTER_METADATA_KEY]).items():
                component, _, setting = name.partition(".")
                settings.setdefault(component, {})[setting] = value
            return settings
        if file.name == "adapter_model.safetensors" and (config.exists() or config.is_symlink()):
            if not config.is_file():
                raise ValueError(f"{config.name} is not a file")
            return {"": dict(json.loads(config.read_text(encoding="utf-8")))}
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its settings of peft cannot be read ({error})") from error
    return {}


def _alpha_by_peft(key: str, settings: Mapping[str, Mapping[str, Any]], rank: int) -> float | None:
    component, name = _component_of(key)
    of_denoiser = [
        settings[other] for other in _DENOISERS if component == _DENOISERS[0] and other in settings
    ]
    chosen = settings.get(component) or next(iter(of_denoiser), settings.get("", {}))
    if not (named := [one for one in ("lora_alpha", "alpha") if one in chosen]):
        return None
    patterns = chosen.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), name), chosen[named[0]]))
    if chosen.get("use_rslora") not in (None, False, True):
        raise ValueError(f"use_rslora is {chosen['use_rslora']!r}")
    if not alpha or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha is {alpha:g}")
    return alpha * math.sqrt(rank) if chosen.get("use_rslora") else alpha


def _refuse_other_kinds(
    file: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Mapping[str, Any]]
) -> None:
    for pattern, kind in _OTHER_KINDS.items():
        if found := [name for name in tensors if re.search(pattern, name)]:
            raise UserError(
                f"{file}: is {kind} ({len(found)} tensors such as {found[0]}), which can be neither "
                "converted nor trained here; use a standard LoRA"
            )
    if COMFYUI_SCALE in "".join(tensors) and MAGNITUDE not in "".join(tensors):
        raise UserError(
            f"{file}: is a DoRA of another program (dora_scale), and which norms these are depends on the "
            "program; use a DoRA with peft's names (lora_magnitude_vector), or a standard LoRA"
        )
    for one in settings.values():
        start = str(one.get("init_lora_weights")).lower()
        if one.get("use_dora") and not any(name.endswith(MAGNITUDE) for name in tensors):
            raise UserError(f"{file}: is a DoRA by its settings, and has no magnitudes; use a standard LoRA")
        if str(one.get("peft_type", "LORA")).upper() not in ("LORA", "LOKR"):
            raise UserError(f"{file}: is of the kind {one['peft_type']} by its settings; use a standard LoRA")
        if unknown := next(filter(one.get, _NOT_HONOURED), None):
            raise UserError(
                f"{file}: has {unknown} in its settings of peft, which is not computed here; use a standard "
                "LoRA"
            )
        if start.startswith(_BASE_CHANGING):
            raise UserError(
                f"{file}: was started by {start}, which changes the base model that it belongs to; save it "
                "with peft's path_initial_model_for_weight_conversion"
            )


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.dtype in _DTYPES and tensor.ndim > 1 and tensor.numel() > 0


def _is_alpha(tensor: Tensor) -> bool:
    is_number = tensor.dtype in (*_DTYPES, torch.int32, torch.int64) and tensor.numel() == 1
    return is_number and bool(tensor.isfinite()) and bool(tensor)


def _sorted_out(
    file: Path, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], dict[str, float]]:
    """The two matrices of each layer, the norms of a DoRA by their own names, and the alphas that are
    tensors.

    By the file's names of layers.
    """
    downs: dict[str, Tensor] = {}
    ups: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    alphas, rest, products = {}, [], set()
    for name, tensor in tensors.items():
        if name.endswith(_ALPHA) and _is_alpha(tensor):
            alphas[name.removesuffix(_ALPHA)] = float(tensor)
        elif (match := _MATRIX.fullmatch(name)) and _is_matrix(tensor):
            (downs if match["down"] else ups)[match["key"]] = tensor
        elif (match := LOKR_NAME.fullmatch(name)) and _is_matrix(tensor):
            products.add(match["key"])
        elif name.endswith((MAGNITUDE, COMFYUI_SCALE)) and tensor.dtype in _DTYPES:
            vectors[name] = tensor.flatten()
        else:
            rest.append(_described(name, tensor))
    if not downs and not products:
        raise UserError(
            f"{file}: holds no LoRA (first of {len(tensors)} tensors: {next(iter(tensors), None)})"
        )
    rest += [f"{key} with one matrix" for key in downs.keys() ^ ups.keys()]
    rest += [f"{key}{_ALPHA}" for key in alphas.keys() - downs.keys() - products]
    rest += _unfitting(downs, ups, vectors)
    if rest:
        raise UserError(
            f"{file}: {len(rest)} tensors belong to no layer of a LoRA: {join_names(sorted(rest))}"
        )
    return {key: (down, ups[key]) for key, down in downs.items()}, vectors, alphas


def _described(name: str, tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "no axes"
    value = f", {tensor.item()}" if tensor.numel() == 1 else ""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')}, {shape}{value})"


def _unfitting(
    downs: Mapping[str, Tensor], ups: Mapping[str, Tensor], vectors: Mapping[str, Tensor]
) -> list[str]:
    """Descriptions of tensors that do not fit the others of their layer."""
    ranks = [
        f"{key} with ranks {down.shape[0]} and {ups[key].shape[1]}"
        for key, down in downs.items()
        if key in ups and down.shape[0] != ups[key].shape[1]
    ]
    norms = []
    for name, vector in vectors.items():
        up = ups.get(name.removesuffix(MAGNITUDE).removesuffix(COMFYUI_SCALE))
        if up is None or vector.shape != up.shape[:1]:
            norms.append(_described(name, vector))
    return ranks + norms
