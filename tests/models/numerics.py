"""How a compiled result is judged: its error against float64 may not exceed eager's by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Compiling reorders sums and removes roundings, so the two errors differ even when both are right. Over many elements
# they agree closely (root mean square); one element alone may be unlucky in one of the two.
_RMS_FACTOR, _MAX_FACTOR = 1.5, 4.0
# The slack covers results eager happens to get exactly, in units of the last place of the largest magnitude.
_SLACK_ULPS = 8.0


def assert_as_accurate_as_eager(what: str, compiled: Tensor, eager: Tensor, reference: Tensor) -> None:
    """Compare one tensor: same dtype, shape, strides and NaNs as eager, and an error of the same size.

    ``reference`` is the same computation in float64 from the same (already rounded) weights and inputs. Integer and
    boolean tensors must be equal.
    """
    assert compiled.dtype == eager.dtype, f"{what}: dtype {compiled.dtype}, eager gives {eager.dtype}"
    assert compiled.shape == eager.shape, f"{what}: shape {tuple(compiled.shape)}, eager gives {tuple(eager.shape)}"
    if not compiled.dtype.is_floating_point:
        assert torch.equal(compiled, eager), f"{what}: integers differ"
        return
    reference = reference.double()
    assert torch.equal(compiled.isfinite(), eager.isfinite()), f"{what}: NaN or infinity in other places than eager"
    finite = eager.isfinite()
    of_compiled = (compiled.double() - reference)[finite]
    of_eager = (eager.double() - reference)[finite]
    if not of_eager.numel():
        return
    slack = _SLACK_ULPS * torch.finfo(compiled.dtype).eps
    scale = reference[finite].abs().max().item()
    rms = reference[finite].square().mean().sqrt().item()
    _check(what, "root mean square", _rms(of_compiled), _RMS_FACTOR * _rms(of_eager) + slack * rms)
    _check(what, "largest", of_compiled.abs().max().item(), _MAX_FACTOR * of_eager.abs().max().item() + slack * scale)


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


def _check(what: str, measure: str, error: float, limit: float) -> None:
    assert error <= limit, f"{what}: {measure} error {error:.3g} above {limit:.3g}"
