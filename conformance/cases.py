"""What is tried: the operators of torch's database, dtypes and sample inputs, and results that vary by design."""

from __future__ import annotations

import random
import sys
import unittest
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

# Operators whose values eager does not determine: memory nobody wrote. Sizes, strides and dtypes are still compared.
UNWRITTEN = {
    "empty": "returns memory as it finds it",
    "empty_like": "returns memory as it finds it",
    "empty_permuted": "returns memory as it finds it",
    "empty_strided": "returns memory as it finds it",
    "new_empty": "returns memory as it finds it",
    "new_empty_strided": "returns memory as it finds it",
}

# Operators that draw random numbers. A sample of one is compared in full where eager draws none for it (dropout
# with p=0, attention without dropout), and by sizes, strides and dtypes otherwise.
RANDOM = {
    "bernoulli": "draws its result",
    "cauchy": "draws its result",
    "exponential": "draws its result",
    "geometric": "draws its result",
    "log_normal": "draws its result",
    "multinomial": "draws its result",
    "nn.functional.alpha_dropout": "draws its mask",
    "nn.functional.dropout": "draws its mask",
    "nn.functional.dropout2d": "draws its mask",
    "nn.functional.dropout3d": "draws its mask",
    "nn.functional.feature_alpha_dropout": "draws its mask",
    "nn.functional.fractional_max_pool2d": "draws its windows",
    "nn.functional.fractional_max_pool3d": "draws its windows",
    "nn.functional.multi_head_attention_forward": "draws its dropout mask",
    "nn.functional.rrelu": "draws its slopes",
    "nn.functional.scaled_dot_product_attention": "draws its dropout mask",
    "normal": "draws its result",
    "pca_lowrank": "projects on random directions",
    "rand_like": "draws its result",
    "randint": "draws its result",
    "randint_like": "draws its result",
    "randn": "draws its result",
    "randn_like": "draws its result",
    "svd_lowrank": "projects on random directions",
    "uniform": "draws its result",
}


@dataclass(frozen=True, order=True)
class Case:
    """One operator (with its variant, after a slash) for one dtype, with its tensors on ``device``."""

    operator: str
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        words = self.operator, self.dtype, "" if self.device == "cpu" else self.device
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Sample:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    for_gradient: Any = None  # what the database applies to results before differentiating, where they are not unique


@lru_cache(maxsize=1)
def database() -> dict[str, Any]:
    """torch's operator database by name."""
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        _stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    _let_random_operators_be_captured()
    return {name_of(info): info for info in op_db}


def _stand_in_for_expecttest() -> None:
    """torch's module of the database imports that package for a base class of tests, none of which run here.

    A machine with a card may not have it.
    """
    module = ModuleType("expecttest")
    module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = module


def _let_random_operators_be_captured() -> None:
    """The database calls random operators through a wrapper that saves, sets and restores the seed.

    Dynamo cannot capture that. Seeds are set here before every run instead.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = _call  # type: ignore[attr-defined]


def _call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def name_of(info: Any) -> str:
    return f"{info.name}/{info.variant_test_name}" if info.variant_test_name else str(info.name)


def cases(operators: Sequence[str] = (), dtypes: Iterable[str] = DTYPES) -> list[Case]:
    """Every operator with every dtype it supports on the CPU; ``operators``: names with or without variant."""
    wanted = list(dtypes)
    found = []
    for name, info in database().items():
        if operators and name not in operators and name.partition("/")[0] not in operators:
            continue
        supported = info.supported_dtypes("cpu")
        found += [Case(name, dtype) for dtype in wanted if DTYPES[dtype] in supported]
    return found


def differentiable(case: Case) -> bool:
    info = database()[case.operator]
    dtype = DTYPES[case.dtype]
    supported = info.supported_backward_dtypes(case.device)
    return bool(dtype.is_floating_point and info.supports_autograd and dtype in supported)


def samples(case: Case) -> list[Sample]:
    """The sample inputs, the same in every run."""
    seed_everything(0)
    info = database()[case.operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = list(info.sample_inputs(case.device, DTYPES[case.dtype], requires_grad=differentiable(case)))
    return [Sample((s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad) for s in made]


def seed_everything(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond to record its caller
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
