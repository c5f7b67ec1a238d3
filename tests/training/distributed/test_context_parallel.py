"""Processes that share the tokens of a sample compute what one computes: losses, gradients and images."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxKontextPipeline, QwenImagePipeline, QwenImageTransformer2DModel
from family_sample import CPU, adapted_transformer, engine_with
from processes import NUM_RANKS, on_ranks
from release_layouts import ti2v, wan_of_images
from ring_on_cpu import allow_rings
from torch import Tensor

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    IneffectiveSwitchError,
    gradient_engine,
)
from diffsynth_lite.core.parallel import (
    MESH_DIMENSIONS,
    ContextParallel,
    FailedWithinPassError,
    PeerFailedError,
    SplitReport,
)
from diffsynth_lite.core.weights.sharding import BaseShards
from diffsynth_lite.pipelines import (
    Conditioning,
    ModelFamily,
    PipelineFolder,
    flux,
    flux2,
    load_family,
    ltx_video,
    qwen_image,
    wan,
)
from diffsynth_lite.training.distributed.context import context_of
from diffsynth_lite.training.distributed.devices import mean_gradients

LENGTHS = (5, 7, 3)
"""Of the prompts of a batch, where they have a mask: none can be split as it is."""
SIGMA = torch.tensor([0.1, 0.5, 0.9])
SAVING = BlockPolicy(selected=BlockStrategy(offload=True, save_attention="park"))


def qwen(**settings: bool) -> QwenImagePipeline:
    """With heads that two can share.

    Args:
        settings: of the model, such as a timestep of its own for what is edited, ``zero_cond_t``.
    """
    parts = qwen_image.tiny().components
    width = parts["text_encoder"].config.text_config.hidden_size
    torch.manual_seed(0)
    parts["transformer"] = QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=width,
        axes_dims_rope=(8, 4, 4),
        **settings,
    )
    return QwenImagePipeline(**parts)


CASES: dict[str, tuple[str, Callable[[], Any], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "flux": ("flux", flux.tiny, (16, 4, 8), {}),
    "flux_kontext": (
        "flux_kontext",
        lambda: FluxKontextPipeline(**flux.tiny().components),
        (16, 4, 8),
        {"input_latents_0": (16, 6, 4)},
    ),
    "flux2 with an image": ("flux2", flux2.tiny, (128, 2, 4), {"input_latents_0": (128, 3, 2)}),
    "qwen_image": ("qwen_image", qwen, (16, 1, 4, 8), {}),
    "qwen_image_edit": (
        "qwen_image_edit",
        lambda: qwen(zero_cond_t=True),
        (16, 1, 4, 8),
        {"input_latents_0": (16, 1, 4, 6)},
    ),
    "qwen_image_layered": (
        "qwen_image_layered",
        lambda: qwen(use_additional_t_cond=True, use_layer3d_rope=True),
        (16, 3, 4, 8),
        {"picture_latents": (16, 1, 4, 8)},
    ),
    "wan": ("wan", wan.tiny, (16, 3, 4, 8), {}),
    "wan from first frames": ("wan", ti2v, (48, 3, 4, 8), {"first_frame_latents": (48, 1, 4, 8)}),
    "wan_i2v": ("wan_i2v", lambda: wan_of_images("flf2v"), (16, 3, 4, 8), {}),
    "ltx_video": ("ltx_video", ltx_video.tiny, (128, 3, 2, 4), {}),
    "ltx_video from first frames": (
        "ltx_video",
        ltx_video.tiny,
        (128, 3, 2, 4),
        {"first_frame_latents": (128, 1, 2, 4), "first_frame_std": (128, 1, 2, 4)},
    ),
}
"""Of what the families are given: the family, its pipeline, the latents, and what else a sample has."""
ALL_WAYS = ("wan",)
"""Which are also computed without checkpointing, and with shards."""
IN_BF16 = ("flux", "qwen_image", "wan", "ltx_video")
"""Which are also computed as a run has it unless its config says otherwise."""
MASKED = ("qwen_image", "qwen_image_edit", "qwen_image_layered", "ltx_video")


def family_of(name: str, folder: Path) -> ModelFamily:
    return load_family(CASES[name][0])(PipelineFolder(path=folder / name))


def sample_of(name: str, family: ModelFamily) -> tuple[Tensor, list[Conditioning]]:
    """Latents and conditioning of a batch of three, the same each time."""
    family_name, _, shape, more = CASES[name]
    generator = torch.Generator().manual_seed(5)
    samples = []
    for length in LENGTHS:
        given = family.example_conditioning(shape) | {key: torch.ones(size) for key, size in more.items()}
        drawn = {
            key: torch.randn(one.shape, generator=generator) if one.ndim else one
            for key, one in given.items()
        }
        if not family_name.startswith("wan"):  # whose image attention counts on 512
            drawn["prompt_embeds"] = drawn["prompt_embeds"][: length if family_name in MASKED else 8]
        samples.append(drawn)
    return torch.randn(3, *shape, generator=generator), samples


def loss_and_gradients(
    name: str, family: ModelFamily, engine: GradientEngine, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Tensor | None]]:
    """Of a model with a LoRA, which is split if the family says so; gradients are those of all processes."""
    model = adapted_transformer(family)
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
    shared = 1
    if family.context is not None:
        family.context.apply_to(model)
        shared = NUM_RANKS
    latents, samples = sample_of(name, family)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with gradient_engine(engine), autocast:
        loss = family.predict(model, latents, SIGMA, samples).float().square().mean()
    with gradient_engine(engine):
        loss.backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    processes = SimpleNamespace(num_processes=shared)
    mean_gradients(trained.values(), processes, context_parallel=shared)
    return loss.item(), {name: one.grad for name, one in trained.items()}


def distance(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Of all gradients together, relative to their length."""
    pairs = [(found[name], one) for name, one in expected.items()]
    assert all((one is None) == (other is None) for one, other in pairs)
    distance = sum(float((one - other).square().sum()) for one, other in pairs if one is not None)
    length = sum(float(other.square().sum()) for _, other in pairs if other is not None)
    return (distance / length) ** 0.5


