"""``torchkiln.memory_report``: what a model saves for backward, line by line, and what a lower budget would change.

``unchanged`` keeps the user's state, ``saved`` measures what autograd keeps, ``capture`` takes the joint graphs of one
call, ``report`` puts the figures together; ``table``, ``page`` and ``plot`` show them.
"""

from __future__ import annotations

from torchkiln.memory.unchanged import random_numbers_kept

with random_numbers_kept():  # rich draws some while it is imported
    from torchkiln.memory.report import BudgetPoint, LineUse, MemoryReport, TensorUse, memory_report

__all__ = ["BudgetPoint", "LineUse", "MemoryReport", "TensorUse", "memory_report"]
