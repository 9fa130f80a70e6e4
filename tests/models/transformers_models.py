"""Whole models of the transformers library with random weights, compiled and checked against eager: ``make models``.

Each has its published architecture with fewer layers or smaller sizes where the real ones would take minutes. The
forward pass is checked in evaluation mode, a training step in training mode with dropout at zero (compiled and eager
draw different random numbers). The step is checked twice. In float64 every gradient must agree with eager's closely.
In float32 that would be asking too much: batch norm over few elements and ReLU at zero amplify rounding, and eager's
own gradients of ResNet-50 are 1 to 5 % from the float64 ones here. There the error against float64 is compared with
the error eager makes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import torchkiln

BACKEND = os.environ.get("TORCHKILN_TEST_BACKEND", "kiln")
# All relative to the size of the tensor. Sums over thousands of elements are taken in another order; a wrong kernel is
# off by far more.
FORWARD_LIMIT, BUFFER_LIMIT = 1e-4, 1e-4
DOUBLE_LIMIT = 1e-6
# In float32, gradients and buffers may be this far from float64, or this many times as far as eager's worst.
GRADIENT_LIMIT, EAGER_FACTOR = 2e-3, 4.0
STEPS = 5

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A model to build and its inputs; ``outputs`` picks the tensor that is compared and trained on.

    ``norm_in_float32`` marks models whose norms compute in float32 even when everything else is float64, so that
    their float64 gradients carry float32 rounding.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    outputs: Callable[[Any], Tensor]
    norm_in_float32: bool = False


def _hidden(output: Any) -> Tensor:
    return output.last_hidden_state  # type: ignore[no-any-return]


def _logits(output: Any) -> Tensor:
    return output.logits  # type: ignore[no-any-return]


def _ids(vocabulary: int, length: int = 64) -> Inputs:
    return {
        "input_ids": torch.randint(vocabulary, (2, length)),
        "attention_mask": (torch.arange(length) < torch.tensor([[length], [length // 2]])).long(),
    }


def _image(size: int) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=8000, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=8000, num_layers=2, num_decoder_layers=2, dropout_rate=0.0, use_cache=False)
    return T5Model(config)


def _t5_inputs() -> Inputs:
    return {**_ids(8000), "decoder_input_ids": torch.randint(8000, (2, 32))}


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=100))


def _mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=100, classifier_dropout_prob=0.0))


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(depths=[2, 2, 3, 2], drop_path_rate=0.0, num_labels=100))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=4,
        image_size=112,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=100,
    )
    return ViTForImageClassification(config)


def _swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        depths=[2, 2, 2, 2],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=100,
    )
    return SwinForImageClassification(config)


def _whisper_encoder() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(encoder_layers=4, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    config.max_source_positions = 200
    return WhisperEncoder(config)


MODELS: Mapping[str, Entry] = {
    "bert": Entry(_bert, lambda: _ids(30522), _hidden),
    "gpt2": Entry(_gpt2, lambda: _ids(8000), _logits),
    "llama": Entry(_llama, lambda: _ids(8000), _logits, norm_in_float32=True),
    "t5": Entry(_t5, _t5_inputs, _hidden, norm_in_float32=True),
    "resnet50": Entry(_resnet50, lambda: _image(96), _logits),
    "mobilenet_v2": Entry(_mobilenet_v2, lambda: _image(96), _logits),
    "convnext": Entry(_convnext, lambda: _image(96), _logits),
    "vit": Entry(_vit, lambda: _image(112), _logits),
    "swin": Entry(_swin, lambda: _image(224), _logits),
    "whisper_encoder": Entry(_whisper_encoder, lambda: {"input_features": torch.randn(2, 80, 400)}, _hidden),
}


@dataclass(frozen=True)
class Result:
    """One row of the table; ``failure`` is empty when everything matched, ``code`` says what was measured."""

    model: str
    code: str
    failure: str = ""
    forward_error: float = float("nan")
    gradient_error: float = float("nan")
    eager_gradient_error: float = float("nan")
    double_gradient_error: float = float("nan")
    first_inference: float = float("nan")
    first_training: float = float("nan")
    eager_ms: float = float("nan")
    compiled_ms: float = float("nan")
    graphs: int = 0
    kernels: int = 0
    externs: int = 0


def _code() -> str:
    """The backend and versions a row is about; for kiln also a digest of its source, so no row of old code stays."""
    digest = hashlib.sha256()
    for path in sorted(Path(torchkiln.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{BACKEND} torch {torch.__version__} {digest.hexdigest()[:16] if BACKEND == 'kiln' else ''}".strip()


def _compiled(model: nn.Module) -> Callable[..., Any]:
    options = {"fallback": False} if BACKEND == "kiln" else None
    return torch.compile(model, backend=BACKEND, options=options, dynamic=False)


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest magnitude; infinite when NaNs or infinities are elsewhere."""
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    finite = want.isfinite()
    if not finite.any():
        return 0.0
    scale = want[finite].abs().max().clamp_min(1e-30)
    return ((got - want)[finite].abs().max() / scale).item()


