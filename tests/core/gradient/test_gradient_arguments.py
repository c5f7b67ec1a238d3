"""Tensors are taken out of any nesting and put back, and nothing else changes."""

import copy
import gc
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from diffusers.utils import BaseOutput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.utils import ModelOutput

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    value: Any
    other: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    derived: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", [self.value])


@dataclass
class WithUnsetField:
    value: Any
    never_set: Any = field(init=False)


@dataclass
class DiffusersOutput(BaseOutput):
    sample: Any
    extra: Any = None


@dataclass
class TransformersOutput(ModelOutput):
    first: Any = None
    second: Any = None


class Registry(dict):
    """A dict with state of its own."""

    note = "class"


def registry(values: dict[str, Any]) -> Registry:
    made = Registry(values)
    made.note = "instance"
    return made


SHARED = torch.zeros(2)
LEAVES = st.one_of(
    st.builds(lambda: torch.ones(1)),
    st.just(SHARED),
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.just(torch.Size([2, 3])),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mappings = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        mappings,
        mappings.map(OrderedDict),
        mappings.map(lambda values: defaultdict(list, values)),
        mappings.map(registry),
        st.builds(Pair, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner),
        st.builds(WithUnsetField, inner),
        # Output classes take a first field that is a container as several when it is the only one.
        st.builds(DiffusersOutput, LEAVES, inner),
        st.builds(TransformersOutput, LEAVES, inner),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=12)
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def content(tree: Any, tensors: dict[int, Any]) -> Any:
    """A comparable description of ``tree``: types, order of keys, state; tensors by their entry."""
    if isinstance(tree, Tensor):
        return tensors[id(tree)]
    name = type(tree).__name__
    described: list[Any] = []
    if isinstance(tree, dict):
        described += [(key, content(value, tensors)) for key, value in tree.items()]
        described.append(getattr(tree, "default_factory", None))
        described.append(getattr(tree, "note", None))
    if is_dataclass(tree):
        names = [one.name for one in fields(tree) if hasattr(tree, one.name)]
        described += [(one, content(getattr(tree, one), tensors)) for one in names]
    if isinstance(tree, list | tuple):
        described += [content(value, tensors) for value in tree]
    return (name, described) if isinstance(tree, dict | list | tuple) or is_dataclass(tree) else tree


def tensors_reachable_from(tree: Any) -> list[Tensor]:
    """Every tensor that the garbage collector sees behind ``tree``, types left aside."""
    found, seen, todo = [], set(), [tree]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        found += [value] if isinstance(value, Tensor) else []
        todo += gc.get_referents(value)
    return found


@untimed
@given(TREES)
def test_what_was_taken_out_can_be_put_back(tree: Any) -> None:
    tensors, template = take_tensors(tree)
    reachable = {id(tensor): tensor for tensor in tensors_reachable_from(tree)}
    assert {id(tensor) for tensor in tensors} == reachable.keys()
    assert len(tensors) == len(reachable)
    names = {id(tensor): str(index) for index, tensor in enumerate(tensors)}
    assert content(put_tensors(template, tensors), names) == content(tree, names)


@untimed
@given(TREES)
def test_other_tensors_can_be_put_in_their_places_any_number_of_times(tree: Any) -> None:
    tensors, template = take_tensors(tree)
    names = {id(tensor): str(index) for index, tensor in enumerate(tensors)}
    expected = content(tree, names)
    for _ in range(2):
        others = [torch.empty(0) for _ in tensors]
        other_names = {id(tensor): str(index) for index, tensor in enumerate(others)}
        assert content(put_tensors(template, others), other_names) == expected
    assert content(tree, names) == expected


@untimed
@given(TREES)
def test_the_template_holds_no_tensor(tree: Any) -> None:
    _, template = take_tensors(tree)
    assert tensors_reachable_from(template) == []


def test_a_container_without_tensors_is_passed_on_as_it_is() -> None:
    options, cache, size = {"name": ["x"]}, Plain(copy), torch.Size([2])
    tensors, template = take_tensors((options, cache, size, torch.ones(1)))
    rebuilt = put_tensors(template, tensors)
    assert rebuilt[0] is options
    assert rebuilt[1] is cache
    assert rebuilt[2] is size


def test_the_result_of_a_torch_function_is_rebuilt_with_its_type() -> None:
    result = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)
    tensors, template = take_tensors([result])
    (rebuilt,) = put_tensors(template, tensors)
    assert type(rebuilt) is type(result)
    assert rebuilt.indices is result.indices
