"""The noise levels that each family trains by default, and each recipe, next to those of other trainers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from diffsynth_lite.config import load_config
from diffsynth_lite.core.noise.densities import (
    TimestepDensity,
    level_shares,
    resolution_mu,
    shift_sigma,
    sigma_from_uniform,
)
from diffsynth_lite.core.noise.paths import LossWeighting, loss_weight
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import family_names, load_family, releases_of
from diffsynth_lite.pipelines.base.diffusers_family import exponential_shift
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.releases import Release
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.data_settings import (
    frame_counts_of,
    own_audio_shape,
    set_learned,
    shifts_by_size,
)

POINTS = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096


def mean_level(density: TimestepDensity, shift: float, weighting: LossWeighting = "none") -> float:
    """Mean of the noise levels, each as much as its loss counts."""
    levels = shift_sigma(sigma_from_uniform(POINTS, density), shift)
    weights = loss_weight(levels, weighting)
    return ((levels * weights).sum() / weights.sum()).item()


def flux_line(num_tokens: int) -> float:
    """The shift of FLUX.1's sampler."""
    return math.exp(
        resolution_mu(num_tokens, base_shift=0.5, max_shift=1.15, base_tokens=256, max_tokens=4096)
    )


def ltx_line(num_tokens: int) -> float:
    """The shift of LTX-Video's sampler."""
    return math.exp(
        resolution_mu(num_tokens, base_shift=0.95, max_shift=2.05, base_tokens=1024, max_tokens=4096)
    )


def of(
    density: TimestepDensity, shift: float | Callable[[int], float], weighting: LossWeighting = "none"
) -> Callable[[int], float]:
    """The mean level by the number of tokens, of a shift that may depend on it."""
    return lambda num_tokens: mean_level(density, shift(num_tokens) if callable(shift) else shift, weighting)


def levels_of_ideogram4(side: float) -> torch.Tensor:
    return torch.sigmoid(math.log(side / 512) + 1.5 * torch.special.ndtri(POINTS))


def mean_of_ideogram4(num_tokens: int) -> float:
    return levels_of_ideogram4(16 * math.sqrt(num_tokens)).mean().item()


def stretched_mean(num_tokens: int) -> float:
    """Of the levels of Lightricks' ``ShiftedLogitNormalTimestepSampler``, one of ten of which is uniform."""
    mu = math.log(ltx_line(num_tokens))
    low, high = torch.sigmoid(torch.tensor([mu - 2.5758, mu + 3.0902], dtype=torch.float64))
    stretched = (torch.sigmoid(mu + torch.special.ndtri(POINTS)) - low) / (high - low)
    reflected = torch.where(stretched < 1e-3, 2e-3 - stretched, stretched).clamp(max=1)
    return 0.9 * reflected.mean().item() + 0.1 * (1 + 1e-3) / 2


def weighted_mean(levels: torch.Tensor) -> float:
    """With the weights of DiffSynth-Studio."""
    weights = loss_weight(levels, "bell")
    return ((levels * weights).sum() / weights.sum()).item()


def mean_of_ltx2(_num_tokens: int) -> float:
    """Of DiffSynth-Studio, whose levels end at a tenth."""
    return weighted_mean(1 - 0.9 * (1 - shift_sigma(POINTS, ltx_line(4096))))


def qwen_21_line(num_tokens: int) -> float:
    mu = resolution_mu(num_tokens, base_shift=0.5, max_shift=0.9, base_tokens=256, max_tokens=8192)
    return math.exp(mu)


