"""Shared libraries of packages, called by a program in C."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import torchkiln
from tests.aot.models import Mlp
from torchkiln.aot import c_interface, shared_library
from torchkiln.errors import OptionError, PackageError
from torchkiln.native.host import Processor
from torchkiln.native.levels import needed_features

_TORCH = Path(torch.__file__).parent / "lib"


class _Convolutions(nn.Module):
    """Calls the typed and the dispatcher's route, a check of indices, and has a constant and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("rows", torch.tensor([3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        found = self.convolution(x[:, None]).flatten(1)
        return torch.cumsum(found, 1)[:, self.rows] + torch.tensor([0.5, 2.0])


def _program(model: nn.Module, example: Tensor, folder: Path, **options: object) -> Path:
    """A program that runs ``model``, built by gcc."""
    torchkiln.aot_compile(model, (example,), shared_library=True, path=folder / "mlp.kiln", **options)  # type: ignore[arg-type]
    source, built = Path(__file__).parent / "program.c", folder / "program"
    libraries = [str(folder / "mlp.so"), f"-L{_TORCH}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}:{folder}"]
    command = ["gcc", "-Wall", "-Werror", f"-I{folder}", str(source), *libraries, "-o", str(built)]
    subprocess.run(command, check=True, timeout=300)
    return built


def _run(program: Path, x: Tensor) -> subprocess.CompletedProcess[str]:
    given = program.parent / "numbers"
    given.write_bytes(x.contiguous().numpy().tobytes())
    command = [str(program), str(given), *map(str, x.shape)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_program_in_c_prints_the_numbers_of_eager(tmp_path: Path) -> None:
    model = Mlp()
    program = _program(model, torch.randn(5, 8), tmp_path, dynamic_shapes={"x": {0: Dim("rows", min=2, max=9)}})
    for rows in (5, 9):
        x = torch.randn(rows, 8)
        done = _run(program, x)
        assert done.returncode == 0, done.stderr
        printed = torch.tensor([float(line) for line in done.stdout.split()]).view(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(printed, model(x))
    for x, message in (
        (torch.randn(1, 8), "run: size 0 of the argument x must be 2 to 9, not 1"),
        (torch.randn(5, 7), "run: size 1 of the argument x must be 8, not 7"),
        (torch.randn(5), "run: the argument x must have 2 dimensions, not 1"),
    ):
        assert message in _run(program, x).stderr


class _Square(nn.Module):
    """Part of a matrix that has more columns than rows, by an even number, and not too many."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        torch._check((columns - 2 * rows) // 3 <= 1)
        return x[:, :rows] * (1 if (columns - rows) % 2 == 0 else -1)


def test_sizes_that_do_not_fit_together_are_refused_in_c(tmp_path: Path) -> None:
    sizes = {"x": {0: Dim("rows", min=2, max=9), 1: Dim("columns", min=2, max=20)}}
    program = _program(_Square(), torch.randn(4, 8), tmp_path, dynamic_shapes=sizes)
    for rows, columns in ((3, 7), (5, 9)):
        x = torch.randn(rows, columns)
        done = _run(program, x)
        assert done.returncode == 0, done.stderr
        printed = torch.tensor([float(line) for line in done.stdout.split()]).view(rows, rows)
        torch.testing.assert_close(printed, x[:, :rows])
    for rows, columns in ((7, 3), (4, 7), (2, 10)):
        assert "run: the model was compiled for sizes where" in _run(program, torch.randn(rows, columns)).stderr


def test_operators_constants_and_weights_of_other_strides_are_linked_in(tmp_path: Path) -> None:
    model = _Convolutions()
    program, x = _program(model, torch.randn(2, 6, 6), tmp_path), torch.randn(2, 6, 6)
    done = _run(program, x)
    assert done.returncode == 0, done.stderr
    printed = torch.tensor([float(line) for line in done.stdout.split()]).view(2, 2)
    with torch.no_grad():
        torch.testing.assert_close(printed, model(x))


class _Refuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.multinomial(x, 1)
        return self.table(x.long()) + drawn[..., None]


def test_errors_while_running_are_told_and_leave_the_program_running(tmp_path: Path) -> None:
    program = _program(_Refuses(), torch.ones(2, 3), tmp_path)
    assert _run(program, torch.ones(2, 3)).returncode == 0
    for x, message in ((torch.full((2, 3), 4.0), "index out of range"), (-torch.ones(2, 3), "probability tensor")):
        done = _run(program, x)
        assert done.returncode == 1
        assert message in done.stderr


def test_a_torch_that_does_not_keep_the_text_of_errors_is_linked_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.13: the function that gives the text is one that no library has."""
    monkeypatch.setenv("CC", "gcc -Dtorch_exception_get_what_without_backtrace=torch_no_such_function")
    program = _program(_Refuses(), torch.ones(2, 3), tmp_path)
    assert _run(program, torch.ones(2, 3)).returncode == 0
    done = _run(program, -torch.ones(2, 3))
    assert done.returncode == 1
    assert "failed: this version of torch writes its message to stderr" in done.stderr


def test_a_processor_that_lacks_a_feature_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = needed_features(Processor("x86_64-unknown-linux-gnu", "x86-64-v3", "")) | {"kl"}  # no server has it
    monkeypatch.setattr(c_interface, "needed_features", lambda processor: more)
    done = _run(_program(Mlp(), torch.randn(5, 8), tmp_path, targets=("x86-64-v3",)), torch.randn(5, 8))
    assert (done.returncode, done.stderr) == (
        1,
        "create: this library was compiled for x86-64-v3, and this processor lacks kl\n",
    )


def test_libraries_need_no_python(tmp_path: Path) -> None:
    _program(Mlp(), torch.randn(5, 8), tmp_path)
    symbols = subprocess.run(["nm", "-D", tmp_path / "mlp.so"], capture_output=True, text=True, check=True).stdout
    assert " U sgemm_" in symbols or " U aoti_torch" in symbols
    assert not [line for line in symbols.splitlines() if " Py" in line or "_Py" in line]


def test_models_that_call_python_are_refused(tmp_path: Path) -> None:
    class Loops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    with pytest.raises(PackageError, match=r"runs without Python, which this model calls .* through"):
        torchkiln.aot_compile(Loops(), (torch.randn(3, 3),), shared_library=True, path=tmp_path / "model.kiln")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shared_library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageError, match=r"needs a C compiler: install gcc or clang, or `pip install ziglang`"):
        torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), shared_library=True, path=tmp_path / "model.kiln")


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O1")
    with pytest.raises(PackageError, match="'no-such-compiler' that CC names cannot be found"):
        torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), shared_library=True, path=tmp_path / "model.kiln")


def test_a_library_is_for_one_target(tmp_path: Path) -> None:
    levels = ("x86-64-v3", "x86-64-v4")
    with pytest.raises(OptionError, match="one target"):
        torchkiln.aot_compile(
            Mlp(), (torch.randn(5, 8),), shared_library=True, targets=levels, path=tmp_path / "model.kiln"
        )
