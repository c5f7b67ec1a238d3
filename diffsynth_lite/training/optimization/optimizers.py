"""This file makes a run's optimizer and learning rates, and tries whether the run can resume exactly."""

import inspect
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Literal

import safetensors.torch
import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.kinds import TrainedTensor
from diffsynth_lite.pipelines.base.discovery import import_named
from diffsynth_lite.training.layer_groups import LayerGroup, RateGroup, adapter_kind, rate_groups
from diffsynth_lite.training.optimization.averages import (
    AveragedWeights,
    AverageOfOptimizer,
    MovingAverage,
    has_modes,
)
from diffsynth_lite.training.optimization.optimizer_state import (
    OptimizerFacts,
    load_optimizer,
    optimizer_tensors,
    state_bytes,
)

LearningRateScheduler = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]

_CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "muon": "torch.optim.Muon",
    "adafactor": "torch.optim.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
    "schedule_free": "schedulefree.AdamWScheduleFree",
}
"""By short name."""
_TRIED = {"first": (8, 512), "second": (512, 8), "idle": (8, 512)}
"""Shapes that an optimizer is tried on: a pair of a LoRA, with as many numbers as bitsandbytes needs before
it keeps 8 bits of them, and a matrix without gradients, as of an expert that a step does not run."""
_VECTOR = {"vector": (512,)}
"""The same for vectors, such as the magnitudes of a DoRA."""
_LAYER_END = re.compile(r"\.(?:lora|lokr)_")
"""Follows the layer in the names of its adapter."""
_STEPS_BEFORE = 2
"""Steps before the state is saved and loaded, when an optimizer is tried."""


def build_learning_rate(config: Config, group: RateGroup | None = None) -> Callable[[int], float]:
    """The learning rate of each 0-based optimizer step."""
    base, setting = config.train.learning_rate, "train.learning_rate"
    if group is not None:
        base, setting = group.learning_rate, f"lora.groups: the learning rate of {group.label},"
    return learning_rate_schedule(
        config.train.lr_scheduler,
        base=base,
        warmup_steps=config.train.warmup_in_run,
        total_steps=config.train.steps,
        setting=setting,
    )


def build_group_rates(config: Config, groups: Sequence[LayerGroup]) -> dict[str, Callable[[int], float]]:
    """The learning rate of each 0-based step for each group of the optimizer, by its label.

    Empty where there is only one group, with the learning rate of the run.
    """
    if not config.lora.groups and config.lora.loraplus_ratio == 1:
        return {}
    return {group.label: build_learning_rate(config, group) for group in rate_groups(config, groups)}


def learning_rate_schedule(
    name: LearningRateScheduler,
    *,
    base: float,
    warmup_steps: int,
    total_steps: int,
    setting: str = "train.learning_rate",
) -> Callable[[int], float]:
    """Learning rate of each optimizer step, counted from 0.

    The first step of a warm-up takes ``base / warmup_steps``, its last one ``base``. From ``total_steps`` on
    the rate stays at that of the last step.

    Args:
        name: shape after the warm-up; ``cosine_with_restarts`` has one cycle, ``polynomial`` has power 1.
    """
    if not 0 <= warmup_steps < total_steps:
        raise UserError(f"train.warmup_steps {warmup_steps} must be less than train.steps {total_steps}")
    # Of a scheduler that is never stepped: a stateful one counts its own steps, which on resume ignores a
    # changed setting (torch's cosine) or jumps (diffusers' lambdas over a new total).
    optimizer = torch.optim.SGD([torch.zeros(())], lr=base)
    shape = "constant_with_warmup" if name == "constant" else name
    numbers = {"num_warmup_steps": warmup_steps, "num_training_steps": total_steps}
    try:
        factor: Callable[[int], float] = get_scheduler(shape, optimizer, **numbers).lr_lambdas[0]
    except ValueError as error:
        raise UserError(f"{setting} {base:g} with train.lr_scheduler {name}: {error}") from error

    def learning_rate(step: int) -> float:
        if step < warmup_steps:
            return base * factor(step + 1)
        return base * factor(min(step, total_steps - 1))

    return learning_rate


def build_optimizer(
    config: Config, transformer: nn.Module, groups: Sequence[LayerGroup]
) -> torch.optim.Optimizer:
    """The optimizer over the adapter's parameters; learning rates are set before each step."""
    trained = {name: weight for name, weight in transformer.named_parameters() if weight.requires_grad}
    rated = rate_groups(config, groups)
    if len(rated) == 1:
        return _make(config, [list(trained.values())], rated)
    members = [
        [
            weight
            for name, weight in trained.items()
            if any(matrix in name for matrix in group.matrices) and _LAYER_END.split(name)[0] in layers
        ]
        for group, layers in ((group, set(group.layers)) for group in rated)
    ]
    assert sum(map(len, members)) == len(trained)
    return _make(config, members, rated)


