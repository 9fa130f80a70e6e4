"""Files of packages: loaded by a process without a compiler, for the machine it has, and refused where damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchkiln
from tests.aot.models import Mlp
from torchkiln.aot import package as package_module
from torchkiln.artifact import decode_function, decode_support
from torchkiln.errors import PackageError
from torchkiln.native.elf import read_object
from torchkiln.target import Target


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mlp]:
    model = Mlp()
    path = tmp_path_factory.mktemp("package") / "mlp.kiln"
    levels = ("x86-64-v3", "x86-64-v4")
    return torchkiln.aot_compile(model, (torch.randn(5, 8),), targets=levels, path=path), model


_LOAD = """
import sys, torch, torchkiln

package = torchkiln.load(sys.argv[1])
torch.manual_seed(1)
x = torch.randn(5, 8)
torch.save(package(x), sys.argv[2])
absent = ("llvmlite", "torch._dynamo", "torch._inductor", "sympy")
stages = ("codegen", "compiler", "frontend", "lowering", "partition", "passes", "schedule", "graph", "ir")
prefixes = (*absent, *(f"torchkiln.{stage}" for stage in stages))
assert not [name for name in sys.modules if name.startswith(prefixes)]
mapped = [line for line in open("/proc/self/maps") if sys.argv[1] in line]
assert mapped and all("rw-p" in line for line in mapped), mapped
"""


def test_another_process_needs_no_compiler_and_maps_the_weights(stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    path, model = stored
    answer = tmp_path / "answer"
    subprocess.run([sys.executable, "-c", _LOAD, path, answer], env=dict(os.environ), check=True, timeout=300)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(answer, weights_only=True), model(torch.randn(5, 8)))


class _Loss(torch.nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x.sin(), target)


_REFUSED = """
import sys
import torch
import torchkiln
package, x = torchkiln.load(sys.argv[1]), torch.zeros(3, 5)
print(float(package(x, torch.tensor([1, 4, 0]))))
try:
    package(x, torch.tensor([1, 7, 0]))
