"""`python -m hicache_vllm.launch FOLDER ...`: the `hicache` command, ended in order when its standard input ends.

That is when the engine closes it, and also when the engine has died, however it did. The folder of its socket goes too.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

HANGS_SECONDS: Final = 15.0
"""After so long behind the signal it has not drained, and never will."""


def end_with_input() -> None:
    """Wait for the end of the input, then ask this process to drain, and see that it ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HANGS_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    folder = sys.argv[1]
    sys.argv[:2] = ["hicache"]
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        runpy.run_module("hicache", run_name="__main__")
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
