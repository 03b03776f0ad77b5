from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from hicache.core.identity import Adapter, Namespace, can_cache, normal_model_name
from hicache.core.layout import KVGeometry
from hicache.errors import NamespaceError

GEOMETRY = KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16")
CONTENT = bytes(range(32))


def namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {"model": "org/x", "revision": "r1", "geometry": GEOMETRY, "page_size": 64}
    return Namespace(**(fields | changes))


def mha(**changes: Any) -> KVGeometry:
    fields: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    return KVGeometry.mha(**(fields | changes))


@pytest.mark.case("KEY-1", "SEC-2")
def test_names_that_look_alike_are_different_models() -> None:
    names = [
        "meta-llama/Llama-3",
        "meta-llama-Llama-3",
        "meta-llama_Llama-3",
        "meta-llama-SEP-Llama-3",
        "meta-llama%2FLlama-3",
        "a/b",
        "a//b",
        "..",
        "../../etc",
        "/etc/x",
        ".",
        "CON",
        "é",
        "e\u0301",  # the same letter, composed otherwise
        "x" * 300,
        "x" * 299 + "y",
    ]
    assert len({namespace(model=name).digest for name in names}) == len(names)
    # Digests alone reach storage: 16 bytes whatever the name is.
    assert all(len(namespace(model=name).digest) == 16 for name in names)


@pytest.mark.case("KEY-8")
@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("org/x", "org/x"),
        ("Org/X", "Org/X"),
        ("org/x/", "org/x"),
        ("a//b", "a//b"),
        ("/models/x", "/models/x"),
        ("/models/x/", "/models/x"),
        ("/models/x///", "/models/x"),
        ("//models/.//x/.", "/models/x"),
        ("/models/../models/x", "/models/../models/x"),  # a link in between would make these two places
        ("./models/x", "./models/x"),
        ("./models/./x/", "./models/x"),
        ("././models/x", "./models/x"),
        ("models/x", "models/x"),
        ("../x/", "../x"),
        ("~/x/", "~/x"),
        ("./", "."),
        (" org/x", " org/x"),
    ],
)
def test_model_names_follow_the_stated_rule(name: str, normal: str) -> None:
    assert normal_model_name(name) == normal
    assert normal_model_name(normal) == normal
    assert namespace(model=name).describe()["model"] == normal
    assert namespace(model=name).digest == namespace(model=normal).digest


@pytest.mark.case("KEY-8")
def test_what_the_rule_keeps_apart() -> None:
    names = ("/models/x", "./models/x", "models/x", "org/x", "Org/X", "../models/x", "~/models/x")
    assert len({namespace(model=name).digest for name in names}) == len(names)


@pytest.mark.case("SEC-2")
@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "\t",
        "/",
        "//",
        "/./",
        "a\0b",
        "a\nb",
        "x\x7f",
        "\ud800",
        "x\udfffy",
        "x" * 10_240,
        "é" * 2049,
        None,
        7,
        b"x",
    ],
)
def test_models_that_are_no_names_are_refused(name: Any) -> None:
    with pytest.raises(NamespaceError, match="model"):
        namespace(model=name)


