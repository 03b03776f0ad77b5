"""Names of keys: injective, parsed strictly, and patterns that match nothing else."""

from __future__ import annotations

import fnmatch

import pytest

from hicache.storage.base import Shard
from hicache.testing.objects import NAMESPACE, SHARD, make_key
from hicache_redis.names import Names, escape_glob


@pytest.mark.case("KEY-1", "SEC-2")
def test_a_name_is_parsed_back_to_its_key_and_to_nothing_else() -> None:
    names = Names("kv")
    key = make_key(1, generation=7, hash_size=32)
    name = names.object(key)
    assert name == b"kv:" + key.name.encode()
    assert b"{" not in name
    assert names.parse(name) == key
    for other in (b"", b"kv:", name[1:], b"k" + name, name + b"x", name.upper(), b"kv:\xff", b"other:" + name[3:]):
        assert names.parse(other) is None


def test_names_of_a_batch_are_those_of_its_keys() -> None:
    names = Names("kv")
    shards = [SHARD, Shard(SHARD.geometry, (4, 8), 1), Shard(SHARD.geometry, (4, 8), 1)]
    keys = [make_key(i, generation=i // 4, shard=shards[i % 3]) for i in range(12)]
    keys += [make_key(1), make_key(1, namespace=bytes(16)), make_key(2, hash_size=32)]
    assert names.objects(keys) == [names.object(key) for key in keys]
    assert names.objects([]) == []


def test_labels_are_no_objects() -> None:
    names = Names("kv")
    generation, manifest = names.generation(NAMESPACE), names.manifest(NAMESPACE)
    assert names.parse(generation) is None
    assert names.parse(manifest) is None
    assert names.parse(names.scratch(b"12345678")) is None
    assert names.label(generation, "generation") == NAMESPACE
    assert names.label(manifest, "manifest") == NAMESPACE
    assert names.label(manifest, "generation") is None
    assert names.label(manifest[:-1], "manifest") is None
    assert names.label(manifest[:-1] + b"g", "manifest") is None


@pytest.mark.case("REDIS-8")
@pytest.mark.parametrize("prefix", ["a*", "a[b]", "a?", "a\\", "[^a]", "a-b", "ab"])
def test_a_pattern_matches_its_own_prefix_only(prefix: str) -> None:
    others = [other for other in ("a*", "a[b]", "a?", "a\\", "[^a]", "a-b", "ab", "axx", "b", "") if other != prefix]
    escaped = escape_glob(prefix.encode()).decode()
    unescaped = "".join(c for i, c in enumerate(escaped) if c != "\\" or (i and escaped[i - 1] == "\\" and i % 2))
    assert unescaped.replace("\\", "") == prefix.replace("\\", "")
    names = Names(prefix)
    mine = names.object(make_key(1))
    assert names.owns(mine)
    assert not any(Names(other).owns(mine) for other in others)
    assert names.of_namespace(NAMESPACE).startswith(escape_glob(prefix.encode()))
    assert names.everything().endswith(b":*")
    assert names.manifests().endswith(b":manifest/*")


def test_plain_prefixes_are_not_changed() -> None:
    assert escape_glob(b"hicache.v1_x") == b"hicache.v1_x"
    assert fnmatch.fnmatchcase("hicache:x", Names("hicache").everything().decode())