def same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> bool:
    return all(
        one is expected[name] is None or torch.equal(one, expected[name]) for name, one in found.items()
    )


def check_family(name: str, folder: Path, meshes: dict[str, Any]) -> dict[str, Any]:
    """What split models of a family compute, next to the whole one."""
    family = family_of(name, folder)
    loss, gradients = loss_and_gradients(name, family, engine_with((False, False)))
    in_bf16 = gradients_in_bf16(name, family) if name in IN_BF16 else {}
    found: dict[str, Any] = {}
    for kind in family.sequence_split.kinds:
        family.context = ContextParallel(meshes[kind], CPU, kind=kind, split=family.sequence_split)
        engine = engine_with((True, True), policy=SAVING)
        split_loss, split = loss_and_gradients(name, family, engine)
        report = engine.report()
        found[kind] = {
            "loss": abs(split_loss - loss) / loss,
            "gradients": distance(split, gradients),
            "did": [report.blocks_recomputed > 0, report.bytes_offloaded > 0, report.attention_saved > 0],
            "split": family.context.report().metrics(),
        }
        if name in IN_BF16:
            found[kind]["in bf16"] = distance(gradients_in_bf16(name, family), in_bf16)
        if name in ALL_WAYS:
            _, kept = loss_and_gradients(name, family, engine_with((False, False)))
            found[kind]["same"] = [same(kept, split), same(check_sharded(name, family), split)]
    return found


def gradients_in_bf16(name: str, family: ModelFamily) -> dict[str, Tensor | None]:
    """Gradients under autocast, that of CUDA."""
    _, gradients = loss_and_gradients(name, family, engine_with((True, False)), torch.bfloat16)
    return gradients


