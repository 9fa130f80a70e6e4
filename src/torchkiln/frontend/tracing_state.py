"""What AOTAutograd's trace of a captured graph depends on beside the graph: flags and registrations of the process.

A flag is part of a key by its value. Code of the user's that a trace would run has no text, so a graph that it may
change is not looked up before it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.fx
import torch.fx.experimental._config as symbolic_shapes_config
from torch import _decomp

from torchkiln.graph.graph_text import NoTextError

# Kernels for these run when compiled code runs, or describe a result as the functional graph does. Batched ones are
# torch's own, registered when a process first uses vmap.
_NOT_TRACED = ("/CPU", "/CUDA", "/MPS", "/Meta", "/FuncTorchBatched")


@dataclass(frozen=True)
class TracingModes:
    """What :func:`tracing_state` says of modes that are others when compiled code is called, to trace under them again.

    ``aot_compile`` configures AOTAutograd while it compiles.
    """

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    configuration: Mapping[str, object]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            now = functorch_config.get_config_copy()
            changed = {name: value for name, value in self.configuration.items() if now.get(name) != value}
            if changed:
                stack.enter_context(functorch_config.patch(changed))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            yield


def tracing_modes() -> TracingModes:
    """Those of now."""
    return TracingModes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((device, torch.get_autocast_dtype(device)) for device in _autocast_devices()),
        torch.is_autocast_cache_enabled(),
        functorch_config.get_config_copy(),
    )


def tracing_state() -> list[str]:
    """A line for each fact, the same in every process; NoTextError where a trace would run code of the user's."""
    _reject_code_of_users()
    return [
        f"gradients {torch.is_grad_enabled()}",
        f"inference mode {torch.is_inference_mode_enabled()}",
        f"default dtype {torch.get_default_dtype()}",
        f"default device {torch.get_default_device()}",
        f"AOTAutograd's configuration {functorch_config.get_hash().hex()}",
        f"configuration of symbolic shapes {symbolic_shapes_config.get_hash().hex()}",  # type: ignore[attr-defined]
        f"fill uninitialized memory {torch.utils.deterministic.fill_uninitialized_memory}",  # type: ignore[attr-defined]
        f"oneDNN {torch._C._get_mkldnn_enabled()}",
        f"cuDNN {torch._C._get_cudnn_enabled()}",
        f"order of einsum {_order_of_einsum()}",
        *_attention(),
        *_autocast(),
    ]


def _reject_code_of_users() -> None:
    if torch._C._are_functorch_transforms_active():
        raise NoTextError("a transform of torch.func around it")
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and all(isinstance(hook, torch.fx.GraphModule) for hook in hooks):
        raise NoTextError("hooks for saved tensors that become part of it")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise NoTextError("a mode of torch functions or of dispatch around it")
    if getattr(functorch_config, "joint_custom_pass", None) is not None:
        raise NoTextError("a pass in AOTAutograd's configuration")
    if (overridden := _overridden_operator()) is not None:
        raise NoTextError(f"{overridden}, which the user implements")


def _overridden_operator() -> str | None:
    """An operator of torch that a trace sees otherwise than torch made it: by a kernel or a decomposition."""
    # Both tables together: 0.4 ms.
    for name in torch.library._impls:
        if name.startswith("aten/") and not name.endswith(_NOT_TRACED):
            return name
    for operator, function in _decomp.decomposition_table.items():
        # functools.wraps gives a user's function the module of torch's, but not its globals.
        space = getattr(function, "__globals__", {})
        if not all(str(name).startswith("torch.") for name in (function.__module__, space.get("__name__"))):
            return f"the decomposition of {operator}"
    return None


def _order_of_einsum() -> str:
    einsum: Any = torch.backends.opt_einsum
    return f"{einsum.strategy}" if einsum.enabled and einsum.is_available() else "as written"


def _attention() -> list[str]:
    """Which kernels of attention are allowed; what is said of CUDA's holds for the CPU's too."""
    allowed: Any = torch.backends.cuda
    return [
        f"flash attention {allowed.flash_sdp_enabled()}",
        f"memory-efficient attention {allowed.mem_efficient_sdp_enabled()}",
        f"attention of cuDNN {allowed.cudnn_sdp_enabled()}",
        f"attention of matmuls {allowed.math_sdp_enabled()}",
        f"attention of matmuls in half precision {allowed.fp16_bf16_reduction_math_sdp_allowed()}",
    ]


def _autocast() -> list[str]:
    """The dtype for the CPU in any case: a region in the graph may leave it open."""
    enabled = _autocast_devices()
    return [
        f"autocast for {' '.join(enabled) or 'nothing'}",
        f"cache of autocast {torch.is_autocast_cache_enabled()}",
        *(f"autocast {device} {torch.get_autocast_dtype(device)}" for device in dict.fromkeys(("cpu", *enabled))),
    ]


def _autocast_devices() -> list[str]:
    return [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)]
