"""Processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import torchkiln


def environment(**variables: str) -> dict[str, str]:
    """This process's, with ``variables``, in which torchkiln is imported from where it was imported here.

    Folders that PYTHONPATH has stay: one of them may hold the metadata by which torch finds the backend.
    """
    source = str(Path(torchkiln.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}
