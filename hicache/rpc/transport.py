"""Settings of gRPC that both sides have to agree about, each with its reason."""

from __future__ import annotations

from typing import Final

__all__ = ["CHANNEL_OPTIONS", "SERVER_OPTIONS", "TRANSPORT_BYTES"]

TRANSPORT_BYTES: Final = 64 * 2**20
"""Bytes of a message above which gRPC itself ends a call, in either direction.

gRPC's own default of 4 MiB holds for each receiver apart, so raising it on one side only moves the failure. This is
what clients take, and the most that a service's `Limits.message_bytes` (16 MiB by default) may be. A service takes
1 MiB more than that limit, so that a message a little over it is refused in words and the session goes on.
"""

_SIZES: Final = (
    ("grpc.max_receive_message_length", TRANSPORT_BYTES),
    ("grpc.max_send_message_length", TRANSPORT_BYTES),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_SIZES,
    # Two servers on one port would split its clients between them. A port that is taken is an error.
    ("grpc.so_reuseport", 0),
    # A peer whose machine is gone, or that is stopped, is seen within 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Pings of clients: gRPC ends a connection ("too_many_pings") that pings more often than every 5 minutes while no
    # data flows. A session is silent for as long as its engine is, and many clients ping every 10 s.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Of every server. A foreign client may ping every 5 s or more seldom, with or without calls."""

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_SIZES,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The client reconnects by itself, with its own backoff; gRPC's grows to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels to one address would share a connection, also after a fork or with another certificate.
    ("grpc.use_local_subchannel_pool", 1),
    # A Unix socket is no place for a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)
"""Of every channel of the client."""
