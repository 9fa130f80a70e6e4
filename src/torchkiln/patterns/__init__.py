"""The pattern matcher: rewrites as plain functions or expressions, matched fast, and explained when they do not match.

Public names, for rewrites written as expressions and for registering in sets of one's own.
"""

from __future__ import annotations

from torchkiln.patterns.expressions import IGNORED, Call, Capture, Ignored, ListOf, OneOf, Outputs, Repeated
from torchkiln.patterns.match import Match
from torchkiln.patterns.registration import gen_register_replacement, register_replacement
from torchkiln.patterns.rewrites import RewriteSet
from torchkiln.patterns.tracing import fwd_only, joint_fwd_bwd

__all__ = [
    "IGNORED",
    "Call",
    "Capture",
    "Ignored",
    "ListOf",
    "Match",
    "OneOf",
    "Outputs",
    "Repeated",
    "RewriteSet",
    "fwd_only",
    "gen_register_replacement",
    "joint_fwd_bwd",
    "register_replacement",
]
