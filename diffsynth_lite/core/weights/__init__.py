"""How frozen weights are kept in memory, the layers that compute with them, and how both are filled."""

from diffsynth_lite.core.weights.formats import (
    Int8,
    MissingKernelsError,
    Nf4,
    NotFiniteError,
    WeightFormat,
    weight_format,
)
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization, QuantizationReport
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen

__all__ = [
    "FrozenLinear",
    "Int8",
    "MissingKernelsError",
    "Nf4",
    "NotFiniteError",
    "Quantization",
    "QuantizationReport",
    "StoredTensors",
    "WeightFormat",
    "load_frozen",
    "weight_format",
]
