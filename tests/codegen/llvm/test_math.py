"""Generated math functions against eager: accuracy over dense samples, special values, every vector width."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import mpmath
import pytest
import torch

from torchkiln.codegen.llvm.math import SUPPORTED, math_function
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.config import Settings
from torchkiln.native.jit import initialize_llvm
from torchkiln.native.symbols import address_of
from torchkiln.native.vector_math import carried_functions
from torchkiln.target import Target, capture_target, gpu_target

LANES = (1, 8, 16, 64)
DTYPES = {"float": torch.float32, "double": torch.float64}
BINARY = ("pow", "atan2", "fmod", "hypot", "nextafter")
INF, NAN = math.inf, math.nan

EAGER: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name) if hasattr(torch, name) else getattr(torch.special, name) for name in SUPPORTED
}

# Where the dense samples lie, and how many units in the last place of the result may be off in float32.
UNARY_FLOAT: dict[str, tuple[float, float, float]] = {
    "exp": (-104, 89, 1.5),
    "exp2": (-150, 128.5, 1.5),
    "expm1": (-25, 89, 1.5),
    "log": (1e-3, 50, 1.5),
    "log2": (1e-3, 50, 1.5),
    "log10": (1e-3, 50, 1.5),
    "log1p": (-0.999, 50, 1.5),
    "sin": (-1.5e5, 1.5e5, 1.5),
    "cos": (-1.5e5, 1.5e5, 1.5),
    "tan": (-1.5e5, 1.5e5, 1.5),
    "asin": (-1, 1, 1.5),
    "acos": (-1, 1, 1.5),
    "atan": (-20, 20, 1.5),
    "sinh": (-89.4, 89.4, 1.5),
    "cosh": (-89.4, 89.4, 1.5),
    "tanh": (-12, 12, 1.5),
    "asinh": (-1e3, 1e3, 1.5),
    "acosh": (1, 1e3, 1.6),
    "atanh": (-1, 1, 1.5),
    "erf": (-5, 5, 1.5),
    "erfc": (-5, 10, 1.5),
    "erfinv": (-1, 1, 1.5),
    "lgamma": (0.1, 100, 2),
    "sigmoid": (-87, 30, 2.5),
}

TARGET = capture_target(Settings())
SPECIAL = (
    *(0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1.5, -2.5, 1e-40, -1e-40),
    *(1e-30, -1e-30, 1e-7, -1e-7, 88.0, -88.0, 100.0, -100.0, -110.0, 1e10, -1e10, 1e38, -1e38, 2.0**24 + 2, 0.3),
)


class Kernels:
    """Loops over arrays around math functions, compiled together."""

    def __init__(self, wanted: Iterable[tuple[str, str, int]], target: Target = TARGET) -> None:
        module = ModuleBuilder(target)
        for name, element, lanes in wanted:
            _define_loop(module, name, element, lanes)
        initialize_llvm()  # makes the machine known to LLVM
        triple = llvm.get_process_triple()
        machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        parsed = llvm.parse_assembly(module.text())
        parsed.triple = triple
        parsed.data_layout = str(machine.target_data)
        parsed.verify()
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.add_aggressive_dce_pass()
        passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2)))
        for function in parsed.functions:
            if function.is_declaration and not function.name.startswith("llvm."):
                address = address_of(function.name)
                assert address is not None, function.name
                llvm.add_symbol(function.name, address)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def __call__(self, name: str, lanes: int, *arguments: torch.Tensor) -> torch.Tensor:
        """The function on whole tensors whose size is a multiple of ``lanes``."""
        (x, *_) = arguments
        assert x.numel() % lanes == 0
        assert all(a.is_contiguous() and a.shape == x.shape and a.dtype == x.dtype for a in arguments)
        element = "float" if x.dtype == torch.float32 else "double"
        address = self._engine.get_function_address(f"loop_{name}_{element}_{lanes}")
        entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)
        out = torch.empty_like(x)
        entry(x.data_ptr(), arguments[-1].data_ptr(), out.data_ptr(), x.numel())
        return out


def _define_loop(module: ModuleBuilder, name: str, element: str, lanes: int) -> None:
    symbol = math_function(module, name, element, lanes)
    vector = element if lanes == 1 else f"<{lanes} x {element}>"
    operands = f"{vector} %a, {vector} %b" if name in BINARY else f"{vector} %a"
    align = 4 if element == "float" else 8
    loop = f"loop_{name}_{element}_{lanes}"
    module.define(
        loop,
        f"""define void @{loop}(ptr %x, ptr %y, ptr %out, i64 %n) #0 {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop.end ]
  %p = getelementptr {element}, ptr %x, i64 %i
  %q = getelementptr {element}, ptr %y, i64 %i
  %r = getelementptr {element}, ptr %out, i64 %i
  %a = load {vector}, ptr %p, align {align}
  %b = load {vector}, ptr %q, align {align}
  %v = call {vector} {symbol}({operands})
  br label %loop.end
