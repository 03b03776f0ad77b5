"""Tries the generated code with the oldest and newest runtimes that users may have: `python check_protobuf.py FOLDER`.

Engines pin protobuf, and the client lives in their environments. Each runtime is installed into a folder of its own,
which is kept, and put before the environment's own packages. Prints one line a runtime and exits with 1 at the first
that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUNTIMES = (
    ("protobuf==5.26.1", "grpcio==1.63.2"),  # the oldest that pyproject.toml allows
    ("protobuf==5.29.6",),
    ("protobuf==6.33.5",),
    ("protobuf<8",),  # the newest
)
OLDEST_HAVE_WHEELS_UP_TO = (3, 12)
CALL = """
import asyncio, google.protobuf, grpc
from grpc import aio
from hicache.rpc.v1 import admin_pb2, admin_pb2_grpc, error_pb2, identity_pb2, lifeline_pb2, session_pb2
from hicache.rpc.v1 import session_pb2_grpc
from hicache.testing.rpcserving import anybody, client, serving
from hicache.testing.rpcservice import FakeService

async def main():
    async with serving(FakeService()) as server, client(server) as one:
        assert (await one.ask(session_pb2.Request(id=9, echo=session_pb2.Echo(data=b"x")))).echoed.data == b"x"
        async with aio.insecure_channel(server.addresses[0].target) as channel:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).Ping(admin_pb2.PingRequest())
            assert answer.server == "fake"

asyncio.run(main())
print("protobuf", google.protobuf.__version__, "grpcio", grpc.__version__)
"""


def run(*command: str | Path, path: Path | None = None) -> str:
    """Run and return what it printed; exits where it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HICACHE_", "PYTHON"))}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def main(folder: Path) -> None:
    """Install what is not there yet, and make a call with each."""
    for requirements in RUNTIMES:
        if len(requirements) > 1 and sys.version_info[:2] > OLDEST_HAVE_WHEELS_UP_TO:
            print("runtimes: no wheel of", requirements[1], "for this Python")
            continue
        target = folder / "_".join(requirements).replace("==", "-").replace("<", "-below-")
        if not target.is_dir():
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:")
            run(*pip, "--target", target, *requirements)
        print("runtimes:", run(sys.executable, "-W", "error", "-c", CALL, path=target), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
