"""What pays on a device: the thresholds of inlining, splitting, fusion and mapping, each with its figure.

Points are iterations of a loop, costs those of :data:`torchkiln.ir.ops.OPS`. Symbolic sizes count as in the first call.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchkiln.ir.index import Extent


@dataclass(frozen=True)
class Limits:
    """The thresholds of one kind of device; the defaults are those of CPUs."""

    # -- inlining
    # A value read by several loops is recomputed in each only when it is next to nothing (a conversion, a negation, a
    # mask from indices, a multiplication by something small), or when all but one read only few elements of it, as a
    # loss by class does. Anything more is left for fusion, which computes it once for all of them.
    trivial_cost: int = 3
    # Ratio up to which two amounts of reading or computing count as the same.
    as_much: float = 1.125
    # Cost beyond which a value is not recomputed for every point of a larger iteration space, at all places together
    # that a point reads. (Gradient of averages over 3 x 3 windows with step 1, which reads each share of a window nine
    # times, 8 x 64 x 56 x 56: 1.94 ms when each reader divides, 1.21 with the shares stored, one thread of a Zen 4.)
    broadcast_cost: int = 8
    # A value made of much smaller ones is recomputed in each reader when it is no dearer than this and too large for a
    # cache: its readers then read the small ones. (Gradients of 512 x 512 distances in 64 dimensions, summed over one
    # side and over the other: a step of 10.6 ms with the 64 MiB of products in memory, 3.7 ms without, one thread.)
    expanded_cost: int = 24
    expanded_bytes: int = 1 << 20

    # -- conversion of half-precision values to float32, once for all readers
    # How often each element must be read for its conversion to be worth a store and loads of twice the bytes.
    widened_reads: int = 64
    # How often each element of everything else that the loop touches must be read: otherwise memory is the limit.
    widened_reads_of_any: int = 16
    # Points below which the time of one more kernel shows.
    widened_points: int = 1 << 19

    # -- splitting of reductions
    # Independent results that already keep the threads busy.
    enough_results: int = 8
    # Points below which a second kernel is taken to cost more than the threads save.
    split_points: int = 1 << 17
    # Points per part at the least, and parts at the most.
    part_points: int = 8192
    most_parts: int = 64
    # Points of one result, or of those side by side, below which one task has them done before a second kernel begins;
    # and parts of all results together that keep the device busy.
    task_points: int = 0
    enough_parts: int = 1 << 62
    # Results computed side by side when the kept dimension is the contiguous one.
    results_side_by_side: int = 64
    # Parts that a second kernel adds up in no time, and the shortest row that is a part.
    most_row_parts: int = 1024
    shortest_row: int = 512
    # Terms of one part of a float sum at the most, along memory and across it. They bound what one task does; digits do
    # not depend on them, since kernels sum in chunks.
    longest_row: int = 1 << 18
    longest_column: int = 1 << 14

    # -- fusion
    kernel_buffers: int = 32
    # Total expression size of a kernel: bounds LLVM's time on one function.
    kernel_nodes: int = 1500
    # A row kernel runs rows in parallel. With fewer rows than this and as many points, separate kernels run faster.
    few_rows: int = 8
    few_rows_points: int = 1 << 17
    # A loop is fused with a unit that reads the same memory if no more library calls than this come between: what one
    # of them reads or writes then lies in memory all the while. A normalization and the matmuls that read it are this
    # near.
    near_calls: int = 6
    # Points from which on a kernel of its own, which stores in tiles, beats storing element by element in a row kernel.
    # (Log-softmax of a transposed 512 x 512 matrix into a contiguous one: 1.19 ms fused, 0.30 ms apart, one thread.)
    tiled_points: int = 1 << 14

    # Independent loops over as many points are one kernel where they have no more points than this, and touch no more
    # buffers together; 0 points where a kernel costs next to nothing to start.
    side_by_side_points: int = 0
    side_by_side_buffers: int = 24

    # -- phases
    # Values dearer than this are kept from one phase to the next instead of being recomputed: a row of scratch costs
    # about two loads and a store per element, a transcendental function ten times that.
    kept_cost: int = 10
    # Longest row kept in scratch: it stays within L2, and the few rows one kernel keeps fit the smallest stacks threads
    # are given (a row of symbolic length is not on the stack).
    scratch_bytes: int = 1 << 18

    # -- loops and lanes
    # A jump of a page or more, in elements, costs the same however far it goes.
    far_stride: int = 1024
    # Lanes a constant stride apart are picked out of contiguous loads by shuffles, up to this many elements and bytes:
    # as many loads, and one shuffle less, for each register. (48 x 1024 values plus 1, in µs, gathered and picked,
    # AVX-512 on a Zen 5; picked with AVX2 it is up to 1.6 times that, and gathered about the same:
    #     stride         -1          2          3          4          5          6          8
    #     int8     11.9  1.3  11.7  1.6  11.6  2.2  11.7  1.8  11.7  2.9  11.7  2.8  12.0  2.9   contiguous 1.1
    #     int16    11.0  1.8  11.5  2.0  11.7  2.1  11.7  2.5  12.0  3.0  11.9  3.5  12.5  5.2   contiguous 1.6
    #     float32  11.4  2.9  11.8  3.0  12.8  4.4  13.8  6.9  14.6  8.7  15.6 10.7  17.8 14.5   contiguous 2.1
    #     float64  13.0  6.3  13.5  8.2  16.2 12.1  19.9 16.0  21.1 19.9  22.0 22.8  27.1 31.4   contiguous 4.3)
    picked_stride: int = 8
    picked_bytes: int = 32
    # Prices of one access along the lane variable: contiguous is 1.
    broadcast_load: float = 0.1
    reversed_access: float = 1.2
    # For each element of the stride.
    picked_load: float = 0.7
    gather: float = 10.0
    # Share of the price of a gather or scatter whose neighbouring lanes are less than a cache line apart. (48 x 1024
    # float32 gathered, without the 6.5 µs of a call: 13 µs at a stride of 2 elements, 23 at 8, 32 at 16.)
    same_line: float = 0.6
    cache_line: int = 64
    # Loads across the lanes that tiles transpose. (A sum of two channels-last images, of float32 and uint8, into a
    # contiguous one, 4 x 64 x 56 x 56, one thread: 0.46 ms stored element by element, 0.26 ms in tiles.)
    tiled_load: float = 4.0
    same_store: float = 2.0
    scatter: float = 16.0
    # Stores across the lanes in tiles. (Sum of two such images: 0.10 ms with both loads in tiles, 0.08 with the store.)
    tiled_store: float = 5.0
    # For each of several values that a store interleaves in registers, and how many there may be.
    interleaved_store: float = 1.3
    most_interleaved: int = 8
    # Shorter lane variables waste lanes.
    full_lanes: int = 16

    # -- tiles and threads
    # Both sides of a tile, in elements: operands across the lanes are read along memory and transposed in registers.
    tile: int = 16
    # Bytes that a block of tiles has along memory at the least: parts of cache lines would be fetched several times.
    line_bytes: int = 64
    # Bytes that lanes of a tiled operand take together at the most. (768 x 1024 float32, transposed and contiguous
    # operands with a result each way: 0.42 ms with 64 lanes, 0.25 with 32; bfloat16 concatenated, 32 and 64 lanes:
    # 0.12 and 0.08. One thread of a Zen 5.)
    tile_row_bytes: int = 128
    # Iterations that keep any number of threads busy; a kernel with fewer rows is split along its lanes too.
    enough_iterations: int = 64
    block: int = 2048
    # Results whose accumulators stay in registers while the reduced axis is walked.
    register_block: int = 64

    def picks_lanes(self, stride: Extent | None, itemsize: int) -> bool:
        """Whether lanes ``stride`` elements apart are picked out of contiguous loads."""
        if not isinstance(stride, int) or stride in (0, 1):
            return False
        return abs(stride) <= min(self.picked_stride, self.picked_bytes // itemsize)


CPU = Limits()

# Registers keep a row, so there are no scratch rows and no tiles of rows; no loads are picked out of others. A card
# runs two thousand threads on each of a hundred and more processors, so it takes more results and parts to keep it
# busy: a few blocks for each processor. Of columns there are four times as many parts: with enough of them, a thread
# takes four neighbouring results at once, and has four times as much to read under way. One processor of an H200 reads
# about 60 bytes in a nanosecond, 65,536 float32 numbers in the 4 µs that a second kernel takes. Up to a quarter of a
# million points, all of them take a kernel less than its launch. Three AdamW steps touch 21 buffers, with one or two
# values of each in the registers of a thread.
GPU = Limits(
    scratch_bytes=0,
    picked_stride=0,
    enough_results=512,
    most_parts=512,
    part_points=1 << 14,
    task_points=1 << 16,
    enough_parts=2048,
    results_side_by_side=32,
    side_by_side_points=1 << 18,
    few_rows=0,
    most_interleaved=0,
)

LIMITS = {"cpu": CPU, "cuda": GPU}
"""By the device of a target."""
