"""The scores of a step: against sums written out, and at the ends of their scales."""

from collections.abc import Iterable
from itertools import permutations, product

import numpy as np
import pytest

from diffsynth_lite.scores.measures import GeneratedFeatures, References

NUM_NEW, NUM_PLAIN, NUM_TAUGHT, SIZE = 5, 4, 3, 7


def unit(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((*shape, SIZE))
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def images(seed: int) -> GeneratedFeatures:
    return GeneratedFeatures(
        new=unit(seed, NUM_NEW),
        plain=unit(seed + 1, NUM_PLAIN),
        taught=unit(seed + 2, NUM_TAUGHT),
        prompt=np.random.default_rng(seed).random(NUM_NEW),
    )


HELD_OUT = [unit(40 + count, count) for count in (1, 3, 2, 1, 4)]
TRAINING = [unit(50 + count, count) for count in (1, 2, 1)]
BASE, SEEN = images(0), images(10)
REFERENCES = References(held_out=HELD_OUT, training=TRAINING, base_plain=BASE.plain)


def mean(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    return float(np.mean([a @ b for a, b in pairs]))


def mean_to_others(seen: np.ndarray, place: int) -> float:
    captions = [mean(product(seen, held)) for other, held in enumerate(HELD_OUT) if other != place]
    return float(np.mean([np.mean(captions), mean(product(seen, BASE.plain))]))


def test_likeness_contrast_and_memory_are_means_of_cosines() -> None:
    found = REFERENCES.scores("10", 10, SEEN)
    own = [mean(product([image], held)) for image, held in zip(SEEN.new, HELD_OUT, strict=True)]
    others = [mean_to_others(SEEN.new[[place]], place) for place in range(NUM_NEW)]
    assert found.likeness == pytest.approx(own, rel=1e-12)
    assert found.contrast == pytest.approx(np.subtract(own, others), rel=1e-12)
    memory = [mean(product([image], held)) for image, held in zip(SEEN.taught, TRAINING, strict=True)]
    assert found.memory == pytest.approx(memory, rel=1e-12)
    assert (found.column, found.step, found.prompt) == ("10", 10, tuple(SEEN.prompt))


def test_kept_compares_the_same_prompt_with_the_distance_between_prompts() -> None:
    between = [1 - a @ b for a, b in permutations(BASE.plain, 2)]
    drift = 1 - np.sum(SEEN.plain * BASE.plain, axis=-1)
    assert REFERENCES.scores("10", 10, SEEN).kept == pytest.approx(1 - drift / np.mean(between), rel=1e-12)
    assert REFERENCES.scores("base", 0, BASE).kept == pytest.approx([1.0] * NUM_PLAIN, abs=1e-12)


def test_another_seed_of_the_base_is_on_the_scale_of_what_is_kept() -> None:
    assert REFERENCES.other_seed == ()
    seen = References(held_out=HELD_OUT, training=TRAINING, base_plain=BASE.plain, base_again=SEEN.plain)
    assert seen.other_seed == REFERENCES.scores("10", 10, SEEN).kept


def test_held_out_images_are_compared_with_others_of_their_caption_and_a_single_one_with_itself() -> None:
    own = []
    for held in HELD_OUT:
        pairs = [(a, b) for a, b in product(range(len(held)), repeat=2) if a != b] or [(0, 0)]
        own.append(np.mean([held[a] @ held[b] for a, b in pairs]))
    others = [mean_to_others(held, place) for place, held in enumerate(HELD_OUT)]
    assert REFERENCES.held_out_contrast == pytest.approx(np.mean(own) - np.mean(others), rel=1e-12)


def test_images_of_one_prompt_are_compared_with_plain_ones_only() -> None:
    alone = {name: value[:1] for name, value in vars(SEEN).items()}
    one = References(held_out=HELD_OUT[:1], training=TRAINING[:1], base_plain=BASE.plain[:1])
    found = one.scores("10", 10, GeneratedFeatures(**alone))
    others = SEEN.new[0] @ BASE.plain[0]
    assert found.contrast == pytest.approx([found.likeness[0] - others], rel=1e-12)
    assert found.kept == pytest.approx([SEEN.plain[0] @ BASE.plain[0]], rel=1e-12)
