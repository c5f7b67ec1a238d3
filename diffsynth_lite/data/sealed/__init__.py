"""Sealed caches: a data set that outgrows a folder of small files, in a mapped table and large files."""

from diffsynth_lite.data.sealed.entries import SealedEntries
from diffsynth_lite.data.sealed.folder import SealFolder
from diffsynth_lite.data.sealed.mapped_file import DamagedSealError
from diffsynth_lite.data.sealed.orders import StoredOrders
from diffsynth_lite.data.sealed.pruning import prune_orders, prune_tables, prune_unfinished
from diffsynth_lite.data.sealed.seal import Seal, SealDocument, open_seal
from diffsynth_lite.data.sealed.writing import SealContent, write_seal

__all__ = [
    "DamagedSealError",
    "Seal",
    "SealContent",
    "SealDocument",
    "SealFolder",
    "SealedEntries",
    "StoredOrders",
    "open_seal",
    "prune_orders",
    "prune_tables",
    "prune_unfinished",
    "write_seal",
]