@pytest.mark.case("KEY-3", "KEY-5", "PLUG-2")
def test_namespaces_that_differ_anywhere_have_other_digests() -> None:
    base = namespace()
    others = [
        namespace(model="org/y"),
        namespace(revision="r2"),
        namespace(revision=None),
        namespace(page_size=32),
        namespace(page_size=16),
        namespace(hash="sha256"),
        namespace(rope={"rope_theta": 1e6}),
        namespace(rope={"rope_theta": 1e5}),
        namespace(scales=bytes(32)),
        namespace(scales=bytes(16)),
        namespace(numerics="vllm/flash-attn/bfloat16"),
        namespace(geometry=mha(dtype="float16")),
        namespace(geometry=mha(dtype="float8_e4m3fn")),
        namespace(geometry=mha(dtype="float8_e5m2")),
        namespace(geometry=mha(layers=31)),
        namespace(geometry=mha(layers=(1, 33))),
        namespace(geometry=mha(kv_heads=4, head_dim=256)),
        namespace(geometry=mha(head_group=2)),
        namespace(geometry=mha(layer_partition=8)),
        namespace(geometry=KVGeometry.mla(32, latent_dim=512, rope_dim=64, dtype="bfloat16")),
    ]
    derived = [
        base.derive(tenant="t1"),
        base.derive(tenant="t2"),
        base.derive(salt="t1"),
        base.derive(tenant="t1", salt="t1"),
        base.derive(adapter=Adapter("t1", CONTENT)),
        base.derive(adapter=Adapter("t1", CONTENT[:16])),
        base.derive(adapter=Adapter("t2", CONTENT)),
        base.derive(adapter=Adapter("t1", CONTENT), tenant="t1"),
        base.derive(adapter=Adapter("t1", CONTENT), salt="t1"),
    ]
    digests = {base.digest, *(other.digest for other in others), *(other.digest for other in derived)}
    assert len(digests) == 1 + len(others) + len(derived)
    assert len({base, *others}) == 1 + len(others)


def test_equal_settings_are_one_namespace() -> None:
    one = namespace(rope={"a": 10000.0, "b": [1.0, {"c": True}]})
    two = namespace(rope={"b": (1, {"c": True}), "a": 10000}, numerics="any/any/bfloat16")
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest
    assert one.rope == '{"a":10000,"b":[1,{"c":true}]}'
    assert namespace(rope={}).digest == namespace(rope=None).digest == namespace().digest
    assert namespace(rope={"a": True}).digest != namespace(rope={"a": 1}).digest
    assert namespace().numerics == "any/any/bfloat16"


def test_replace_keeps_the_rest() -> None:
    one = namespace(rope={"rope_theta": 5e5}, numerics="n", scales=CONTENT)
    assert dataclasses.replace(one).digest == one.digest
    assert (
        dataclasses.replace(one, revision="r2").digest
        == namespace(rope={"rope_theta": 5e5}, numerics="n", scales=CONTENT, revision="r2").digest
    )


def test_nothing_derived_is_the_base() -> None:
    base = namespace()
    assert base.derive().digest == base.digest
    assert base.derive().seed is None
    assert base.derive(tenant="t").seed is None  # the tenant separates by the digest; chains stay SGLang's
    assert base.derive(salt="s").seed is not None
    assert base.derive() == base.derive(adapter=None, tenant=None, salt=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": False}, "prefix-LM"),
        ({"causal": 1}, "causal"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": -64}, "page_size"),
        ({"page_size": 64.0}, "page_size"),
        ({"geometry": None}, "KVGeometry"),
        ({"geometry": "llama"}, "KVGeometry"),
        ({"hash": "md5"}, "sha256, xxh3_128"),
        ({"hash": ["sha256"]}, "sha256, xxh3_128"),
        ({"revision": ""}, "revision is empty"),
        ({"revision": "a\0"}, "revision"),
        ({"revision": 1}, "revision must be text"),
        ({"numerics": "\ud800"}, "numerics"),
        ({"scales": b"short"}, "scales"),
        ({"scales": "a" * 32}, "scales"),
        ({"rope": {"a": float("nan")}}, "rope"),
        ({"rope": {"a": float("inf")}}, "rope"),
        ({"rope": {"a": object()}}, "rope"),
        ({"rope": {1: 2}}, "rope"),
        ({"rope": "[1]"}, "rope"),
        ({"rope": "{"}, "rope"),
        ({"rope": [1]}, "rope"),
    ],
)
def test_unsafe_namespaces_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NamespaceError, match=words):
        namespace(**changes)


def test_deeply_nested_settings_are_refused_not_fatal() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(NamespaceError, match="rope"):
        namespace(rope=nested)
    while nested:  # taken apart from outside; freeing it at once would recurse
        nested = nested["a"]