def build_average(
    config: Config, transformer: nn.Module, optimizer: torch.optim.Optimizer
) -> AveragedWeights | None:
    """The average of the adapter that the run or its optimizer keeps; None where neither does."""
    if has_modes(optimizer):
        return AverageOfOptimizer(transformer, optimizer)
    decay = config.train.ema_decay
    return None if decay is None else MovingAverage(transformer, decay=decay)


def measures_average(config: Config, averaged: AveragedWeights | None) -> bool:
    """Whether losses and previews are of the averaged weights."""
    return averaged is not None and (averaged.is_result or config.validation.use_ema)


def learned_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate that an optimizer found by itself, where it does.

    Prodigy and its successors keep their estimate as ``d`` of a group, which multiplies the given rate, and
    begin it at ``d0``. In others ``d`` is something else.
    """
    group = optimizer.param_groups[0]
    return float(group["d"] * group["lr"]) if {"d", "d0"} <= group.keys() else None


def shown_name(config: Config) -> str:
    """The name of the class of the config's optimizer."""
    return _CLASSES.get(config.train.optimizer, config.train.optimizer).rpartition(".")[2]


def shown_arguments(config: Config) -> str:
    """The full name of the optimizer's class and its arguments but for the learning rate."""
    kind = _optimizer_class(config.train.optimizer)
    arguments = _arguments(config, kind)
    shown = ",".join(f"{name}={value}" for name, value in arguments.items() if name not in ("lr", "fused"))
    return f"{kind.__module__}.{kind.__qualname__}({shown})"


def examine_optimizer(
    config: Config,
    groups: Sequence[LayerGroup],
    shapes: Mapping[TrainedTensor, int],
    device: torch.device,
) -> OptimizerFacts:
    """The state of a config's optimizer, after it was tried; by a step on a matrix of each shape.

    Args:
        shapes: of all trained tensors, and how many there are of each.
    """
    rated = rate_groups(config, groups)
    check_optimizer(config, rated, device)
    if any(len(tensor.shape) == 1 for tensor in shapes):
        try:
            check_optimizer(config, rated, device, tried=_VECTOR)
        except UserError as error:
            raise UserError(
                f"train.optimizer: {config.train.optimizer} does not train the magnitudes of a DoRA, which "
                f"are vectors; take another one, or set lora.kind: lora ({error})"
            ) from error
    state, averages = 0, False
    for tensor, number in shapes.items():
        # Of zeros Prodigy keeps less.
        fill = torch.zeros if tensor.starts_at_zero else torch.ones
        parameter = nn.Parameter(fill(tensor.shape))
        parameter.grad = torch.ones_like(parameter)
        optimizer = _make(config, [[parameter]], rated[:1])
        with _explained(config):
            optimizer.step()
        state += number * state_bytes(optimizer)
        averages = has_modes(optimizer)
    return OptimizerFacts(state_bytes=state, has_average=averages)


def check_optimizer(
    config: Config,
    rated: Sequence[RateGroup],
    device: torch.device,
    *,
    tried: Mapping[str, tuple[int, ...]] = MappingProxyType(_TRIED),
) -> None:
    """Try whether a run with the config's optimizer can be stopped and resumed exactly, on small matrices.

    After two steps its state is saved as in checkpoints and loaded into a new optimizer; a third step of both
    must be the same, bit for bit, and so must the state after it.
    """
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{place}.{name}": torch.randn(shape, generator=generator)
        for place in range(len(rated))
        for name, shape in tried.items()
    }
    parameters = _parameters(values, device)
    optimizer = _make(config, _by_group(parameters, len(tried)), rated)
    if has_modes(optimizer) and config.train.ema_decay is not None:
        raise UserError(
            f"train.ema_decay: {config.train.ema_decay:g}, and {config.train.optimizer} trains an average "
            "already; set it to null"
        )
    with _explained(config):
        for step in range(_STEPS_BEFORE):
            _step(optimizer, parameters, step)
        copies = _parameters(parameters, device)
        fresh = _make(config, _by_group(copies, len(tried)), rated)
        tensors, document = optimizer_tensors(optimizer, parameters)
        host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        saved = safetensors.torch.load(safetensors.torch.save(host))
        load_optimizer(fresh, copies, saved, json.loads(json.dumps(document)))
        for one, matrices in ((optimizer, parameters), (fresh, copies)):
            _step(one, matrices, _STEPS_BEFORE)
        differing = _differing(optimizer_tensors(optimizer, parameters), optimizer_tensors(fresh, copies))
        differing += [name for name in parameters if not torch.equal(parameters[name], copies[name])]
    if differing:
        raise UserError(
            f"train.optimizer: {config.train.optimizer} does not continue exactly after its state was saved "
            f"and loaded (in {differing[0]}): a run with it could not be resumed exactly; take another one"
        )


@contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Scope in which an error of an optimizer's class becomes one about the setting."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # classes of other packages may raise anything
        text = " ".join(str(error).split())
        raise UserError(
            f"train.optimizer: {config.train.optimizer} cannot train a LoRA that is to be resumed "
            f"({type(error).__name__}: {text}); take another one"
        ) from error


def _make(
    config: Config, members: Sequence[Sequence[nn.Parameter]], rated: Sequence[RateGroup]
) -> torch.optim.Optimizer:
    """The config's optimizer over the members of each group, ready to train."""
    kind = _optimizer_class(config.train.optimizer)
    arguments = _arguments(config, kind)
    undecayed = adapter_kind(config).undecayed
    decays = {group.weight_decay for group in rated if group.matrices != undecayed}
    decays -= {config.train.weight_decay}
    if decays and "weight_decay" not in arguments:
        raise UserError(
            f"lora.groups: {config.train.optimizer} takes no weight_decay ({max(decays):g}); leave it out"
        )
    groups = [
        {"params": list(weights), "lr": group.learning_rate}
        | ({"weight_decay": group.weight_decay} if "weight_decay" in arguments else {})
        for weights, group in zip(members, rated, strict=True)
    ]
    try:
        with redirect_stdout(io.StringIO()):  # prodigyopt prints how it decays weights
            optimizer = kind(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"train.optimizer_options: {config.train.optimizer} refuses its settings: {error}"
        ) from error
    if has_modes(optimizer):
        optimizer.train()
    return optimizer


def _arguments(config: Config, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The arguments of an optimizer's class."""
    train = config.train
    arguments = {"lr": train.learning_rate, "weight_decay": train.weight_decay, **_own_options(config)}
    taken = inspect.signature(kind).parameters
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in taken.values())
    if "weight_decay" not in taken and not takes_any:
        if not train.is_default("weight_decay"):
            raise UserError(f"train.weight_decay: {train.optimizer} takes none; leave it out")
        del arguments["weight_decay"]
    unknown = [name for name in train.optimizer_options if name not in taken]
    if unknown and not takes_any:
        known = [name for name in taken if name not in ("params", "lr", "weight_decay")]
        close = get_close_matches(unknown[0], known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
        raise UserError(f"train.optimizer_options: {train.optimizer} has no {unknown[0]}; {meant}")
    return arguments


def _own_options(config: Config) -> dict[str, Any]:
    """The arguments that our settings or the short name decide, and those of ``train.optimizer_options``.

    Fused, as torch's default AdamW took 7 times as long on the CPU: 4.8 ms a step for 144 small tensors.
    """
    train = config.train
    adam = {"betas": (train.adam_beta1, train.adam_beta2), "eps": train.adam_epsilon}
    own: dict[str, dict[str, Any]] = {
        "adamw": {**adam, "fused": True},
        "adamw8bit": adam,
        # Updates as large as AdamW's, so that learning rates mean the same (arXiv:2502.16982).
        "muon": {"adjust_lr_fn": "match_rms_adamw"},
        # Otherwise the small rates of a warm-up would spoil its estimate.
        "prodigy": {"safeguard_warmup": train.warmup_in_run > 0},
    }
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in train.optimizer_options.items()
    }
    return own.get(train.optimizer, {}) | given


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of a short or dotted name."""
    path = _CLASSES.get(name, name)
    module, _, class_name = path.rpartition(".")
    package = module.partition(".")[0]
    try:
        found = getattr(import_named(module, setting="train.optimizer"), class_name, None)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing != package:
            raise UserError(f"train.optimizer: {name} needs {missing}: pip install {missing}") from error
        how = "" if name not in _CLASSES else f": pip install {package}"
        raise UserError(f"train.optimizer: {name} needs {package}, which is not installed{how}") from error
    if found is None and name in _CLASSES:
        raise UserError(
            f"train.optimizer: {name} is {path}, which {package} {version(package)} does not have; install "
            "a later one"
        )
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"train.optimizer: {path} is not a class of optimizers of torch; name one that is")
    return found


def _parameters(values: Mapping[str, Tensor], device: torch.device) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(tensor.detach().to(device, copy=True)) for name, tensor in values.items()}


def _by_group(parameters: Mapping[str, nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """The parameters in groups of ``number``."""
    weights = list(parameters.values())
    return [weights[first : first + number] for first in range(0, len(weights), number)]


def _step(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1 + step)
    for name, parameter in parameters.items():
        if not name.endswith(".idle"):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
    optimizer.step()
    optimizer.zero_grad()


def _differing(
    one: tuple[dict[str, Tensor], dict[str, Any]], other: tuple[dict[str, Tensor], dict[str, Any]]
) -> list[str]:
    """The names of differing entries of two states."""
    (tensors, document), (others, other_document) = one, other
    names = [name for name in tensors if not torch.equal(tensors[name], others.get(name, Tensor()))]
    return names + [key for key in document if document[key] != other_document.get(key)]
