"""GPUs that need not be here, as data: published peaks, and the share of them that our kernels reach on the one that was measured.

Peaks are dense (no sparsity), FP32 without tensor cores, FP16 with FP32 sums; links are what a copy from pinned memory reaches. The
shares are an H200's (docs/results/h200/), so every rate of another GPU is a guess, and is said to be one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from maxsim_eval.errors import UnknownNameError
from maxsim_eval.planning.costs import SCANS, Encoding, PathRates, Rate, Rates, Sizes
from maxsim_eval.planning.plan import Room
from maxsim_eval.quantities import size_text

MEASURED = "h200"  # the GPU that the shares were measured on
HOST_THREAD = 4.6e9  # bytes a second that a thread copies out of the page cache (docs/scale.md, the rates)


@dataclass(frozen=True)
class Gpu:
    """Peaks in operations a second (None: no such products), memory in bytes, its rate and the link's in bytes a second."""

    fp32: float
    fp16: float
    int8: float
    fp8: float | None
    memory: int
    bandwidth: float
    link: float


GPUS = {
    "a100-80gb": Gpu(19.5e12, 312e12, 624e12, None, 80 * 10**9, 2.04e12, 25e9),
    "h100": Gpu(67e12, 989e12, 1979e12, 1979e12, 80 * 10**9, 3.35e12, 55e9),
    "h200": Gpu(67e12, 989e12, 1979e12, 1979e12, 141 * 10**9, 4.8e12, 55e9),
    "l40s": Gpu(91.6e12, 362e12, 733e12, 733e12, 48 * 10**9, 0.86e12, 25e9),
    "rtx4090": Gpu(82.6e12, 165e12, 661e12, 330e12, 24 * 10**9, 1.01e12, 25e9),
}

# path -> the peak that bounds it, the share of that reached, how far apart the measurements of it lay: the slowest is the whole command
# over 7,405 queries (docs/results/h200/rehearsal_slow.json), where a path waits for the host too.
SHARES: dict[str, tuple[str, float, float]] = {
    "fp32": ("fp32", 0.33, 0.3),  # the reference: 22 T operations/s by 256 queries
    "fp16": ("fp16", 0.55, 2.3),  # 460 T over streamed passages, 531 ragged, 657 of equal length (cuBLAS: 755)
    "bf16": ("fp16", 0.55, 2.3),
    "int8": ("int8", 0.37, 3.4),  # a scale a token: 1.36 times FP16
    "int8-document": ("int8", 0.54, 2.4),  # 1.9 to 2.1 times FP16
    "int8-corpus": ("int8", 0.54, 2.4),
    "fp8": ("fp8", 0.51, 2.4),  # 1.86 times FP16
}
# Of the FP16 peak, while a model encodes: 2.0M tokens/s through BERT-base's layers (docs/results/h100/rehearsal.json), 1.8M for few
# texts with what the ends take (h200/encoding.json), and less than half for short passages on a slow host (h200/rehearsal_slow.json).
ENCODING = (0.34, 1.4)


@dataclass(frozen=True)
class Machine:
    """A machine that is described, not measured: rates in bytes a second, `ram` in bytes; None: the table's link, memory not known."""

    name: str
    gpus: int
    disk: int
    link: int | None = None
    ram: int | None = None

    def __post_init__(self) -> None:
        if self.name not in GPUS:
            raise UnknownNameError("--gpu", self.name, GPUS)

    def __str__(self) -> str:
        whose = "shares measured on one" if self.name == MEASURED else f"from the table, not measured: shares of the {MEASURED}"
        memory = "memory not known, so every path reads the disk" if self.ram is None else f"memory {size_text(self.ram)}"
        return f"{self.gpus} x {self.name} ({whose}), disk {size_text(self.disk)}/s, {memory}"

    def rates(self, paths: Iterable[str], readers: int) -> Rates:
        """Rates of its GPUs, disk and links; paths that the table knows nothing of (a user's function, FP8 on an A100) are left out."""
        gpu, found = GPUS[self.name], {}
        # Preparing reads a block, writes it in another form and reads that once or twice; the top-k passes over scores a few times.
        prepare, topk = Rate(gpu.bandwidth / 4), Rate(gpu.bandwidth / 16)
        for path in paths:
            unit, share, spread = SHARES.get(SCANS.get(path, path), ("", 0.0, 0.0))
            peak: float | None = getattr(gpu, unit, None)
            if peak is not None:
                found[path] = PathRates(Rate(peak * share, f"{share} of the peak", spread), prepare)
        disk, link = Rate(self.disk), Rate(self.link or gpu.link)
        host = Rate(HOST_THREAD * readers * self.gpus, f"{readers} threads a GPU")
        return Rates("cuda", found, disk=disk, host=host, link=link, topk=topk, output=disk)

    def encode(self, sizes: Sizes, parameters: float) -> Encoding | None:
        """Documents a second of one GPU, with their share of the queries, by a model of `parameters` a token; None: no model."""
        if not parameters or not sizes.documents:
            return None
        share, spread = ENCODING
        each = (sizes.document_tokens + sizes.query_tokens) / sizes.documents * 2 * parameters
        how = f"{share} of the FP16 peak, {parameters / 1e6:,.0f}M parameters a token"
        return Encoding(Rate(GPUS[self.name].fp16 * share / max(each, 1.0), how, spread))

    def room(self) -> Room:
        """Its memory and GPUs; of its disks nothing is known."""
        return Room(memory=self.ram, gpu=GPUS[self.name].memory, gpus=self.gpus)
