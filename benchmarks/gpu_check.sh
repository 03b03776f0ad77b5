#!/usr/bin/env bash
# Everything that needs a GPU, in one go of less than 8 minutes, on a machine without a network.
#
#   benchmarks/gpu_check.sh [--again] [--dry-run] [PART ...]     PART: tests sanitizer bandwidth overlap replay
#   benchmarks/gpu_check.sh prepare [PYTHON_VERSION]             beforehand, where there is a network
#
# The machine needs python3 (or PYTHON=...) with cupy for CUDA 13 and numpy; torch is used where it is. What else is
# missing comes from wheels in benchmarks/wheels (or WHEELS=...), which `prepare` puts there for the version of Python
# that the machine has. Each part leaves benchmarks/results/gpu-PART.json (or in OUT=...); a part that has done so with
# success is not repeated, unless --again is given. --dry-run tries every part on a fake device, at small sizes, and
# leaves its results in benchmarks/out/gpu-dry-run.
#
# Exit codes: 0 all fine; 1 something is wrong, slower than its bar, or was not run, as where compute-sanitizer is
# missing; 2 bad usage, or something to install first; 3 no GPU here.
set -uo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(dirname "$HERE")"
PYTHON="${PYTHON:-python3}"
WHEELS="${WHEELS:-$HERE/wheels}"
SITE="$ROOT/build/gpu-check"
PARTS=(tests sanitizer bandwidth overlap replay)
# Seconds at most; most parts take half of them. A part gets $LAST less, so that one that hangs can still say where.
declare -A LIMIT=([tests]=120 [sanitizer]=130 [bandwidth]=130 [overlap]=65 [replay]=130)
LAST=20
BUDGET=470  # seconds of all parts together

usage() {
    sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

prepare() {
    local version="${1:-3.12}"
    mkdir -p "$WHEELS"
    "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$WHEELS" "$ROOT" &&
        "$PYTHON" -m pip download --quiet --dest "$WHEELS" --only-binary=:all: --python-version "$version" \
            "msgspec>=0.19" "xxhash>=3.4" "grpcio>=1.63.2" "protobuf>=5.26.1,<8" "pytest>=9" "hypothesis>=6.140" \
            "cuda-bindings>=13" &&
        echo "gpu_check: wheels for Python $version are in $WHEELS: copy this folder to the GPU's machine"
}

# Wheels that are to be installed: of packages that the machine lacks, and those that run the tests, whose versions
# matter. numpy, cupy and torch are the machine's own, so nothing is ever looked up for them.
wanted() {
    "$PYTHON" - "$WHEELS" <<'END'
import importlib.metadata, pathlib, sys

tests = {"pytest", "pluggy", "iniconfig", "pygments", "packaging", "hypothesis", "sortedcontainers"}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    name = wheel.name.partition("-")[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        tests.add(name)
    if name in tests:
        print(wheel)
END
}

install() {
    local wheels
    if [ ! -f "$SITE/.installed" ]; then
        mapfile -t wheels < <(wanted)
        if [ "${#wheels[@]}" -gt 0 ]; then
            "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$SITE" "${wheels[@]}" || return 1
        fi
    fi
    # hicache itself is installed too, as what is found by entry points (storage) needs that; the code is this folder's.
    local said
    if said="$("$PYTHON" -c "import msgspec, xxhash, grpc, google.protobuf, pytest, hypothesis, numpy
import importlib.metadata; importlib.metadata.distribution('hicache')" 2>&1)"; then
        mkdir -p "$SITE" && touch "$SITE/.installed"
    else
        echo "gpu_check: ${said##*$'\n'}, and not in $WHEELS: run '$0 prepare' where there is a network" >&2
        return 1
    fi
}

done_already() {
    [ -f "$OUT/gpu-$1.json" ] && "$PYTHON" -c "import json, sys; sys.exit(not json.load(open(sys.argv[1]))['ok'])" \
        "$OUT/gpu-$1.json"
}

again=no fake=() chosen=()
while [ $# -gt 0 ]; do
    case "$1" in
    prepare) shift; prepare "$@"; exit $? ;;
    --again) again=yes ;;
    --dry-run) fake=(--fake) ;;
    tests | sanitizer | bandwidth | overlap | replay) chosen+=("$1") ;;
    *) usage ;;
    esac
    shift
done
[ "${#chosen[@]}" -eq 0 ] && chosen=("${PARTS[@]}")

if [ "${#fake[@]}" -gt 0 ]; then
    OUT="${OUT:-$ROOT/benchmarks/out/gpu-dry-run}"
else
    OUT="${OUT:-$ROOT/benchmarks/results}"
    if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
        echo "gpu_check: no GPU here (nvidia-smi shows none): nothing was measured; --dry-run tries the parts without one" >&2
        exit 3
    fi
    export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
    install || exit 2
fi
export PYTHONPATH="$ROOT:$ROOT/storage_backends:$ROOT/connectors${PYTHONPATH:+:$PYTHONPATH}"
cd "$ROOT" || exit 2

failed=0
for part in "${chosen[@]}"; do
    if [ "$again" = no ] && done_already "$part"; then
        echo "$part: done already, see $OUT/gpu-$part.json"
        continue
    fi
    left=$((BUDGET - SECONDS))
    if [ "$left" -lt $((LAST + 10)) ]; then
        echo "gpu_check: out of time before $part: run it again, what is done is kept" >&2
        failed=1
        break
    fi
    limit=$((LIMIT[$part] < left ? LIMIT[$part] : left))
    timeout --kill-after=5 "$limit" "$PYTHON" -m benchmarks.gpu.check "$part" --out "$OUT" \
        --seconds $((limit - LAST)) "${fake[@]}"
    code=$?
    [ "$code" -eq 124 ] && echo "gpu_check: $part did not end in $limit s" >&2
    [ "$code" -eq 3 ] && exit 3
    [ "$code" -ne 0 ] && failed=1
done
"$PYTHON" -m benchmarks.gpu.check report --out "$OUT" || failed=1
exit "$failed"
