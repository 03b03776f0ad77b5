"""The documented byte formats: code, a second reading of the document and the golden vectors agree."""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.core.hashing import PageHasher, hash_seed
from hicache.core.identity import Adapter, DerivedNamespace, Namespace
from hicache.core.keys import ObjectKey
from hicache.core.layout import KVGeometry
from hicache.core.partition import plan_shards
from hicache.core.symbols import page_extras, symbols
from hicache.storage.codec import decode_header, encode_header, verify

SEQUENCES: dict[str, list[int]] = {
    "count": list(range(64)),
    "count_two_pages": list(range(128)),
    "zeros": [0] * 64,
    "largest": [2**32 - 1] * 64,
    "words": [(i * 2654435761) % 2**32 for i in range(192)],
}
CONTENT = bytes(range(32))
GEOMETRIES = {
    "llama_8b": KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16"),
    "llama_8b_split": KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16", head_group=2, layer_partition=16),
    "deepseek_v3": KVGeometry.mla(61, latent_dim=512, rope_dim=64, dtype="bfloat16"),
    "opaque": KVGeometry.opaque(
        engine="vllm", backend="flash-attn", version="1", shape="2x16x8x128", cell_bytes=65536, layers=32
    ),
}


def namespaces() -> dict[str, Namespace | DerivedNamespace]:
    plain = Namespace("meta-llama/Llama-3.1-8B", revision="8c22764", geometry=GEOMETRIES["llama_8b"], page_size=64)
    full = Namespace(
        "/models/x/",
        geometry=GEOMETRIES["deepseek_v3"],
        page_size=64,
        hash="sha256",
        rope={"rope_theta": 10000.0, "rope_scaling": {"factor": 40, "type": "yarn"}},
        scales=CONTENT,
        numerics="sglang/fa3/bfloat16",
    )
    adapter = Adapter("lora-abc", CONTENT)
    return {
        "plain": plain,
        "full": full,
        "tenant": plain.derive(tenant="t1"),
        "salt": plain.derive(salt="t1"),
        "adapter": plain.derive(adapter=adapter),
        "all": full.derive(adapter=adapter, tenant="t1", salt="salt"),
    }


