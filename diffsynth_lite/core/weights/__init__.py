"""How frozen weights are kept, the layers that compute with them, how both are filled, and streaming."""

from diffsynth_lite.core.reports import StreamReport
from diffsynth_lite.core.weights.float8 import StoredFormatError, is_scale
from diffsynth_lite.core.weights.formats import (
    Int8,
    MissingKernelsError,
    Nf4,
    NotFiniteError,
    WeightFormat,
    counted_format,
    is_finite,
    weight_format,
)
from diffsynth_lite.core.weights.frozen_linear import (
    FrozenLinear,
    Quantization,
    QuantizationReport,
    row_norms,
    weight_norm,
    weight_rows,
)
from diffsynth_lite.core.weights.gguf import GgufTensors
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.packing import HostBlocks, frozen_weights, packed_bytes
from diffsynth_lite.core.weights.sharding import (
    BaseShards,
    ShardReport,
    is_sharded,
    local_bytes,
    local_part,
)
from diffsynth_lite.core.weights.stream import (
    SLOTS_TO_GENERATE,
    WeightStream,
    require_saving,
    spread_evenly,
)

__all__ = [
    "SLOTS_TO_GENERATE",
    "BaseShards",
    "FrozenLinear",
    "GgufTensors",
    "HostBlocks",
    "Int8",
    "MissingKernelsError",
    "Nf4",
    "NotFiniteError",
    "Quantization",
    "QuantizationReport",
    "ShardReport",
    "StoredFormatError",
    "StoredTensors",
    "StreamReport",
    "WeightFormat",
    "WeightStream",
    "counted_format",
    "frozen_weights",
    "is_finite",
    "is_scale",
    "is_sharded",
    "load_frozen",
    "local_bytes",
    "local_part",
    "packed_bytes",
    "require_saving",
    "row_norms",
    "spread_evenly",
    "weight_format",
    "weight_norm",
    "weight_rows",
]