FLUX = (
    of("uniform", 1),  # diffusers' training scripts
    of("logit_normal", flux_line),  # musubi-tuner, flux_shift
    of("uniform", 3, "bell"),  # DiffSynth-Studio
)
QWEN_IMAGE = (
    of("uniform", 1),  # diffusers' training script
    of("uniform", math.exp(0.8), "bell"),  # DiffSynth-Studio
    of("logit_normal", 2.2),  # musubi-tuner, docs/qwen_image.md
)
WAN = (
    of("uniform", 5, "bell"),  # DiffSynth-Studio
    of("logit_normal", 3),  # musubi-tuner, docs/wan.md
    of("logit_normal", 5),  # the same with what Wan is sampled with at 720p
)
KREA2 = (
    of("uniform", 1),  # diffusers' training script, and ai-toolkit for edits (krea2:o_edit of its screen)
    of("uniform", math.exp(0.8), "bell"),  # DiffSynth-Studio
    of("logit_normal", math.exp(1.15)),  # musubi-tuner, krea2_shift, of 1280 x 1280 pixels
)
LONGCAT_IMAGE = (
    of("logit_normal", flux_line),  # its authors, train_examples/lora and edit_lora
    of("uniform", flux_line),  # the sampler's own
)
REFERENCES: dict[str, Sequence[Callable[[int], float]]] = {
    **dict.fromkeys(("chroma", "flux", "flux_fill", "flux_kontext"), FLUX),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_layered"), QWEN_IMAGE),
    **dict.fromkeys(("krea2", "krea2_edit"), KREA2),
    **dict.fromkeys(("longcat_image", "longcat_image_edit"), LONGCAT_IMAGE),
    **dict.fromkeys(("wan", "wan_i2v", "wan_vace", "wan_animate"), WAN),
    "anima": (
        of("logit_normal", 1),  # kohya's sd-scripts, by default, and OneTrainer, of its preset
        of("uniform", 3, "bell"),  # DiffSynth-Studio
        of("uniform", 3),  # the sampler's own
    ),
    "cogvideox": (of("uniform", 1),),  # diffusers' training script
    "ernie_image": (
        of("uniform", 1),  # diffusion-pipe, by default
        of("uniform", 3, "bell"),  # DiffSynth-Studio
        of("uniform", 4),  # the sampler's own
    ),
    "aura_flow": (
        of("logit_normal", 1),  # diffusion-pipe, by default
        of("logit_normal", 1.73),  # SimpleTuner's example
    ),
    "flux2": (
        of("uniform", math.exp(0.8), "bell"),  # DiffSynth-Studio
        of("logit_normal", flux_line),  # musubi-tuner, flux2_shift
    ),
    "flux3": (of("uniform", 6.93),),  # the sampler's own; what other trainers take was not found
    "hidream": (
        of("uniform", 3),  # ai-toolkit, diffusers' training script, and the sampler's own
        of("logit_normal", 1),  # diffusion-pipe, by default, and OneTrainer, of its preset
        of("uniform", 6),  # the sampler of Dev
    ),
    "hunyuan_video": (
        of("logit_normal", 1),  # diffusion-pipe
        of("logit_normal", 7),  # musubi-tuner, docs/hunyuan_video.md
    ),
    "hunyuan_video_i2v": (
        of("logit_normal", 7),  # Tencent's trainer
        of("uniform", 7),  # the sampler's own
    ),
    "hunyuan_video_15": (
        of("logit_normal", 3),  # Tencent's trainer, train.py
        of("logit_normal", 2),  # musubi-tuner, docs/hunyuan_video_1_5.md
    ),
    "ideogram4": (
        mean_of_ideogram4,  # diffusers' training script and musubi-tuner
        lambda _: weighted_mean(levels_of_ideogram4(1024)),  # DiffSynth-Studio
    ),
    "kandinsky5": (
        of("logit_normal", 5),  # musubi-tuner, docs/kandinsky5.md
        of("uniform", 3),  # what its authors' own program samples with
        of("uniform", 5),  # the sampler's own
    ),
    "kandinsky5_video": (
        of("logit_normal", 5),  # musubi-tuner, docs/kandinsky5.md
        of("uniform", 10),  # what its authors' own program samples with
        of("uniform", 5),  # the sampler's own
    ),
    "ltx2": (
        stretched_mean,  # Lightricks' trainer
        mean_of_ltx2,
        of(
            "uniform", lambda num_tokens: ltx_line(min(num_tokens, 4096))
        ),  # the sampler's own line, to its end
    ),
    "ltx_video": (
        of("logit_normal", 1),  # diffusion-pipe and finetrainers
        of("logit_normal", ltx_line),  # Lightricks' trainer for LTX-Video
    ),
    "lumina2": (
        of("logit_normal", flux_line),  # its authors, transport/transport.py
        of("logit_normal", 1),  # diffusion-pipe, by default
        of("uniform", 6),  # the sampler's own
    ),
    "minimax_h3": (
        of("uniform", 8),  # diffusion-pipe, its example
        of("uniform", 12),  # the sampler's own, also of SimpleTuner
    ),
    "qwen_image_21": (
        of("uniform", math.exp(0.8), "bell"),  # DiffSynth-Studio
        of("uniform", qwen_21_line),  # what it is sampled with
    ),
    "sana": (
        of("uniform", 1),  # diffusers' training script
        of("logit_normal", 3),  # its own training
    ),
    "sd3": (
        of("logit_normal", 3),  # diffusers' training script
        of("uniform", 1),  # kohya's sd-scripts
        of("logit_normal", 1),  # diffusion-pipe
    ),
    "sdxl": (of("uniform", 1),),  # diffusers' training scripts
    "z_image": (
        of("uniform", 6),  # diffusers' training script, of the base model
        of("uniform", 3, "bell"),  # DiffSynth-Studio
        of("logit_normal", 2),  # musubi-tuner, docs/zimage.md
    ),
}

