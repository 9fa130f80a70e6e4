"""SLEEF's vector functions, which torch's library carries for the widest registers of the machine."""

from __future__ import annotations

from functools import cache

from torchkiln.native.symbols import address_of

# Those that generated code calls, with the error bound their names end in, in units of the last place; exact functions
# have none.
FUNCTIONS = {
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "lgamma", "erf"), "_u10"),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "atan2"), "_u10"),
    **dict.fromkeys(("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"), "_u10"),
    "erfc": "_u15",
    "hypot": "_u05",
    "fmod": "",
}


def sleef_symbol(name: str, element: str, bits: int) -> tuple[str, int]:
    """The name SLEEF has for a function of ``float`` or ``double`` in registers of ``bits``, and its lanes."""
    lanes = bits // (32 if element == "float" else 64)
    return f"Sleef_{name}{element[0]}{lanes}{FUNCTIONS[name]}", lanes


def symbols_for(bits: int) -> frozenset[str]:
    """Symbols of all of them for registers of ``bits``."""
    return frozenset(sleef_symbol(name, element, bits)[0] for name in FUNCTIONS for element in ("float", "double"))


@cache
def carried_functions(bits: int) -> frozenset[str]:
    """Symbols of the functions that this process has for registers of ``bits``."""
    return frozenset(symbol for symbol in symbols_for(bits) if address_of(symbol) is not None) if bits else frozenset()