except IndexError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith(("llvmlite", "torch._dynamo", "sympy", "torchkiln.ir"))]
"""


def test_another_process_says_which_class_is_out_of_bounds(tmp_path: Path) -> None:
    path = torchkiln.aot_compile(_Loss(), (torch.zeros(3, 5), torch.tensor([1, 4, 0])), path=tmp_path / "loss.kiln")
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED, path], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, message = done.stdout.splitlines()[:2]
    assert float(loss) == pytest.approx(float(torch.tensor(5.0).log()))
    assert "Target 7 is out of bounds" in message


def test_weights_start_at_a_page_and_are_a_safetensors_file(stored: tuple[Path, Mlp]) -> None:
    from safetensors.torch import load

    path, model = stored
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("weights.safetensors")
        content = archive.read(info)
    assert path.read_bytes().index(content) % 65536 == 0
    found = load(content)
    assert set(found) == set(model.state_dict())
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


def _only(*names: str) -> Callable[[Target], bool]:
    return lambda target: target.cpu in names


@pytest.mark.parametrize(
    ("fits", "chosen"), [(("x86-64-v3",), "x86-64-v3"), (("x86-64-v3", "x86-64-v4"), "x86-64-v4")]
)
def test_the_widest_target_that_runs_here_is_chosen(
    fits: tuple[str, ...], chosen: str, stored: tuple[Path, Mlp], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = stored
    runs_here = package_module.runs_here
    monkeypatch.setattr(package_module, "runs_here", lambda target: runs_here(target) and _only(*fits)(target))
    package, x = torchkiln.load(path), torch.randn(5, 8)
    assert package.target == chosen
    with torch.no_grad():
        torch.testing.assert_close(package(x), model(x))


def test_a_machine_that_can_run_none_of_the_targets_is_told_so(
    stored: tuple[Path, Mlp], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_module, "runs_here", _only())
    with pytest.raises(PackageError, match=r"code for x86-64-v3, x86-64-v4, none of which this processor .* can run"):
        torchkiln.load(stored[0])


def test_code_for_aarch64_is_cross_compiled(tmp_path: Path) -> None:
    path = torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), targets=("aarch64",), path=tmp_path / "mlp.kiln")
    with zipfile.ZipFile(path) as archive:
        function = decode_function(archive.read("aarch64/function"))
        support = decode_support(archive.read("aarch64/support"))
    codes = [function.forward.step_code, function.forward.kernel_code, *(module.code for module in support.modules)]
    assert {read_object(code).machine for code in codes} == {183}  # EM_AARCH64


def test_slips_in_what_to_compile_are_named(tmp_path: Path) -> None:
    x = torch.randn(5, 8)
    with pytest.raises(torchkiln.errors.OptionError, match=r"must be a tuple, as in aot_compile\(model, \(x,\)\)"):
        torchkiln.aot_compile(Mlp(), x, path=tmp_path / "mlp.kiln")
    with pytest.raises(torchkiln.errors.OptionError, match=r"as in targets=\('native',\)"):
        torchkiln.aot_compile(Mlp(), (x,), targets="native", path=tmp_path / "mlp.kiln")
    with pytest.raises(torchkiln.errors.OptionError, match="is a folder"):
        torchkiln.aot_compile(Mlp(), (x,), path=tmp_path)
    with pytest.raises(torchkiln.errors.OptionError, match="another suffix"):
        torchkiln.aot_compile(Mlp(), (x,), shared_library=True, path=tmp_path / "mlp.so")
    with pytest.raises(torchkiln.errors.OptionError, match=r"must be a torchkiln\.Settings, not a dict"):
        torchkiln.aot_compile(Mlp(), (x,), settings={"fuse": False}, path=tmp_path / "mlp.kiln")
    exported = torch.export.export(Mlp(), (x,))
    with pytest.raises(torchkiln.errors.OptionError, match="has its own dynamic shapes"):
        torchkiln.aot_compile(exported, (x,), dynamic_shapes=({0: torch.export.Dim("n")},), path=tmp_path / "mlp.kiln")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackageError, match=r"mlp\.kiln' cannot be written \([A-Z][a-z ]+\); give a path"):
        torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), targets=("x86-64-v9",), path=tmp_path / "file" / "mlp.kiln")


def test_packages_are_compiled_wherever_new_tensors_are_made(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ELU(0.3)), torch.randn(5, 8)
    with torch.device("meta"):
        torchkiln.aot_compile(model, (x,), path=tmp_path / "model.kiln")
    torch.testing.assert_close(torchkiln.load(tmp_path / "model.kiln")(x), model(x).detach())


def test_unknown_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(torchkiln.errors.OptionError, match="x86-64-v9"):
        torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), targets=("x86-64-v9",), path=tmp_path / "mlp.kiln")
    with pytest.raises(torchkiln.errors.OptionError, match="needs a target"):
        torchkiln.aot_compile(Mlp(), (torch.randn(5, 8),), targets=(), path=tmp_path / "mlp.kiln")


def test_code_for_another_torch_is_not_loaded(stored: tuple[Path, Mlp], monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkiln.artifact import support

    here = dict(support.binary_interface())
    monkeypatch.setattr(support, "binary_interface", lambda: {**here, "torch": "9.9"})
    with pytest.raises(PackageError, match=r"compiled for torch .*, and this process has torch 9\.9"):
        torchkiln.load(stored[0])


# Damage


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_found_or_harmless(data: st.DataObject, stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    path, model = stored
    content = bytearray(path.read_bytes())
    begin = content.index(b"weights.safetensors") + 19
    padding = range(begin, begin + 60000)
    position = data.draw(st.integers(0, len(content) - 1).filter(lambda k: k not in padding))
    content[position] ^= data.draw(st.integers(1, 255))
    damaged = tmp_path / "damaged.kiln"
    damaged.write_bytes(content)
    try:
        package = torchkiln.load(damaged, verify=True)
    except PackageError:
        return
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(package(x), model(x))


@given(kept=st.floats(0, 0.999))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_off_package_is_refused(kept: float, stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    content = stored[0].read_bytes()
    damaged = tmp_path / "damaged.kiln"
    damaged.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(PackageError):
        torchkiln.load(damaged)


@given(content=st.binary(max_size=2000))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_no_package(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "random.kiln"
    path.write_bytes(content)
    with pytest.raises(PackageError, match="no package or a damaged one"):
        torchkiln.load(path)


def _rewritten(path: Path, to: Path, edit: Callable[[dict[str, bytes]], None], **options: int) -> Path:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(to, "w", **options) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            archive.writestr(name, content)
    return to


def test_code_that_is_not_what_the_metadata_lists_is_not_loaded(stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    def swap(members: dict[str, bytes]) -> None:
        members["x86-64-v4/function"] = members["x86-64-v3/function"]

    with pytest.raises(PackageError, match="checksum of x86-64-v4/function"):
        torchkiln.load(_rewritten(stored[0], tmp_path / "swapped.kiln", swap), verify=True)


def test_members_that_a_package_does_not_have_are_refused(stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    for name in ("../../outside", "/etc/passwd", "native/more"):
        hostile = _rewritten(stored[0], tmp_path / "hostile.kiln", lambda members, n=name: members.update({n: b"x"}))
        with pytest.raises(PackageError, match="its members are not those that it lists"):
            torchkiln.load(hostile)


_WRONG_SIGNATURES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a weight less": lambda s: s["weights"].pop(),
    "a weight more": lambda s: s["weights"].append(s["weights"][0]),
    "an input less": lambda s: s["inputs"].pop(),
    "an order of other dimensions": lambda s: s["inputs"][0].update(order=[7, 9]),
    "an order of one dimension twice": lambda s: s["inputs"][0].update(order=[0, 0]),
    "a size of no range": lambda s: s["inputs"][0]["sizes"].__setitem__(0, _symbolic(symbol=9)),
    "a size that is a multiple of 0": lambda s: s["inputs"][0]["sizes"].__setitem__(0, _symbolic(times=0)),
    "a condition that is no tree": lambda s: s.update(conditions=[_condition("rows")]),
    "a condition on another symbol": lambda s: s.update(conditions=[_condition(["symbol", 9])]),
    "a condition by an operation there is none of": lambda s: s.update(conditions=[_condition(["pow", 2, 2])]),
    "a range of text": lambda s: s.update(ranges=[{"type": "Range", "least": "a", "most": None}]),
    "a result that code does not have": lambda s: s.update(results=[{"type": "ComputedResult", "number": 9}]),
    "more leaves than results": lambda s: s.update(returned={"list": [None, None]}),
}


def _symbolic(symbol: int = 0, times: int = 1) -> dict[str, Any]:
    return {"type": "SymbolicSize", "symbol": symbol, "times": times, "plus": 0}


def _condition(tree: Any) -> dict[str, Any]:
    return {"type": "SizeCondition", "tree": tree, "text": "it holds"}


@pytest.mark.parametrize("wrong", _WRONG_SIGNATURES)
def test_a_signature_that_no_call_can_have_is_refused(wrong: str, stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        metadata = json.loads(members["metadata.json"])
        _WRONG_SIGNATURES[wrong](metadata["signature"])
        members["metadata.json"] = json.dumps(metadata).encode()

    with pytest.raises(PackageError, match="no package or a damaged one"):
        torchkiln.load(_rewritten(stored[0], tmp_path / "wrong.kiln", edit))


def test_compressed_members_are_refused(stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    def bomb(members: dict[str, bytes]) -> None:
        members["weights.safetensors"] = bytes(1 << 26)

    small = _rewritten(stored[0], tmp_path / "bomb.kiln", bomb, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(PackageError, match="is compressed"):
        torchkiln.load(small)


def test_other_formats_and_missing_files_are_named(stored: tuple[Path, Mlp], tmp_path: Path) -> None:
    def later(members: dict[str, bytes]) -> None:
        members["metadata.json"] = json.dumps({**json.loads(members["metadata.json"]), "format": 99}).encode()

    with pytest.raises(PackageError, match="has format 99"):
        torchkiln.load(_rewritten(stored[0], tmp_path / "later.kiln", later))
    with pytest.raises(PackageError, match="No such file"):
        torchkiln.load(tmp_path / "absent.kiln")
    for path in (tmp_path, "/dev/zero"):
        with pytest.raises(PackageError, match="cannot be opened: it is no file"):
            torchkiln.load(path)
