"""The scores of a step: against sums written out, and at the ends of their scales."""

from itertools import product

import numpy as np
import pytest

from diffsynth_lite.scores.measures import GeneratedFeatures, References
from diffsynth_lite.scores.record import ScoredColumn

NUM_NEW, NUM_PLAIN, NUM_TAUGHT, SEEDS, SIZE = 5, 4, 3, 2, 7


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal((*shape, SIZE))
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def images(seed: int) -> GeneratedFeatures:
    rng = np.random.default_rng(seed)
    return GeneratedFeatures(
        new=unit(rng, NUM_NEW, SEEDS),
        plain=unit(rng, NUM_PLAIN, SEEDS),
        taught=unit(rng, NUM_TAUGHT, SEEDS),
        new_prompt=rng.random((NUM_NEW, SEEDS)),
        plain_prompt=rng.random((NUM_PLAIN, SEEDS)),
    )


HELD_OUT = [unit(np.random.default_rng(40 + count), count) for count in (1, 3, 2, 1, 4)]
TRAINING = [unit(np.random.default_rng(50 + count), count) for count in (1, 2, 1)]
BASE = images(0)


def references() -> References:
    return References(held_out=HELD_OUT, training=TRAINING, base_plain=BASE.plain)


def mean(pairs: product) -> float:
    return float(np.mean([a @ b for a, b in pairs]))


def test_likeness_contrast_and_memory_are_means_of_cosines() -> None:
    seen = images(1)
    column = references().scores("10", 10, seen)
    for place in range(NUM_NEW):
        own = mean(product(seen.new[place], HELD_OUT[place]))
        others = [
            mean(product(seen.new[place], HELD_OUT[other])) for other in range(NUM_NEW) if other != place
        ]
        assert column.likeness[place] == pytest.approx(own, rel=1e-12)
        assert column.contrast[place] == pytest.approx(own - np.mean(others), rel=1e-12)
    memory = [mean(product(seen.taught[place], TRAINING[place])) for place in range(NUM_TAUGHT)]
    assert column.memory == pytest.approx(memory, rel=1e-12)
    assert column.prompt == pytest.approx(seen.new_prompt.mean(1), rel=1e-12)
    assert column.plain_prompt == pytest.approx(seen.plain_prompt.mean(1), rel=1e-12)
    assert (column.column, column.step) == ("10", 10)


def test_kept_compares_the_same_prompt_and_seed_with_the_distance_between_prompts() -> None:
    seen = images(1)
    places = list(product(range(NUM_PLAIN), range(SEEDS)))
    between = [
        1 - BASE.plain[one] @ BASE.plain[other]
        for one, other in product(places, places)
        if one[0] != other[0]
    ]
    for place, kept in enumerate(references().scores("10", 10, seen).kept):
        drift = [1 - seen.plain[place, seed] @ BASE.plain[place, seed] for seed in range(SEEDS)]
        assert kept == pytest.approx(1 - np.mean(drift) / np.mean(between), rel=1e-12)


def test_the_base_keeps_everything() -> None:
    assert references().scores("base", 0, BASE).kept == pytest.approx([1.0] * NUM_PLAIN, abs=1e-12)


def test_held_out_images_are_compared_with_others_of_their_caption_and_a_single_one_with_itself() -> None:
    own, others = [], []
    for place, held in enumerate(HELD_OUT):
        pairs = [(a, b) for a, b in product(range(len(held)), repeat=2) if a != b] or [(0, 0)]
        own.append(np.mean([held[a] @ held[b] for a, b in pairs]))
        others += [[mean(product(held, HELD_OUT[o])) for o in range(NUM_NEW) if o != place]]
    assert references().held_out_contrast == pytest.approx(np.mean(own) - np.mean(others), rel=1e-12)


def test_images_of_one_prompt_are_scored_without_others_to_compare_with() -> None:
    one = References(held_out=HELD_OUT[:1], training=[], base_plain=BASE.plain[:1])
    seen = images(1)
    first = GeneratedFeatures(
        new=seen.new[:1],
        plain=seen.plain[:1],
        taught=seen.taught[:0],
        new_prompt=seen.new_prompt[:1],
        plain_prompt=seen.plain_prompt[:1],
    )
    column: ScoredColumn = one.scores("10", 10, first)
    assert column.contrast == column.likeness
    assert column.kept == pytest.approx([np.mean(np.sum(seen.plain[0] * BASE.plain[0], axis=-1))], rel=1e-12)
    assert column.memory == ()


def test_values_of_a_wrong_number_of_training_images_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        References(held_out=HELD_OUT, training=TRAINING[:1], base_plain=BASE.plain).scores(
            "10", 10, images(1)
        )
