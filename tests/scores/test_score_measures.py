"""The scores of a step: against sums written out, and at the ends of their scales."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from diffsynth_lite.scores.measures import GeneratedFeatures, References

NUM_NEW, NUM_PLAIN, NUM_TAUGHT, SEEDS, SIZE = 5, 4, 3, 2, 7


def unit(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((*shape, SIZE))
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def images(seed: int) -> GeneratedFeatures:
    prompts = np.random.default_rng(seed).random((NUM_NEW + NUM_PLAIN, SEEDS))
    return GeneratedFeatures(
        new=unit(seed, NUM_NEW, SEEDS),
        plain=unit(seed + 1, NUM_PLAIN, SEEDS),
        taught=unit(seed + 2, NUM_TAUGHT, SEEDS),
        new_prompt=prompts[:NUM_NEW],
        plain_prompt=prompts[NUM_NEW:],
    )


HELD_OUT = [unit(40 + count, count) for count in (1, 3, 2, 1, 4)]
TRAINING = [unit(50 + count, count) for count in (1, 2, 1)]
BASE, SEEN = images(0), images(10)
REFERENCES = References(held_out=HELD_OUT, training=TRAINING, base_plain=BASE.plain)


def mean(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    return float(np.mean([a @ b for a, b in pairs]))


def mean_to_others(seen: np.ndarray, place: int) -> float:
    captions = [mean(product(seen, held)) for other, held in enumerate(HELD_OUT) if other != place]
    return float(np.mean([np.mean(captions), mean(product(seen, BASE.plain.reshape(-1, SIZE)))]))


def test_likeness_contrast_and_memory_are_means_of_cosines() -> None:
    found = REFERENCES.scores("10", 10, SEEN)
    own = [mean(product(*pair)) for pair in zip(SEEN.new, HELD_OUT, strict=True)]
    others = [mean_to_others(SEEN.new[place], place) for place in range(NUM_NEW)]
    assert found.likeness == pytest.approx(own, rel=1e-12)
    assert found.contrast == pytest.approx(np.subtract(own, others), rel=1e-12)
    memory = [mean(product(*pair)) for pair in zip(SEEN.taught, TRAINING, strict=True)]
    assert found.memory == pytest.approx(memory, rel=1e-12)
    prompt = found.prompt + found.plain_prompt
    assert prompt == pytest.approx(np.vstack([SEEN.new_prompt, SEEN.plain_prompt]).mean(1), rel=1e-12)
    assert (found.column, found.step) == ("10", 10)


def test_kept_compares_the_same_prompt_and_seed_with_the_distance_between_prompts() -> None:
    places = list(product(range(NUM_PLAIN), range(SEEDS)))
    between = [1 - BASE.plain[a] @ BASE.plain[b] for a, b in product(places, places) if a[0] != b[0]]
    drift = 1 - np.sum(SEEN.plain * BASE.plain, axis=-1).mean(1)
    assert REFERENCES.scores("10", 10, SEEN).kept == pytest.approx(1 - drift / np.mean(between), rel=1e-12)
    assert REFERENCES.scores("base", 0, BASE).kept == pytest.approx([1.0] * NUM_PLAIN, abs=1e-12)


def test_another_seed_of_the_base_is_on_the_scale_of_what_is_kept() -> None:
    assert REFERENCES.other_seed == ()
    again = SEEN.plain
    seen = References(held_out=HELD_OUT, training=TRAINING, base_plain=BASE.plain, base_again=again)
    pairings = (again, np.roll(again, 1, axis=1))  # each image with each of the other seeds
    kept = [REFERENCES.scores("10", 10, replace(BASE, plain=paired)).kept for paired in pairings]
    assert seen.other_seed == pytest.approx(np.mean(kept, axis=0), rel=1e-12)


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
    others = mean(product(SEEN.new[0], BASE.plain[0]))
    assert found.contrast == pytest.approx([found.likeness[0] - others], rel=1e-12)
    assert found.kept == pytest.approx([np.mean(np.sum(SEEN.plain[0] * BASE.plain[0], axis=-1))], rel=1e-12)
