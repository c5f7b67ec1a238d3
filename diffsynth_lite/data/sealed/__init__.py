"""Sealed caches: a data set that outgrows a folder of small files, in a mapped table and large files."""

from diffsynth_lite.data.sealed.entries import LANCE_ERRORS, SealedEntries, SealFolder, first_line
from diffsynth_lite.data.sealed.mapped import (
    DamagedSealError,
    StoredOrders,
    prune_orders,
    prune_tables,
    prune_unfinished,
)
from diffsynth_lite.data.sealed.seal import Seal, SealDocument, open_seal, write_seal

__all__ = [
    "LANCE_ERRORS",
    "DamagedSealError",
    "Seal",
    "SealDocument",
    "SealFolder",
    "SealedEntries",
    "StoredOrders",
    "first_line",
    "open_seal",
    "prune_orders",
    "prune_tables",
    "prune_unfinished",
    "write_seal",
]