@dataclass(frozen=True)
class Step:
    """What a training step leaves behind, by name."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def worst_gradient_against(self, reference: Step) -> tuple[float, str]:
        return _worst(self.gradients, reference.gradients)


def _step(entry: Entry, model: nn.Module, inputs: Inputs, *, compile_it: bool = False) -> Step:
    """One step on a copy of ``model``."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    call = _compiled(model) if compile_it else model
    entry.outputs(call(**inputs)).square().mean().backward()
    # AOTAutograd gives zeros where eager gives None: for a parameter whose output the loss does not read.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return Step(gradients, {name: b for name, b in model.named_buffers() if b.is_floating_point()})


def _worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, in the Euclidean norm, and whose it is.

    What is zero but for rounding is measured against the size of the others: the bias before a normalization, or of
    an attention key, has no influence, so its gradient is noise on every side.
    """
    floor = 1e-3 * max((value.double().norm().item() for value in want.values()), default=0.0)
    worst = (0.0, "")
    for name, value in want.items():
        other = got[name].double()
        if not torch.equal(other.isfinite(), value.isfinite()):
            return float("inf"), name
        error = (other - value.double()).nan_to_num().norm().item()
        scale = max(value.double().nan_to_num().norm().item(), floor, 1e-300)
        worst = max(worst, (error / scale, name))
    return worst


def _interleaved_ms(left: Callable[[], object], right: Callable[[], object]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * STEPS):
        start = time.perf_counter()
        (left, right)[number % 2]()
        times[number % 2].append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def check_model(name: str) -> Result:
    """Compile and compare one model in this process."""
    entry = MODELS[name]
    torch.manual_seed(0)
    model = entry.build()
    inputs = entry.inputs()
    torchkiln.reset_stats()

    model.eval()
    compiled = _compiled(model)
    with torch.no_grad():
        want = entry.outputs(model(**inputs))
        start = time.perf_counter()
        got = entry.outputs(compiled(**inputs))
        first_inference = time.perf_counter() - start
        forward_error = _error(got, want)
        eager_ms, compiled_ms = _interleaved_ms(lambda: model(**inputs), lambda: compiled(**inputs))
    failures = []
    if got.stride() != want.stride():
        failures.append(f"strides {got.stride()} instead of {want.stride()}")
    if not forward_error <= FORWARD_LIMIT:
        failures.append(f"forward differs by {forward_error:.2g}")

    model.train()
    start = time.perf_counter()
    compiled_step = _step(entry, model, inputs, compile_it=True)
    first_training = time.perf_counter() - start
    eager_step = _step(entry, model, inputs)
    precise_inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    precise_model = copy.deepcopy(model).double()
    precise = _step(entry, precise_model, precise_inputs)
    compiled_precise = _step(entry, precise_model, precise_inputs, compile_it=True)
    eager_error, _ = eager_step.worst_gradient_against(precise)
    gradient_error, worst = compiled_step.worst_gradient_against(precise)
    limit = max(GRADIENT_LIMIT, EAGER_FACTOR * eager_error)
    if not gradient_error <= limit:
        failures.append(f"gradient of {worst} is {gradient_error:.2g} from float64, the limit is {limit:.2g}")
    double_error, worst_double = compiled_precise.worst_gradient_against(precise)
    if not double_error <= (GRADIENT_LIMIT if entry.norm_in_float32 else DOUBLE_LIMIT):
        failures.append(f"float64 gradient of {worst_double} differs by {double_error:.2g}")
    eager_buffer_error, _ = _worst(eager_step.buffers, precise.buffers)
    limits = {"float32": max(BUFFER_LIMIT, EAGER_FACTOR * eager_buffer_error), "float64": DOUBLE_LIMIT}
    for (kind, limit), step in zip(limits.items(), (compiled_step, compiled_precise), strict=True):
        buffer_error, buffer = _worst(step.buffers, precise.buffers)
        if not buffer_error <= limit:
            failures.append(f"{kind} buffer {buffer} differs by {buffer_error:.2g}, the limit is {limit:.2g}")

    stats = torchkiln.stats()
    if BACKEND == "kiln" and not stats.graphs:
        failures.append("no graph was compiled")
    failures += [f"{fallback.graph} fell back: {fallback.reason}" for fallback in stats.fallbacks]
    return Result(
        model=name,
        code=_code(),
        failure="; ".join(failures),
        forward_error=forward_error,
        gradient_error=gradient_error,
        eager_gradient_error=eager_error,
        double_gradient_error=double_error,
        first_inference=first_inference,
        first_training=first_training,
        eager_ms=eager_ms,
        compiled_ms=compiled_ms,
        graphs=stats.graphs,
        kernels=stats.kernels,
        externs=sum(stats.extern_calls.values()),
    )


def _apart(name: str) -> Result:
    """The same in a process of its own, so that a crash costs one row and first-call times are true."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.models.transformers_models", "--one", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        message = done.stderr[-3000:].strip() or "no message"
        return Result(name, _code(), failure=f"exit code {done.returncode}: {message}")
    return Result(**json.loads(lines[-1]))