# A second implementation, written from the document alone.
def frame(value: bytes | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + struct.pack("<Q", len(value)) + value


def number(value: int | None) -> bytes:
    return frame(None if value is None else struct.pack("<Q", value))


def digest(algorithm: str, data: bytes) -> bytes:
    return sha256(data).digest() if algorithm == "sha256" else xxhash.xxh3_128(data).digest()


def geometry_frames(fmt: bytes, page_size: int, partition: int | None, numbers: list[int], texts: list[bytes]) -> bytes:
    group = b"".join([*map(number, numbers), *map(frame, texts)])
    return frame(b"hicache-geometry-v1") + frame(fmt) + number(page_size) + number(partition) + frame(group)


LLAMA_FRAMES = geometry_frames(b"canonical-v1", 64, None, [0, 32, 8, 8, 4096, 0], [b"mha", b"bfloat16", b"128"])
SPLIT_FRAMES = geometry_frames(b"canonical-v1", 64, 16, [0, 32, 8, 2, 1024, 0], [b"mha", b"bfloat16", b"128"])
LATENT_FRAMES = geometry_frames(b"canonical-v1", 64, None, [0, 61, 0, 0, 1152, 0], [b"mla", b"bfloat16", b"512+64"])
OPAQUE_FRAMES = geometry_frames(
    b"opaque:vllm/flash-attn/1/2x16x8x128", 64, None, [0, 32, 0, 0, 0, 65536], [b"opaque", b"uint8", b"2x16x8x128"]
)


def test_geometry_digests(golden: dict[str, Any]) -> None:
    documented = dict(zip(GEOMETRIES, (LLAMA_FRAMES, SPLIT_FRAMES, LATENT_FRAMES, OPAQUE_FRAMES), strict=True))
    assert [vector["name"] for vector in golden["geometries"]] == list(GEOMETRIES)
    for vector in golden["geometries"]:
        geometry = GEOMETRIES[vector["name"]]
        assert geometry.digest(vector["page_size"]) == vector["digest"]
        assert "hg1-" + sha256(documented[vector["name"]]).hexdigest()[:16] == vector["digest"]
        assert geometry.page_bytes(vector["page_size"]) == vector["page_bytes"]
        assert [shard.suffix for shard in plan_shards(geometry, 64).shards] == vector["shards"]


def test_namespace_digests(golden: dict[str, Any]) -> None:
    made = namespaces()
    assert {vector["name"]: vector["digest"] for vector in golden["namespaces"]} == {
        name: namespace.digest.hex() for name, namespace in made.items()
    }
    plain = (
        frame(b"hicache-namespace-v1")
        + frame(b"meta-llama/Llama-3.1-8B")
        + frame(b"8c22764")
        + number(64)
        + frame(LLAMA_FRAMES)
        + frame(b"xxh3_128")
        + frame(None)
        + frame(None)
        + frame(b"any/any/bfloat16")
    )
    full = (
        frame(b"hicache-namespace-v1")
        + frame(b"/models/x")
        + frame(None)
        + number(64)
        + frame(LATENT_FRAMES)
        + frame(b"sha256")
        + frame(b'{"rope_scaling":{"factor":40,"type":"yarn"},"rope_theta":10000}')
        + frame(CONTENT)
        + frame(b"sglang/fa3/bfloat16")
    )
    none = frame(None)
    documented = {
        "plain": plain + none + none + none + none,
        "full": full + none + none + none + none,
        "tenant": plain + none + none + frame(b"t1") + none,
        "salt": plain + none + none + none + frame(b"t1"),
        "adapter": plain + frame(b"lora-abc") + frame(CONTENT) + none + none,
        "all": full + frame(b"lora-abc") + frame(CONTENT) + frame(b"t1") + frame(b"salt"),
    }
    for name, data in documented.items():
        assert sha256(data).digest()[:16] == made[name].digest


def test_manifest_digests_of_secrets() -> None:
    namespace = namespaces()["all"]
    assert isinstance(namespace, DerivedNamespace)
    for what, value in ((b"tenant", b"t1"), (b"salt", b"salt")):
        data = b"hicache-secret-v1" + namespace.base.digest + frame(what) + frame(value)
        assert namespace.describe()[f"{what.decode()}_digest"] == sha256(data).hexdigest()[:32]


def test_seeds(golden: dict[str, Any]) -> None:
    for vector in golden["seeds"]:
        algorithm, adapter, salt = vector["algorithm"], vector["adapter_name"], vector["salt"]
        made = hash_seed(algorithm, adapter_name=adapter, salt=salt)
        assert made is not None
        assert made.hex() == vector["seed"]
        parts = [frame(None if part is None else part.encode()) for part in (adapter, salt)]
        assert digest(algorithm, b"sglang-cache-namespace-v1" + b"".join(parts)) == made


@pytest.mark.case("KEY-4")
def test_page_hashes(golden: dict[str, Any]) -> None:
    assert {vector["sequence"] for vector in golden["page_hashes"]} == set(SEQUENCES)
    for vector in golden["page_hashes"]:
        tokens = SEQUENCES[vector["sequence"]]
        hasher = PageHasher(vector["algorithm"], page_size=64)
        assert hasher.extend(None, symbols(tokens, 64), len(tokens) // 64).hex() == "".join(vector["hashes"])
        before = b""
        for page, expected in enumerate(vector["hashes"]):
            before = digest(vector["algorithm"], before + struct.pack("<64I", *tokens[page * 64 : page * 64 + 64]))
            assert before.hex() == expected


@pytest.mark.case("KEY-6")
def test_extras(golden: dict[str, Any]) -> None:
    vector = golden["extras"]
    items = [(bytes.fromhex(item["content"]), item["start"], item["length"]) for item in vector["items"]]
    extras = page_extras(items, vector["page_size"], vector["pages"])
    assert extras.hex() == "".join(vector["digests"])
    for page, (offset, length) in {1: (36, 28), 2: (-28, 70)}.items():
        data = b"hicache-extras-v1" + frame(items[0][0]) + struct.pack("<qQ", offset, length)
        assert sha256(data).hexdigest()[:32] == vector["digests"][page]
    for algorithm, hashes in vector["page_hashes_of_words"].items():
        data = symbols(SEQUENCES["words"], 64, extras[:48])
        assert PageHasher(algorithm, page_size=64).extend(None, data, 3).hex() == "".join(hashes)


def test_names(golden: dict[str, Any]) -> None:
    spaces = namespaces()
    words = PageHasher("xxh3_128", page_size=64).extend(None, symbols(SEQUENCES["words"], 64), 3)
    count = PageHasher("sha256", page_size=64).extend(None, symbols(SEQUENCES["count"], 64), 1)
    plain = ObjectKey(spaces["plain"].digest, 0, words[:16], GEOMETRIES["llama_8b"].anchor(64))
    full = ObjectKey(spaces["full"].digest, 7, count, GEOMETRIES["deepseek_v3"].anchor(64))
    assert [vector["name"] for vector in golden["names"]] == [plain.name, full.name]


def test_headers(golden: dict[str, Any]) -> None:
    first, second = golden["headers"]
    geometry = GEOMETRIES["llama_8b_split"]
    namespace = Namespace("meta-llama/Llama-3.1-8B", revision="8c22764", geometry=geometry, page_size=4)
    hashes = PageHasher("xxh3_128", page_size=4).extend(None, symbols(range(8), 4), 2)
    key = ObjectKey(namespace.digest, 3, hashes[16:], plan_shards(geometry, 4).shards[5])
    payload = bytes(range(256))
    tokens = symbols([4, 5, 6, 7], 4)
    made = encode_header(key, parent_hash=hashes[:16], depth=1, tokens=tokens, payload=payload)
    assert key.name == first["name"]
    assert made.hex() == first["header"]
    assert verify(key, made, payload).ok
    other = ObjectKey.parse(second["name"])
    made = encode_header(other, parent_hash=None, depth=0, tokens=b"", payload=b"", extras=bytes(range(1, 17)))
    assert made.hex() == second["header"]
    assert decode_header(made).key == other


def test_header_bytes_lie_where_the_table_says(golden: dict[str, Any]) -> None:
    header = bytes.fromhex(golden["headers"][0]["header"])
    key = ObjectKey.parse(golden["headers"][0]["name"])
    u = int.from_bytes
    assert header[:8] == b"\x89HICACHE"
    assert (u(header[8:10], "little"), u(header[10:12], "little")) == (1, 1 | 2)
    assert u(header[12:16], "little") == len(header) == 112 + 16 + 16 + 16 + 8
    assert (u(header[16:20], "little"), u(header[20:24], "little")) == (0, 1)
    assert u(header[24:32], "little") == u(header[32:40], "little") == 256
    assert u(header[40:48], "little") == xxhash.xxh3_64_intdigest(bytes(range(256)))
    assert u(header[48:56], "little") == key.generation
    assert header[56:64] == b"\x10\0\0\0\x10\0\0\0"
    assert header[64:80] == key.namespace
    assert header[80:100].decode() == key.shard.geometry
    assert (u(header[100:104], "little"), u(header[104:108], "little")) == key.shard.layers
    assert u(header[108:112], "little") == key.shard.head_group
    assert header[112:128] == key.page_hash
    assert header[144:160] == struct.pack("<4I", 4, 5, 6, 7)
    assert u(header[160:], "little") == xxhash.xxh3_64_intdigest(header[:160])


def quoted(vectors: dict[str, Any]) -> list[str]:
    found = [digest for vector in vectors["page_hashes"] for digest in vector["hashes"]]
    found += [digest for digest in vectors["extras"]["digests"] if digest.strip("0")]
    found += [digest for hashes in vectors["extras"]["page_hashes_of_words"].values() for digest in hashes]
    found += [vector["seed"] for vector in vectors["seeds"]]
    found += [vector[part] for vector in vectors["geometries"] for part in ("call", "digest")]
    found += [vector[part] for vector in vectors["namespaces"][:2] for part in ("call", "digest")]
    found += [vector[part] for vector in vectors["namespaces"][2:] for part in ("call", "digest")]
    found += [vector["name"] for vector in vectors["names"]]
    found += [vector[part] for vector in vectors["headers"] for part in ("name", "header")]
    found += [vector["digest"] for vector in vectors["sglang"]]
    return found


def test_the_document_quotes_every_vector(golden: dict[str, Any], repository: Path) -> None:
    document = "".join((repository / "proto" / "formats.md").read_text(encoding="utf-8").split())
    missing = [text for text in quoted(golden) if "".join(text.split()) not in document]
    assert missing == []
