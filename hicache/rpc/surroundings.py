"""gRPC's own services beside ours: health and reflection, where their packages are installed (extra `server`).

They are generated code too, and refuse a runtime that is older than they are by whatever error; that costs only them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from grpc import aio

_log = logging.getLogger("hicache.rpc")


class Health:
    """What `grpc.health.v1.Health` answers for our services and for the whole ("").

    Args:
        services: their full names.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._names = ("", *services)
        self._servicer: Any = None
        try:
            self._module = import_module("grpc_health.v1.health")
            self._messages = import_module("grpc_health.v1.health_pb2")
            self._stubs = import_module("grpc_health.v1.health_pb2_grpc")
        except Exception as error:
            _log.info("no health service: %s", str(error))
            return
        self._servicer = self._module.aio.HealthServicer()
        self._setting: set[asyncio.Task[None]] = set()

    def add(self, server: aio.Server) -> None:
        """Let a server answer it too."""
        if self._servicer is not None:
            self._stubs.add_HealthServicer_to_server(self._servicer, server)

    def set(self, ready: bool) -> None:
        """What is answered from now on, also to those who watch."""
        if self._servicer is None:
            return
        states = self._messages.HealthCheckResponse
        state = states.SERVING if ready else states.NOT_SERVING
        task = asyncio.ensure_future(self._set(state))
        self._setting.add(task)
        task.add_done_callback(self._setting.discard)

    async def _set(self, state: int) -> None:
        for name in self._names:
            await self._servicer.set(name, state)


def add_reflection(server: aio.Server, services: Sequence[str]) -> None:
    """Let a server tell what it serves, so that grpcurl and the like need no .proto files."""
    try:
        reflection = import_module("grpc_reflection.v1alpha.reflection")
    except Exception as error:
        # As text: a record that is kept would keep the error, its frames, and with them the server.
        _log.info("no reflection: %s", str(error))
        return
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)
