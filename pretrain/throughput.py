"""Speed and memory of a training process, in the terms of `docs/metrics.md`."""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHINCHILLA_TOKENS_PER_PARAMETER = 20


class Throughput:
    """Speed over the window since the last report. Counts are global, times are this rank's.

    `flops_per_token` covers forward and backward; `non_embedding_parameters` leaves out the token
    embedding and the output head, and of a mixture of experts counts the active ones.
    """

    def __init__(
        self,
        *,
        total_tokens: int,
        flops_per_token: float,
        non_embedding_parameters: int,
        devices: int = 1,
        peak_tflops: float | None = None,
        tokens: int = 0,
        samples: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert total_tokens > 0 and non_embedding_parameters > 0 and devices > 0
        self.total_tokens = total_tokens
        self.flops_per_token = flops_per_token
        self.chinchilla_tokens = CHINCHILLA_TOKENS_PER_PARAMETER * non_embedding_parameters
        self.devices = devices
        self.peak_tflops = peak_tflops
        self.tokens, self.samples = tokens, samples
        self.clock = clock
        self.started = clock()
        self._begin_window()

    def _begin_window(self) -> None:
        self.window_start = self.clock()
        self.window_tokens = self.window_steps = 0
        self.data_seconds = self.excluded_seconds = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time in this block is the wait for the next batch."""
        start = self.clock()
        yield
        self.data_seconds += self.clock() - start

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in this block (evaluation, checkpoints) does not count as training time."""
        start = self.clock()
        yield
        self.excluded_seconds += self.clock() - start

    def step(self, *, tokens: int, samples: int) -> None:
        """Count one finished step of `tokens` and `samples` over all ranks."""
        self.tokens += tokens
        self.samples += samples
        self.window_tokens += tokens
        self.window_steps += 1

    def report(self) -> dict[str, float]:
        """The figures of the window, which ends here; a new one begins."""
        assert self.window_steps, "report() without a step since the last one"
        now = self.clock()
        seconds = max(now - self.window_start - self.excluded_seconds, 1e-9)
        rate = self.window_tokens / seconds
        tflops = rate * self.flops_per_token / self.devices / 1e12
        figures = {
            "throughput/tokens_per_second": rate,
            "throughput/tokens_per_second_per_device": rate / self.devices,
            "throughput/tflops_per_device": tflops,
            "time/step_seconds": seconds / self.window_steps,
            "time/data_wait_percent": 100 * self.data_seconds / seconds,
            "time/excluded_seconds": self.excluded_seconds,
            "time/elapsed_seconds": now - self.started,
            "time/eta_seconds": max(self.total_tokens - self.tokens, 0) / rate,
            "data/tokens": self.tokens,
            "data/samples": self.samples,
            "data/chinchilla_multiple": self.tokens / self.chinchilla_tokens,
        }
        if self.peak_tflops is not None:
            figures["throughput/mfu_percent"] = 100 * tflops / self.peak_tflops
        self._begin_window()
        return figures


def memory_report(device_type: str) -> dict[str, float]:
    """Memory of this process in GiB: host memory always, device memory on CUDA."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1024
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        current = pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        current = peak
    figures = {"memory/rss_gib": current / 2**30, "memory/rss_peak_gib": max(peak, current) / 2**30}
    if device_type == "cuda":
        import torch

        figures["memory/cuda_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        figures["memory/cuda_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return figures
