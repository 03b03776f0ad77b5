"""What there is of CUDA here, in one line, for people who ask before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hicache.cuda.driver import CudaDriver, CudaError, version_text
from hicache.errors import ConfigError
from hicache.units import format_size

__all__ = ["found"]


def found(*, root: Path = Path("/")) -> tuple[bool, str]:
    """Whether all is well, and what was found. No GPU is well: the device tier is then in main memory, or an engine's.

    Args:
        root: folder under which `proc` is read.
    """
    has_driver = (root / "proc/driver/nvidia/version").exists()
    if find_spec("cupy") is None:
        if has_driver:
            return True, "an NVIDIA driver, and no cupy: pip install 'hicache[cuda]' for pages in GPU memory"
        return True, "no GPU: no NVIDIA driver and no cupy"
    from hicache.cuda.cupy_driver import open_driver

    try:
        return True, _describe(open_driver())
    except (ConfigError, CudaError) as error:
        return not has_driver, str(error)


def _describe(driver: CudaDriver) -> str:
    facts, (free, total) = driver.facts(), driver.memory()
    major, minor = facts.capability
    node = "unknown" if facts.numa_node is None else str(facts.numa_node)
    memory = f"{format_size(free)} of {format_size(total)} free"
    batches = "batched copies" if driver.batches else f"no batched copies ({driver.no_batches})"
    return (
        f"{facts.name}, capability {major}.{minor}, {memory}, NUMA node {node}, "
        f"driver for CUDA {version_text(facts.driver)}, cupy for {version_text(facts.runtime)}, {batches}"
    )
