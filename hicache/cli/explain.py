"""`hicache explain WHERE`: why prompts miss, in a running service or in a store."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from hicache.cli.output import Table, print_json, print_table, progress, say
from hicache.cli.service import (
    add_prompts_argument,
    add_secret_arguments,
    add_target_arguments,
    connected,
    read_prompts,
    required_target,
    seconds_of,
)
from hicache.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    import numpy as np

    from hicache.analytics.explain.records import Explanation
    from hicache.rpc.service import Target

    Prompts = list[np.ndarray[tuple[int], np.dtype[np.uint32]]]

HELP = "say why a prompt misses, in a running service or in a store"

_NO_SWEEP = "janitor=never"

_EPILOG = """\
WHERE is a service (unix:///run/hicache/hicache.sock or host:port), the URL of a store, or its folder. Nothing is
moved, pinned or counted. A service is asked by administrators, and tells of their own tenant only.

  hicache explain unix:///run/hicache/hicache.sock --model org/model --prompts prompts.jsonl
  hicache explain /var/lib/hicache/store --model org/model --tokenizer /models/m --text "You are a helpful ..."

JSON: {"explanations": [...]}, one for each prompt, and for each pool where several serve the model, with the fields of
hicache.analytics.explain.records.Explanation: model, namespace, derived, generation, page_size, tokens, pages, tiers
(leading pages that device, host and storage have; null: no such tier, or not asked), usable_pages, usable_tokens,
causes (first_page, end_page, tokens, reason, text, seconds_ago), others (namespaces that have more of the prompt, and
where they differ) and notes; and "prompt", its number from 0. tokens = usable_tokens + the causes' tokens, always.
Reasons are those by which the cache counts missed pages. Exit code 0 also for prompts that miss.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("address", metavar="WHERE", help="a service, a store's URL, or a store's folder")
    add_target_arguments(parser)
    group = parser.add_argument_group("which prompts")
    add_prompts_argument(group, required=False)
    group.add_argument("--text", help="a prompt as text; needs --tokenizer")
    group.add_argument("--text-file", metavar="FILE", help="file with one prompt as text; - is standard input")
    group.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json, or folder of the model; nothing is downloaded"
    )
    group.add_argument("--no-special-tokens", action="store_true", help="add no BOS and the like to text")
    parser.add_argument(
        "--storage-seconds",
        default="5",
        metavar="SECONDS",
        help="for which a service may ask its store; 0 shows what it believes (default: 5)",
    )
    parser.add_argument("--no-verify", action="store_true", help="of a store: do not read the pages that are there")
    add_secret_arguments(parser)
    parser.add_argument("--timeout", default="10", metavar="SECONDS", help="for one call (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Explain, print, and return the exit code."""
    from hicache.cli.main import EXIT_FINE

    target, prompts = required_target(options), _prompts(options)
    url = store_url(options.address)
    found = _of_service(options, target, prompts) if url is None else _of_store(options, url, target, prompts)
    shown = list(found)
    if options.json:
        print_json({"explanations": [{"prompt": number} | each.document() for number, each in shown]})
        return EXIT_FINE
    for number, explanation in shown:
        show(explanation, title=f"prompt {number}" if len(prompts) > 1 else "prompt")
    return EXIT_FINE


def store_url(where: str) -> str | None:
    """The URL of a store; None where it is a service.

    Whoever looks keeps no house: a folder is opened so that nothing in it is swept.

    Raises:
        ConfigError: a folder that does not exist.
    """
    if os.path.isdir(where):
        return f"file://{quote(os.path.abspath(where))}?{_NO_SWEEP}"
    scheme, found, rest = where.partition("://")
    if not found or scheme == "unix":
        if not found and "/" in where:
            raise ConfigError(f"{where!r:.200} is no folder that exists, and no address of a service")
        return None
    if scheme != "file":
        return where
    folder, _, parameters = rest.partition("?")
    if not os.path.isdir(unquote(folder)):
        raise ConfigError(f"{where!r:.200}: there is no such folder; explain makes none")
    kept = [each for each in parameters.split("&") if each and not each.startswith("janitor=")]
    return f"file://{folder}?{'&'.join([*kept, _NO_SWEEP])}"


def _prompts(options: argparse.Namespace) -> Prompts:
    given = [name for name in ("prompts", "text", "text_file") if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError("which prompt? give one of --prompts, --text and --text-file")
    if given == ["prompts"]:
        if options.tokenizer is not None:
            raise ConfigError("--tokenizer is for text: --prompts has token ids already")
        found = list(read_prompts(options.prompts))
        if not found:
            raise InvalidInput(f"{options.prompts!r:.200} has no prompt")
        return found
    if options.tokenizer is None:
        raise ConfigError(f"--{given[0].replace('_', '-')} needs --tokenizer: the engine's own, as a file or a folder")
    from hicache.cli.tokenizing import load_tokenizer, read_text

    encode = load_tokenizer(options.tokenizer, special=not options.no_special_tokens)
    return [encode(options.text if given == ["text"] else read_text(options.text_file))]


def _of_service(options: argparse.Namespace, target: Target, prompts: Prompts) -> Iterator[tuple[int, Explanation]]:
    from hicache.analytics.explain.records import Explanation

    seconds = seconds_of(options.storage_seconds, "--storage-seconds", least=0.0)
    with connected(options) as client:
        for number, prompt in enumerate(prompts):
            for document in client.explain(target, prompt, storage_seconds=seconds)["explanations"]:
                yield number, Explanation.of(document)


def _of_store(
    options: argparse.Namespace, url: str, target: Target, prompts: Prompts
) -> Iterator[tuple[int, Explanation]]:
    from hicache.analytics.explain.manifests import Secrets
    from hicache.analytics.explain.storage import Asked, Store, explain_prompt
    from hicache.storage.registry import open_storage

    adapter = target.scope.adapter
    asked = Asked(
        target.model,
        target.namespace_digest.hex(),
        None if adapter is None or adapter.digest is None else (adapter.name, adapter.digest.hex()),
        Secrets(target.tenant, target.scope.salt),
    )
    backend = open_storage(url)
    try:
        store = Store(backend)
        for number, prompt in enumerate(prompts):
            with progress("explain") as shown:
                found = explain_prompt(store, asked, prompt, verify=not options.no_verify, progress=shown)
            yield number, found
    finally:
        backend.close()


# ---- for people


def show(explanation: Explanation, *, title: str) -> None:
    """Print one explanation."""
    say(f"{title}: {headline(explanation)}")
    say(f"  namespace {explanation.namespace} of {explanation.model}, generation {_or(explanation.generation, '?')}")
    print_table(_reach(explanation))
    for line in missed(explanation):
        say(line)
    for other in explanation.others:
        print_table(
            Table(
                f"namespace {other.namespace} ({other.model}) has {other.pages:,} pages, {other.tokens:,} tokens",
                ("it differs in", "asked", "there"),
                [(each.field, each.asked, each.found) for each in other.differs],
                texts=3,
            )
        )
    for note in explanation.notes:
        say(f"note: {note}")


def headline(explanation: Explanation) -> str:
    """What came of it, in a line."""
    tokens, usable = explanation.tokens, explanation.usable_tokens
    if not tokens:
        return "it has no tokens"
    share = f"{usable:,} of {tokens:,} tokens ({100 * usable / tokens:.1f} %) would be hits"
    if not explanation.causes:
        return f"{share}; nothing is missed"
    cause = max(explanation.causes, key=lambda each: each.tokens)
    return f"{share}; most is missed as {cause.reason.value}"


def _reach(explanation: Explanation) -> Table:
    pages, size = explanation.pages, explanation.page_size
    rows = [(name, *_reached(count, pages, size)) for name, count in explanation.tiers.items()]
    rows.append(("a request gets", *_reached(explanation.usable_pages, pages, size)))
    return Table(f"how far it matches, of {pages:,} whole pages of {size} tokens", ("tier", "pages", "tokens"), rows)


def _reached(count: int | None, pages: int, size: int) -> tuple[str, str]:
    return ("-", "-") if count is None else (f"{count:,} of {pages:,}", f"{count * size:,}")


def missed(explanation: Explanation) -> Iterator[str]:
    """What is missed and why, in lines that fit the terminal."""
    width = shutil.get_terminal_size().columns
    if explanation.causes:
        yield "what is missed"
    for cause in explanation.causes:
        where = f"pages {cause.first_page:,} to {cause.end_page - 1:,}"
        if cause.first_page == cause.end_page:
            where = "the page tail"
        went = "" if cause.seconds_ago is None else f", {_ago(cause.seconds_ago)} ago"
        text = f"{where}, {cause.tokens:,} tokens, {cause.reason.value}{went}: {cause.text}"
        yield textwrap.fill(text, max(width, 40), initial_indent="  ", subsequent_indent="    ")
    if explanation.causes:
        yield ""


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _or(value: Any, otherwise: str) -> str:
    return otherwise if value is None else str(value)