loop.end:
  store {vector} %v, ptr %r, align {align}
  %next = add i64 %i, {lanes}
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %exit
exit:
  ret void
}}""",
    )


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return Kernels((name, element, lanes) for name in sorted(SUPPORTED) for element in DTYPES for lanes in LANES)


def errors_in_ulp(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from the float64 value in units of the last place of the result's type, denormals included."""
    rounded = exact.to(got.dtype).abs()
    step = torch.nextafter(rounded, torch.full_like(rounded, INF)).double() - rounded.double()
    return (got.double() - exact).abs() / step


def same_special(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Zeros with their sign, infinities and NaN agree; other values are not compared."""
    special = (want == 0) | ~want.isfinite() | (got == 0) | ~got.isfinite()
    equal = (got.isnan() & want.isnan()) | ((got == want) & (got.signbit() == want.signbit()))
    return ~special | equal


def dense(low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Samples of the whole range, of what lies near zero and one, and of many magnitudes in between."""
    generator = torch.Generator().manual_seed(0)

    def uniform(a: float, b: float, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.float64).uniform_(a, b, generator=generator)

    tiny = torch.exp(uniform(-60, 1, 2048))
    parts = [uniform(low, high, 8192), uniform(-2, 2, 8192), tiny, -tiny, 1 + tiny * 1e-3]
    return torch.cat([p.clamp(low, high) for p in parts]).to(dtype)[: 20480 // 64 * 64]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", sorted(UNARY_FLOAT))
def test_float32_is_close_to_the_float64_value(kernels: Kernels, name: str, lanes: int) -> None:
    low, high, bound = UNARY_FLOAT[name]
    x = dense(low, high, torch.float32)
    exact = EAGER[name](x.double())
    got = kernels(name, lanes, x)
    keep = exact.to(torch.float32).isfinite() & exact.isfinite()
    assert (got.isfinite() == keep).all()
    worst = errors_in_ulp(got, exact)[keep].max().item()
    assert worst <= bound


CARD = gpu_target((9, 0))


@pytest.fixture(scope="module")
def kernels_of_a_card() -> Kernels:
    """The code for cards, compiled for this machine."""
    names = (name for name in sorted(UNARY_FLOAT) if CARD.computes(name, torch.float32))
    return Kernels(((name, "float", lanes) for name in names for lanes in (1, 4, 8)), CARD)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("name", sorted(name for name in UNARY_FLOAT if CARD.computes(name, torch.float32)))
def test_functions_of_cards_are_close_to_the_float64_value(kernels_of_a_card: Kernels, name: str, lanes: int) -> None:
    low, high, bound = UNARY_FLOAT[name]
    x = dense(low, high, torch.float32)
    if name in ("sin", "cos", "tan"):
        bits = torch.arange(-(2**31) + 9973, 2**31, 2**15)
        x = torch.cat([x, bits.int().view(torch.float32)[: bits.numel() // 8 * 8]])
    exact = EAGER[name](x.double())
    got = kernels_of_a_card(name, lanes, x)
    keep = exact.to(torch.float32).isfinite() & exact.isfinite()
    assert (got.isfinite() == keep).all()
    assert errors_in_ulp(got, exact)[keep].max().item() <= bound


@pytest.mark.parametrize("lanes", [8, 64])
@pytest.mark.parametrize("name", sorted(set(UNARY_FLOAT) - {"lgamma"}))
def test_float32_of_bits_from_the_whole_range_is_close_to_the_float64_value(
    kernels: Kernels, name: str, lanes: int
) -> None:
    """Every exponent and sign has its share of 2**18 arguments; ``make accuracy`` takes more of them."""
    low, high, bound = UNARY_FLOAT[name]
    bits = torch.arange(-(2**31) + 9973, 2**31, 2**14)
    x = bits.int().view(torch.float32).clone()
    if name == "sigmoid":  # further down eager's is 0, and so is ours
        x = x.clamp(low, high)
    exact = EAGER[name](x.double())
    got = kernels(name, lanes, x)
    keep = exact.to(torch.float32).isfinite()
    assert (got.isnan() == exact.isnan()).all()
    assert errors_in_ulp(got, exact)[keep].max().item() <= bound


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p", "asinh", "acosh", "lgamma"])
def test_float32_is_close_over_all_magnitudes(kernels: Kernels, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    exponents = torch.empty(16384, dtype=torch.float64).uniform_(-149, 127.99, generator=generator)
    x = torch.exp2(exponents).float()
    if name == "acosh":
        x = x + 1
    if name == "lgamma":
        x = x.clamp(1e-30, 1e30)
    exact = EAGER[name](x.double())
    assert errors_in_ulp(kernels(name, 64, x), exact).max().item() <= 2


def test_float32_pow_is_close_to_the_float64_value(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(2)
    logs = torch.empty(32768, dtype=torch.float64).uniform_(-100, 88, generator=generator)
    logs[:16384] *= 0.02
    x = torch.exp(logs).float()
    # The whole range of finite results, denormals and a little beyond.
    power = torch.empty(32768, dtype=torch.float64).uniform_(-105, 90, generator=generator)
    y = (power / x.double().log()).float()
    exact = x.double() ** y.double()
    got = kernels("pow", 64, x, y)
    finite = exact.float().isfinite()
    assert (got.isfinite() == finite).all()
    assert finite.float().mean() > 0.9
    assert errors_in_ulp(got, exact)[finite].max().item() <= 1.5


def test_float32_pow_takes_negative_bases_with_whole_exponents(kernels: Kernels) -> None:
    x = -torch.linspace(0.01, 20, 6400)
    y = torch.arange(6400).remainder(21).sub(10).float()
    exact = x.double() ** y.double()
    assert errors_in_ulp(kernels("pow", 16, x, y), exact).max().item() <= 1.5


@pytest.mark.parametrize("name", ["atan2", "hypot", "fmod"])
@pytest.mark.parametrize("lanes", LANES)
def test_float32_binary_functions_are_close(kernels: Kernels, name: str, lanes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(16384, generator=generator) * 10 for _ in range(2))
    exact = EAGER[name](x.double(), y.double())
    assert errors_in_ulp(kernels(name, lanes, x, y), exact).max().item() <= 2


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_large_angles_in_some_lanes_are_reduced_exactly(kernels: Kernels, name: str) -> None:
    x = torch.logspace(-3, 38, 6400, dtype=torch.float64).float()
    x = x[torch.randperm(6400, generator=torch.Generator().manual_seed(4))]
    exact = EAGER[name](x.double())
    assert errors_in_ulp(kernels(name, 64, x), exact).max().item() <= 2


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", sorted(SUPPORTED - set(BINARY)))
def test_special_values_are_those_of_eager(kernels: Kernels, name: str, element: str) -> None:
    x = torch.tensor(SPECIAL * 2, dtype=DTYPES[element])
    want = EAGER[name](x)
    for lanes in LANES:
        got = kernels(name, lanes, x)
        wrong = ~same_special(got, want)
        assert not wrong.any(), [(a, g, w) for a, g, w in zip(x[wrong], got[wrong], want[wrong], strict=True)]


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", BINARY)
def test_special_pairs_are_those_of_eager(kernels: Kernels, name: str, element: str) -> None:
    values = torch.tensor(SPECIAL, dtype=DTYPES[element])
    x, y = (t.reshape(-1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    want = EAGER[name](x, y)
    for lanes in LANES:
        got = kernels(name, lanes, x, y)
        wrong = ~same_special(got, want)
        assert not wrong.any(), [t[wrong].tolist() for t in (x, y, got, want)]


@pytest.mark.parametrize("element", DTYPES)
def test_nextafter_is_exact(kernels: Kernels, element: str) -> None:
    values = torch.tensor(SPECIAL, dtype=DTYPES[element])
    x, y = (t.reshape(-1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    got, want = kernels("nextafter", 16, x, y), torch.nextafter(x, y)
    assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", sorted(set(UNARY_FLOAT) - {"sigmoid"}))
def test_double_is_close_to_the_exact_value(kernels: Kernels, name: str) -> None:
    low, high, _ = UNARY_FLOAT[name]
    rng = random.Random(5)
    points = [rng.uniform(low, high) for _ in range(96)]
    points += [min(max(rng.uniform(-2, 2), low), high) for _ in range(96)]
    x = torch.tensor(points, dtype=torch.float64)
    function: Any = {"lgamma": "loggamma", "log1p": "log1p"}.get(name, name)
    function = (lambda v: mpmath.log(v, 2)) if name == "log2" else getattr(mpmath, function, None)
    if name == "exp2":
        function = lambda v: mpmath.power(2, v)  # noqa: E731
    with mpmath.workdps(40):
        exact = [function(mpmath.mpf(v)) for v in points]
        for lanes in LANES:
            got = kernels(name, lanes, x).tolist()
            for at, value, right in zip(points, got, exact, strict=True):
                if math.isinf(value) or mpmath.isinf(right):
                    assert value == float(right), at
                else:
                    step = math.ulp(float(right))
                    assert abs(mpmath.mpf(value) - right) <= 2.5 * step, (at, value, right)


@pytest.mark.parametrize("name", ["sinh", "cosh", "asinh", "acosh"])
@pytest.mark.parametrize("element", DTYPES)
def test_hyperbolic_functions_hold_to_the_end_of_the_range(kernels: Kernels, name: str, element: str) -> None:
    largest = torch.finfo(DTYPES[element]).max
    end = math.log(largest) + math.log(2) if name in ("sinh", "cosh") else largest
    points = [end * (1 - 2.0**-20) * (0.98 + 0.02 * i / 31) for i in range(32)]
    points += [min(end**0.5 * 1.3 ** (i - 16), points[0]) for i in range(32)]
    x = torch.tensor(points, dtype=DTYPES[element])
    with mpmath.workdps(40):
        exact = [getattr(mpmath, name)(mpmath.mpf(v)) for v in x.tolist()]
        for value, right in zip(kernels(name, 16, x).tolist(), exact, strict=True):
            assert abs(mpmath.mpf(value) / right - 1) <= 2.5 * torch.finfo(DTYPES[element]).eps


@pytest.mark.parametrize("name", ["pow", "atan2", "hypot", "fmod", "sigmoid"])
def test_double_is_close_to_eager(kernels: Kernels, name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.empty(6400, dtype=torch.float64).uniform_(0.01, 30, generator=generator)
    y = torch.empty(6400, dtype=torch.float64).uniform_(-20, 20, generator=generator)
    arguments = (x, y) if name in BINARY else (x,)
    for lanes in LANES:
        got = kernels(name, lanes, *arguments)
        assert errors_in_ulp(got, EAGER[name](*arguments)).max().item() <= 2


@pytest.mark.parametrize("element", DTYPES)
def test_digamma_is_close_to_the_exact_value(kernels: Kernels, element: str) -> None:
    rng = random.Random(7)
    x = torch.tensor([rng.uniform(-10, 40) for _ in range(192)], dtype=DTYPES[element])
    with mpmath.workdps(30):
        exact = torch.tensor([float(mpmath.digamma(v)) for v in x.tolist()], dtype=torch.float64)
    for lanes in LANES:
        error = (kernels("digamma", lanes, x).double() - exact).abs() / exact.abs().clamp(min=1)
        assert error.max().item() <= (1e-13 if element == "double" else 1e-7)


@pytest.mark.parametrize("name", sorted(SUPPORTED - set(BINARY)))
def test_the_number_of_lanes_does_not_change_a_bit(kernels: Kernels, name: str) -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.cat([dense(-20, 20, torch.float32), torch.tensor(SPECIAL * 2)])
    x = x[torch.randperm(x.numel(), generator=generator)]
    first, *others = (kernels(name, lanes, x).nan_to_num(nan=7.0) for lanes in LANES)
    for other in others:
        assert torch.equal(first.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("lanes", LANES)
def test_erf_is_close_where_its_intervals_meet_and_one_beyond_them(kernels: Kernels, lanes: int) -> None:
    """Every float32 around the ends and the middles of the intervals that a table has, for either sign."""
    around = torch.arange(-512, 512)
    middles = torch.tensor([k * 0.253 / 2 for k in range(1, 33)])
    x = (middles.view(torch.int32)[:, None] + around).flatten().int().view(torch.float32)
    for signed in (x, -x):
        assert errors_in_ulp(kernels("erf", lanes, signed), torch.erf(signed.double())).max().item() <= 1.25
    beyond = torch.cat([torch.linspace(3.9193, 4.5, 4096), torch.logspace(0.6, 38, 4096)])
    assert (kernels("erf", lanes, beyond) == 1).all()
    assert (kernels("erf", lanes, -beyond) == -1).all()


def test_sigmoid_goes_to_zero_without_nan(kernels: Kernels) -> None:
    x = -torch.linspace(80, 200, 6400)
    got = kernels("sigmoid", 64, x)
    assert not got.isnan().any()
    assert (got.diff() <= 0).all()
    assert got[-1] == 0


def test_exp_of_nan_keeps_any_payload_a_nan(kernels: Kernels) -> None:
    bits = torch.tensor([0x7FC00001, 0x7FFFFFFF, 0x7F800001, -1, -0x400000, 0x7FC001FF, 0x7F8000FF, 0x7FD55555] * 8)
    x = bits.to(torch.int32).view(torch.float32)
    for name in ("exp", "exp2", "expm1", "sigmoid", "tanh", "erf", "erfc", "sin", "cos", "log", "log1p"):
        for lanes in LANES:
            assert kernels(name, lanes, x).isnan().all(), (name, lanes)


@pytest.mark.parametrize(
    "name", ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "erf", "erfc", "pow"]
)
def test_hot_float32_functions_call_nothing_outside(name: str) -> None:
    module = ModuleBuilder(TARGET)
    math_function(module, name, "float", 64)
    declared = [line for line in module.text().splitlines() if line.startswith("declare")]
    assert all("@llvm." in line for line in declared)


def test_asking_twice_adds_nothing() -> None:
    module = ModuleBuilder(TARGET)
    symbol = math_function(module, "sin", "float", 16)
    text = module.text()
    assert math_function(module, "sin", "float", 16) == symbol == "@kiln_sin_f32_v16"
    assert module.text() == text


@pytest.mark.parametrize(
    ("name", "element", "lanes", "complaint"),
    [("cbrt", "float", 8, "no math function"), ("exp", "half", 8, "float and double"), ("exp", "float", 3, "lanes")],
)
def test_what_does_not_exist_is_refused(name: str, element: str, lanes: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        math_function(ModuleBuilder(TARGET), name, element, lanes)


def test_resolved_addresses_are_callable() -> None:
    address = address_of("cos")
    assert address is not None
    assert ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(address)(1.0) == pytest.approx(math.cos(1.0), rel=1e-15)
    assert address_of("no_such_function_anywhere") is None


def test_without_sleef_the_c_library_is_called_lane_by_lane() -> None:
    without = replace(TARGET, sleef=frozenset())
    x = torch.linspace(0.5, 20, 640)
    wanted = [("lgamma", "float", 4), ("hypot", "double", 8), ("lgamma", "double", 1), ("atanh", "float", 64)]
    scalar = Kernels(wanted, without)
    assert errors_in_ulp(scalar("lgamma", 4, x), torch.lgamma(x.double())).max() <= 2
    assert errors_in_ulp(scalar("lgamma", 1, x.double()), torch.lgamma(x.double())).max() <= 4
    y = x.double()
    assert errors_in_ulp(scalar("hypot", 8, y, y.flip(0)), torch.hypot(y, y.flip(0))).max() <= 1
    assert errors_in_ulp(scalar("atanh", 64, x / 21), torch.atanh((x / 21).double())).max() <= 2


@pytest.mark.parametrize("bits", [256, 512])
def test_sleef_is_called_at_the_width_of_the_machine(bits: int) -> None:
    if not llvm.get_host_cpu_features().get("avx2" if bits == 256 else "avx512f"):
        pytest.skip(f"no registers of {bits} bits here")
    target = replace(TARGET, sleef_bits=bits, sleef=carried_functions(bits))
    module = ModuleBuilder(target)
    math_function(module, "lgamma", "double", 4)
    assert f"@Sleef_lgammad{bits // 64}_u10(" in module.text()
    x = torch.linspace(0.5, 20, 640, dtype=torch.float64)
    called = Kernels([("lgamma", "double", 4), ("log", "double", 32), ("lgamma", "float", 2)], target)
    assert errors_in_ulp(called("lgamma", 4, x), torch.lgamma(x)).max() <= 4
    assert errors_in_ulp(called("log", 32, x), torch.log(x)).max() <= 1
    assert errors_in_ulp(called("lgamma", 2, x.float()), torch.lgamma(x.float().double())).max() <= 2


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "log10"])
def test_plain_instructions_give_the_bits_of_avx512(kernels: Kernels, name: str) -> None:
    x = torch.cat([dense(-110, 95, torch.float32), torch.tensor(SPECIAL * 2)])
    plain = Kernels([(name, "float", 64)], replace(TARGET, sleef_bits=256))(name, 64, x).nan_to_num(nan=7.0)
    assert torch.equal(plain, kernels(name, 64, x).nan_to_num(nan=7.0))


@pytest.mark.parametrize("element", DTYPES)
def test_every_power_of_two_of_lanes_compiles(kernels: Kernels, element: str) -> None:
    x = torch.linspace(0.1, 30, 640, dtype=DTYPES[element])
    names = ("exp", "log", "sin", "lgamma", "digamma", "erfinv")
    others = Kernels((name, element, lanes) for name in names for lanes in (2, 4, 32))
    for name in names:
        want = kernels(name, 16, x).nan_to_num(nan=7.0)
        for lanes in (2, 4, 32):
            assert torch.equal(others(name, lanes, x).nan_to_num(nan=7.0), want)
