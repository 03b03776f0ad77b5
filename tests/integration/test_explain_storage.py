"""Misses that are made on purpose in a store, and what `hicache explain` says of each."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

import hicache
from hicache.analytics.explain.manifests import Manifest, Secrets
from hicache.analytics.explain.records import Cause, Explanation
from hicache.analytics.explain.storage import Asked, Store, explain_prompt
from hicache.cli import main
from hicache.errors import ConfigError, InvalidInput, NotFound
from hicache.records import MissReason
from hicache.rpc.service import Caller, RequestScope, Target
from hicache.storage.base import ObjectKey
from hicache.storage.registry import open_storage
from hicache.testing.servers import Server, binaries, call
from hicache.testing.sessions import NAMESPACE, PLAIN, Client, hashes, prompt, running

MODEL = Asked(model="org/model")


def stored(
    folder: Path,
    tokens: NDArray[np.uint32],
    scope: RequestScope = PLAIN,
    *,
    namespace: hicache.Namespace = NAMESPACE,
    tenant: str | None = None,
    clear: bool = False,
    url: str = "",
) -> str:
    """Have a service put a prompt into a store, by default one in a folder; returns its URL."""
    url = url or f"file://{folder}/store?capacity=1GiB&janitor=never"

    async def put() -> None:
        async with running(storage=url) as (service, _):
            client = await Client.attach(service, Caller(tenant=tenant), namespace=namespace, pool_bytes=8 << 20)
            await client.store(tokens, scope)
            (pool,) = service.pools
            await asyncio.to_thread(pool.cache.flush, 10.0)
            if clear:
                await service.clear(Caller(tenant=tenant), Target(model=namespace.model, scope=scope))

    asyncio.run(cast("Any", put()))
    return url


def explained(url: str, tokens: NDArray[np.uint32], asked: Asked = MODEL, *, verify: bool = True) -> Explanation:
    """The explanation; its sums are checked."""
    backend = open_storage(url)
    try:
        found = explain_prompt(Store(backend), asked, tokens, verify=verify)
    finally:
        backend.close()
    assert found.tokens == len(tokens) == found.usable_tokens + sum(cause.tokens for cause in found.causes)
    return found


def only(found: Explanation) -> Cause:
    (cause,) = found.causes
    return cause


def objects(folder: Path, page: int, tokens: NDArray[np.uint32]) -> list[Path]:
    """Files of a page, the first shard first."""
    name = hashes(tokens)[32 * page : 32 * page + 32].hex()
    return sorted(folder.rglob(f"{name}*"), key=lambda path: path.name)


def spoil(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"spoilt")


def test_what_is_there_is_a_hit(tmp_path: Path) -> None:
    """All pages; the tail is none of them."""
    url = stored(tmp_path, prompt(4))
    found = explained(url, np.concatenate([prompt(4), prompt(1)[:3]]))
    assert (found.usable_pages, found.tiers) == (4, {"device": None, "host": None, "storage": 4})
    assert (only(found).reason, only(found).tokens) == (MissReason.UNALIGNED_TAIL, 3)


def test_never_stored(tmp_path: Path) -> None:
    """Cold, as the store remembers nothing of what it does not have."""
    url = stored(tmp_path, prompt(4))
    assert only(explained(url, prompt(3, 9))).reason is MissReason.COLD
    longer = explained(url, np.concatenate([prompt(4), prompt(2, 9)]))
    assert (longer.usable_pages, only(longer).reason) == (4, MissReason.COLD)


@pytest.mark.redis
def test_in_redis(tmp_path: Path) -> None:
    """The same in Redis: a hit, a page that was evicted, and a damaged one."""
    options = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
    with Server(next(iter(binaries().values())), tmp_path / "server", options) as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        stored(tmp_path, prompt(6), url=url)
        assert explained(url, prompt(6)).causes == ()
        names = [hashes(prompt(6))[32 * page : 32 * page + 32] for page in range(6)]
        shard = NAMESPACE.geometry.anchor(NAMESPACE.page_size)
        keys = [f"hicache:{ObjectKey(NAMESPACE.digest, 0, name, shard).name}" for name in names]
        call(("127.0.0.1", server.port), "SETRANGE", keys[4], 5000, "spoilt")
        assert (only(explained(url, prompt(6))).reason, explained(url, prompt(6)).usable_pages) == (
            MissReason.FAILED,
            4,
        )
        call(("127.0.0.1", server.port), "DEL", keys[2])
        assert (only(explained(url, prompt(6))).reason, explained(url, prompt(6)).usable_pages) == (
            MissReason.EVICTED,
            2,
        )


def test_a_page_that_was_removed(tmp_path: Path) -> None:
    """Later pages tell that it was there; without it they are of no use."""
    url = stored(tmp_path, prompt(6))
    for path in objects(tmp_path, 2, prompt(6)):
        path.unlink()
    cause = only(explained(url, prompt(6)))
    assert (cause.reason, cause.first_page, cause.end_page) == (MissReason.EVICTED, 2, 6)
    assert "3 later pages" in cause.text


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_part(tmp_path: Path, verify: bool) -> None:
    """A page counts only whole: its first shard is there, another one is not."""
    url = stored(tmp_path, prompt(4))
    objects(tmp_path, 1, prompt(4))[-1].unlink()
    cause = only(explained(url, prompt(4), verify=verify))
    assert (cause.reason, cause.first_page) == (MissReason.FAILED, 1)
    assert "1 of its 4 objects are missing" in cause.text


def test_a_damaged_part(tmp_path: Path) -> None:
    """Every byte is read, unless that is not wanted; what is damaged is left where it is."""
    url = stored(tmp_path, prompt(4))
    victim = objects(tmp_path, 3, prompt(4))[1]
    spoil(victim)
    cause = only(explained(url, prompt(4)))
    assert (cause.reason, cause.first_page) == (MissReason.FAILED, 3)
    assert "damaged" in cause.text
    assert victim.exists()
    assert explained(url, prompt(4), verify=False).causes == ()


def test_an_object_of_a_newer_version(tmp_path: Path) -> None:
    """It is left alone, so only an upgrade helps."""
    url = stored(tmp_path, prompt(4))
    with objects(tmp_path, 2, prompt(4))[0].open("r+b") as file:
        header = bytearray(file.read(16))
        header += file.read(int.from_bytes(header[12:16], "little") - 16)
        header[8] = 2
        header[-8:] = xxhash.xxh3_64_intdigest(header[:-8]).to_bytes(8, "little")
        file.seek(0)
        file.write(header)
    cause = only(explained(url, prompt(4)))
    assert (cause.reason, cause.first_page) == (MissReason.FAILED, 2)
    assert "newer version" in cause.text


def test_another_object_under_the_name(tmp_path: Path) -> None:
    """An object that says it is another page."""
    url = stored(tmp_path, prompt(4))
    shutil.copyfile(objects(tmp_path, 0, prompt(4))[0], objects(tmp_path, 2, prompt(4))[0])
    cause = only(explained(url, prompt(4)))
    assert (cause.reason, cause.first_page) == (MissReason.FAILED, 2)
    assert "another one under its name" in cause.text


def test_cleared(tmp_path: Path) -> None:
    """What a clear has taken is told from what was never there, as long as its objects lie about."""
    url = stored(tmp_path, prompt(4), clear=True)
    found = explained(url, prompt(4))
    assert found.generation == 1
    assert any("cleared" in note for note in found.notes)
    assert only(found).reason is MissReason.EXPIRED
    assert "in generation 0" in only(found).text
    assert objects(tmp_path, 0, prompt(4))  # whoever looks sweeps nothing


def test_another_namespace(tmp_path: Path) -> None:
    """Each field that differs, with both values, of the base and of the request."""
    adapter = hicache.Adapter("lora", b"d" * 16)
    other = replace(NAMESPACE, revision="2", rope={"theta": 1e6})
    stored(tmp_path, prompt(4))
    stored(tmp_path, prompt(1, 5), namespace=other)
    url = stored(tmp_path, prompt(5), RequestScope(adapter=adapter))
    found = explained(url, prompt(4), Asked(namespace=other.digest.hex()))
    assert only(found).reason is MissReason.OTHER_NAMESPACE
    plain = next(each for each in found.others if each.derived == NAMESPACE.digest.hex())
    assert [(each.field, each.asked, each.found) for each in plain.differs] == [
        ("revision", "2", "1"),
        ("rope", '{"theta":1000000}', "none"),
    ]
    longer = explained(url, prompt(5), Asked(namespace=NAMESPACE.digest.hex()))
    (lora,) = longer.others
    assert (longer.usable_pages, lora.pages) == (4, 5)
    assert [(each.field, each.asked, each.found) for each in lora.differs] == [
        ("adapter", "none", f"lora={(b'd' * 16).hex()}")
    ]
    salted = explained(url, prompt(4), Asked(namespace=NAMESPACE.digest.hex(), secrets=Secrets(salt="s")))
    assert (salted.derived, salted.usable_pages) == ("", 0)
    assert [each.field for each in salted.others[0].differs] == ["salt"]


def test_secrets(tmp_path: Path) -> None:
    """With its salt and tenant a prompt is found; without the salt nobody can look, and that is said."""
    url = stored(tmp_path, prompt(4), RequestScope(salt="s"), tenant="crimson")
    secrets = Secrets(tenant="crimson", salt="s")
    assert explained(url, prompt(4), replace(MODEL, secrets=secrets)).usable_pages == 4
    found = explained(url, prompt(4))
    assert (found.usable_pages, found.others) == (0, ())
    assert any("salts" in note for note in found.notes)
    assert "crimson" not in json.dumps(found.document())


def test_geometry_is_named_by_its_parts(tmp_path: Path) -> None:
    """Two geometries differ in numbers, not in digests."""
    geometry = hicache.KVGeometry.mha(4, kv_heads=4, head_dim=64, dtype="bfloat16", head_group=2)
    other = replace(NAMESPACE, geometry=geometry)
    stored(tmp_path, prompt(2, 8), namespace=other)
    url = stored(tmp_path, prompt(3))
    (found,) = explained(url, prompt(3), Asked(namespace=other.digest.hex())).others
    assert ("geometry.groups[0].head_group", "2", "1") in [
        (each.field, each.asked, each.found) for each in found.differs
    ]
    assert all("digest" not in each.field for each in found.differs)


def test_which_namespace(tmp_path: Path) -> None:
    """An unknown model names those that are there; a model under several namespaces names their digests."""
    other = replace(NAMESPACE, revision="2")
    stored(tmp_path, prompt(1))
    url = stored(tmp_path, prompt(1), namespace=other)
    with pytest.raises(NotFound, match="it has: org/model"):
        explained(url, prompt(1), Asked(model="nobody"))
    with pytest.raises(InvalidInput, match="by --namespace") as caught:
        explained(url, prompt(1))
    assert other.digest.hex() in str(caught.value)


def test_stores_that_tell_nothing(tmp_path: Path) -> None:
    """An empty one; manifests that are broken are counted, and the others used."""
    with pytest.raises(ConfigError, match="no namespace is described"):
        explained(f"file://{tmp_path}/empty", prompt(1))
    url = stored(tmp_path, prompt(2))
    (manifest,) = tmp_path.rglob("MANIFEST")
    twin = manifest.parent.with_name("0" * 32)
    shutil.copytree(manifest.parent, twin)
    twin.joinpath("MANIFEST").write_bytes(b"[" * 60_000)
    assert any("1 manifests" in note for note in explained(url, prompt(2)).notes)


@pytest.mark.parametrize("change", [{"version": 2}, {"digest": 7}, {"hash": "md5"}, {"page_size": "16"}], ids=repr)
def test_manifests_of_others(change: dict[str, Any]) -> None:
    """What this version does not understand is refused in one line."""
    fields = NAMESPACE.derive().describe() | change
    with pytest.raises(InvalidInput, match="does not understand"):
        Manifest.parse(json.dumps(fields).encode())


def test_a_manifest_that_contradicts_itself() -> None:
    """Its geometry is not that of its digest, or none at all."""
    fields = NAMESPACE.derive().describe()
    with pytest.raises(InvalidInput, match="another geometry"):
        Manifest(fields | {"page_size": 32}).geometry()
    with pytest.raises(InvalidInput, match="no geometry"):
        Manifest(fields | {"geometry": {}}).geometry()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder, a URL, prompts from a file, tables and JSON."""
    url = stored(tmp_path, prompt(4))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompt(4).tolist()) + "\n" + json.dumps({"tokens": prompt(6).tolist()}) + "\n")
    command = ["explain", str(tmp_path / "store"), "--model", "org/model", "--prompts", str(file)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "prompt 0: 64 of 64 tokens (100.0 %) would be hits; nothing is missed" in shown
    assert "prompt 1: 64 of 96 tokens (66.7 %) would be hits; most is missed as cold" in shown
    assert "pages 4 to 5, 32 tokens, cold: " in shown
    command[1] = url
    assert main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["explanations"]
    assert (first["prompt"], first["causes"], second["causes"][0]["reason"]) == (0, [], "cold")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/at/all", "--model", "m", "--text", "x"], "which prompt|--text needs --tokenizer"),
        (["{folder}", "--model", "m"], "which prompt"),
        (["{folder}", "--model", "m", "--text", "x", "--prompts", "y"], "which prompt"),
        (["{folder}", "--model", "m", "--text", "x"], "--text needs --tokenizer"),
        (["{folder}", "--model", "m", "--prompts", "{folder}/p", "--tokenizer", "t"], "has token ids already"),
        (["{folder}", "--model", "m", "--text", "x", "--tokenizer", "{folder}/none"], "no such file or folder"),
        (["nowhere/at/all", "--model", "m", "--prompts", "{folder}/p"], "no folder that exists"),
        (["file://{folder}/none", "--model", "m", "--prompts", "{folder}/p"], "no such folder"),
        (["{folder}", "--prompts", "{folder}/p"], "whose pages"),
        (["memory://", "--model", "m", "--prompts", "{folder}/p"], "no manifests|no namespace"),
        (["{folder}", "--model", "m", "--prompts", "{folder}/empty"], "has no prompt"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each: what is wrong, and what to do."""
    (tmp_path / "p").write_text("[1]\n")
    (tmp_path / "empty").write_text("")
    assert main(["explain", *(each.replace("{folder}", str(tmp_path)) for each in arguments)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert any(word in message for word in words.split("|"))
