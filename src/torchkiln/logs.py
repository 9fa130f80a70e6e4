"""Generated code in torch's logs: ``TORCH_LOGS="output_code"`` and ``torch._logging.set_logs`` show ours too.

All else that is logged goes to ``logging.getLogger(__name__)`` of a module, which ``TORCH_LOGS="+torchkiln"`` shows.
"""

from __future__ import annotations

import logging

from torch._logging._internal import getArtifactLogger


def code_log(module: str, artifact: str) -> logging.Logger:
    """A log for generated code under a name that ``TORCH_LOGS`` knows; in a torch that does not, one of that name."""
    try:
        log: logging.Logger = getArtifactLogger(module, artifact)
    except ValueError:
        log = logging.getLogger(f"{module}.{artifact}")
    return log


def is_shown(log: logging.Logger) -> bool:
    """Whether somebody asked for the code; if nobody did, making its text can be left out.

    torch cuts the log of an artifact that was not asked for off from its parents.
    """
    if not log.propagate or not log.isEnabledFor(logging.DEBUG):
        return False
    if not log.hasHandlers():  # torch gives handlers to logs that are named as such, not to those of an artifact alone
        for handler in logging.getLogger("torch").handlers:
            log.addHandler(handler)
    return True
