"""What padding of badly aligned matmuls gains on a device: times as measured by the pass, and its decision.

    python benchmarks/padded_matmuls.py                 on the GPU if there is one, otherwise on the CPU
    python benchmarks/padded_matmuls.py --device cpu --largest 1024

Needs torch alone, beside the sources of torchkiln on the path.
"""

from __future__ import annotations

import argparse

import torch

from torchkiln.passes.joint.matmul_timing import Matmul, Operand, measure_on_device
from torchkiln.passes.joint.pad_matmuls import padded_sizes, pays

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# M, K, N; whether the first and the second matrix lie in columns, as they do in matmuls of a backward.
SHAPES = (
    ((4095, 4095, 4097), (False, False)),
    ((4096, 4095, 4096), (False, False)),
    ((4096, 4096, 4095), (False, False)),
    ((4095, 4096, 4096), (True, False)),
    ((2047, 2047, 2047), (False, True)),
    ((8192, 1023, 50257), (False, True)),
    ((1024, 769, 3073), (False, False)),
    ((16, 4095, 4095), (False, False)),
    ((255, 255, 255), (False, False)),
    ((999, 511, 257), (False, False)),
)


def matmul(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool], dtype: torch.dtype, device: torch.device
) -> Matmul:
    rows, inner, columns = sizes
    first = Operand((rows, inner), (1, rows) if transposed[0] else (inner, 1))
    second = Operand((inner, columns), (1, inner) if transposed[1] else (columns, 1))
    return Matmul("mm", device, dtype, (first, second))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--largest", type=int, default=1 << 20, help="leave out matmuls with a larger size")
    given = arguments.parse_args()
    device = torch.device(given.device)
    print(torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", "torch", torch.__version__)
    print("dtype     M, K, N               order  padded to               plain us  padded us   gain  pads")
    for dtype in DTYPES:
        for sizes, transposed in SHAPES:
            if max(sizes) > given.largest:
                continue
            item = matmul(sizes, transposed, dtype, device)
            padded = padded_sizes(item)
            times = None if padded is None else measure_on_device(item, padded)
            name, shown = str(dtype).removeprefix("torch."), str(padded or "-")
            order = "".join("NT"[flag] for flag in transposed)
            line = f"{name:<10}{sizes!s:<22}{order:<7}{shown:<22}"
            if times is not None:
                line += f"{times.plain * 1e6:>10.0f}{times.padded * 1e6:>11.0f}{times.plain / times.padded:>7.2f}"
                line += "  yes" if pays(times) else "  no"
            print(line)


if __name__ == "__main__":
    main()
