"""Children that answer a question, and what they cannot answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchkiln.debug import children
from torchkiln.debug.children import ask
from torchkiln.errors import UnsupportedError


def test_a_backward_pass_that_torch_refuses_to_forks_is_said_with_a_way_out() -> None:
    def refused() -> None:
        raise RuntimeError(
            "Unable to handle autograd's threading in combination with fork-based multiprocessing. See torch's wiki."
        )

    with pytest.raises(UnsupportedError, match="kiln bisect"):
        ask(refused)


def test_getting_ready_leaves_children_the_backward_pass() -> None:
    """Where torch is built for GPUs, a backward pass here would end those of the children."""
    program = f"""
import torch
from {children.__name__} import ask, import_compiler
import_compiler()
def differentiate():
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: 2 * x, backend="kiln")(x).sum().backward()
    return x.grad.tolist()
print(ask(differentiate))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "value=[2.0, 2.0]" in done.stdout


def test_an_interrupt_during_a_fork_is_not_lost() -> None:
    """Python drops what a hook of a fork raises."""
    program = f"""
import os, signal
from {children.__name__} import ask
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
interrupting = [True]
def interrupt():
    if interrupting:
        interrupting.clear()
        os.kill(os.getpid(), signal.SIGINT)
os.register_at_fork(after_in_parent=interrupt)
try:
    print(ask(lambda: 1))
except KeyboardInterrupt:
    print("interrupted, then", ask(lambda: 2).value)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted, then 2\n", done.stderr