RELEASES = [(name, release) for name in family_names() for release in releases_of(name)]
RECIPES = [
    path
    for path in sorted((Path(__file__).parents[2] / "configs").glob("*_lora.yaml"))
    if releases_of(load_config(path).config.model.family)  # else nothing is known of its sampler
]


def require_within(mean: float, name: str, num_tokens: int) -> None:
    # One reference is exact; several span what is usual.
    references = [reference(num_tokens) for reference in REFERENCES[name]]
    assert min(references) - 1e-4 <= mean <= max(references) + 1e-4


@pytest.mark.parametrize(("name", "release"), RELEASES, ids=[release.hub_id for _, release in RELEASES])
def test_the_family_default_is_within_what_others_train(name: str, release: Release, tmp_path: Path) -> None:
    family = load_family(name)(write_release(release, tmp_path))
    shape = family.latents_shape(*release.size)
    require_within(mean_level("uniform", family.family_shift(shape)), name, family.num_tokens(shape))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_within_what_others_train(path: Path, tmp_path: Path) -> None:
    config = load_config(path).config
    name = config.model.family
    (release,) = (one for one in releases_of(name) if one.hub_id == config.model.path)
    family = load_family(name)(write_release(release, tmp_path))
    levels = build_noise_levels(config, family)
    shape = family.latents_shape(*config.data.first_size, max(frame_counts_of(config, family)))
    mean = sum(part * shares.mean for part, shares in levels.shares(shape))
    require_within(mean, name, family.num_tokens(shape))


def test_the_recipe_of_ltx2_has_the_noise_levels_of_its_authors(tmp_path: Path) -> None:
    path = next(path for path in RECIPES if path.name == "ltx2_lora.yaml")
    config = load_config(path, ["data.audio=true", "objective.audio_noise=own"]).config
    family = load_family("ltx2")(write_release(releases_of("ltx2")[0], tmp_path))
    set_learned(config, family)
    levels = build_noise_levels(config, family)
    shape = family.latents_shape(768, 512, 81)
    audio_shape = own_audio_shape(config, family, 81)
    assert audio_shape is not None
    for part, num_tokens, mean, below_half, highest in (
        (shape, 4224, 0.747, 0.137, 0.275),
        (audio_shape, 84, 0.579, 0.355, 0.072),
    ):
        assert family.num_tokens(part) == num_tokens
        ((_, shares),) = levels.shares(part)
        assert shares.mean == pytest.approx(stretched_mean(num_tokens), abs=1e-4)
        found = shares.mean, shares.below_half, shares.tenths[-1]
        assert found == pytest.approx((mean, below_half, highest), abs=6e-4)
    # The run is known by both.
    known = {"768x512x81": ltx_line(4224), "audio of 81 frames": ltx_line(84)}
    assert shifts_by_size(config, family, levels.shift) == pytest.approx(known)


@pytest.mark.parametrize(
    ("hub_id", "size", "mean", "below_half", "mean_before"),
    [
        ("black-forest-labs/FLUX.2-dev", (512, 512, 1), 0.631, 0.31, 0.759),
        ("black-forest-labs/FLUX.2-dev", (1024, 1024, 1), 0.631, 0.31, 0.797),
        ("black-forest-labs/FLUX.2-klein-base-4B", (1024, 1024, 1), 0.631, 0.31, 0.797),
        ("Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", (1280, 720, 81), 0.747, 0.17, 0.870),
        ("Lightricks/LTX-Video", (768, 512, 161), 0.800, 0.11, 0.917),
        ("Lightricks/LTX-Video", (768, 512, 73), 0.790, 0.12, 0.790),
    ],
)
def test_what_was_corrected_has_these_noise_levels_and_had_those(
    hub_id: str,
    size: tuple[int, int, int],
    mean: float,
    below_half: float,
    mean_before: float,
    tmp_path: Path,
) -> None:
    ((name, release),) = ((name, release) for name, release in RELEASES if release.hub_id == hub_id)
    family = load_family(name)(write_release(release, tmp_path))
    shape = family.latents_shape(*size)
    shift = family.family_shift(shape)
    shares = level_shares(lambda draws: shift_sigma(sigma_from_uniform(draws, "uniform"), shift))
    assert (round(shares.mean, 3), round(shares.below_half, 2)) == (mean, below_half)
    assert round(mean_level("uniform", family.earlier_shift(shape)), 3) == mean_before


def test_a_shift_that_no_number_holds_is_an_error_of_the_user() -> None:
    with pytest.raises(UserError, match=r"objective\.shift: that of the sampler is exp\(2700\)"):
        exponential_shift(2700.2)
