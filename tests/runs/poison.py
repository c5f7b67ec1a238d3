"""Files that run code when they are unpickled, in the forms that machine learning has for them."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch


class MakesFolder:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def poisons(marker: Path) -> dict[str, bytes]:
    """Content of a file in each form, which makes the folder ``marker``."""
    harmful = MakesFolder(marker)
    zipped, legacy, array = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"weight": harmful}, zipped)
    torch.save({"weight": harmful}, legacy, _use_new_zipfile_serialization=False)
    objects = np.empty(1, dtype=object)
    objects[0] = harmful
    np.save(array, objects, allow_pickle=True)
    return {
        "pickle": pickle.dumps(harmful),
        "pickle of protocol 0": pickle.dumps(harmful, protocol=0),
        "torch.save": zipped.getvalue(),
        "torch.save before 1.6": legacy.getvalue(),
        "numpy objects": array.getvalue(),
    }
