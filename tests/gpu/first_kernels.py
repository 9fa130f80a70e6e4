"""``python -m tests.gpu.first_kernels``: whether this machine's card runs anything of ours, step by step, in a minute.

Each step prints what it found before the next begins, so that the last line says where it ended.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable

import llvmlite
import torch
import torch.nn.functional as F

import torchkiln
from torchkiln.artifact.artifact import CARD_FUNCTIONS
from torchkiln.backend import kiln
from torchkiln.native import card_assembler
from torchkiln.runtime.card import cuda_driver
from torchkiln.target import capture_target, gpu_target

# A function of two tensors of half precision, 512 x 1024 and 1024.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda x, w: F.gelu(x * w) + 1,
    "a sum of rows": lambda x, w: x.float().sum(-1),
    "a sum of columns": lambda x, w: x.float().sum(0),
    "layer norm": lambda x, w: F.layer_norm(x, (1024,), w),
    "softmax of long rows": lambda x, w: torch.softmax(x.reshape(32, -1).float(), -1),
    "a transposition": lambda x, w: (x.t() * 2).contiguous(),
    "a gather": lambda x, w: x[torch.arange(0, 512, 3, device=x.device)] + w,
    "a matmul with what follows": lambda x, w: F.relu(x @ x.t() + 1),
    "dropout": lambda x, w: F.dropout(x, 0.3) * w,
    "float64": lambda x, w: (x.double() * w).sum(-1),
}


def main() -> int:
    if len(sys.argv) == 1:
        _look()
    names, failed = sys.argv[1:] or list(STEPS), 0
    x, w = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((512, 1024), (1024,)))
    for number, name in enumerate(names):
        print(f"{name}: ", end="", flush=True)
        try:
            print(f"right, {_first_call(STEPS[name], x, w):.2f} s", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED: {type(error).__name__}: {error}", flush=True)
            _go_on_elsewhere_if_need_be(names[number + 1 :])
    return failed


def _look() -> None:
    """What is here, and whether the driver and nvJitLink take the least there is to take."""
    print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    print(f"llvmlite {llvmlite.__version__}, LLVM {llvmlite.binding.llvm_version_info}, torchkiln {torchkiln.__file__}")
    torch.cuda.init()
    print(f"{torch.cuda.get_device_name()}, {capture_target(torchkiln.Settings()).card}", flush=True)
    driver, version = cuda_driver(), ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    print(f"driver {version.value}: {', '.join(n for n in CARD_FUNCTIONS if driver.function(n))}", flush=True)
    processor = gpu_target(torch.cuda.get_device_capability()).cpu
    ptx = f".version 7.8\n.target {processor}\n.address_size 64\n.entry k() {{ ret; }}\n"
    code = card_assembler.assemble(ptx, processor)
    print(f"nvJitLink: {card_assembler._library()}, {len(code)} bytes of machine code", flush=True)
    for what, given in (("PTX", ptx.encode()), ("machine code", code)):
        if given:
            _, unload = driver.load(given, ["k"], torch.cuda.current_device())
            unload()
            print(f"the driver takes {what}", flush=True)


def _first_call(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> float:
    torch._dynamo.reset()
    start = time.perf_counter()
    torch.manual_seed(3)
    options = {"cache": False, "fallback": False, "adaptive": False}
    found = torch.compile(function, backend=kiln, fullgraph=True, options=options)(x, w)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    torch.manual_seed(3)
    torch.testing.assert_close(found, function(x, w), rtol=2e-2, atol=2e-2)
    return took


def _go_on_elsewhere_if_need_be(names: list[str]) -> None:
    """In a process that the card takes something from; some errors end all use of it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the card takes nothing from this process any more: {error}", flush=True)
        if names:
            os.execv(sys.executable, [sys.executable, "-m", "tests.gpu.first_kernels", *names])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing of a broken card is waited for
