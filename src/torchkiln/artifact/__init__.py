"""Compiled graphs as plain data: what one process makes and any other can load.

Nothing here refers to a graph, a plan or an address of the process that compiled it.
"""

from torchkiln.artifact.artifact import Artifact, GraphSummary
from torchkiln.artifact.codec import decode, decode_as, decode_function, decode_support, encode
from torchkiln.artifact.convention import CallingConvention, CompiledFunction
from torchkiln.artifact.precompiled import PrecompiledFunction
from torchkiln.artifact.support import SupportCode
from torchkiln.artifact.texts import with_sources

__all__ = [
    "Artifact",
    "CallingConvention",
    "CompiledFunction",
    "GraphSummary",
    "PrecompiledFunction",
    "SupportCode",
    "decode",
    "decode_as",
    "decode_function",
    "decode_support",
    "encode",
    "with_sources",
]