def _table(results: list[Result]) -> Table:
    table = Table(title=f"transformers models, {BACKEND} against eager, {torch.get_num_threads()} threads")
    table.add_column("model")
    for heading in (
        "forward error",
        "gradients",
        "eager's",
        "in float64",
        "first call, s",
        "first step, s",
        "eager, ms",
        f"{BACKEND}, ms",
        "graphs",
        "kernels",
        "externs",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row.model if not row.failure else f"[red]{row.model}[/]",
            f"{row.forward_error:.1e}",
            f"{row.gradient_error:.1e}",
            f"{row.eager_gradient_error:.1e}",
            f"{row.double_gradient_error:.1e}",
            f"{row.first_inference:.1f}",
            f"{row.first_training:.1f}",
            f"{row.eager_ms:.1f}",
            f"{row.compiled_ms:.1f}",
            str(row.graphs),
            str(row.kernels),
            str(row.externs),
        )
    return table


def main(
    models: Annotated[str, typer.Option(help="Models to check, with commas.")] = ",".join(MODELS),
    resume: Annotated[bool, typer.Option(help="Keep the good rows of a stopped run of the same code.")] = False,
    results: Annotated[Path, typer.Option(help="Where rows are kept for --resume.")] = Path("results/models.json"),
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Check whole models; exit code 1 when one differs from eager or does not compile."""
    if one is not None:
        try:
            print(json.dumps(asdict(check_model(one))))
        except Exception:
            traceback.print_exc()
            raise typer.Exit(1) from None
        return
    names = [name.strip() for name in models.split(",")]
    if unknown := [name for name in names if name not in MODELS]:
        raise typer.BadParameter(f"unknown model {unknown[0]!r}; there are: {', '.join(MODELS)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    kept: dict[str, Result] = {}
    if resume and results.exists():
        stored = [Result(**row) for row in json.loads(results.read_text())]
        kept = {row.model: row for row in stored if not row.failure and row.code == _code()}
    rows = []
    for name in names:
        with console.status(name):
            row = kept.get(name) or _apart(name)
        rows.append(row)
        console.print(f"{name}: {row.failure.splitlines()[-1] if row.failure else 'ok'}", markup=False)
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps([asdict(each) for each in {**kept, **{r.model: r for r in rows}}.values()]))
    console.print(_table(rows))
    for row in rows:
        if row.failure:
            console.print(f"{row.model}: {row.failure}", markup=False)
    raise typer.Exit(1 if any(row.failure for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
