"""Stores a page in a service and loads it again.

To run it, in a copy of this folder and with nothing else of hicache installed:

    python -m pip install grpcio-tools
    python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. hicache/rpc/v1/*.proto
    python example_client.py unix:/run/hicache/hicache.sock

Uses nothing of hicache but the code that protoc makes of the .proto files beside this one, so a client in any other
language looks the same. It streams bytes; clients on the same machine can map the service's memory (lifeline.proto).
"""

from __future__ import annotations

import hashlib
import queue
import struct
import sys
from typing import Any

import grpc

from hicache.rpc.v1 import identity_pb2, session_pb2_grpc
from hicache.rpc.v1 import session_pb2 as pb

PAGE_SIZE = 16
LAYERS = {"end_layer": 2, "kv_heads": 4, "head_group": 4, "kind": "mha", "dtype": "float16", "dims": "32"}
LAYER = identity_pb2.LayerGroup(**LAYERS, token_bytes=2 * 4 * 32 * 2)  # keys and values, heads, elements, bytes of one
GEOMETRY = identity_pb2.Geometry(format="canonical-v1", groups=[LAYER])
MODEL = identity_pb2.Namespace(model="example/tiny", geometry=GEOMETRY, page_size=PAGE_SIZE, hash="sha256")


def main(address: str) -> None:
    """Store, load, compare."""
    tokens = struct.pack(f"<{PAGE_SIZE}I", *range(PAGE_SIZE))
    page_hash = hashlib.sha256(tokens).digest()  # of the first page; the next one's is over this and its tokens
    requests: queue.SimpleQueue[pb.OpenRequest | None] = queue.SimpleQueue()

    with grpc.insecure_channel(address) as channel:
        stream = session_pb2_grpc.SessionServiceStub(channel).Open(iter(requests.get, None))
        replies = (reply for message in stream for reply in message.replies if reply.id)

        def ask(**verb: Any) -> pb.Reply:
            requests.put(pb.OpenRequest(requests=[pb.Request(id=1, **verb)]))
            reply = next(replies)
            if reply.HasField("error"):
                sys.exit(f"refused: {reply.error.message}")
            return reply

        ask(hello=pb.Hello(protocol_min=1, protocol_max=1, client="example"))
        attach = pb.Attach(attachment=1, namespace=MODEL, streamed=True, worker=True)
        page_bytes = ask(attach=attach).attached.page_bytes
        prompt = pb.Lease(attachment=1, page_hashes=page_hash, tokens=PAGE_SIZE, limit=1)

        lease = ask(lease=prompt).leased.lease
        ask(reserve=pb.Reserve(lease=lease, pages=1))
        content = bytes(index % 251 for index in range(page_bytes))
        ask(put_bytes=pb.PutBytes(lease=lease, page=0, data=content))
        ask(commit=pb.Commit(lease=lease, upto=1, tokens=tokens))
        ask(release=pb.Release(lease=lease))

        lease = ask(lease=prompt).leased.lease
        reply = ask(get_bytes=pb.GetBytes(lease=lease, end_page=1))
        loaded = reply.bytes.data
        while reply.more:
            reply = next(replies)
            loaded += reply.bytes.data
        ask(release=pb.Release(lease=lease))
        ask(goodbye=pb.Goodbye())
        requests.put(None)
        print(f"{len(loaded)} bytes came back", "as they were" if loaded == content else "WRONG")


if __name__ == "__main__":
    main(sys.argv[1])