@pytest.mark.case("SEC-2", "KEY-1")
def test_any_text_separates_requests_or_is_refused() -> None:
    base = namespace()
    texts = ["../../etc", "/etc/x", "a\0b", "a", "a\0", ".", "CON", "x" * 10_240, "x" * 10_239 + "y", "é", "\U0001f600"]
    digests = {base.derive(tenant=text).digest for text in texts} | {base.derive(salt=text).digest for text in texts}
    assert len(digests) == 2 * len(texts)
    for text in ("", "  ", "\ud800", "x" * 70_000, 7, b"x"):
        for what in ("tenant", "salt"):
            with pytest.raises(NamespaceError, match=what):
                base.derive(**{what: text})  # type: ignore[arg-type]


def test_adapters_need_a_digest_of_their_content() -> None:
    assert can_cache(None)
    assert can_cache(Adapter("x", CONTENT))
    assert not can_cache(Adapter("x"))
    with pytest.raises(NamespaceError, match="bypass"):
        namespace().derive(adapter=Adapter("x"))
    with pytest.raises(NamespaceError, match="Adapter"):
        namespace().derive(adapter="x")  # type: ignore[arg-type]
    for name, digest in (("", CONTENT), ("a\0", CONTENT), ("x", b"short"), ("x", "a" * 32)):
        with pytest.raises(NamespaceError, match="adapter"):
            Adapter(name, digest)  # type: ignore[arg-type]


class Served(str, Enum):  # noqa: UP042  the older form, whose text is its class and member
    MODEL = "org/x"


@pytest.mark.case("KEY-7")
def test_enum_members_are_their_values() -> None:
    assert namespace(model=Served.MODEL).digest == namespace(model="org/x").digest
    assert type(namespace(model=Served.MODEL).model) is str
    assert namespace().derive(tenant=Served.MODEL).digest == namespace().derive(tenant="org/x").digest


def test_manifests_are_json_and_hide_secrets() -> None:
    derived = namespace(scales=CONTENT).derive(adapter=Adapter("lora", CONTENT), tenant="customer-7", salt="hunter2")
    manifest = json.loads(json.dumps(derived.describe()))
    assert manifest["model"] == "org/x"
    assert manifest["base_digest"] == derived.base.digest.hex()
    assert manifest["digest"] == derived.digest.hex()
    assert manifest["adapter"] == {"name": "lora", "digest": CONTENT.hex()}
    assert manifest["geometry"]["groups"][0]["dtype"] == "bfloat16"
    for shown in (json.dumps(manifest), repr(derived)):
        assert "customer-7" not in shown
        assert "hunter2" not in shown
    assert manifest["tenant_digest"] != manifest["salt_digest"]
    other = namespace(model="org/y").derive(salt="hunter2").describe()
    assert other["salt_digest"] != manifest["salt_digest"]
    assert other["tenant_digest"] is None
    assert json.loads(json.dumps(namespace().describe()))["digest"] == namespace().digest.hex()


PROGRAM = """
import sys
from hicache.core.identity import Adapter, Namespace
from hicache.core.keys import ObjectKey
from hicache.core.layout import KVGeometry
from hicache.core.symbols import symbols
geometry = KVGeometry.mha(32, kv_heads=8, head_dim=128, dtype="bfloat16")
base = Namespace("meta-llama/Llama-3.1-8B", revision="8c22764", geometry=geometry, page_size=64)
sequences = [range(64), [0] * 64, [2**32 - 1] * 64, range(128), [(i * 2654435761) % 2**32 for i in range(192)]]
for space in (base.derive(), base.derive(adapter=Adapter("lora-abc", bytes(range(32))), tenant="t1", salt="salt")):
    for tokens in sequences:
        data = symbols(tokens, 64)
        hashes = space.hasher().extend(None, data, len(data) // 256)
        print(ObjectKey(space.digest, 0, hashes[-16:], geometry.anchor(64)).name)
"""


@pytest.mark.case("KEY-4")
def test_names_are_the_same_in_every_process(repository: Path) -> None:
    outputs = set()
    for seed in ("0", "1", None):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    names = outputs.pop().splitlines()
    golden = json.loads((repository / "tests/data/golden_vectors.json").read_text())
    assert names == golden["process_names"]
