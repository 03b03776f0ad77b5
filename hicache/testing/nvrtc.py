"""CUDA compilers that need no GPU: nvcc where it is installed, and NVRTC from its wheel."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Compiler", "Nvcc", "Nvrtc", "find_compilers"]


class Compiler(Protocol):
    """Compiles CUDA C++."""

    def compile(self, source: str, target: str, folder: Path) -> tuple[bytes, str]:
        """Machine code for a target such as "sm_90", and what the compiler said.

        Args:
            source: the text.
            target: the architecture.
            folder: for files of its own.

        Raises:
            ValueError: it does not compile; has what the compiler said.
        """
        ...


def find_compilers() -> list[Compiler]:
    """Those that are installed."""
    found: list[Compiler] = []
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is not None:
        found.append(Nvcc(nvcc))
    library = _library()
    if library is not None:
        found.append(Nvrtc(library))
    return found


class Nvcc:
    """The compiler of the CUDA toolkit.

    Args:
        path: of the program.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def compile(self, source: str, target: str, folder: Path) -> tuple[bytes, str]:
        """See `Compiler`."""
        text, code = folder / "kernel.cu", folder / f"{target}.cubin"
        text.write_text(source, encoding="utf-8")
        command = [self._path, "-cubin", "-std=c++17", f"-arch={target}", "-o", str(code), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  a compiler
        said = done.stdout + done.stderr
        if done.returncode:
            raise ValueError(said)
        return code.read_bytes(), said


class Nvrtc:
    """The compiler that is a library, which is also what cupy uses.

    Args:
        path: of the library.
    """

    def __init__(self, path: Path) -> None:
        self._library: Any = ctypes.CDLL(str(path))

    def compile(self, source: str, target: str, folder: Path) -> tuple[bytes, str]:
        """See `Compiler`."""
        del folder
        library, program = self._library, ctypes.c_void_p()
        status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        if status:
            raise ValueError(f"NVRTC made no program: error {status}")
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"--std=c++17")
            status = library.nvrtcCompileProgram(program, len(options), options)
            said = self._read("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).rstrip(b"\0").decode()
            if status:
                raise ValueError(said or f"NVRTC failed: error {status}")
            return self._read("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program), said
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, size_call: str, call: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, size_call)(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, call)(program, text)
        return text.raw


def _library() -> Path | None:
    """NVRTC of the wheel `nvidia-cuda-nvrtc`, wherever it is on the path."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))]
    return found[0] if found else None