def rms_norm_of_cuda(
    states: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """In 32 bits under autocast, as CUDA's has it and the CPU's has not."""
    if torch.is_autocast_enabled("cpu"):
        states, weight = states.float(), None if weight is None else weight.float()
    return torch.rms_norm(states, shape, weight, eps)


def check_sharded(name: str, family: ModelFamily) -> dict[str, Tensor | None]:
    """Gradients where the processes share the base, too."""
    family.shards = BaseShards(torch.distributed.group.WORLD, CPU, family.block_lists)
    _, gradients = loss_and_gradients(name, family, engine_with((True, True)))
    family.shards = None
    return gradients


def generated(family: ModelFamily) -> Tensor:
    """What a preview makes of a prompt, which is padded where it is split."""
    model = family.load_transformer(torch.float32)
    if family.context is not None:
        family.context.apply_to(model)
    generator = torch.Generator().manual_seed(1)
    width = model.config.joint_attention_dim
    prompts = [{"prompt_embeds": torch.randn(length, width, generator=generator)} for length in (5, 3)]
    request = SimpleNamespace(
        conditioning=prompts[0],
        negative=prompts[1],
        guidance_scale=2.0,
        is_guided=True,
        call_arguments=dict,
    )
    seen: list[Tensor] = []

    def pipeline(**given: Any) -> Any:
        for prefix in ("", "negative_"):
            embeds, mask = given[f"{prefix}prompt_embeds"], given[f"{prefix}prompt_embeds_mask"]
            with torch.no_grad():
                seen.append(
                    model(
                        hidden_states=torch.linspace(-1, 1, 512).reshape(1, 8, 64),
                        timestep=torch.tensor([0.5]),
                        encoder_hidden_states=embeds,
                        encoder_hidden_states_mask=mask,
                        img_shapes=[[(1, 2, 4)]],
                        return_dict=False,
                    )[0]
                )
        return SimpleNamespace(images=[])

    pipeline.transformer = model
    family.generate(pipeline, request)
    return torch.cat(seen)


def failures(rank: int, folder: Path, mesh: Any) -> dict[str, str]:
    """Names of the errors that a process gets where one fails while previews are generated."""
    family = family_of("wan", folder)
    model = family.load_transformer(torch.float32)
    shared = ContextParallel(mesh, CPU, kind="ulysses", split=family.sequence_split)
    shared.apply_to(model)
    found = {}
    latents, samples = sample_of("wan", family)

    def attempt(name: str, last_frame: int, fails: bool) -> None:
        found[name] = "none"
        try:
            with torch.no_grad(), shared.failing_together():
                for place in range(2):
                    if fails and rank == 1 and place == 1:
                        raise ValueError("of one process")
                    family.predict(model, latents[:, :, :last_frame], SIGMA, samples)
        except (PeerFailedError, FailedWithinPassError, ValueError) as error:
            found[name] = type(error).__name__

    attempt("between", 3, fails=True)
    attempt("nowhere", 3, fails=False)
    # 3 rows of latents make 1 row of tokens; 1 x 1 x 3 cannot be split.
    latents = latents[:, :, :, :2, :6]
    attempt("within", 1, fails=False)
    return found


def waits_of_all(family: ModelFamily) -> list[float]:
    """Seconds that all processes wait for one another, before all of them share samples and after."""
    train = SimpleNamespace(context_parallel=2, context_parallel_kind="ulysses", step_timeout_minutes=0.5)
    options = torch.distributed.group.WORLD._get_backend(CPU).options
    before = options._timeout.total_seconds()
    accelerator = SimpleNamespace(num_processes=NUM_RANKS, device=CPU)
    context_of(SimpleNamespace(train=train), family, accelerator)
    return [before, options._timeout.total_seconds()]


def work_on_a_rank(rank: int, folder: Path) -> None:
    allow_rings()
    torch.nn.functional.rms_norm = rms_norm_of_cuda
    meshes = {
        kind: torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=MESH_DIMENSIONS)
        for kind, shape in (("ulysses", (1, 1, NUM_RANKS)), ("ring", (1, NUM_RANKS, 1)))
    }
    found: dict[str, Any] = {name: check_family(name, folder, meshes) for name in CASES}
    family = family_of("qwen_image", folder)
    whole = generated(family)
    family.context = ContextParallel(meshes["ulysses"], CPU, kind="ulysses", split=family.sequence_split)
    found["generated"] = float((generated(family) - whole).norm() / whole.norm())
    found["failures"] = failures(rank, folder, meshes["ulysses"])
    found["waits"] = waits_of_all(family)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, (_, build, _, _) in CASES.items():
        pipeline = build()
        pipeline.transformer.save_pretrained(folder / name / "transformer")
        for part in ("scheduler", "vae"):
            getattr(pipeline, part).save_config(folder / name / part)
        if encoder := pipeline.components.get("image_encoder"):
            encoder.config.save_pretrained(folder / name / "image_encoder")
        pipeline.save_config(folder / name)
    on_ranks(work_on_a_rank, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_what_processes_compute_of_a_sample_together_is_what_one_computes(
    results: list[dict[str, Any]], name: str
) -> None:
    kinds = ["ulysses"] if name.startswith("qwen") else ["ulysses", "ring"]
    for result in results:
        assert list(result[name]) == kinds
        for kind, found in result[name].items():
            # Sums over tokens are added in another order.
            assert found["loss"] < 1e-6, kind
            assert found["gradients"] < 1e-6, kind
            assert found.get("same") == ([True, True] if name in ALL_WAYS else None), kind
            assert ("in bf16" in found) == (name in IN_BF16)
            assert found.get("in bf16", 0) < 0.03  # 8 bits for each number on the way
            # A ring computes attention part by part, which cannot be saved; that to separate prompts can.
            saves = kind == "ulysses" or name.startswith(("wan", "ltx"))
            assert found["did"] == [True, True, saves]
            split = found["split"]
            assert split["context_parallel"] == NUM_RANKS
            assert split["tokens_of_process"] * NUM_RANKS == split["tokens_of_sequence"] > 0


def test_the_limit_of_a_step_is_not_that_of_the_caches_before_it(results: list[dict[str, Any]]) -> None:
    for before, after in (result["waits"] for result in results):
        assert before == after > 30


def test_prompts_that_cannot_be_split_are_padded_in_previews_too(results: list[dict[str, Any]]) -> None:
    assert all(0 < result["generated"] < 1e-6 for result in results)


def test_where_one_process_fails_between_passes_all_fail_and_go_on_together(
    results: list[dict[str, Any]],
) -> None:
    for result, failed in zip(results, ("PeerFailedError", "ValueError"), strict=True):
        within = FailedWithinPassError.__name__
        assert result["failures"] == {"between": failed, "nowhere": "none", "within": within}


def test_a_run_in_which_nothing_was_split_stops() -> None:
    report = SplitReport(kind="ulysses", num_processes=2, tokens=6, whole_tokens=12)
    report.require_effect()
    for idle in (replace(report, tokens=12), replace(report, tokens=0, whole_tokens=0)):
        with pytest.raises(IneffectiveSwitchError, match="context_parallel: 2 had no effect"):
            idle.require_effect()
